// What the token strip shows of a lock: the locked query's row, or the locked key's column.

class LockedValues {
  constructor(view) {
    this.view = view;
  }

  /** (query, key) of the pair that a token stands for under the lock. */
  #pair(token) {
    const { lock } = this.view;
    return lock.query === null ? [token, lock.key] : [lock.query, token];
  }

  /** Value of a plane for a pair of tokens, from an exact strip where there is one. */
  #valueAt(name, query, key) {
    const { strips, map } = this.view;
    const strip = strips.find((one) => Number.isFinite(one.at(name, query, key)));
    return (strip ?? map).at(name, query, key);
  }

  #isHidden(key) {
    const { options, map } = this.view;
    return options.hideSink && map.hasSinkColumn && key < map.colEdges[1];
  }

  /** Value of the chosen plane for a token's chip; NaN where there is none. */
  of(token) {
    const [query, key] = this.#pair(token);
    return this.#isHidden(key) ? NaN : this.#valueAt(this.view.source, query, key);
  }

  /** What must be said about the values beside what they are. */
  caveats() {
    const { lock, strips, map, header } = this.view;
    if (!lock) return "";
    const said = this.#isHidden(lock.query === null ? lock.key : 0) ? [" · sink hidden"] : [];
    const isStripOfLock = (strip) => cellOf(lock.query === null ? strip.colEdges : strip.rowEdges, lock.query ?? lock.key) >= 0;
    if (!strips.some(isStripOfLock)) {
      if (!map.exact) said.push(" · means over tiles");
      else if (isWindow(map, header)) said.push(" · only tokens inside this window have values");
    }
    return said.join("");
  }

  /** What the tooltip says about a token's chip. */
  describe(token) {
    const { lock, header, map } = this.view;
    const named = (position) => describeTokens(header.labels, position, position + 1);
    const prediction = describePrediction(header.labels, token, token + 1);
    if (!lock) return { heading: [["token", named(token)]], values: [], notes: [prediction] };
    const [query, key] = this.#pair(token);
    const heading = [["query", named(query)], ["key", named(key)]];
    if (key > query) return { heading, values: [], notes: [AFTER_QUERY] };
    const values = panelNames(map).map((name) => [
      panelTitle(header, name),
      formatValue(this.#valueAt(name, query, key), { signed: name === "difference", floor: map.floors[name] }),
      name,
    ]);
    return { heading, values, notes: [] };
  }
}
