// The payload of map_payload.py, decoded: header, the map, and exact strips beside it.

const NAN_CODE = -32768;

/** Values of all codes of a plane with the given peak. */
function codeTable(peak, step) {
  const table = new Float32Array(65536);
  for (let k = 1; k <= 32767; k++) {
    const size = peak * Math.exp((k - 32767) * step);
    table[k] = size;
    table[65536 - k] = -size;
  }
  table[NAN_CODE & 0xffff] = NaN;
  return table;
}

/** Last index i with edges[i] <= position, or -1 where the edges do not cover the position. */
function cellOf(edges, position) {
  if (position < edges[0] || position >= edges[edges.length - 1]) return -1;
  let low = 0;
  let high = edges.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (edges[middle] <= position) low = middle;
    else high = middle;
  }
  return low;
}

/** Half-open range of the cells that tokens [start, stop) lie in; empty where the edges do not cover them. */
function cellsOf(edges, start, stop) {
  const [first, end] = [Math.max(start, edges[0]), Math.min(stop, edges[edges.length - 1])];
  return first < end ? [cellOf(edges, first), cellOf(edges, end - 1) + 1] : [0, 0];
}

/** One pair of maps over the same cells: `base`, `variant` and `difference`, row by row, NaN where there is no value.

`third` says how the difference is shown: its name, its formula, whether as base − variant, and whether in the middle. */
class MapData {
  constructor(part, step, codes, third) {
    this.third = third;
    this.rowEdges = part.rows;
    this.colEdges = part.cols;
    this.rows = part.rows.length - 1;
    this.cols = part.cols.length - 1;
    this.planes = {};
    this.floors = {};
    let offset = 0;
    for (const plane of part.planes) {
      const own = codes.subarray(offset, offset + plane.count);
      this.planes[plane.name] = this.#unpack(own, codeTable(plane.peak, step), part.triangular);
      this.floors[plane.name] = plane.peak * Math.exp(-32766 * step);
      offset += plane.count;
    }
    this.count = offset;
    this.#addVariant();
  }

  #unpack(codes, table, triangular) {
    const values = new Float32Array(this.rows * this.cols).fill(NaN);
    let next = 0;
    for (let r = 0; r < this.rows; r++) {
      const stored = triangular ? r + 1 : this.cols;
      const causal = Math.min(stored, this.causalCells(r));
      for (let c = 0; c < causal; c++) values[r * this.cols + c] = table[codes[next + c] & 0xffff];
      next += stored;
    }
    return values;
  }

  #addVariant() {
    const { base, difference } = this.planes;
    if (!difference) return;
    this.planes.variant = base.map((value, i) => value + difference[i]);
    this.floors.variant = Math.max(this.floors.base, this.floors.difference);
    if (this.third.negated) this.planes.difference = difference.map((value) => -value);
  }

  /** Number of cells of row r whose keys do not all lie after its last query. */
  causalCells(r) {
    const last = this.rowEdges[r + 1] - 1;
    if (last >= this.colEdges[this.cols]) return this.cols;
    return last < this.colEdges[0] ? 0 : cellOf(this.colEdges, last) + 1;
  }

  value(name, r, c) {
    return this.planes[name] ? this.planes[name][r * this.cols + c] : NaN;
  }

  /** Value at token positions, NaN outside this map. */
  at(name, query, key) {
    const r = cellOf(this.rowEdges, query);
    const c = cellOf(this.colEdges, key);
    return r < 0 || c < 0 ? NaN : this.value(name, r, c);
  }

  get hasSinkColumn() {
    return this.colEdges[0] === 0 && this.cols > 1;
  }

  /** Largest step of the edges: 1 means exact entries. */
  get tile() {
    const widest = (edges) => edges.reduce((most, edge, i) => (i ? Math.max(most, edge - edges[i - 1]) : most), 0);
    return [widest(this.rowEdges), widest(this.colEdges)];
  }

  get exact() {
    return Math.max(...this.tile) === 1;
  }

  /** {low, high} of a plane, the first column left out on request; zero is always inside. */
  range(name, hideSink) {
    const values = this.planes[name];
    const skip = hideSink && this.hasSinkColumn ? 0 : -1;
    let low = 0;
    let high = 0;
    for (let i = 0; i < values.length; i++) {
      if (i % this.cols === skip) continue;
      if (values[i] < low) low = values[i];
      if (values[i] > high) high = values[i];
    }
    return { low, high };
  }
}

/** Header of a payload, and where its values begin. */
function decodeHeader(bytes) {
  const length = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  return { header: JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length))), start: 4 + length };
}

/** The map, and the exact strips beside it. */
function decodeMaps(bytes, { header, start }) {
  const codes = new Int16Array(bytes.slice(start).buffer);
  let offset = 0;
  const [map, ...strips] = [header.map, ...header.strips].map((part) => {
    const data = new MapData(part, header.step, codes.subarray(offset), header.third);
    offset += data.count;
    return data;
  });
  return { map, strips };
}

/** What the user has set, by the key of the component; kept while the browser tab lives. */
const memories = new Map();

function memoryOf(id) {
  if (!memories.has(id)) {
    const options = { hideSink: false, log: false, commonScale: false, source: "variant", clickLocksKey: false };
    memories.set(id, { options, lock: null, focus: null, tokens: "", ordered: "", seq: 0 });
  }
  return memories.get(id);
}
