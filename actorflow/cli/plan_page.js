
// The page of a plan: its tables, what is selected, chains and changes. plan_graph.js draws the
// actors, plan_timeline.js what is predicted, page.js the memory maps.
// What is selected is one thing, {kind, index}: an actor, a register or a launch. `related` says
// what belongs to it, and every view marks that.
const { actors, registers, launches, rows } = data;
const PAGE = 500, MOST_LISTED = 12, LANE_LABEL = 88;
const registerName = index => registers.strings[registers.name[index]];
const launchText = (column, index) => launches.strings[launches[column][index]];
const lastOf = actor => actor.first + actor.count;
const ownerOf = launch => actors.findIndex(a => a.first <= launch && launch < lastOf(a));

// The slots of a register; those without bytes are credits.
function slotsOf(register) {
  const size = registers.size[register], slots = whole(registers.slots[register]);
  return size ? `${slots} × ${bytes(size)}` : `${slots} credit${slots === "1" ? "" : "s"}`;
}

const launchCount = ({ count }) => `${whole(count)} launch${count === 1 ? "" : "es"}`;

function duration(ns) {
  if (ns < 1e3) return `${whole(ns)} ns`;
  return ns < 1e6 ? `${(ns / 1e3).toFixed(1)} us` : `${(ns / 1e6).toFixed(3)} ms`;
}

function operands(launch) {
  const scratch = launches.scratch[launch];
  const named = [...launches.inputs[launch], ...launches.outputs[launch]];
  return scratch < 0 ? named : [...named, scratch];
}

function launchesOf(register) {
  return [...launches.label.keys()].filter(launch => operands(launch).includes(register));
}

// What belongs to a selection: sets of actors, registers and launches, or null for nothing.
function related(thing) {
  if (!thing) return null;
  const linked = { actor: new Set(), register: new Set(), launch: new Set() };
  linked[thing.kind].add(thing.index);
  if (thing.kind === "actor") {
    const actor = actors[thing.index];
    for (const [register] of [...actor.inputs, ...actor.outputs]) linked.register.add(register);
    for (let i = actor.first; i < lastOf(actor); i++) {
      operands(i).forEach(r => linked.register.add(r));
    }
  } else if (thing.kind === "launch") {
    linked.actor.add(ownerOf(thing.index));
    operands(thing.index).forEach(r => linked.register.add(r));
  } else {
    actors.forEach((actor, index) => {
      const ports = [...actor.inputs, ...actor.outputs];
      if (ports.some(([register]) => register === thing.index)) linked.actor.add(index);
    });
    for (const launch of launchesOf(thing.index)) {
      linked.launch.add(launch);
      linked.actor.add(ownerOf(launch));
    }
  }
  linked.launchesBy = new Map([...linked.actor].map(actor => {
    const { first, count } = actors[actor];
    return [actor, [...linked.launch].map(i => i - first).filter(k => 0 <= k && k < count)];
  }));
  return linked;
}

const changeOf = new Map();
for (const [mark, what, , , index] of data.changes || []) {
  if (index >= 0) changeOf.set(`${what} ${index}`, mark);
}
const markOf = (kind, index) => changeOf.get(`${kind} ${index}`);

// -- what is selected, in words ----------------------------------------------------------------

function factsOf(thing) {
  const { kind, index } = thing;
  if (kind === "actor") {
    const actor = actors[index], [stream, device] = data.streams[actor.stream];
    return [actor.name, [["actor", `${actor.kind}, stream ${stream} on ${device}`],
      ["launches", whole(actor.count)], ["a firing takes", duration(actor.ns)]]];
  }
  if (kind === "launch") {
    const scratch = launches.scratch[index];
    return [launchText("label", index), [
      ["launch", `${whole(index - actors[ownerOf(index)].first)} of ${actors[ownerOf(index)].name},`
        + ` ${data.phases[launches.phase[index]][0]}`],
      ["op", launchText("op", index)], ["kernel", launchText("kernel", index)],
      ["makes", launchText("makes", index) || "-"],
      ["bytes", `reads ${bytes(launches.read[index])}, writes ${bytes(launches.written[index])}`
        + (scratch < 0 ? "" : `, workspace ${bytes(registers.size[scratch])}`)],
      ["predicted", duration(launches.ns[index])], ["line", launchText("line", index)]]];
  }
  const kindName = registers.strings[registers.kind[index]];
  const facts = [["register", kindName], ["slots", slotsOf(index)]];
  const reason = registers.strings[registers.reason[index]];
  if (reason) facts.push(["why so many", reason]);
  const map = data.maps[registers.arena[index]];
  const boxes = map ? map.boxes.filter(box => box[REGISTER] === index) : [];
  if (boxes.length) {
    facts.push(["held as", data.kinds[boxes[0][KIND]][0]], ["arena", map.device],
      ["offset", boxes.map(box => `${whole(box[OFFSET])} B`).join(", ")],
      ["lives in", `launches [${boxes[0][BEGIN]}, ${boxes[0][END]}) of ${map.horizon}`]);
  }
  return [registerName(index), facts];
}

function nameOf({ kind, index }) {
  if (kind === "actor") return actors[index].name;
  return kind === "launch" ? launchText("label", index) : registerName(index);
}

function describe(panel, thing) {
  panel.replaceChildren();
  if (!thing) {
    element("p", panel, "Select an actor, a register, a launch, a bar or a tensor: the other"
      + " pictures mark what belongs to it. Escape ends the selection.", "soft");
    return;
  }
  const [title, facts] = factsOf(thing), mark = markOf(thing.kind, thing.index);
  element("b", panel, title);
  const list = element("dl", panel, undefined, "facts-of");
  for (const [name, text] of mark ? [...facts, ["compared", mark]] : facts) {
    element("dt", list, name);
    element("dd", list, text);
  }
  const linked = related(thing);
  for (const kind of ["actor", "register", "launch"]) {
    const others = [...linked[kind]].filter(index => kind !== thing.kind || index !== thing.index);
    if (kind === "register") others.sort((a, b) => registers.size[b] - registers.size[a]);
    if (others.length) listLinks(panel, kind, others);
  }
}

function listLinks(panel, kind, others) {
  const title = { actor: "Actors", register: "Registers", launch: "Launches" }[kind];
  element("div", panel, `${title}: ${whole(others.length)}`, "soft");
  const list = element("div", panel);
  for (const index of others.slice(0, MOST_LISTED)) {
    const size = kind === "register" ? `  ${bytes(registers.size[index])}` : "";
    element("button", list, nameOf({ kind, index }) + size).onclick = () => select({ kind, index });
    list.append(" ");
  }
  if (others.length > MOST_LISTED) list.append(`and ${others.length - MOST_LISTED} others`);
}

// -- chains: folded; the launches of one are drawn when it is unfolded, some at a time ----------

class ChainView {
  constructor(root, actor) {
    this.actor = actor;
    this.from = 0;  // the launch of the first row
    this.rows = [];
    this.fold = element("details", root, undefined, "chain");
    element("summary", this.fold, `${actor.name}: ${launchCount(actor)}, ${duration(actor.ns)}`);
    this.earlier = element("button", this.fold, "");
    this.earlier.onclick = () => this.restart(this.from - PAGE);
    this.list = element("div", this.fold, undefined, "launches");
    this.list.setAttribute("role", "listbox");
    this.list.setAttribute("aria-label", `launches of ${actor.name}`);
    this.more = element("button", this.fold, "");
    this.more.onclick = () => this.draw(this.from + this.rows.length + PAGE);
    this.fold.ontoggle = () => { if (this.fold.open && !this.rows.length) this.draw(PAGE); };
    this.list.onkeydown = event => {
      const way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      const now = this.rows.indexOf(document.activeElement);
      if (!way || now < 0) return;
      event.preventDefault();
      this.draw(this.from + now + 2);
      this.rows[Math.min(this.rows.length - 1, Math.max(0, now + way))].focus();
    };
  }

  // Draw rows up to the launch `end`.
  draw(end) {
    while (this.from + this.rows.length < Math.min(end, this.actor.count)) this.add();
    const rest = this.actor.count - this.from - this.rows.length;
    this.more.textContent = `${whole(rest)} further launches`;
    this.more.hidden = !rest;
    this.earlier.textContent = `${whole(this.from)} earlier launches`;
    this.earlier.hidden = !this.from;
  }

  // Draw rows anew, from a launch on.
  restart(from) {
    this.list.replaceChildren();
    this.rows = [];
    this.from = Math.max(0, from);
    this.draw(this.from + PAGE);
  }

  add() {
    const number = this.from + this.rows.length, index = this.actor.first + number;
    const mark = markOf("launch", index);
    const row = element("div", this.list, undefined, mark ? "changed" : undefined);
    element("span", row, duration(launches.ns[index]), "time");
    element("span", row, `${number} `, "soft");
    element("span", row, `${mark ? `${mark}: ` : ""}${launchText("label", index)}`);
    element("div", row, `${launchText("kernel", index)} · ${bytes(launches.read[index]
      + launches.written[index])} · ${launchText("line", index)}`, "soft");
    row.setAttribute("role", "option");
    pressed(row, () => select({ kind: "launch", index }));
    row.onfocus = () => show({ kind: "launch", index });
    row.onblur = () => show(selected);
    row.tabIndex = this.rows.length ? -1 : 0;
    this.rows.push(row);
    this.markRow(this.rows.length - 1);
  }

  markRow(place) {
    const index = this.actor.first + this.from + place, row = this.rows[place];
    const isChosen = selected?.kind === "launch" && selected.index === index;
    row.classList.toggle("marked", Boolean(marked?.launch.has(index)));
    row.classList.toggle("chosen", isChosen);
    row.setAttribute("aria-selected", isChosen);
  }

  // Unfold the chain of a selected launch or actor, and bring the launch into view.
  mark(thing) {
    const number = thing?.kind === "launch" ? thing.index - this.actor.first : -1;
    const isMine = number >= 0 && number < this.actor.count;
    if (isMine || (thing?.kind === "actor" && actors[thing.index] === this.actor)) {
      this.fold.open = true;
      const isDrawn = this.from <= number && number < this.from + this.rows.length;
      if (!isDrawn && (isMine || !this.rows.length)) this.restart(number - PAGE / 2);
    }
    this.rows.forEach((_, k) => this.markRow(k));
    if (isMine) {
      const chosen = this.rows[number - this.from];
      for (const row of this.rows) row.tabIndex = row === chosen ? 0 : -1;
      this.list.scrollTop = chosen.offsetTop - this.list.offsetTop - 60;
    }
  }
}

// -- what changed ------------------------------------------------------------------------------

function listChanges(parent) {
  element("h2", parent, `What changed from plan ${data.compared}`);
  if (!data.changes.length) {
    element("p", parent, data.is_equal ? "No difference."
      : "Only the order of launches, offsets, values or source lines differ.");
    return;
  }
  const frame = element("div", parent, undefined, "wide changes");
  frame.tabIndex = 0;
  const table = element("table", frame), more = element("button", parent, "");
  let count = 0;
  const draw = () => {
    for (const [mark, what, name, text, index] of data.changes.slice(count, count + PAGE)) {
      const row = element("tr", table);
      element("td", row, mark);
      element("td", row, what);
      const cell = element("td", row);
      if (index < 0) cell.textContent = name;
      else element("button", cell, name).onclick = () => select({ kind: what, index });
      element("td", row, text.replaceAll("->", "-\u2060>"));  // no line ends within an arrow
    }
    count = Math.min(count + PAGE, data.changes.length);
    more.textContent = `${whole(data.changes.length - count)} further changes`;
    more.hidden = count === data.changes.length;
  };
  more.onclick = draw;
  draw();
}

// -- the page ----------------------------------------------------------------------------------

let selected = null, marked = null;
document.title = `plan ${data.name}`;
element("h1", document.body, `Plan ${data.name}`);
for (const line of data.facts) element("p", document.body, line, "facts");
if (data.changes) listChanges(document.body);
const plan = element("div", document.body, undefined, "plan");
const main = element("main", plan), side = element("aside", plan, undefined, "side");
const flow = element("section", main), memory = element("section", main, undefined, "memory");
element("h2", flow, "Actors, by stream");
const graph = new GraphView(flow);
element("div", flow, "A box is an actor: it runs its launches when its inputs are ready. A line is"
  + " a register, the buffer between two actors: slots × bytes, or credits, which only set an"
  + " order.", "soft");
element("h2", flow, "Predicted timeline of the first steps");
listPhases(flow, launches.phase);
const timeline = new TimelineView(flow);
element("div", flow, "click or Enter: select · arrow keys: the next firing · drag: zoom in"
  + " · double click: all", "soft");
element("h2", memory, "Memory");
const registerAt = box => box && { kind: "register", index: box[REGISTER] };
const views = drawMaps(memory, { pointed: box => show(registerAt(box) || selected),
  picked: box => select(registerAt(box)) });
document.querySelector(".maps").style.setProperty("--columns", 1);
const folds = views.map(({ root, map }, index) => {  // arenas after the first are folded
  const fold = element("details", root.parentNode);
  element("summary", fold, `arena ${map.device}: ${bytes(map.arena)}`);
  fold.append(root);
  fold.open = !index;
  fold.ontoggle = () => views[index].draw();
  return fold;
});
element("h2", side, "Selected");
const panel = element("div", side);
panel.setAttribute("aria-live", "polite");
element("h2", side, "Launches, by actor");
const chains = actors.filter(actor => actor.count).map(actor => new ChainView(side, actor));

let panelKey = null;  // what the panel shows

function show(thing) {
  const key = thing ? `${thing.kind} ${thing.index}` : "";
  if (key === panelKey) return;
  panelKey = key;
  describe(panel, thing);
}

function select(thing) {
  selected = thing;
  marked = related(thing);
  panelKey = null;
  show(thing);
  graph.mark(marked, thing);
  chains.forEach(chain => chain.mark(thing));
  timeline.draw();
  for (const view of views) {
    if (view.pinned && !marked?.register.has(view.pinned[REGISTER])) {
      view.pinned = null;
      view.choose(null);
    }
    view.mark(marked && marked.register);
  }
  for (const register of marked ? marked.register : []) {
    if (registers.size[register]) folds[registers.arena[register]].open = true;
  }
  document.body.dataset.selected = thing ? `${thing.kind} ${thing.index}` : "";
}

document.addEventListener("keydown", event => { if (event.key === "Escape") select(null); });
select(null);
keepDrawn(() => { timeline.draw(); views.forEach(view => view.draw()); });
