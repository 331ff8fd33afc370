"use strict";
window.onerror = (message, file, line) => {
  document.body.dataset.state = "failed";
  document.body.append(`the picture cannot be drawn: ${message} (line ${line})`);
};

const data = JSON.parse(document.getElementById("data").textContent);
const KIND = 0, OFFSET = 1, SIZE = 2, BEGIN = 3, END = 4, NAME = 5, WRITER = 6;
const OP = 0, SCOPE = 1, SOURCE = 2, ACTOR = 3, PHASE = 4;
const LEFT = 74, RIGHT = 14, TOP = 26, STRIP = 10;

function element(tag, parent, text, style) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (style) made.className = style;
  parent.append(made);
  return made;
}

function bytes(count) {
  if (count < 1024) return `${count} B`;
  let value = count / 1024;
  for (const unit of ["KiB", "MiB", "GiB"]) {
    if (value < 1023.95) return `${value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

function unitOf(most) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, most) * 0.99) / 10)));
  return [units[power], 2 ** (10 * power)];
}

function ticks(from, to, wanted) {
  const raw = Math.max((to - from) / wanted, 1e-9), scale = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(s => s * scale >= raw) * scale, found = [];
  const last = Math.floor(to / step + 1e-9);
  for (let k = Math.ceil(from / step - 1e-9); k <= last; k++) found.push(k * step);
  return found;
}

function inkOn(colour) {  // by the weights of ITU-R BT.601
  const [red, green, blue] = [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 150 ? "#1c232d" : "#fff";
}

const whole = value => value.toLocaleString("en-US");
const shown = value => whole(Number(value.toFixed(3)));

class MapView {
  constructor(root, map, top) {
    this.map = map;
    this.top = top;
    this.window = { x0: 0, x1: map.horizon, y0: 0, y1: top };
    this.chosen = this.pinned = null;
    const head = element("div", root);
    const title = map.caption ? `${map.caption}: ${bytes(map.arena)}` : "";
    if (title) element("h2", head, title);
    element("div", head, `arena ${map.device}: ${bytes(map.arena)} = `
      + map.parts.map(([name, size]) => `${name} ${bytes(size)}`).join(" + "));
    const at = map.steps[map.peak];
    const where = at ? `, ${this.label(at)} (${map.strings[at[SOURCE]]})` : "";
    element("div", head, `peak ${bytes(map.live)} live at launch ${map.peak} of ${map.horizon}`
      + `${where}; lower bound ${bytes(map.bound)}`
      + `${map.live < map.bound ? ", with chains that run at the same time" : ""}; ${map.text}`);
    const body = element("div", root, undefined, "map");
    const pictures = element("div", body), side = element("div", body);
    this.phases(pictures);
    this.address = element("canvas", pictures, undefined, "address");
    this.curve = element("canvas", pictures, undefined, "curve");
    element("div", pictures, "hover: who is it · click: hold it · drag: zoom in · double click:"
      + " the whole arena", "soft");
    this.details = element("div", side, undefined, "details");
    this.listHolders(side);
    this.listKinds(side);
    this.listen();
    this.describe(null);
  }

  label(step) {
    const [op, scope] = [this.map.strings[step[OP]], this.map.strings[step[SCOPE]]];
    return scope ? `${scope}:${op}` : op;
  }

  phases(parent) {
    const line = element("div", parent, undefined, "phases");
    const present = new Set(this.map.steps.map(step => step[PHASE]));
    data.phases.forEach(([name, colour], index) => {
      if (!present.has(index)) return;
      const item = element("span", line);
      element("i", item, undefined, "chip").style.background = colour;
      item.append(` ${name}`);
    });
  }

  listHolders(side) {
    const map = this.map;
    const live = map.boxes.filter(b => b[BEGIN] <= map.peak && map.peak < b[END]);
    live.sort((a, b) => b[SIZE] - a[SIZE] || a[OFFSET] - b[OFFSET]);
    element("h2", side, `held at the peak: ${live.length} tensors, ${bytes(map.live)}`);
    const table = element("table", element("div", side, undefined, "holders"));
    this.rows = new Map();
    for (const box of live.slice(0, 200)) {
      const row = element("tr", table);
      const chip = element("i", element("td", row), undefined, "chip");
      chip.style.background = data.kinds[box[KIND]][1];
      element("td", row, bytes(box[SIZE]), "number");
      element("td", row, `${(100 * box[SIZE] / map.live).toFixed(1)} %`, "number");
      element("td", row, map.strings[box[NAME]], "name");
      row.onmouseenter = () => this.choose(box);
      row.onmouseleave = () => this.choose(this.pinned);
      row.onclick = () => { this.pinned = box; this.choose(box); };
      this.rows.set(box, row);
    }
    const rest = live.slice(200).reduce((sum, box) => sum + box[SIZE], 0);
    if (rest) element("div", side, `and ${bytes(rest)} in ${live.length - 200} others`, "soft");
  }

  listKinds(side) {
    const map = this.map, count = new Map(), held = new Map();
    for (const box of map.boxes) {
      const is_live = box[BEGIN] <= map.peak && map.peak < box[END];
      count.set(box[KIND], (count.get(box[KIND]) || 0) + 1);
      held.set(box[KIND], (held.get(box[KIND]) || 0) + (is_live ? box[SIZE] : 0));
    }
    element("h2", side, "kinds, and what they hold at the peak");
    const table = element("table", side);
    data.kinds.forEach(([name, colour], kind) => {
      if (!count.has(kind)) return;
      const row = element("tr", table);
      element("i", element("td", row), undefined, "chip").style.background = colour;
      element("td", row, name);
      element("td", row, `${count.get(kind)}`, "number");
      element("td", row, bytes(held.get(kind)), "number");
    });
  }

  describe(box) {
    const panel = this.details, map = this.map;
    panel.replaceChildren();
    if (!box) {
      element("span", panel, "Point at a box to see what it is.", "soft");
      return;
    }
    element("b", panel, map.strings[box[NAME]]);
    const line = text => element("div", panel, text);
    line(`${data.kinds[box[KIND]][0]}, ${bytes(box[SIZE])} (${whole(box[SIZE])} B)`);
    line(`offset ${whole(box[OFFSET])} B`);
    const lives = box[END] - box[BEGIN];
    line(`lives in launches [${box[BEGIN]}, ${box[END]}), ${lives} of ${map.horizon}`);
    const step = map.steps[box[WRITER]];
    if (!step) return;
    line(`first written by launch ${box[WRITER]}, ${this.label(step)}`);
    const [phase] = data.phases[step[PHASE]];
    line(`${phase} of ${map.strings[step[ACTOR]]}, ${map.strings[step[SOURCE]]}`);
  }

  choose(box) {
    if (box === this.chosen) return;
    this.rows.get(this.chosen)?.classList.remove("chosen");
    this.rows.get(box)?.classList.add("chosen");
    this.chosen = box;
    this.describe(box);
    this.overlay();
  }

  // -- drawing -------------------------------------------------------------------------------

  fit(canvas) {
    const ratio = window.devicePixelRatio || 1, area = canvas.getBoundingClientRect();
    canvas.width = Math.round(area.width * ratio);
    canvas.height = Math.round(area.height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    return [pen, area.width, area.height];
  }

  draw() {
    const [pen, width, height] = this.fit(this.address);
    this.place = { left: LEFT, top: TOP, width: width - LEFT - RIGHT, height: height - TOP - 34 };
    this.paint(pen);
    this.still = document.createElement("canvas");
    this.still.width = this.address.width;
    this.still.height = this.address.height;
    this.still.getContext("2d").drawImage(this.address, 0, 0);
    this.overlay();
    this.drawCurve();
  }

  x(launch) {
    const { left, width } = this.place, { x0, x1 } = this.window;
    return left + width * (launch - x0) / (x1 - x0);
  }

  y(offset) {
    const { top, height } = this.place, { y0, y1 } = this.window;
    return top + height * (1 - (offset - y0) / (y1 - y0));
  }

  rectangle(box) {
    const x = this.x(box[BEGIN]), y = this.y(box[OFFSET] + box[SIZE]);
    return [x, y, this.x(box[END]) - x, this.y(box[OFFSET]) - y];
  }

  paint(pen) {
    const map = this.map, { left, top, width, height } = this.place;
    pen.fillStyle = "#f5f7f9";
    pen.fillRect(left, top, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width, height);
    pen.clip();
    for (const box of map.boxes) {
      const [x, y, w, h] = this.rectangle(box);
      if (x > left + width || x + w < left || y > top + height || y + h < top) continue;
      pen.fillStyle = data.kinds[box[KIND]][1];
      pen.fillRect(x, y, Math.max(w, 0.6), Math.max(h, 0.6));
      if (h > 4 && w > 3) {
        pen.strokeStyle = "rgba(255,255,255,0.75)";
        pen.lineWidth = 0.8;
        pen.strokeRect(x + 0.4, y + 0.4, w - 0.8, h - 0.8);
      }
      if (h > 13 && w > 60) this.write(pen, box, x, y, w, h);
    }
    if (this.window.y1 > map.arena) this.edge(pen, this.y(map.arena), `arena ${bytes(map.arena)}`);
    pen.restore();
    this.peakLine(pen, top - 4, top + height);
    this.axes(pen);
    this.strip(pen);
  }

  write(pen, box, x, y, w, h) {
    const name = this.map.strings[box[NAME]], from = Math.max(x, this.place.left);
    const room = Math.min(x + w, this.place.left + this.place.width) - from - 8;
    const fitting = Math.floor(room / 6.2);
    if (fitting < 6) return;
    pen.fillStyle = inkOn(data.kinds[box[KIND]][1]);
    const text = name.length > fitting ? `${name.slice(0, fitting - 1)}…` : name;
    pen.fillText(text, from + 4, y + h / 2 + 4);
  }

  edge(pen, y, text) {
    pen.strokeStyle = "#1c232d";
    pen.setLineDash([5, 4]);
    pen.beginPath();
    pen.moveTo(this.place.left, y);
    pen.lineTo(this.place.left + this.place.width, y);
    pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = "#1c232d";
    pen.fillText(text, this.place.left + 6, y - 5);
  }

  peakLine(pen, from, to) {
    const at = this.map.peak + 0.5, x = this.x(at), { left, width } = this.place;
    if (x < left || x > left + width) return;
    pen.strokeStyle = pen.fillStyle = "#c4161c";
    pen.lineWidth = 1.4;
    pen.beginPath();
    pen.moveTo(x, from);
    pen.lineTo(x, to);
    pen.stroke();
    pen.textAlign = x < left + 110 ? "left" : x > left + width - 110 ? "right" : "center";
    pen.fillText(`peak: launch ${this.map.peak}, ${bytes(this.map.live)}`, x, from - 5);
    pen.textAlign = "left";
  }

  axes(pen) {
    const { left, top, width, height } = this.place, { x0, x1, y0, y1 } = this.window;
    const [unit, size] = unitOf(this.top);
    pen.fillStyle = "#5d6876";
    pen.strokeStyle = "#b5bdc7";
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const tick of ticks(y0 / size, y1 / size, height / 55)) {
      const y = Math.round(this.y(tick * size)) + 0.5;
      this.stroke(pen, left - 5, y, left, y);
      pen.fillText(shown(tick), left - 8, y + 3.5);
    }
    pen.textAlign = "center";
    for (const tick of ticks(x0, x1, width / 90)) {
      if (tick % 1) continue;
      const x = Math.round(this.x(tick)) + 0.5;
      this.stroke(pen, x, top + height + STRIP + 2, x, top + height + STRIP + 6);
      pen.fillText(shown(tick), x, top + height + STRIP + 18);
    }
    pen.save();
    pen.translate(14, top + height / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(`offset in the arena [${unit}]`, 0, 0);
    pen.restore();
    pen.textAlign = "left";
  }

  strip(pen) {
    const { left, top, width, height } = this.place, steps = this.map.steps;
    const y = top + height + 1;
    for (let from = 0; from < steps.length;) {
      let to = from + 1;
      while (to < steps.length && steps[to][PHASE] === steps[from][PHASE]) to++;
      const a = Math.max(left, this.x(from)), b = Math.min(left + width, this.x(to));
      pen.fillStyle = data.phases[steps[from][PHASE]][1];
      if (b > a) pen.fillRect(a, y, b - a, STRIP);
      from = to;
    }
  }

  stroke(pen, ...line) {
    pen.beginPath();
    pen.moveTo(line[0], line[1]);
    pen.lineTo(line[2], line[3]);
    pen.stroke();
  }

  overlay() {
    if (!this.still) return;
    const pen = this.address.getContext("2d"), ratio = window.devicePixelRatio || 1;
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.address.width, this.address.height);
    pen.drawImage(this.still, 0, 0);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const { left, top, width, height } = this.place;
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width, height);
    pen.clip();
    if (this.chosen) {
      const [x, y, w, h] = this.rectangle(this.chosen);
      pen.fillStyle = "rgba(255,255,255,0.45)";
      pen.fillRect(x, y, Math.max(w, 2), Math.max(h, 2));
      pen.strokeStyle = "#000";
      pen.lineWidth = 2;
      pen.strokeRect(x, y, Math.max(w, 2), Math.max(h, 2));
    }
    if (this.drag) {
      const { x0, y0, x1, y1 } = this.drag;
      pen.fillStyle = "rgba(28,35,45,0.12)";
      pen.fillRect(Math.min(x0, x1), Math.min(y0, y1), Math.abs(x1 - x0), Math.abs(y1 - y0));
    }
    pen.restore();
  }

  drawCurve() {
    const map = this.map, [pen, width, height] = this.fit(this.curve);
    const place = { left: LEFT, top: 16, width: width - LEFT - RIGHT, height: height - 40 };
    const [unit, size] = unitOf(this.top);
    const x = launch => place.left + place.width * (launch - this.window.x0)
      / (this.window.x1 - this.window.x0);
    const y = count => place.top + place.height * (1 - count / this.top);
    pen.save();
    pen.beginPath();
    pen.rect(place.left, 0, place.width, height);
    pen.clip();
    pen.beginPath();
    pen.moveTo(x(0), y(0));
    let before = 0;
    for (const [launch, live] of map.curve) {
      pen.lineTo(x(launch), y(before));
      pen.lineTo(x(launch), y(live));
      before = live;
    }
    pen.lineTo(x(map.horizon), y(0));
    pen.fillStyle = "#dfe6ef";
    pen.fill();
    pen.strokeStyle = "#3f6fb5";
    pen.lineWidth = 1.2;
    pen.stroke();
    pen.setLineDash([5, 4]);
    pen.strokeStyle = "#1c232d";
    this.stroke(pen, place.left, y(map.bound), place.left + place.width, y(map.bound));
    pen.setLineDash([]);
    pen.fillStyle = "#1c232d";
    pen.textAlign = "right";
    pen.fillText(`lower bound ${bytes(map.bound)}`, place.left + place.width - 4, y(map.bound) - 4);
    const at = x(map.peak + 0.5);
    pen.strokeStyle = pen.fillStyle = "#c4161c";
    this.stroke(pen, at, place.top - 6, at, place.top + place.height);
    pen.beginPath();
    pen.arc(at, y(map.live), 3.5, 0, 7);
    pen.fill();
    pen.restore();
    pen.fillStyle = "#5d6876";
    pen.strokeStyle = "#b5bdc7";
    pen.textAlign = "right";
    for (const tick of ticks(0, this.top / size, 4)) {
      this.stroke(pen, place.left - 5, y(tick * size), place.left, y(tick * size));
      pen.fillText(shown(tick), place.left - 8, y(tick * size) + 3.5);
    }
    pen.textAlign = "center";
    pen.fillText("time [launches of all chains, one after the other]",
      place.left + place.width / 2, height - 8);
    pen.save();
    pen.translate(14, place.top + place.height / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(`live [${unit}]`, 0, 0);
    pen.restore();
  }

  // -- the mouse -----------------------------------------------------------------------------

  at(event) {
    const area = this.address.getBoundingClientRect(), w = this.window, p = this.place;
    const x = event.clientX - area.left, y = event.clientY - area.top;
    const launch = w.x0 + (w.x1 - w.x0) * (x - p.left) / p.width;
    const offset = w.y0 + (w.y1 - w.y0) * (1 - (y - p.top) / p.height);
    return { x, y, launch, offset };
  }

  find({ launch, offset }) {
    let best = null;
    for (const box of this.map.boxes) {
      const is_inside = box[BEGIN] <= launch && launch < box[END]
        && box[OFFSET] <= offset && offset < box[OFFSET] + box[SIZE];
      if (is_inside && (!best || box[SIZE] < best[SIZE])) best = box;
    }
    return best;
  }

  listen() {
    const canvas = this.address;
    canvas.onmousedown = event => {
      const { x, y } = this.at(event);
      this.drag = { x0: x, y0: y, x1: x, y1: y, event };
    };
    canvas.onmousemove = event => {
      const here = this.at(event);
      if (this.drag) {
        Object.assign(this.drag, { x1: here.x, y1: here.y });
        this.overlay();
      } else {
        this.choose(this.find(here) || this.pinned);
      }
    };
    canvas.onmouseleave = () => {
      this.drag = null;
      this.choose(this.pinned);
    };
    canvas.onmouseup = event => {
      const drag = this.drag;
      this.drag = null;
      if (!drag) return;
      if (Math.abs(drag.x1 - drag.x0) > 6 && Math.abs(drag.y1 - drag.y0) > 6) {
        this.zoom(this.at(drag.event), this.at(event));
      } else {
        this.pinned = this.find(this.at(event));
        this.choose(this.pinned);
      }
    };
    canvas.ondblclick = () => {
      this.window = { x0: 0, x1: this.map.horizon, y0: 0, y1: this.top };
      this.draw();
    };
  }

  zoom(a, b) {
    this.window = {
      x0: Math.max(0, Math.min(a.launch, b.launch)),
      x1: Math.min(this.map.horizon, Math.max(a.launch, b.launch)),
      y0: Math.max(0, Math.min(a.offset, b.offset)),
      y1: Math.min(this.top, Math.max(a.offset, b.offset)),
    };
    this.draw();
  }
}

const first = data.maps[0], top_ = Math.max(1, ...data.maps.map(map => map.arena));
document.title = `memory map of ${first.title}`;
element("h1", document.body, `Memory map of plan ${first.title}`);
const grid = element("div", document.body, undefined, "maps");
const columns = Math.min(2, data.maps.length);
grid.style.setProperty("--columns", columns);
if (columns > 1) grid.classList.add("narrow");
const views = data.maps.map(map => new MapView(element("div", grid), map, top_));
const drawAll = () => views.forEach(view => view.draw());
window.addEventListener("resize", drawAll);
drawAll();
if (document.body.dataset.state !== "failed") document.body.dataset.state = "drawn";
document.body.dataset.boxes = data.maps.map(map => map.boxes.length).join(" ");
