
// The actor graph of a plan: a lane for each stream, actors in order, registers between them.
// plan_page.js has the plan's tables and what is selected.
const BOX = [156, 42], GAP = 84, LANE = 78;
const SVG = "http://www.w3.org/2000/svg";

function shape(tag, parent, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

// Each register between two actors, once for each actor that reads it.
function edges() {
  const makers = new Map(), all = [];
  actors.forEach((actor, index) => actor.outputs.forEach(([r]) => makers.set(r, index)));
  actors.forEach((actor, index) => actor.inputs.forEach(([register]) => {
    if (makers.has(register)) all.push({ register, from: makers.get(register), to: index });
  }));
  return all;
}

// The column of each actor: right of those that feed it, and of those before it in its lane.
function columnsOf(all) {
  const column = new Map(), seen = new Set(), free = new Map();
  const visit = index => {
    seen.add(index);
    const before = all.filter(edge => edge.to === index).map(edge => edge.from);
    for (const other of before) if (!seen.has(other)) visit(other);
    const { stream } = actors[index];
    // Whoever has no column yet is fed by this one: its register goes back.
    const feeding = before.filter(other => column.has(other)).map(other => column.get(other) + 1);
    column.set(index, Math.max(free.get(stream) || 0, ...feeding));
    free.set(stream, column.get(index) + 1);
  };
  actors.forEach((_, index) => { if (!seen.has(index)) visit(index); });
  return actors.map((_, index) => column.get(index));
}

// Whether two rectangles share more than a rim of two pixels.
const overlap = (a, b) => a.x + 2 < b.x + b.width && b.x + 2 < a.x + a.width
  && a.y + 2 < b.y + b.height && b.y + 2 < a.y + a.height;

class GraphView {
  constructor(root) {
    const lanes = [...new Set(actors.map(actor => actor.stream))].sort((a, b) => a - b);
    const all = edges();
    this.column = columnsOf(all);
    this.lane = actors.map(actor => lanes.indexOf(actor.stream));
    const width = (1 + Math.max(0, ...this.column)) * (BOX[0] + GAP) - GAP + 24;
    this.frame = element("div", root, undefined, "lanes");
    this.streams(lanes);
    this.svg = this.lanes(lanes, width, { role: "group", "aria-label": "actor graph" });
    this.drawn = { actor: new Map(), register: new Map() };
    // Where labels and actors lie.
    this.taken = actors.map((_, index) => {
      const [x, y] = this.corner(index);
      return { x, y, width: BOX[0], height: BOX[1] };
    });
    const pairs = new Map();
    // Short edges take their room first, and lie above the long ones that pass them.
    const span = ({ from, to }) => Math.abs(this.column[to] - this.column[from]);
    all.sort((a, b) => span(a) - span(b) || b.to - a.to);
    for (const edge of all) this.drawEdge(edge, pairs);
    actors.forEach((actor, index) => this.drawActor(actor, index));
  }

  lanes(lanes, width, attributes) {
    const svg = shape("svg", this.frame, { width, height: lanes.length * LANE, ...attributes });
    const ground = shape("g", svg, {});
    lanes.forEach((_, k) => shape("rect", ground,
      { class: "lane", x: 0, y: k * LANE, width: "100%", height: LANE }));
    return svg;
  }

  // The names of the streams, which stay where they are when the graph is scrolled.
  streams(lanes) {
    const svg = this.lanes(lanes, LANE_LABEL, { class: "streams" });
    lanes.forEach((stream, k) => {
      const [name, device] = data.streams[stream];
      shape("text", svg, { x: 8, y: k * LANE + 36 }, cut(name, 13));
      shape("text", svg, { x: 8, y: k * LANE + 52, class: "soft" }, cut(device, 13));
    });
  }

  corner(index) {
    const x = 12 + this.column[index] * (BOX[0] + GAP);
    return [x, this.lane[index] * LANE + (LANE - BOX[1]) / 2];
  }

  button(kind, index, label) {
    const group = shape("g", this.svg, { class: kind === "actor" ? "actor" : "edge", role: "button",
      "aria-label": label });
    pressed(group, () => select({ kind, index }));
    group.onmouseenter = group.onfocus = () => show({ kind, index });
    group.onmouseleave = group.onblur = () => show(selected);
    const drawn = this.drawn[kind];
    drawn.set(index, [...(drawn.get(index) || []), group]);
    if (markOf(kind, index)) group.classList.add("changed");
    return group;
  }

  drawEdge({ register, from, to }, pairs) {
    const [x0, y0] = this.corner(from), [x1, y1] = this.corner(to), key = `${from} ${to}`;
    const nth = pairs.get(key) || 0;
    pairs.set(key, nth + 1);
    const text = slotsOf(register);
    const group = this.button("register", register, `register ${registerName(register)}: ${text}`);
    const start = [x0 + BOX[0], y0 + BOX[1] / 2 + 7 * nth], end = [x1, y1 + BOX[1] / 2 + 7 * nth];
    // A register that goes back, or past actors of its lane, bends around them.
    const isFar = this.column[to] - this.column[from] !== 1 && y0 === y1;
    const bow = isFar ? 0.7 * LANE + 8 * nth : 0;
    const reach = Math.max(50, Math.abs(end[0] - start[0]) / 2);
    const [a, b] = [start[0] + reach, end[0] - reach];
    shape("path", group, { d: `M${start} C${a},${start[1] + bow} ${b},${end[1] + bow} ${end}` });
    const x = (start[0] + end[0] + 3 * (a + b)) / 8;  // the middle of the curve
    const y = (start[1] + end[1]) / 2 + 0.75 * bow + 22 * nth;
    const label = [shape("text", group, { x, y: y - 5 }, cut(registerName(register), 14)),
      shape("text", group, { x, y: y + 9, class: "soft" }, text)].map(line => line.getBBox());
    shape("title", group, {}, `${registerName(register)}: ${text}`);
    // A label that would hide another is shown when its edge is pointed at or marked.
    const isHidden = label.some(a => this.taken.some(b => overlap(a, b)));
    if (isHidden) group.classList.add("crowded");
    else this.taken.push(...label);
    this.svg.firstChild.after(group);
  }

  drawActor(actor, index) {
    const [x, y] = this.corner(index), mark = markOf("actor", index);
    const work = actor.count ? launchCount(actor) : actor.kind;
    const facts = actor.ns ? `${work}, ${duration(actor.ns)}` : work;
    const group = this.button("actor", index, `actor ${actor.name}: ${work}`);
    shape("rect", group, { x, y, width: BOX[0], height: BOX[1], rx: 5 });
    shape("text", group, { x: x + 8, y: y + 18 }, cut(actor.name, 18));
    shape("text", group, { x: x + 8, y: y + 35, class: "soft" }, facts);
    if (mark) shape("text", group, { x: x + 2, y: y - 5, class: "change" }, mark);
    shape("title", group, {}, `${actor.name}: ${work}`);
  }

  mark(linked, thing) {
    const [actor] = linked ? linked.actor : [];
    if (actor !== undefined) {
      const [x] = this.corner(actor), { scrollLeft, clientWidth } = this.frame;
      const room = clientWidth - LANE_LABEL;
      const isSeen = scrollLeft <= x && x + BOX[0] <= scrollLeft + room;
      if (!isSeen) this.frame.scrollLeft = x + (BOX[0] - room) / 2;
    }
    for (const [kind, drawn] of Object.entries(this.drawn)) {
      for (const [index, groups] of drawn) {
        for (const group of groups) {
          group.classList.toggle("marked", Boolean(linked?.[kind].has(index)));
          group.classList.toggle("chosen", thing?.kind === kind && thing.index === index);
        }
      }
    }
  }
}
