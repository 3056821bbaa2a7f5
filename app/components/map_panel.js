// One square panel: title, canvas with the map and its axes, colour bar.

const LABEL_CELL = 12; // smallest cell, in CSS pixels, beside which a token label fits
const LABEL_FONT = "11px";
const NUMBER_GUTTER = 34;
const EDGE = 8;
const MARK = 4;

/** Creates an element with a class, text and attributes. */
function make(tag, className = "", text = "", attributes = {}) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** The longest beginning of a text that fits into a width, with an ellipsis where it is cut. */
function fitText(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const letters = Array.from(text);
  while (letters.length && context.measureText(`${letters.join("")}…`).width > width) letters.pop();
  return `${letters.join("")}…`;
}

/** Where the plot lies inside a canvas of the given width: square, with room for labels at the left and below. */
function layOut(map, header, width, context) {
  const labelled = Math.max(map.rows, map.cols) <= 64 && map.exact ? labelGutter(map, header, width, context) : 0;
  const withLabels = width - EDGE - labelled;
  const labels = labelled > 0 && withLabels / Math.max(map.rows, map.cols) >= LABEL_CELL;
  const gutter = labels ? labelled : NUMBER_GUTTER;
  const side = width - EDGE - gutter;
  const bottom = labels ? labelled : 22;
  return { labels, left: gutter, top: EDGE, side, bottom, width, height: EDGE + side + bottom, cellW: side / map.cols, cellH: side / map.rows };
}

function labelGutter(map, header, width, context) {
  context.font = `${LABEL_FONT} ${context.fontFamily}`;
  let widest = 0;
  for (const edges of [map.rowEdges, map.colEdges]) {
    for (let i = 0; i + 1 < edges.length; i++) widest = Math.max(widest, context.measureText(axisLabel(header, edges[i])).width);
  }
  return Math.min(Math.ceil(widest) + 12, Math.round(width * 0.32));
}

function axisLabel(header, position) {
  return `${position} ${isolate(header.labels[position])}`;
}

/** Token positions worth a number along an axis that has room for about `count` of them. */
function tickPositions(edges, count) {
  const [first, last] = [edges[0], edges[edges.length - 1] - 1];
  const rough = Math.max(1, (last - first) / count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough));
  const ticks = [];
  for (let at = Math.ceil(first / step) * step; at <= last; at += step) ticks.push(at);
  return ticks;
}

class Panel {
  constructor(view, name) {
    this.view = view;
    this.name = name;
    this.root = make("figure", "panel", "", { "data-panel": name });
    this.title = make("figcaption", "panel-title");
    this.canvas = make("canvas", "plot", "", { tabindex: "0", role: "application" });
    this.legend = make("div", "legend");
    this.root.append(this.title, this.canvas, this.legend);
    this.context = this.canvas.getContext("2d");
    this.#listen();
  }

  #listen() {
    const { canvas, view } = this;
    canvas.addEventListener("pointermove", (event) => view.pointAt(this.hit(event), event.clientX, event.clientY));
    canvas.addEventListener("pointerleave", () => view.pointAt(null));
    canvas.addEventListener("pointerdown", (event) => (this.pressed = this.hit(event)));
    canvas.addEventListener("click", () => view.choose(this.pressed));
    canvas.addEventListener("keydown", (event) => view.pressKey(event, canvas));
    canvas.addEventListener("blur", () => view.pointAt(null));
  }

  /** Cell, row label or column label under a pointer: {area, r, c} or null. */
  hit(event) {
    const { left, top, side, cellW, cellH } = this.layout;
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - left, event.clientY - box.top - top];
    const { map } = this.view;
    const c = Math.min(map.cols - 1, Math.floor(x / cellW));
    const r = Math.min(map.rows - 1, Math.floor(y / cellH));
    const [inX, inY] = [x >= 0 && x < side, y >= 0 && y < side];
    if (inX && inY) return { area: "cell", r, c };
    if (inY && x < 0) return { area: "row", r, c: null };
    if (inX && y >= side) return { area: "col", r: null, c };
    return null;
  }

  /** Client coordinates of a cell's centre. */
  centreOf(r, c) {
    const box = this.canvas.getBoundingClientRect();
    const { left, top, cellW, cellH } = this.layout;
    return [box.left + left + (c + 0.5) * cellW, box.top + top + (r + 0.5) * cellH];
  }

  /** Renew the picture of the data: after new data, options or colours. */
  repaint() {
    const { map, scales, options, header } = this.view;
    this.picture = new OffscreenCanvas(map.cols, map.rows);
    this.picture.getContext("2d").putImageData(paintPlane(map, this.name, scales[this.name], options.hideSink), 0, 0);
    this.scaled = null;
    this.title.replaceChildren(make("span", `swatch ${header.only ?? this.name}`), document.createTextNode(panelTitle(header, this.name)));
    if (this.name === "difference") this.title.append(make("span", "formula", header.third.formula));
    this.canvas.setAttribute(
      "aria-label",
      `${panelTitle(header, this.name)}: ${header.unit} of ${header.head}, ${map.rows} queries by ${map.cols} keys. ` +
        "Arrow keys move the cell cursor, Enter locks it, R locks its row, C its column, Escape unlocks.",
    );
    drawLegend(this.legend, scales[this.name], legendCaption(this.view, this.name));
  }

  /** Fit the canvas to a width in CSS pixels. */
  resize(width) {
    this.context.fontFamily = this.view.theme.font;
    this.scaled = null;
    this.layout = layOut(this.view.map, this.view.header, width, this.context);
    const ratio = window.devicePixelRatio || 1;
    const { height, left, top, side } = this.layout;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.canvas.dataset.plot = [left, top, side, side].join(",");
    this.legend.style.marginLeft = `${left}px`;
    this.legend.style.width = `${side}px`;
  }

  draw() {
    const { context, layout, view } = this;
    const ratio = window.devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, layout.width, layout.height);
    context.fillStyle = view.theme.blank;
    context.fillRect(layout.left, layout.top, layout.side, layout.side);
    context.lineWidth = 1;
    context.strokeStyle = view.theme.line;
    context.strokeRect(layout.left - 0.5, layout.top - 0.5, layout.side + 1, layout.side + 1);
    this.scaled ??= this.#scalePicture(Math.round(layout.side * ratio));
    context.drawImage(this.scaled, layout.left, layout.top, layout.side, layout.side);
    if (layout.labels) this.#drawLabels();
    else this.#drawNumbers();
    this.#drawMarks();
    this.#drawLock();
    this.#drawCursor();
  }

  /** The picture at screen size: hard edges where a cell has a pixel or more, averages where cells share a pixel. */
  #scalePicture(side) {
    const scaled = new OffscreenCanvas(side, side);
    const context = scaled.getContext("2d");
    context.imageSmoothingEnabled = Math.max(this.view.map.rows, this.view.map.cols) > side;
    context.imageSmoothingQuality = "high";
    context.drawImage(this.picture, 0, 0, side, side);
    return scaled.transferToImageBitmap();
  }

  #drawLabels() {
    const { context, layout, view } = this;
    const marked = view.markedCells();
    const label = (position, on) => {
      context.font = `${on ? "600 " : ""}${LABEL_FONT} ${view.theme.font}`;
      context.fillStyle = on ? view.theme.text : view.theme.muted;
      return fitText(context, axisLabel(view.header, position), layout.left - 10);
    };
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let r = 0; r < view.map.rows; r++) {
      const text = label(view.map.rowEdges[r], marked.rows.has(r));
      context.fillText(text, layout.left - 5, layout.top + (r + 0.5) * layout.cellH);
    }
    for (let c = 0; c < view.map.cols; c++) {
      const text = label(view.map.colEdges[c], marked.cols.has(c));
      context.save();
      context.translate(layout.left + (c + 0.5) * layout.cellW, layout.top + layout.side + 5);
      context.rotate(-Math.PI / 2);
      context.fillText(text, 0, 0);
      context.restore();
    }
  }

  #drawNumbers() {
    const { context, layout, view } = this;
    const { rowEdges, colEdges } = view.map;
    context.font = `${LABEL_FONT} ${view.theme.font}`;
    context.fillStyle = view.theme.muted;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const at of tickPositions(rowEdges, layout.side / 50)) {
      context.fillText(String(at), layout.left - 5, layout.top + (cellOf(rowEdges, at) + 0.5) * layout.cellH);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const at of tickPositions(colEdges, layout.side / 50)) {
      context.fillText(String(at), layout.left + (cellOf(colEdges, at) + 0.5) * layout.cellW, layout.top + layout.side + 6);
    }
  }

  /** Needle and question as bars along both axes. */
  #drawMarks() {
    const { context, layout, view } = this;
    const { marks = [], palette } = view.header;
    for (const [kind, start, stop] of marks) {
      context.fillStyle = palette.marks[kind];
      const [r0, r1] = cellsOf(view.map.rowEdges, start, stop);
      const [c0, c1] = cellsOf(view.map.colEdges, start, stop);
      context.fillRect(layout.left - MARK, layout.top + r0 * layout.cellH, MARK, (r1 - r0) * layout.cellH);
      context.fillRect(layout.left + c0 * layout.cellW, layout.top + layout.side, (c1 - c0) * layout.cellW, MARK);
    }
  }

  #drawLock() {
    const { r, c } = this.view.lockedCells();
    this.context.strokeStyle = this.view.theme.lock;
    this.context.lineWidth = 1.5;
    this.#frame(r, c);
  }

  #drawCursor() {
    const { cursor, theme } = this.view;
    if (!cursor) return;
    this.context.strokeStyle = theme.cross;
    this.context.lineWidth = 1;
    this.#frame(cursor.r ?? -1, cursor.c ?? -1);
  }

  /** Outline a row and a column; where they meet, the cell stands out by itself. */
  #frame(r, c) {
    const { left, top, side, cellW, cellH } = this.layout;
    const box = (x, y, w, h) => this.context.strokeRect(x - 0.5, y - 0.5, Math.max(w, 2) + 1, Math.max(h, 2) + 1);
    if (r >= 0) box(left, top + r * cellH, side, cellH);
    if (c >= 0) box(left + c * cellW, top, cellW, side);
  }
}

/** Fill a colour bar with its gradient, three numbers and a caption. */
function drawLegend(root, scale, caption) {
  const stops = Array.from({ length: 17 }, (_, i) => `rgb(${scale.colours[Math.round((i * 255) / 16)].join(" ")})`);
  const bar = make("div", "bar");
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  const ticks = make("div", "ticks");
  ticks.append(...scale.ticks().map((text) => make("span", "", text)));
  root.replaceChildren(bar, ticks, make("div", "caption", caption));
}

function legendCaption({ header, options, scales }, name) {
  if (name !== "difference") return `${header.unit}${scales.variant && header.names[1] ? ", common scale" : ""}`;
  if (!scales.difference.limit) return header.third.nothing;
  return options.commonScale ? `${header.unit}, common scale` : `${header.unit}, scale of its own`;
}
