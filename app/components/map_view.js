// The component: data in, events out, and the state that survives reruns.

const STACK_BELOW = 560; // CSS pixels of width under which the panels stand below each other
const PANEL_MAX = 520;
const GAP = 12;
const LEGEND_TEXT = "Rows are queries i, and row i predicts token i + 1; columns are keys j. Click a cell, or a label beside the map, to lock it; Esc unlocks.";

const views = new WeakMap();

class MapView {
  constructor(host) {
    this.root = make("section", "attention-map");
    this.tooltip = new Tooltip();
    this.locked = new LockedValues(this);
    this.strip = new TokenStrip(this);
    this.frame = new Frame(this);
    this.frame.mount(this.root, this.strip, this.tooltip);
    this.panels = [];
    this.cursor = null;
    this.pending = "";
    this.digest = "";
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.lock) this.setLock(null);
    });
    host.append(this.root);
    this.observer = new ResizeObserver(() => this.#fit(false));
    this.observer.observe(this.root);
  }

  get options() {
    return this.memory.options;
  }

  get lock() {
    return this.memory.lock;
  }

  /** The plane that the strip shows. */
  get source() {
    return this.map.planes[this.options.source] ? this.options.source : "base";
  }

  /** Take in a payload; the same payload in the same theme changes nothing. */
  update({ data, setStateValue }) {
    this.setStateValue = setStateValue;
    const head = decodeHeader(data);
    this.memory = memoryOf(head.header.id);
    const theme = readTheme(this.root);
    const fresh = head.header.digest !== this.digest || JSON.stringify(theme) !== JSON.stringify(this.theme);
    const waited = this.pending !== "";
    this.theme = theme;
    this.pending = "";
    if (fresh) this.#renew(data, head);
    const relocked = this.#takeOrder(head.header.lock);
    if (fresh || relocked || waited) this.#refresh();
  }

  #renew(data, head) {
    this.digest = head.header.digest;
    this.header = head.header;
    Object.assign(this, decodeMaps(data, head));
    if (this.memory.tokens !== this.header.tokens) {
      Object.assign(this.memory, { lock: null, focus: null, tokens: this.header.tokens });
      this.strip.active = this.strip.root.scrollTop = 0;
    }
    this.memory.focus = this.#shownFocus();
    this.cursor = null;
    this.tooltip.hide();
    const names = panelNames(this.map);
    if (names.join() !== this.panels.map((panel) => panel.name).join()) {
      this.panels = names.map((name) => new Panel(this, name));
      this.frame.panels.replaceChildren(...this.panels.map((panel) => panel.root));
    }
    this.#repaint();
    this.#fit(true);
  }

  /** The pair around which the shown window lies; null for the whole map. */
  #shownFocus() {
    if (!isWindow(this.map, this.header)) return null;
    const middle = (edges) => edges[0] + ((edges[edges.length - 1] - edges[0]) >> 1);
    return { query: middle(this.map.rowEdges), key: middle(this.map.colEdges) };
  }

  /** A lock that the page asks for; the same order is obeyed once. */
  #takeOrder(order) {
    const name = order ? JSON.stringify(order) : "";
    if (name === this.memory.ordered) return false;
    this.memory.ordered = name;
    if (!order) return false;
    this.memory.lock = order.query === null && order.key === null ? null : order;
    return true;
  }

  #repaint() {
    this.scales = makeScales(this.map, this.options, this.header.palette, this.theme.dark ? "dark" : "light");
    for (const panel of this.panels) panel.repaint();
  }

  /** Fit everything to the width; does nothing while it is unchanged, unless forced. */
  #fit(force) {
    const width = Math.floor(this.root.clientWidth);
    const ratio = window.devicePixelRatio;
    if (!this.map || !width || (!force && width === this.width && ratio === this.ratio)) return;
    Object.assign(this, { width, ratio });
    const columns = width < STACK_BELOW ? 1 : this.panels.length;
    const each = Math.min(PANEL_MAX, Math.floor((width - GAP * (columns - 1)) / columns));
    this.frame.panels.style.gridTemplateColumns = `repeat(${columns}, ${each}px)`;
    for (const panel of this.panels) panel.resize(each);
    this.strip.layOut(this.strip.root.clientWidth - 2);
    this.#refresh();
  }

  #refresh() {
    this.frame.refresh();
    this.#publish();
    for (const panel of this.panels) panel.draw();
    this.strip.draw();
  }

  /** State as attributes, for style sheets, assistive tools and tests. */
  #publish() {
    const { header, map, lock, options } = this;
    const facts = {
      head: header.head,
      tokens: header.labels.length,
      cells: `${map.rows}x${map.cols}`,
      exact: map.exact,
      window: isWindow(map, header),
      theme: this.theme.dark ? "dark" : "light",
      query: lock?.query ?? "",
      key: lock?.key ?? "",
      sink: options.hideSink ? "hidden" : "shown",
    };
    Object.assign(this.root.dataset, facts);
    for (const [name, colour] of Object.entries(header.palette.accents[facts.theme])) this.root.style.setProperty(`--${name}`, colour);
  }

  /** Draw once in the next frame, however often it is asked for: "panels" after a hover, "strip" after scrolling. */
  requestDraw(part) {
    this.wanted ??= new Set();
    if (!this.wanted.size) {
      requestAnimationFrame(() => {
        if (this.wanted.has("panels")) for (const panel of this.panels) panel.draw();
        if (this.wanted.has("strip")) this.strip.draw();
        this.wanted.clear();
      });
    }
    this.wanted.add(part);
  }

  setOption(name, value) {
    this.options[name] = value;
    this.pending = "";
    if (name !== "source" && name !== "clickLocksKey") this.#repaint();
    this.#refresh();
  }

  setLock(lock) {
    this.pending = "";
    this.memory.lock = JSON.stringify(lock) === JSON.stringify(this.lock) ? null : lock;
    this.#refresh();
    this.#send();
  }

  lockToken(token, asKey) {
    this.setLock(asKey ? { query: null, key: token } : { query: token, key: null });
  }

  setFocus(focus) {
    this.memory.focus = focus;
    this.pending = focus ? "Loading exact values around this tile." : "Loading the whole map.";
    this.#refresh();
    this.#send();
  }

  #send() {
    const { lock, focus, tokens } = this.memory;
    this.memory.seq += 1;
    this.setStateValue("view", { seq: this.memory.seq, tokens, lock, focus });
  }

  /** Move the cursor of all panels to what the pointer or the keyboard is on; null takes it away. */
  pointAt(hit, x, y) {
    this.cursor = hit;
    this.requestDraw("panels");
    if (hit) this.tooltip.show(this.#describe(hit), x, y);
    else this.tooltip.hide();
  }

  #describe({ area, r, c }) {
    const { map, header } = this;
    if (area === "cell") return describeCell(map, header, r, c, this.options.hideSink);
    const edges = area === "row" ? map.rowEdges : map.colEdges;
    const [from, to] = [edges[r ?? c], edges[(r ?? c) + 1]];
    const notes = area === "row" ? [describePrediction(header.labels, from, to)] : [];
    return { heading: [[area === "row" ? "query" : "key", describeTokens(header.labels, from, to)]], values: [], notes: [...notes, "Click to lock."] };
  }

  /** A click or Enter on a cell, a row label or a column label. */
  choose(hit) {
    if (!hit) return;
    const query = hit.r === null ? null : this.map.rowEdges[hit.r];
    const key = hit.c === null ? null : this.map.colEdges[hit.c];
    if (hit.area === "cell" && hit.c >= this.map.causalCells(hit.r)) return;
    if (hit.area === "cell" && !this.map.exact) this.setFocus({ query, key });
    else this.setLock({ query, key });
    if (this.lock) this.strip.reveal(this.lock.query ?? this.lock.key);
  }

  pressKey(event, canvas) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const { r, c } = this.#keyboardCell();
    if (event.key in moves) {
      const [dr, dc] = moves[event.key].map((step) => step * (event.shiftKey ? 10 : 1));
      const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
      this.#pointCell(this.cursor ? clamp(r + dr, this.map.rows) : r, this.cursor ? clamp(c + dc, this.map.cols) : c, canvas);
    } else if (event.key === "Enter" || event.key === " ") this.choose({ area: "cell", r, c });
    else if (event.key === "r") this.choose({ area: "row", r, c: null });
    else if (event.key === "c") this.choose({ area: "col", r: null, c });
    else return;
    event.preventDefault();
  }

  #keyboardCell() {
    const locked = this.lockedCells();
    return { r: Math.max(0, this.cursor?.r ?? locked.r), c: Math.max(0, this.cursor?.c ?? locked.c) };
  }

  #pointCell(r, c, canvas) {
    const panel = this.panels.find((one) => one.canvas === canvas);
    this.pointAt({ area: "cell", r, c }, ...panel.centreOf(r, c));
    this.frame.readout.textContent = this.readoutText();
  }

  /** Indices of the locked row and column in this map; -1 for none. */
  lockedCells() {
    const { lock, map } = this;
    return {
      r: lock?.query == null ? -1 : cellOf(map.rowEdges, lock.query),
      c: lock?.key == null ? -1 : cellOf(map.colEdges, lock.key),
    };
  }

  /** Rows and columns whose labels stand out. */
  markedCells() {
    const { r, c } = this.lockedCells();
    return { rows: new Set([r, this.cursor?.r]), cols: new Set([c, this.cursor?.c]) };
  }

  readoutText() {
    const { r, c } = this.cursor?.area === "cell" ? this.cursor : this.lockedCells();
    if (r >= 0 && c >= 0) return cellSentence(describeCell(this.map, this.header, r, c, this.options.hideSink));
    return LEGEND_TEXT;
  }

  destroy() {
    this.observer.disconnect();
    this.root.remove();
  }
}

/** Called by Streamlit with every payload and every change of theme; the last cleanup belongs to the last call. */
export default function attentionMap(component) {
  const { parentElement } = component;
  if (!views.has(parentElement)) views.set(parentElement, new MapView(parentElement));
  const view = views.get(parentElement);
  view.update(component);
  const call = (view.calls = (view.calls ?? 0) + 1);
  return () => {
    if (call !== view.calls) return;
    view.destroy();
    views.delete(parentElement);
  };
}
