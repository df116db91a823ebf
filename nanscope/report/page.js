"use strict";
// What the page can do beyond being read: look at any token, in any role, as recorded and with the fix; step along the chain; read charts.
// It reads the data of this page, draws with them, and does nothing else: no request, no storage, no code out of data.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, node = document) => [...node.querySelectorAll(selector)];
  const make = (tag, text = "", name = "") => Object.assign(document.createElement(tag), { textContent: text, className: name });
  const drawn = (svg, tag) => document.createElementNS(svg.namespaceURI, tag);
  const real = (value) => (value === "n" ? NaN : value === "i" ? Infinity : value === "-i" ? -Infinity : value);
  const minus = (text) => text.replace(/^-/, "−").replace(/e-/, "e−").replace(/e\+/, "e");
  const numeral = (value) => {
    if (value === null || value === undefined) return "–";
    if (Number.isNaN(value)) return "NaN";
    if (!Number.isFinite(value)) return value > 0 ? "+inf" : "−inf";
    if (value === 0) return "0";
    const size = Math.abs(value);
    return minus(size >= 1e6 || size < 1e-4 ? value.toExponential(3).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4))));
  };
  const count = (number) => number.toLocaleString("en");

  // -- the map --------------------------------------------------------------------------------------------------------------------------

  const MARGIN = 0.35; // around the cells, in cells
  const share = (cell, size) => 100 * (cell + 0.5 + MARGIN) / (size + 2 * MARGIN); // where the middle of a cell lies, in percent

  const outline = (cells) => cells.map(([row, first, last]) => `M${first} ${row}h${last - first}v1h${first - last}z`).join("");

  const runs = (height, width, look) => {
    const found = {};
    for (let row = 0; row < height; row++) {
      for (let column = 0; column < width; ) {
        const name = look(row, column), first = column;
        do column++; while (column < width && look(row, column) === name);
        if (name) (found[name] ||= []).push([row, first, column]);
      }
    }
    return found;
  };

  class Look {
    constructor(node, map) {
      Object.assign(this, { node, map, window: 0, track: map.main, way: "as_recorded", at: null });
      this.svg = node.querySelector("svg.cells");
      this.readout = node.querySelector(".readout tbody");
      this.caption = node.querySelector(".where");
      node.querySelector(".controls").hidden = false;
      this.tracks = node.querySelector("select.track");
      this.ways = node.querySelector("select.run");
      map.tracks.forEach((track, n) => this.tracks.add(new Option(track.name === track.role ? track.name : `${track.name} · ${track.role.replaceAll("_", " ")}`, n)));
      Object.entries(map.ways).forEach(([id, words]) => this.ways.add(new Option(words, id)));
      this.tracks.value = this.track;
      this.ways.disabled = Object.keys(map.ways).length < 2;
      this.tracks.onchange = () => { this.track = Number(this.tracks.value); this.draw(); };
      this.ways.onchange = () => { this.way = this.ways.value; this.draw(); };
      this.svg.setAttribute("tabindex", "0");
      this.svg.setAttribute("role", "application");
      this.svg.setAttribute("aria-label", "map of tokens: the arrow keys go from one to the next, and what is known of it is read below");
      this.svg.addEventListener("pointermove", (event) => this.over(event));
      this.svg.addEventListener("pointerdown", (event) => { this.over(event); this.pinned = this.at; });
      this.svg.addEventListener("pointerleave", () => { if (this.pinned) { this.at = this.pinned; this.read(); } });
      this.svg.addEventListener("keydown", (event) => this.key(event));
      all("[data-row]", node).forEach((spot) => { spot.disabled = false; spot.addEventListener("click", (event) => { event.preventDefault(); this.go(Number(spot.dataset.row), Number(spot.dataset.column)); this.svg.scrollIntoView({ block: "center" }); }); });
      const tiles = node.querySelector("svg.tiles");
      if (tiles) {
        tiles.addEventListener("click", (event) => {
          const box = tiles.getBoundingClientRect();
          const row = Math.floor((event.clientY - box.top) / box.height * map.rows), column = Math.floor((event.clientX - box.left) / box.width * map.columns);
          this.go(...(this.near(row, column, 6 * map.rows / box.height, 6 * map.columns / box.width) || [row, column]));
        });
      }
      this.mark = drawn(this.svg, "rect");
      this.mark.setAttribute("class", "cursor");
      this.go(map.row, map.column);
    }

    cells(track, way = this.way) { return (track.cells[way] || track.cells.as_recorded)[this.window]; }

    value(track, row, column, way) {
      const line = this.cells(track, way)[row];
      return line === undefined ? null : real(line[track.per_row ? 0 : column]);
    }

    go(row, column) {
      const { windows } = this.map;
      const holds = (w) => row >= w.row && row < w.row + w.height && column >= w.column && column < w.column + w.width;
      const here = windows[this.window];
      const found = holds(here) ? this.window : windows.findIndex(holds);
      if (found < 0) {
        this.at = this.pinned = null;
        this.caption.textContent = `${this.map.row_name} ${count(row)}, ${this.map.column_name} ${count(column)}: its values are in the snapshot, and not in this page; the map above shows ${this.map.row_name}s ${count(here.row)}–${count(here.row + here.height - 1)}, ${this.map.column_name}s ${count(here.column)}–${count(here.column + here.width - 1)}`;
        this.readout.replaceChildren();
        this.mark.setAttribute("width", 0);
        return;
      }
      this.window = found;
      this.at = this.pinned = [row - windows[found].row, column - windows[found].column];
      this.draw();
    }

    over(event) {
      const w = this.map.windows[this.window], box = this.svg.getBoundingClientRect(), view = this.svg.viewBox.baseVal;
      const column = Math.floor(view.x + (event.clientX - box.left) / box.width * view.width);
      const row = Math.floor(view.y + (event.clientY - box.top) / box.height * view.height);
      if (row < 0 || column < 0 || row >= w.height || column >= w.width) return;
      this.at = [row, column];
      this.read();
    }

    // the bad token that is meant by a click beside its small red mark, if its values are kept
    near(row, column, down, across) {
      const track = this.map.tracks[this.map.main], found = [];
      this.map.windows.forEach((w, n) => track.cells.as_recorded[n].forEach((line, r) => line.forEach((cell, c) => {
        const value = real(cell), far = [Math.abs(w.row + r - row) / Math.max(1, down), Math.abs(w.column + c - column) / Math.max(1, across)];
        if ((!Number.isFinite(value) || (track.limit !== null && value > track.limit)) && Math.max(...far) <= 1) found.push([Math.hypot(...far), w.row + r, w.column + c]);
      })));
      found.sort((a, b) => a[0] - b[0]);
      return found.length ? found[0].slice(1) : null;
    }

    key(event) {
      const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }, move = moves[event.key], w = this.map.windows[this.window];
      if (event.key === "Home") { event.preventDefault(); this.go(this.map.row, this.map.column); return; }
      if (!move) return;
      event.preventDefault();
      if (!this.at) { this.go(this.map.row, this.map.column); return; }
      this.go(
        Math.max(0, Math.min(this.map.rows - 1, w.row + this.at[0] + move[0])),
        Math.max(0, Math.min(this.map.columns - 1, w.column + this.at[1] + move[1])),
      );
    }

    draw() {
      const { map } = this, track = map.tracks[this.track], w = map.windows[this.window];
      const width = w.width, height = w.height;
      const bad = (value) => !Number.isFinite(value) || (track.limit !== null && value > track.limit);
      const at = (row, column) => this.value(track, row, column);
      const sizes = [];
      for (let row = 0; row < height; row++) for (let column = 0; column < width; column++) { const value = at(row, column); if (!bad(value)) sizes.push(Math.abs(value)); }
      sizes.sort((a, b) => a - b);
      const usual = sizes.length ? sizes[Math.floor(0.95 * (sizes.length - 1))] : 0, most = sizes.length ? sizes[sizes.length - 1] : 0;
      const saturated = 0 < 5 * usual && 5 * usual < most, scale = saturated ? usual : most;
      const look = (row, column) => {
        const value = at(row, column);
        if (bad(value) || (map.overflowed && row + w.row === map.row && column + w.column === map.column && this.track === map.main && this.way === "as_recorded")) return "bad";
        const level = scale > 0 ? Math.sign(value) * Math.round(5 * Math.min(1, Math.abs(value) / scale)) : 0;
        return level ? `${level < 0 ? "n" : "p"}${Math.abs(level)}` : "z0";
      };
      const layers = runs(height, width, look), group = this.svg.querySelector("g.layers");
      group.replaceChildren(...Object.entries(layers).map(([name, cells]) => { const path = drawn(this.svg, "path"); path.setAttribute("class", name); path.setAttribute("d", outline(cells)); return path; }));
      const masked = w.masked ? runs(height, width, (row, column) => (w.masked[row][column] === "1" && look(row, column) !== "bad" ? "x" : "")) : {};
      const set = (name, value) => { const part = this.svg.querySelector(name); if (part) part.setAttribute("d", value); };
      set(".hatch", outline(masked.x || []));
      set(".crosses", outline(layers.bad || []));
      set(".gaps", `M0 0h${width}v${height}h${-width}z`);
      this.svg.setAttribute("viewBox", `${-MARGIN} ${-MARGIN} ${width + 2 * MARGIN} ${height + 2 * MARGIN}`);
      const ring = this.svg.querySelector(".ring"), inside = map.row >= w.row && map.row < w.row + height && map.column >= w.column && map.column < w.column + width;
      const told = inside && this.track === map.main && this.way === "as_recorded";
      all(".ring", this.svg).forEach((part) => { part.style.display = inside ? "" : "none"; });
      all(".lead", this.svg).forEach((part) => { part.style.display = told ? "" : "none"; });
      if (ring) { ring.setAttribute("x", map.column - w.column - 0.16); ring.setAttribute("y", map.row - w.row - 0.16); }
      set(".lead", `M${map.column - w.column + 0.5} ${-MARGIN}V${map.row - w.row - 0.16}`);
      const flag = this.node.querySelector(".flag");
      if (flag) flag.style.visibility = told ? "" : "hidden";
      if (flag && inside) flag.firstElementChild.style.left = `${share(map.column - w.column, width)}%`;
      const ticks = (node, first, size, side, strong, least) => {
        if (!node) return;
        const every = size > 16 ? 8 : size > 8 ? 4 : 1, numbers = [];
        for (let n = 0; n < size; n++) if (first + n === strong || ((first + n) % every === 0 && Math.abs(first + n - strong) >= Math.min(every, least))) numbers.push(n);
        node.replaceChildren(...numbers.map((n) => { const tick = make("span", String(first + n), first + n === strong ? "strong" : ""); tick.style[side] = `${share(n, size)}%`; return tick; }));
      };
      ticks(this.node.querySelector(".map .xaxis"), w.column, width, "left", map.column, 3);
      ticks(this.node.querySelector(".map .yaxis"), w.row, height, "top", map.row, 2);
      const ends = all(".scale b", this.node);
      if (ends.length) { ends[0].textContent = `${saturated ? "≤ " : ""}−${numeral(scale)}`; ends[1].textContent = `${saturated ? "≥ " : ""}${numeral(scale)}`; }
      this.node.querySelector(".caption code").textContent = track.name;
      const [many, hidden] = track.left[this.way] || [track.bad, track.bad_masked];
      this.node.querySelector(".caption .total").textContent = many
        ? `${count(many)} of ${count(track.per_row ? map.rows : map.rows * map.columns)} ${track.limit !== null ? "beyond the limit" : "non-finite"}${hidden ? `, ${hidden === many ? "all" : count(hidden)} masked` : ""}`
        : "all finite";
      const here = this.node.querySelector(".tiles .here");
      if (here) Object.entries({ x: w.column, y: w.row, width: w.width, height: w.height }).forEach(([name, value]) => here.setAttribute(name, value));
      this.histogram(track);
      this.svg.append(this.mark);
      this.read();
    }

    read() {
      if (!this.at) return;
      const { map } = this, w = map.windows[this.window], [row, column] = this.at;
      Object.entries({ x: column, y: row, width: 1, height: 1 }).forEach(([name, value]) => this.mark.setAttribute(name, value));
      this.mark.style.display = w.row + row === map.row && w.column + column === map.column ? "none" : ""; // the ring is there
      const hidden = w.masked && w.masked[row][column] === "1";
      this.caption.textContent = `${map.row_name} ${count(w.row + row)}, ${map.column_name} ${count(w.column + column)}${hidden ? ": masked, the loss does not count it" : w.masked ? ": the loss counts it" : ""}`;
      const fixed = Object.keys(map.ways).find((way) => way !== "as_recorded");
      this.readout.replaceChildren(...map.tracks.map((track) => {
        const line = make("tr"), name = make("th"), value = this.value(track, row, column, "as_recorded");
        name.scope = "row";
        name.append(make("code", track.name), make("span", track.role === track.name ? "" : ` ${track.role.replaceAll("_", " ")}`));
        const bad = !Number.isFinite(value) || (track.limit !== null && value > track.limit);
        const low = real(track.low), high = real(track.high), room = 5 * (high - low);
        const far = !bad && room > 0 && !(low - room <= value && value <= high + room);
        line.append(name, make("td", track.ids ? String(value) : numeral(value), bad ? "num bad" : far ? "num far-out" : "num"));
        if (fixed) line.append(make("td", track.cells[fixed] ? numeral(this.value(track, row, column, fixed)) : "same", track.cells[fixed] ? "num" : "num quiet"));
        const known = !Number.isNaN(real(track.median));
        line.append(make("td", known ? numeral(real(track.median)) : "", "num"), make("td", known ? `${numeral(real(track.low))} … ${numeral(real(track.high))}` : "", "num"));
        return line;
      }));
    }

    histogram(track) {
      const node = this.node.querySelector(".histogram");
      if (!node) return;
      const h = track.histogram, top = h && Math.max(...h.counted, ...h.masked);
      node.hidden = !h;
      if (!h) return;
      const high = (n) => (n ? 4 + 40 * Math.log1p(n) / Math.log1p(top) : 0), bars = (counts, shift) => counts.map((n, bin) => (n ? `M${10 * bin + shift} 46v${-high(n)}h4v${high(n)}z` : "")).join("");
      node.querySelector(".counted").setAttribute("d", bars(h.counted, 1));
      node.querySelector(".hidden").setAttribute("d", bars(h.masked, 5));
      const limit = node.querySelector(".limit"), x = track.limit === null ? -1 : 10 * h.counted.length * (track.limit - h.low) / (h.high - h.low);
      limit.setAttribute("d", x >= 0 && x <= 10 * h.counted.length ? `M${x} 0V46` : "");
      const ends = all(".ends span", node);
      ends[0].textContent = numeral(h.low);
      ends[1].textContent = numeral(h.high);
    }
  }

  all(".lookout").forEach((node) => { if (data.maps[node.dataset.map]) new Look(node, data.maps[node.dataset.map]); });

  // -- charts: the values under the pointer, and a part of the steps --------------------------------------------------------------------

  class Chart {
    constructor(node, chart) {
      Object.assign(this, { node, chart, svg: node.querySelector("svg"), first: chart.first, last: chart.last, from: null });
      this.said = make("span", "", "under");
      node.querySelector("figcaption").append(this.said);
      this.line = drawn(this.svg, "path");
      this.line.setAttribute("class", "under-line");
      this.svg.append(this.line);
      this.svg.setAttribute("tabindex", "0");
      this.steps = [...new Set(chart.curves.flatMap((curve) => curve.points.map(([step]) => step)))].sort((a, b) => a - b);
      this.svg.addEventListener("pointermove", (event) => this.show(this.step(event)));
      this.svg.addEventListener("pointerleave", () => { if (this.from === null) this.show(null); });
      this.svg.addEventListener("pointerdown", (event) => { this.from = this.step(event); });
      this.svg.addEventListener("pointerup", (event) => { const to = this.step(event), from = this.from; this.from = null; if (Math.abs(this.x(to) - this.x(from)) > 12) this.zoom(Math.min(from, to), Math.max(from, to)); });
      this.svg.addEventListener("dblclick", () => this.zoom(chart.first, chart.last));
      this.svg.addEventListener("keydown", (event) => {
        if (event.key === "Escape") this.zoom(chart.first, chart.last);
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!move) return;
        event.preventDefault();
        const at = this.steps.indexOf(this.now);
        this.show(this.steps[Math.max(0, Math.min(this.steps.length - 1, at < 0 ? this.steps.length - 1 : at + move))]);
      });
    }

    x(step) { return 6 + 468 * (this.last > this.first ? (step - this.first) / (this.last - this.first) : 0.5); }

    step(event) {
      const box = this.svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * 480;
      const wanted = this.first + (x - 6) / 468 * (this.last - this.first);
      return this.steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), this.steps[0]);
    }

    show(step) {
      this.now = step;
      this.line.setAttribute("d", step === null ? "" : `M${this.x(step)} 0V120`);
      const values = step === null ? [] : this.chart.curves.map((curve) => { const point = curve.points.find(([at]) => at === step); return point ? `${this.chart.curves.length > 1 ? `${curve.name} ` : ""}${numeral(real(point[1]))}` : ""; });
      this.said.textContent = step === null ? "" : `step ${step}: ${values.filter(Boolean).join(", ")}`;
    }

    zoom(first, last) {
      Object.assign(this, { first, last });
      const { chart } = this, inside = chart.curves.map((curve) => curve.points.map(([step, value]) => [step, real(value)]).filter(([step]) => step >= first && step <= last));
      const whole = first === chart.first && last === chart.last;
      const finite = inside.flat().map(([, value]) => value).filter(Number.isFinite);
      const low = whole || !finite.length ? chart.low : Math.min(...finite), high = whole || !finite.length ? chart.high : Math.max(...finite);
      const form = chart.log ? Math.log10 : (value) => value / 4;
      const y = (value) => 110 - 98 * (form(high) > form(low) ? (form(value) - form(low)) / (form(high) - form(low)) : 0.5);
      const set = (name, draw) => { const part = this.svg.querySelector(name); if (part) part.setAttribute("d", draw); };
      inside.forEach((points, n) => {
        let pen = "M", drawn = "", marks = "";
        points.forEach(([step, value]) => {
          if (!Number.isFinite(value)) { marks += `M${this.x(step) - 4} 1h8l-4 7z`; pen = "M"; return; }
          drawn += `${pen}${this.x(step).toFixed(1)} ${y(value).toFixed(1)}`;
          pen = "L";
        });
        set(`[data-curve="${n}"].curve`, drawn);
        set(`[data-curve="${n}"].dots`, points.length <= 48 ? points.filter(([, value]) => Number.isFinite(value)).map(([step, value]) => `M${this.x(step).toFixed(1)} ${y(value).toFixed(1)}h0`).join("") : "");
        set(`[data-curve="${n}"].mark`, marks);
      });
      const limit = chart.limit === null ? NaN : y(chart.limit);
      set(".limit", limit >= 0 && limit <= 120 ? `M0 ${limit}H480` : "");
      set(".incident", chart.incident !== null && chart.incident >= first && chart.incident <= last ? `M${this.x(chart.incident)} 0V120` : "");
      all(".said, .said-words, .limit-words, .yaxis .strong", this.node).forEach((part) => { part.style.display = whole ? "" : "none"; });
      const ends = all(".xaxis span", this.node), sides = all(".yaxis span:not(.strong)", this.node);
      ends[0].textContent = `step ${first}`;
      ends[ends.length - 1].textContent = String(last);
      if (sides.length > 1) { sides[0].textContent = numeral(low); sides[1].textContent = numeral(high); }
      this.show(null);
    }
  }

  all("[data-chart]").forEach((node) => new Chart(node, data.charts[node.dataset.chart]));

  // -- the chain, link by link ------------------------------------------------------------------------------------------------------------

  all("section.way").forEach((section) => {
    const links = all(".chain a", section), buttons = section.querySelector(".steps");
    if (!links.length) return;
    let at = -1;
    const light = (n) => {
      at = Math.max(0, Math.min(links.length - 1, n));
      all(".here, .lit", section).forEach((node) => node.classList.remove("here", "lit"));
      links[at].closest("li").classList.add("here");
      const line = document.getElementById(links[at].hash.slice(1));
      if (line) { line.classList.add("lit"); line.scrollIntoView({ block: "nearest" }); }
      section.querySelector(".step-at").textContent = `${at + 1} of ${links.length}`;
    };
    links.forEach((link, n) => link.addEventListener("click", (event) => { event.preventDefault(); light(n); }));
    buttons.hidden = false;
    const [back, on] = all("button", buttons);
    back.onclick = () => light(at - 1);
    on.onclick = () => light(at + 1);
    section.addEventListener("keydown", (event) => {
      const move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (move && event.target.closest(".chain")) { event.preventDefault(); light(at + move); links[at].focus(); }
    });
  });

  // -- what can be copied -----------------------------------------------------------------------------------------------------------------

  all("[data-copy]").forEach((button) => {
    button.hidden = false;
    button.onclick = async () => {
      const text = document.getElementById(button.dataset.copy).textContent;
      try { await navigator.clipboard.writeText(text); button.textContent = "copied"; } catch { getSelection().selectAllChildren(document.getElementById(button.dataset.copy)); button.textContent = "selected"; }
    };
  });
})();
