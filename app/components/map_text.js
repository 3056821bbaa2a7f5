// Words and numbers: everything the component says about cells, tokens and scales.

const AFTER_QUERY = "The key comes after the query: no attention.";

/** Three significant digits, with a true minus sign; `floor` is the smallest magnitude that can be told from it. */
function formatValue(value, { signed = false, floor = 0 } = {}) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : signed ? "+" : "";
  if (size <= floor * 1.0001) return `0 (less than ${exponential(floor)})`;
  return sign + (size < 1e-4 || size >= 1e6 ? exponential(size) : size >= 1000 ? size.toFixed(0) : size.toPrecision(3));
}

function exponential(size) {
  return size.toExponential(2).replace("-", "−").replace("+", "");
}

/** A label whose writing direction cannot reach the text around it (Unicode first-strong isolate). */
function isolate(label) {
  return `\u2068${label}\u2069`;
}

/** A token with its position, or the range of tokens that a tile covers. */
function describeTokens(labels, from, to) {
  const quoted = (position) => `“${isolate(labels[position])}”`;
  if (to - from === 1) return `${from} ${quoted(from)}`;
  return `${from}–${to - 1} ${quoted(from)} … ${quoted(to - 1)}`;
}

/** What row i predicts, as a sentence. */
function describePrediction(labels, from, to) {
  if (to - from > 1) return `Rows predict tokens ${from + 1}–${to}.`;
  const next = to < labels.length ? `“${isolate(labels[to])}”` : "the one after the prompt";
  return `Row ${from} predicts token ${to}: ${next}.`;
}

/** Everything the tooltip says about cell (r, c) of a map. */
function describeCell(map, header, r, c, hideSink) {
  const [q0, q1] = [map.rowEdges[r], map.rowEdges[r + 1]];
  const [k0, k1] = [map.colEdges[c], map.colEdges[c + 1]];
  const heading = [
    ["query", describeTokens(header.labels, q0, q1)],
    ["key", describeTokens(header.labels, k0, k1)],
  ];
  const notes = [describePrediction(header.labels, q0, q1)];
  if (k0 > q1 - 1) return { heading, values: [], notes: [AFTER_QUERY, ...notes] };
  const values = panelNames(map).map((name) => [
    panelTitle(header, name),
    formatValue(map.value(name, r, c), { signed: name === "difference", floor: map.floors[name] }),
    name,
  ]);
  for (const name of ["base", "variant"]) {
    const extreme = map.value(`${name}Extreme`, r, c);
    if (Number.isFinite(extreme)) values.push([`${panelTitle(header, name)}, largest in tile`, formatValue(extreme), name]);
  }
  if (hideSink && c === 0 && map.hasSinkColumn) notes.unshift("Hidden in the picture: first column.");
  if (!map.exact) notes.unshift("Values are means over the tile’s causal entries.");
  return { heading, values, notes };
}

/** The same as one line, for the readout. */
function cellSentence(description) {
  const parts = [...description.heading, ...description.values].map(([name, text]) => `${name} ${text}`);
  return [parts.join(" · "), ...description.notes].join(" · ");
}

function panelNames(map) {
  const order = map.third.middle ? ["base", "difference", "variant"] : ["base", "variant", "difference"];
  return order.filter((name) => map.planes[name]);
}

function panelTitle(header, name) {
  if (name === "difference") return header.third.name;
  return header.names[name === "base" ? 0 : 1];
}

/** Notes above the panels: what the cells are, and what is hidden or rescaled. */
function mapNotes(map, header, options) {
  const notes = [];
  const [height, width] = map.tile;
  const count = header.labels.length;
  if (!map.exact) notes.push(`Tiled: each cell is the mean of up to ${height} × ${width} tokens, ${count.toLocaleString("en")} in all. Click a tile for exact values.`);
  if (isWindow(map, header)) notes.push(`Window: queries ${span(map.rowEdges)}, keys ${span(map.colEdges)} of ${count.toLocaleString("en")} tokens.`);
  if (options.hideSink && map.hasSinkColumn) {
    const hidden = map.colEdges[1] > 1 ? `tokens 0–${map.colEdges[1] - 1}` : "token 0";
    notes.push(`First column (${hidden}) is hidden and left out of the colour range; values are not renormalised.`);
  }
  if (options.log) notes.push(`Log colours over ${LOG_DECADES} decades; values are unchanged.`);
  return notes;
}

function span(edges) {
  return `${edges[0]}–${edges[edges.length - 1] - 1}`;
}

/** True where the map covers a part of the prompt only. */
function isWindow(map, header) {
  const whole = (edges) => edges[0] === 0 && edges[edges.length - 1] === header.labels.length;
  return !whole(map.rowEdges) || !whole(map.colEdges);
}

/** What the token strip shows for a lock. */
function lockSentence(lock, header, source) {
  const token = (position) => describeTokens(header.labels, position, position + 1);
  const shown = panelTitle(header, source);
  if (!lock) return "Click a token to see what it attends to; shift-click to see who attends to it.";
  if (lock.query === null) return `Who attends to key ${token(lock.key)} · ${shown}`;
  const cell = lock.key === null ? "" : ` · key ${token(lock.key)} is marked`;
  return `What query ${token(lock.query)} attends to · ${shown}${cell}`;
}
