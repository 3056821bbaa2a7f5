// Tokens as chips; two clicks, or a drag, mark a span. What is marked belongs to the page: a click only reports what it should become.

const pickers = new WeakMap();

function element(tag, className, text = "", attributes = {}) {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

class TokenPicker {
  constructor(host) {
    this.kind = "needle";
    this.first = null;
    this.active = 0;
    this.root = element("section", "token-picker");
    const bar = element("div", "bar");
    this.choices = ["needle", "question"].map((kind) => {
      const button = element("button", `choice ${kind}`, kind === "needle" ? "Mark needle" : "Mark question", { type: "button" });
      button.addEventListener("click", () => this.choose(kind));
      return button;
    });
    this.clear = element("button", "choice clear", "Clear marks", { type: "button" });
    this.clear.addEventListener("click", () => this.report([], null));
    this.hint = element("span", "hint", "", { role: "status", "aria-live": "polite" });
    bar.append(...this.choices, this.clear, this.hint);
    this.list = element("div", "tokens", "", { tabindex: "0", role: "listbox", "aria-label": "Tokens to mark" });
    this.pressed = null;
    this.onToken("click", (token) => this.pick(token));
    this.onToken("pointerdown", (token) => (this.pressed = token));
    this.onToken("pointerover", (token, { buttons }) => this.point(token, buttons));
    this.onToken("pointerup", (token) => this.drop(token));
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.root.append(bar, this.list);
    host.append(this.root);
  }

  /** Listens to an event on a token's chip. */
  onToken(name, act) {
    this.list.addEventListener(name, (event) => {
      const chip = event.target.closest(".token");
      if (chip) act(Number(chip.dataset.token), event);
    });
  }

  update({ data, setStateValue }) {
    this.setStateValue = setStateValue;
    const text = JSON.stringify(data);
    if (text === this.shown) return;
    if (!this.data || data.tokens !== this.data.tokens) this.build(data);
    this.shown = text;
    this.data = data;
    this.first = null;
    this.paint();
  }

  build(data) {
    const special = new Set(data.special);
    this.chips = data.labels.map((label, i) => {
      const chip = element("bdi", "token", label, { role: "option", "data-token": i, id: `token-${i}` });
      chip.classList.toggle("special", special.has(i));
      return chip;
    });
    this.list.replaceChildren(...this.chips);
    this.active = 0;
  }

  choose(kind) {
    this.kind = kind;
    this.first = null;
    this.paint();
  }

  /** The span of a kind that holds a token, or null. */
  holding(token) {
    const holds = ([start, stop]) => start <= token && token < stop;
    if (this.kind === "question") return this.data.question && holds(this.data.question) ? this.data.question : null;
    return this.data.needle.find(holds) ?? null;
  }

  pick(token) {
    this.active = token;
    const { needle, question } = this.data;
    const held = this.first === null ? this.holding(token) : null;
    if (held) {
      if (this.kind === "question") this.report(needle, null);
      else this.report(needle.filter((span) => span !== held), question);
    } else if (this.first === null) {
      this.first = token;
      this.paint();
    } else this.mark(this.first, token);
  }

  /** Mark everything between two tokens. */
  mark(one, other) {
    const { needle, question } = this.data;
    const span = [Math.min(one, other), Math.max(one, other) + 1];
    if (this.kind === "question") this.report(needle, span);
    else this.report([...needle.filter(([start, stop]) => stop <= span[0] || start >= span[1]), span], question);
  }

  /** The pointer is over a token: show what would be marked, by the next click or by letting go. */
  point(token, buttons) {
    if (!(buttons & 1)) this.pressed = null;
    const from = this.first ?? this.pressed;
    if (from !== null) this.preview(from, token);
  }

  /** The pointer was let go over a token; over the one it was pressed on it is a click. */
  drop(token) {
    const from = this.pressed;
    this.pressed = null;
    if (from !== null && from !== token) this.mark(from, token);
  }

  report(needle, question) {
    this.first = null;
    this.setStateValue("marks", { tokens: this.data.tokens, needle, question, stamp: Date.now() });
    this.paint();
  }

  preview(one, other) {
    const [start, stop] = [Math.min(one, other), Math.max(one, other) + 1];
    this.chips.forEach((chip, i) => chip.classList.toggle("preview", start <= i && i < stop));
  }

  key(event) {
    const last = this.chips.length - 1;
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key in steps) {
      this.active = Math.max(0, Math.min(last, this.active + steps[event.key]));
      this.chips[this.active].scrollIntoView({ block: "nearest" });
      this.paint();
      if (this.first !== null) this.preview(this.first, this.active);
    } else if (event.key === "Enter" || event.key === " ") this.pick(this.active);
    else if (event.key === "Escape" && this.first !== null) {
      this.first = null;
      this.paint();
    } else return;
    event.preventDefault();
  }

  paint() {
    const { needle, question, rows } = this.data;
    const within = (spans, i) => spans.some(([start, stop]) => start <= i && i < stop);
    const measured = new Set(rows);
    this.chips.forEach((chip, i) => {
      const marked = { needle: within(needle, i), question: Boolean(question) && within([question], i) };
      chip.classList.toggle("needle", marked.needle);
      chip.classList.toggle("question", marked.question && !marked.needle);
      chip.classList.toggle("row", measured.has(i));
      chip.classList.toggle("preview", i === this.first);
      chip.classList.toggle("active", i === this.active);
      chip.setAttribute("aria-selected", String(marked.needle || marked.question));
      chip.title = `token ${i}${marked.needle ? ", needle" : marked.question ? ", question" : ""}`;
    });
    this.choices.forEach((button, i) => button.setAttribute("aria-pressed", String(this.kind === ["needle", "question"][i])));
    this.clear.disabled = !needle.length && !question;
    this.list.setAttribute("aria-activedescendant", `token-${this.active}`);
    this.hint.textContent =
      this.first === null
        ? `Click the first and the last token of the ${this.kind}, or drag; click a marked one to unmark it.`
        : `First token ${this.first}: now click the last one. Esc starts again.`;
  }
}

/** Called by Streamlit with every change; the last cleanup belongs to the last call. */
export default function tokenPicker(component) {
  const { parentElement } = component;
  if (!pickers.has(parentElement)) pickers.set(parentElement, new TokenPicker(parentElement));
  const picker = pickers.get(parentElement);
  picker.update(component);
  const call = (picker.calls = (picker.calls ?? 0) + 1);
  return () => {
    if (call !== picker.calls) return;
    picker.root.remove();
    pickers.delete(parentElement);
  };
}
