// The prompt's tokens as chips, coloured by the locked row or column. Only chips in sight exist in the document.

const CHIP_HEIGHT = 26;
const CHIP_GAP = 3;
const CHIP_PADDING = 12;
const CHIP_MAX = 180;
const STRIP_PADDING = 10;
const OVERSCAN = 3;

class TokenStrip {
  constructor(view) {
    this.view = view;
    this.active = 0;
    this.places = [];
    this.root = make("div", "strip", "", { tabindex: "0", role: "listbox", "aria-label": "Tokens of the prompt" });
    this.inner = make("div", "strip-inner");
    this.root.append(this.inner);
    this.measure = document.createElement("canvas").getContext("2d");
    this.root.addEventListener("scroll", () => view.requestDraw("strip"));
    this.root.addEventListener("click", (event) => this.#click(event));
    this.root.addEventListener("keydown", (event) => this.#key(event));
    this.root.addEventListener("pointermove", (event) => this.#point(event));
    this.root.addEventListener("pointerleave", () => view.tooltip.hide());
  }

  /** Places all chips in lines of the given width; a few milliseconds for thousands of tokens. */
  layOut(width) {
    const { labels } = this.view.header;
    this.measure.font = `12px ${this.view.theme.font}`;
    let [x, y] = [0, 0];
    this.places = labels.map((label, i) => {
      const text = this.measure.measureText(label).width + 7 * String(i).length;
      const w = Math.min(CHIP_MAX, width, Math.ceil(text) + CHIP_PADDING + 5);
      if (x && x + w > width) [x, y] = [0, y + CHIP_HEIGHT + CHIP_GAP];
      const place = { x, y, w };
      x += w + CHIP_GAP;
      return place;
    });
    this.inner.style.height = `${y + CHIP_HEIGHT}px`;
    this.active = Math.min(this.active, labels.length - 1);
  }

  draw() {
    const top = this.root.scrollTop - OVERSCAN * CHIP_HEIGHT;
    const bottom = this.root.scrollTop + this.root.clientHeight + OVERSCAN * CHIP_HEIGHT;
    const { lock, locked, source, scales } = this.view;
    const colours = lock ? { of: (i) => locked.of(i), scale: scales[source] } : null;
    const chips = [];
    for (let i = this.#firstBelow(top); i < this.places.length && this.places[i].y <= bottom; i++) chips.push(this.#chip(i, colours));
    this.inner.replaceChildren(...chips);
    this.root.setAttribute("aria-activedescendant", `chip-${this.active}`);
  }

  #firstBelow(y) {
    let low = 0;
    let high = this.places.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.places[middle].y + CHIP_HEIGHT < y) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  #chip(i, colours) {
    const { lock, header } = this.view;
    const { x, y, w } = this.places[i];
    const chip = make("div", "chip", "", { role: "option", id: `chip-${i}`, "data-token": i });
    chip.append(make("span", "chip-position", String(i)), make("bdi", "chip-label", header.labels[i]));
    chip.style.cssText = `transform: translate(${x}px, ${y}px); width: ${w}px`;
    const value = colours ? colours.of(i) : NaN;
    if (Number.isFinite(value)) {
      const colour = colours.scale.colour(value);
      chip.style.background = `rgb(${colour.join(" ")})`;
      chip.style.color = luminance(colour) > 0.18 ? "#111" : "#fff";
      chip.dataset.value = String(value);
    }
    const isLocked = Boolean(lock) && (lock.query === i || lock.key === i);
    chip.setAttribute("aria-selected", String(isLocked));
    chip.classList.toggle("locked", isLocked);
    chip.classList.toggle("outside", Boolean(colours) && !Number.isFinite(value));
    chip.classList.toggle("active", i === this.active);
    for (const [kind, start, stop] of header.marks ?? []) if (start <= i && i < stop) chip.classList.add(kind);
    return chip;
  }

  #tokenOf(event) {
    const chip = event.target.closest(".chip");
    return chip ? Number(chip.dataset.token) : null;
  }

  #click(event) {
    const token = this.#tokenOf(event);
    if (token === null) return;
    this.active = token;
    this.view.lockToken(token, event.shiftKey !== this.view.options.clickLocksKey);
  }

  #point(event) {
    const token = this.#tokenOf(event);
    if (token === null) this.view.tooltip.hide();
    else this.view.tooltip.show(this.view.locked.describe(token), event.clientX, event.clientY);
  }

  #key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key in steps) {
      this.active = Math.max(0, Math.min(this.places.length - 1, this.active + steps[event.key]));
      this.reveal(this.active);
    } else if (event.key === "Enter" || event.key === " ") {
      this.view.lockToken(this.active, event.shiftKey !== this.view.options.clickLocksKey);
    } else return;
    event.preventDefault();
    this.view.requestDraw("strip");
  }

  /** Scroll a token into sight. */
  reveal(token) {
    const { y } = this.places[token];
    const { scrollTop, clientHeight } = this.root;
    if (y < scrollTop) this.root.scrollTop = y;
    else if (y + CHIP_HEIGHT + STRIP_PADDING > scrollTop + clientHeight) this.root.scrollTop = y + CHIP_HEIGHT + STRIP_PADDING - clientHeight;
  }
}
