// What stands around the panels: title, switches, notes, readout, tooltip.

/** A button that is on or off. */
function makeSwitch(text, hint, onChange) {
  const button = make("button", "switch", text, { type: "button", "aria-pressed": "false", title: hint });
  button.addEventListener("click", () => onChange(button.getAttribute("aria-pressed") !== "true"));
  return button;
}

/** A row of buttons of which one is on; `set(choices, chosen)` fills it. */
class Choice {
  constructor(label, onChange) {
    this.root = make("div", "choice", "", { role: "group", "aria-label": label });
    this.onChange = onChange;
  }

  set(choices, chosen) {
    const wanted = JSON.stringify(choices);
    if (this.root.dataset.choices !== wanted) {
      this.root.dataset.choices = wanted;
      this.root.replaceChildren(...choices.map(([value, text]) => this.#button(value, text)));
    }
    for (const button of this.root.children) button.setAttribute("aria-pressed", String(button.dataset.value === chosen));
  }

  #button(value, text) {
    const button = make("button", "switch", text, { type: "button", "data-value": value });
    button.addEventListener("click", () => this.onChange(value));
    return button;
  }
}

/** A box beside the pointer, in the browser's top layer, so that nothing clips it; always inside the window. */
class Tooltip {
  constructor() {
    this.root = make("div", "tooltip", "", { role: "tooltip", popover: "manual" });
  }

  show({ heading, values, notes }, x, y) {
    const rows = heading.map(([name, text]) => this.#row(name, text, "token"));
    rows.push(...values.map(([name, text, plane]) => this.#row(name, text, plane)));
    this.root.replaceChildren(...rows, ...notes.map((note) => make("div", "tooltip-note", note)));
    if (!this.root.matches(":popover-open")) this.root.showPopover();
    const { offsetWidth: w, offsetHeight: h } = this.root;
    const margin = 8;
    const left = x + 14 + w + margin > window.innerWidth ? x - 14 - w : x + 14;
    const top = y + 14 + h + margin > window.innerHeight ? y - 14 - h : y + 14;
    this.root.style.left = `${Math.max(margin, Math.min(left, window.innerWidth - w - margin))}px`;
    this.root.style.top = `${Math.max(margin, Math.min(top, window.innerHeight - h - margin))}px`;
  }

  #row(name, text, kind) {
    const row = make("div", "tooltip-row", "", { "data-kind": kind });
    row.append(make("span", "tooltip-name", name), make("bdi", "tooltip-value", text));
    return row;
  }

  hide() {
    if (this.root.matches(":popover-open")) this.root.hidePopover();
  }
}

/** All parts of the frame, wired to the view; `refresh` writes what depends on data and options. */
class Frame {
  constructor(view) {
    this.view = view;
    this.title = make("h3", "title");
    this.hideSink = makeSwitch("Hide sink", "Mask the first column", (on) => view.setOption("hideSink", on));
    this.log = makeSwitch("Log scale", "Logarithmic colours", (on) => view.setOption("log", on));
    this.scale = new Choice("Scale of the third map", (value) => view.setOption("commonScale", value === "common"));
    this.whole = make("button", "switch whole", "Whole map", { type: "button" });
    this.whole.addEventListener("click", () => view.setFocus(null));
    this.notes = make("div", "notes");
    this.panels = make("div", "panels");
    this.readout = make("div", "readout", "", { role: "status", "aria-live": "polite" });
    this.stripText = make("bdi", "strip-text");
    this.source = new Choice("Values shown in the strip", (value) => view.setOption("source", value));
    this.click = new Choice("What a click on a token locks", (value) => view.setOption("clickLocksKey", value === "key"));
  }

  mount(root, strip, tooltip) {
    const tools = make("div", "tools");
    this.scaleLabel = make("span", "label", "");
    tools.append(this.whole, this.hideSink, this.log, this.scaleLabel, this.scale.root);
    const head = make("div", "head");
    head.append(this.title, tools);
    const bar = make("div", "strip-bar");
    const choices = make("div", "tools");
    choices.append(make("span", "label", "Click locks"), this.click.root, make("span", "label", "Shows"), this.source.root);
    bar.append(this.stripText, choices);
    root.append(head, this.notes, this.panels, this.readout, bar, strip.root, tooltip.root);
  }

  refresh() {
    const { header, map, options, lock, pending } = this.view;
    this.title.textContent = header.title;
    this.hideSink.setAttribute("aria-pressed", String(options.hideSink));
    this.hideSink.disabled = !map.hasSinkColumn;
    this.log.setAttribute("aria-pressed", String(options.log));
    const compared = Boolean(map.planes.difference);
    this.scaleLabel.textContent = `${header.third.name} on`;
    this.scaleLabel.hidden = this.scale.root.hidden = !compared;
    this.scale.set([["own", "own scale"], ["common", "common scale"]], options.commonScale ? "common" : "own");
    this.whole.hidden = !isWindow(map, header);
    const notes = pending ? [pending] : mapNotes(map, header, options);
    this.notes.replaceChildren(...notes.map((note) => make("span", "note", `${note} `)));
    const source = this.view.source;
    this.source.set(panelNames(map).map((name) => [name, panelTitle(header, name)]), source);
    this.click.set([["query", "query"], ["key", "key"]], options.clickLocksKey ? "key" : "query");
    this.stripText.textContent = lockSentence(lock, header, source) + this.view.locked.caveats();
    this.readout.textContent = this.view.readoutText();
  }
}
