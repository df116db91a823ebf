"use strict";
// What the page can do beyond being read: look at any token, in any role, as recorded and with the fix; step along the chain; read charts.
// It reads the data of this page, draws with them, and does nothing else: no request, no storage, no code out of data.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, node = document) => [...node.querySelectorAll(selector)];
  const make = (tag, text = "", name = "") => Object.assign(document.createElement(tag), { textContent: text, className: name });
  const drawn = (svg, tag) => document.createElementNS(svg.namespaceURI, tag);
  const real = (value) => (value === "n" ? NaN : value === "i" ? Infinity : value === "-i" ? -Infinity : value);
  const numeral = (value) => { // as Python writes it with four digits
    if (value === null || value === undefined) return "–";
    if (Number.isNaN(value)) return "NaN";
    if (!Number.isFinite(value)) return value > 0 ? "+inf" : "−inf";
    const [digits, power] = value.toExponential(3).split("e"), plain = value === 0 || (power >= -4 && power < 4);
    const text = plain ? String(Number(value.toPrecision(4))) : `${Number(digits)}e${power[0]}${power.slice(1).padStart(2, "0")}`;
    return text.replaceAll("-", "−");
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
      this.away = node.querySelector(".away");
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
      this.svg.setAttribute("aria-label", `map of ${map.column_name}s: the arrow keys go from one to the next, and what is known of it is read below`);
      this.svg.addEventListener("pointermove", (event) => this.over(event));
      this.svg.addEventListener("pointerdown", (event) => { this.over(event); this.pinned = this.at; });
      this.svg.addEventListener("pointerleave", () => { if (this.pinned) { this.at = this.pinned; this.read(); } });
      this.svg.addEventListener("keydown", (event) => this.key(event));
      all("[data-row]", node).forEach((spot) => { spot.disabled = false; spot.addEventListener("click", (event) => { event.preventDefault(); this.go(Number(spot.dataset.row), Number(spot.dataset.column)); this.show(); }); });
      const tiles = node.querySelector("svg.tiles");
      if (tiles) this.overview(tiles);
      this.odd = drawn(this.svg, "path");
      this.odd.setAttribute("class", "odd");
      this.svg.append(this.odd);
      this.odds = make("li", "far from all others");
      this.odds.prepend(make("i", "", "odd"));
      node.querySelector(".legend").append(this.odds);
      this.mark = drawn(this.svg, "rect");
      this.mark.setAttribute("class", "cursor");
      this.go(map.row, map.column);
    }

    cells(track, way = this.way) { return (track.cells[way] || track.cells.as_recorded)[this.window]; }

    value(track, row, column, way) {
      const line = this.cells(track, way)[row];
      return line === undefined ? null : real(line[track.per_row ? 0 : column]);
    }

    spot(row, column, join = ", ") { const { map } = this; return `${map.row_name ? `${map.row_name} ${count(row)}${join}` : ""}${map.column_name} ${count(column)}`; }

    show() { this.svg.scrollIntoView({ block: "nearest" }); }

    // the whole batch from far: the parts that are kept are framed, and a click, a tap or an arrow key goes to one of them
    overview(tiles) {
      const { map } = this;
      map.windows.forEach((w) => {
        const frame = drawn(tiles, "rect");
        Object.entries({ class: "kept", x: w.column, y: w.row, width: w.width, height: w.height }).forEach(([name, value]) => frame.setAttribute(name, value));
        tiles.insertBefore(frame, tiles.querySelector(".here"));
      });
      const whole = map.windows.some((w) => w.width === map.columns && w.height === map.rows);
      this.node.querySelector(".framed").hidden = whole;
      tiles.setAttribute("tabindex", "0");
      tiles.setAttribute("role", "application");
      tiles.setAttribute("aria-label", `${tiles.getAttribute("aria-label")}: the arrow keys go from one part whose values are in this page to the next`);
      tiles.addEventListener("click", (event) => {
        const box = tiles.getBoundingClientRect(), cell = (at, size, many) => Math.max(0, Math.min(many - 1, Math.floor(at / size * many)));
        const row = cell(event.clientY - box.top, box.height, map.rows), column = cell(event.clientX - box.left, box.width, map.columns);
        this.go(...(this.near(row, column, 6 * map.rows / box.height, 6 * map.columns / box.width) || [row, column]));
        this.show();
      });
      tiles.addEventListener("keydown", (event) => {
        const move = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1 }[event.key];
        if (!move) return;
        event.preventDefault();
        const many = map.windows.length, w = map.windows[this.window = (this.window + move + many) % many];
        const spot = this.near(w.row + (w.height - 1) / 2, w.column + (w.width - 1) / 2, w.height / 2, w.width / 2);
        this.go(...(spot || [w.row, w.column]));
      });
    }

    // of a place whose values are not in the page, the nearest one that is
    go(row, column) {
      const { map } = this, inside = (at, first, size) => Math.max(first, Math.min(first + size - 1, at));
      const spots = map.windows.map((w, n) => [n, inside(row, w.row, w.height), inside(column, w.column, w.width)]);
      const far = ([n, r, c]) => Math.hypot((r - row) / map.rows, (c - column) / map.columns) + (n === this.window ? 0 : 1e-9);
      const [found, r, c] = spots.reduce((best, spot) => (far(spot) < far(best) ? spot : best));
      const away = r !== row || c !== column;
      this.window = found;
      this.at = this.pinned = [r - map.windows[found].row, c - map.windows[found].column];
      all(".worst [data-row]", this.node).forEach((spot) => spot.setAttribute("aria-pressed", Number(spot.dataset.row) === r && Number(spot.dataset.column) === c));
      this.away.hidden = !away;
      this.away.textContent = away ? `The values at ${this.spot(row, column)} are not in this page. Shown is the nearest that is, ${this.spot(r, c)}.` : "";
      if (away && map.command) this.away.append(" To print them, run this where the snapshot is:", make("code", this.command(row, column)));
      this.draw();
    }

    // the path in it, which stands first, may say anything
    command(row, column) {
      const { command } = this.map, mark = "[ROW, COLUMN ", at = command.lastIndexOf(mark);
      return command.slice(0, at) + `[${row}, ${column} ` + command.slice(at + mark.length);
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
      const scale = real(track.full);
      let saturated = false;
      for (let row = 0; row < height; row++) for (let column = 0; column < width; column++) { const value = at(row, column); saturated ||= !bad(value) && Math.abs(value) > scale; }
      const look = (row, column) => {
        const value = at(row, column);
        if (bad(value) || (map.overflowed && row + w.row === map.row && (map.per_row || column + w.column === map.column) && this.track === map.main && this.way === "as_recorded")) return "bad";
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
      const ring = this.svg.querySelector(".ring"), first = map.per_row ? 0 : map.column - w.column;
      const inside = map.row >= w.row && map.row < w.row + height && first >= 0 && first < width;
      const told = inside && this.track === map.main && this.way === "as_recorded";
      all(".ring", this.svg).forEach((part) => { part.style.display = inside ? "" : "none"; });
      all(".lead", this.svg).forEach((part) => { part.style.display = told ? "" : "none"; });
      if (ring) Object.entries({ x: first - 0.16, y: map.row - w.row - 0.16, width: (map.per_row ? width : 1) + 0.32 }).forEach(([name, value]) => ring.setAttribute(name, value));
      set(".lead", `M${first + 0.5} ${-MARGIN}V${map.row - w.row - 0.16}`);
      const flag = this.node.querySelector(".flag");
      if (flag) flag.style.visibility = told ? "" : "hidden";
      if (flag && inside) flag.firstElementChild.style.left = `${share(first, width)}%`;
      const ticks = (node, first, size, side, strong, least) => {
        if (!node) return;
        const every = size > 16 ? 8 : size > 8 ? 4 : 1, numbers = [];
        for (let n = 0; n < size; n++) if (first + n === strong || ((first + n) % every === 0 && Math.abs(first + n - strong) >= Math.min(every, least))) numbers.push(n);
        node.replaceChildren(...numbers.map((n) => { const tick = make("span", String(first + n), first + n === strong ? "strong" : ""); tick.style[side] = `${share(n, size)}%`; return tick; }));
      };
      ticks(this.node.querySelector(".map .xaxis"), w.column, width, "left", map.per_row ? -Infinity : map.column, 3);
      ticks(this.node.querySelector(".map .yaxis"), w.row, height, "top", map.row, 2);
      const ends = all(".scale b", this.node);
      if (ends.length) { ends[0].textContent = `${saturated ? "≤ " : ""}−${numeral(scale)}`; ends[1].textContent = `${saturated ? "≥ " : ""}${numeral(scale)}`; }
      const beyond = this.node.querySelector(".beyond"), over = this.node.querySelector(".over");
      if (beyond) beyond.hidden = !saturated;
      if (over) over.hidden = track.limit === null;
      this.odd.setAttribute("d", outline(runs(height, width, (row, column) => { const value = at(row, column); return !bad(value) && this.far(track, value, 20) ? "x" : ""; }).x || []));
      this.odds.hidden = !this.odd.getAttribute("d");
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
      this.mark.style.display = !map.per_row && w.row + row === map.row && w.column + column === map.column ? "none" : ""; // the ring is there
      const hidden = w.masked && w.masked[row][column] === "1";
      this.caption.textContent = `${this.spot(w.row + row, w.column + column, map.tracks[this.track].per_row ? ", and its " : ", ")}${hidden ? ": masked, the loss does not count it" : w.masked ? ": the loss counts it" : ""}`;
      const best = Object.keys(map.ways).find((way) => way !== "as_recorded"), fixed = this.way === "as_recorded" ? best : this.way;
      const edited = this.node.querySelector(".edited");
      if (edited) edited.textContent = fixed === best ? "with the fix" : "with this edit";
      this.readout.replaceChildren(...map.tracks.map((track) => {
        const line = make("tr"), name = make("th"), value = this.value(track, row, column, "as_recorded");
        name.scope = "row";
        name.append(make("code", track.name), make("span", track.ids ? " token id" : track.role === track.name ? "" : ` ${track.role.replaceAll("_", " ")}`));
        const bad = !Number.isFinite(value) || (track.limit !== null && value > track.limit);
        const far = !bad && this.far(track, value);
        line.append(name, make("td", track.ids ? (map.texts[value] === undefined ? String(value) : `${value} “${map.texts[value]}”`) : numeral(value), bad ? "num bad" : far ? "num far-out" : "num"));
        if (fixed) line.append(make("td", track.cells[fixed] ? numeral(this.value(track, row, column, fixed)) : "same", track.cells[fixed] ? "num" : "num quiet"));
        const known = !Number.isNaN(real(track.median));
        line.append(make("td", known ? numeral(real(track.median)) : "", "num"), make("td", known ? `${numeral(real(track.low))} … ${numeral(real(track.high))}` : "", "num"));
        return line;
      }));
    }

    // far beyond what nine in ten of the counted tokens have, by so many of their ranges
    far(track, value, many = 5) {
      const low = real(track.low), high = real(track.high), room = many * (high - low);
      return room > 0 && !(low - room <= value && value <= high + room);
    }

    histogram(track) {
      const node = this.node.querySelector(".histogram");
      if (!node) return;
      const h = track.histograms[this.way] || track.histograms.as_recorded, top = h && Math.max(...h.counted, ...h.masked);
      node.hidden = !h;
      if (!h) return;
      const fixed = Object.keys(this.map.ways).find((way) => way !== "as_recorded"), edited = this.way === fixed ? "with the fix" : "with this edit";
      node.querySelector(".of").textContent = this.way === "as_recorded" ? "as recorded" : track.cells[this.way] ? edited : `${edited}, the same as recorded`;
      const high = (n) => (n ? 4 + 40 * Math.log1p(n) / Math.log1p(top) : 0), bars = (counts, shift) => counts.map((n, bin) => (n ? `M${10 * bin + shift} 46v${-high(n)}h4v${high(n)}z` : "")).join("");
      node.querySelector(".counted").setAttribute("d", bars(h.counted, 1));
      node.querySelector(".hidden").setAttribute("d", bars(h.masked, 5));
      const limit = node.querySelector(".limit"), x = track.limit === null ? -1 : 10 * h.counted.length * (track.limit - h.low) / (h.high - h.low);
      limit.setAttribute("d", x >= 0 && x <= 10 * h.counted.length ? `M${x} 0V46` : "");
      all(".ends span", node).forEach((end, n) => { end.textContent = h.ends[n]; });
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
      all(".said, .said-words, .limit-words, .last, .yaxis .strong", this.node).forEach((part) => { part.style.display = whole ? "" : "none"; });
      const ends = all(".xaxis span", this.node), sides = all(".yaxis span:not(.strong)", this.node);
      ends[0].textContent = `step ${first}`;
      ends[ends.length - 1].textContent = String(last);
      ends.forEach((end) => { end.style.color = end.style.fontWeight = whole ? "" : "inherit"; });
      if (sides.length > 1) { sides[0].textContent = numeral(low); sides[1].textContent = numeral(high); }
      this.show(null);
    }
  }

  all("[data-chart]").forEach((node) => new Chart(node, data.charts[node.dataset.chart]));

  // -- the chain, link by link ------------------------------------------------------------------------------------------------------------

  all("section.way").forEach((section) => {
    all(".source div", section).forEach((box) => { const line = box.querySelector(".marked"); if (line) box.scrollTop = line.offsetTop - box.offsetTop - box.clientHeight / 2; });
    const links = all(".chain li", section), buttons = section.querySelector(".steps");
    if (!links.length) return;
    let at = -1;
    const light = (n) => {
      at = Math.max(0, Math.min(links.length - 1, n));
      all(".here, .lit", section).forEach((node) => node.classList.remove("here", "lit"));
      links.forEach((link, n) => { link.tabIndex = n === at ? 0 : -1; n === at ? link.setAttribute("aria-current", "step") : link.removeAttribute("aria-current"); });
      links[at].classList.add("here");
      const anchor = links[at].querySelector("a"), line = anchor && document.getElementById(anchor.hash.slice(1));
      if (line) { line.classList.add("lit"); line.scrollIntoView({ block: "nearest" }); }
      section.querySelector(".step-at").textContent = `${at + 1} of ${links.length}`;
    };
    links.forEach((link, n) => {
      link.tabIndex = n ? -1 : 0;
      const anchor = link.querySelector("a");
      if (anchor) anchor.tabIndex = -1; // the row is what is stepped to
      link.addEventListener("click", (event) => {
        event.preventDefault();
        const marked = getSelection();
        if (marked.isCollapsed || !marked.containsNode(link, true)) light(n); // who marks text of a row does not step
      });
    });
    buttons.hidden = false;
    const [back, on] = all("button", buttons);
    back.onclick = () => light(at - 1);
    on.onclick = () => light(at + 1);
    section.addEventListener("keydown", (event) => {
      const row = event.target.closest(".chain li"), from = links.indexOf(row);
      const to = { ArrowUp: from - 1, ArrowDown: from + 1, Enter: from, " ": from, Home: 0, End: links.length - 1 }[event.key];
      if (!row || to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      light(to);
      links[at].focus();
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
