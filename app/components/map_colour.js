// Colour scales: from a value to one of 256 colours, and what the legend says about it.

const LOG_DECADES = 4;

function parseHex(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** 256 RGB triples interpolated between equally spaced hex stops. */
function ramp(stops) {
  const colours = stops.map(parseHex);
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (colours.length - 1);
    const left = Math.min(Math.floor(at), colours.length - 2);
    return [0, 1, 2].map((k) => Math.round(colours[left][k] + (at - left) * (colours[left + 1][k] - colours[left][k])));
  });
}

/** Relative luminance of an RGB triple, 0 to 1 (WCAG). */
function luminance(colour) {
  const [r, g, b] = colour.map((part) => (part <= 10 ? part / 3294 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** A scale from −limit (or 0) to limit; linear, or logarithmic over four decades on either side of zero. */
class Scale {
  constructor({ limit, diverging, log, stops }) {
    this.limit = limit;
    this.diverging = diverging;
    this.log = log;
    this.colours = ramp(stops);
    this.packed = Uint32Array.from(this.colours, ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0);
  }

  /** Place of a value on the scale, −1 to 1. */
  place(value) {
    if (!this.limit) return 0;
    const share = Math.min(1, Math.abs(value) / this.limit);
    const size = this.log ? Math.max(0, 1 + Math.log10(share || 1e-30) / LOG_DECADES) : share;
    return value < 0 ? -size : size;
  }

  /** Index of a value's colour, 0 to 255. */
  index(value) {
    const place = this.place(value);
    return Math.round(255 * (this.diverging ? (place + 1) / 2 : Math.max(0, place)));
  }

  colour(value) {
    return this.colours[this.index(value)];
  }

  /** Labels under the colour bar: left, middle, right. */
  ticks() {
    const high = formatValue(this.limit);
    const small = `≤ ${formatValue(this.limit / 10 ** LOG_DECADES)}`;
    if (this.diverging) return [this.limit ? `−${high}` : "0", this.log && this.limit ? `|x| ${small}` : "0", high];
    return [this.log && this.limit ? small : "0", this.log ? "log" : formatValue(this.limit / 2), high];
  }
}

/** Scales of all panels: one for base and variant, one for the difference. */
function makeScales(map, options, palette, theme) {
  const names = ["base", "variant"].filter((name) => map.planes[name]);
  const ranges = names.map((name) => map.range(name, options.hideSink));
  const diverging = names.some((name) => map.range(name, false).low < 0);
  const limit = Math.max(...ranges.map(({ low, high }) => Math.max(high, -low)));
  const stops = palette[diverging ? "diverging" : "sequential"][theme];
  const common = new Scale({ limit, diverging, log: options.log, stops });
  const scales = { base: common, variant: common };
  if (map.planes.difference) {
    const { low, high } = map.range("difference", options.hideSink);
    const own = options.commonScale ? limit : Math.max(high, -low);
    scales.difference = new Scale({ limit: own, diverging: true, log: options.log, stops: palette.diverging[theme] });
  }
  return scales;
}

/** RGBA pixels of a plane at one pixel a cell; transparent where there is no value. */
function paintPlane(map, name, scale, hideSink) {
  const image = new ImageData(map.cols, map.rows);
  const pixels = new Uint32Array(image.data.buffer);
  const values = map.planes[name];
  const hidden = hideSink && map.hasSinkColumn ? 0 : -1;
  for (let i = 0; i < values.length; i++) {
    if (!Number.isNaN(values[i]) && i % map.cols !== hidden) pixels[i] = scale.packed[scale.index(values[i])];
  }
  return image;
}

/** Colours and font of the app's theme, as the canvas needs them. */
function readTheme(root) {
  const style = getComputedStyle(root);
  const probe = document.createElement("canvas").getContext("2d");
  const colour = (name, fallback) => {
    probe.fillStyle = fallback;
    probe.fillStyle = style.getPropertyValue(name).trim() || fallback;
    return probe.fillStyle;
  };
  const background = colour("--st-background-color", "#ffffff");
  const text = colour("--st-text-color", "#31333f");
  const dark = luminance(parseHex(background)) < 0.18;
  return {
    dark,
    text,
    muted: `${text}b0`,
    blank: `${colour("--st-secondary-background-color", "#f0f2f6")}80`,
    line: `${text}26`,
    cross: text,
    lock: dark ? "#ffd166" : "#111111",
    font: style.fontFamily,
  };
}
