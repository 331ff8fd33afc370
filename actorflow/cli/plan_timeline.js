
// The predicted timeline of a plan: firings on their streams, in them the phases of their launches.
// plan_page.js has the plan's tables and what is selected.

const ROW = 34, BAR = 26;

class TimelineView {
  constructor(root) {
    this.streams = [...new Set(rows.map(row => actors[row[0]].stream))].sort((a, b) => a - b);
    this.end = Math.max(1, ...rows.map(row => row[3]));
    this.window = [0, this.end];
    this.at = -1;
    this.canvas = element("canvas", root, undefined, "timeline");
    this.canvas.style.setProperty("--height", `${this.streams.length * ROW + 46}px`);
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", "predicted timeline: arrow keys go from firing to"
      + " firing, Enter selects its actor");
    // Where launches lie in a firing, as shares of it.
    this.shares = actors.map(actor => {
      const ends = [0];
      for (let i = actor.first; i < lastOf(actor); i++) ends.push(ends.at(-1) + launches.ns[i]);
      const total = ends.at(-1) || 1;
      return ends.map(end => end / total);
    });
    this.stretches = actors.map((actor, index) => this.stretchesOf(actor, this.shares[index]));
    this.listen();
  }

  x(time) {
    return LANE_LABEL + (this.width - LANE_LABEL - 12) * (time - this.window[0])
      / (this.window[1] - this.window[0]);
  }

  y(actor) {
    return 8 + ROW * this.streams.indexOf(actors[actor].stream);
  }

  draw() {
    const [pen, width, height] = fit(this.canvas);
    if (!width) return;
    this.width = width;
    this.axes(pen, height);
    pen.save();
    pen.beginPath();
    pen.rect(LANE_LABEL, 0, width - LANE_LABEL, height);
    pen.clip();
    rows.forEach((row, index) => this.bar(pen, row, index));
    pen.restore();
  }

  axes(pen, height) {
    const base = this.streams.length * ROW + 10;
    this.streams.forEach((stream, k) => {
      pen.fillStyle = colour("wash");
      pen.fillRect(LANE_LABEL, 8 + ROW * k, this.width - LANE_LABEL - 12, BAR);
      pen.fillStyle = colour("ink");
      pen.fillText(cut(data.streams[stream][0], 14), 8, 25 + ROW * k);
    });
    pen.fillStyle = colour("soft");
    pen.textAlign = "center";
    const [from, to] = this.window.map(time => time / 1e6);
    for (const tick of ticks(from, to, (this.width - LANE_LABEL) / 90)) {
      pen.fillText(`${Number(tick.toPrecision(6))}`, this.x(tick * 1e6), base + 12);
    }
    pen.fillText("predicted time [ms]", (this.width + LANE_LABEL) / 2, height - 6);
    pen.textAlign = "left";
  }

  bar(pen, [actor, , start, end], index) {
    const a = this.x(start), b = Math.max(this.x(end), a + 1), y = this.y(actor);
    if (b < LANE_LABEL || a > this.width) return;
    const isDim = marked && !marked.actor.has(actor);
    pen.globalAlpha = isDim ? 0.25 : 1;
    pen.fillStyle = colour("c7");
    pen.fillRect(a, y, b - a, BAR);
    this.phases(pen, actor, a, b - a, y);
    pen.globalAlpha = 1;
    if (marked && !isDim) this.highlight(pen, actor, a, b - a, y);
    if (index === this.at) {
      pen.strokeStyle = colour("ink");
      pen.lineWidth = 2;
      pen.strokeRect(a, y, b - a, BAR);
    }
  }

  // Launches of one phase, one after the other: [colour, begin, end] in shares of a firing.
  stretchesOf({ first, count }, shares) {
    const stretches = [];
    for (let from = 0; from < count;) {
      let to = from + 1;
      while (to < count && launches.phase[first + to] === launches.phase[first + from]) to++;
      stretches.push([data.phases[launches.phase[first + from]][1], shares[from], shares[to]]);
      from = to;
    }
    return stretches;
  }

  phases(pen, actor, x, width, y) {
    for (const [fill, from, to] of this.stretches[actor]) {
      pen.fillStyle = fill;
      pen.fillRect(x + width * from, y, width * (to - from), BAR);
    }
  }

  // The launches that are selected, or all of the firing of a selected actor.
  highlight(pen, actor, x, width, y) {
    const shares = this.shares[actor], own = marked.launchesBy.get(actor) || [];
    pen.fillStyle = pen.strokeStyle = colour("ink");
    pen.lineWidth = 2;
    if (!own.length) pen.strokeRect(x, y, width, BAR);
    let drawn = -1;
    for (const k of own) {
      const end = Math.max(width * shares[k + 1], width * shares[k] + 2);
      if (end < drawn + 1) continue;  // within a pixel of the one before
      pen.fillRect(x + width * shares[k], y - 3, end - width * shares[k], 5);
      pen.fillRect(x + width * shares[k], y + 24, end - width * shares[k], 5);
      drawn = end;
    }
  }

  // The firing at a place of the canvas, and the launch in it.
  find(event) {
    const area = this.canvas.getBoundingClientRect();
    const x = event.clientX - area.left, y = event.clientY - area.top;
    const index = rows.findIndex(([actor, , start, end]) => {
      const a = this.x(start), b = Math.max(this.x(end), a + 1), top = this.y(actor);
      return a <= x && x <= b && top <= y && y <= top + BAR;
    });
    return { x, index };
  }

  // A firing's launch at a place where launches are wide enough to be meant, or its actor.
  thingAt({ x, index }) {
    if (index < 0) return null;
    const [actor, , start, end] = rows[index], shares = this.shares[actor];
    const share = (x - this.x(start)) / (this.x(end) - this.x(start));
    const k = shares.findIndex((end_, i) => i && share < end_) - 1;
    const isWide = k >= 0 && (this.x(end) - this.x(start)) * (shares[k + 1] - shares[k]) > 5;
    if (!isWide) return { kind: "actor", index: actor };
    return { kind: "launch", index: actors[actor].first + k };
  }

  listen() {
    const canvas = this.canvas;
    let from = null;
    canvas.onmousedown = event => { from = this.find(event).x; };
    canvas.onmousemove = event => show(this.thingAt(this.find(event)) || selected);
    canvas.onmouseleave = () => { from = null; show(selected); };
    canvas.onmouseup = event => {
      const place = this.find(event), [a, b] = this.window, size = this.width - LANE_LABEL - 12;
      const time = x => Math.min(b, Math.max(a, a + (b - a) * (x - LANE_LABEL) / size));
      if (from !== null && Math.abs(place.x - from) > 6) {
        const [begin, end] = [time(Math.min(place.x, from)), time(Math.max(place.x, from))];
        if (begin < end) this.window = [begin, end];
        this.draw();
      } else {
        this.at = place.index;
        select(this.thingAt(place));
      }
      from = null;
    };
    canvas.ondblclick = () => { this.window = [0, this.end]; this.draw(); };
    canvas.onkeydown = event => {
      const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Enter" && this.at >= 0) select({ kind: "actor", index: rows[this.at][0] });
      if (!way || !rows.length) return;
      event.preventDefault();
      this.at = (this.at + way + rows.length) % rows.length;
      show({ kind: "actor", index: rows[this.at][0] });
      this.draw();
    };
  }
}
