"use strict";
window.onerror = (message, file, line) => {
  document.body.dataset.state = "failed";
  document.body.append(`the picture cannot be drawn: ${message} (line ${line})`);
};

const data = JSON.parse(document.getElementById("data").textContent);
const KIND = 0, OFFSET = 1, SIZE = 2, BEGIN = 3, END = 4, NAME = 5, WRITER = 6, REGISTER = 7;
const OP = 0, SCOPE = 1, SOURCE = 2, ACTOR = 3, PHASE = 4;
const LEFT = 74, RIGHT = 14, TOP = 26, STRIP = 10;

function element(tag, parent, text, style) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (style) node.className = style;
  parent.append(node);
  return node;
}

// A colour of the page's style, which has two of each: for light and for dark.
const colours = new Map();
function colour(name) {
  if (!colours.has(name)) {
    const style = getComputedStyle(document.documentElement);
    colours.set(name, style.getPropertyValue(`--${name}`).trim());
  }
  return colours.get(name);
}

function addKey(parent, colour) {
  element("i", parent, undefined, "key").style.setProperty("--c", colour);
}

// The colours of phases, of which those that occur are given by number.
function listPhases(parent, present) {
  const line = element("div", parent, undefined, "phases");
  for (const index of [...new Set(present)].sort((a, b) => a - b)) {
    const item = element("span", line), [name, colour] = data.phases[index];
    addKey(item, colour);
    item.append(name);
  }
}

// Let a thing be pressed like a button, by mouse and keyboard.
function pressed(item, action) {
  item.setAttribute("tabindex", "0");
  item.onclick = action;
  item.onkeydown = event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    action();
  };
}

function fit(canvas) {
  const ratio = window.devicePixelRatio || 1, area = canvas.getBoundingClientRect();
  canvas.width = Math.max(1, Math.round(area.width * ratio));
  canvas.height = Math.max(1, Math.round(area.height * ratio));
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  return [pen, area.width, area.height];
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
  const step = [1, 2, 5, 10].find(s => s * scale >= raw) * scale, places = [];
  const last = Math.floor(to / step + 1e-9);
  for (let k = Math.ceil(from / step - 1e-9); k <= last; k++) places.push(k * step);
  return places;
}

function inkOn(colour) {  // by the weights of ITU-R BT.601
  const [red, green, blue] = [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 150 ? "#1c232d" : "#fff";
}

const cut = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;
const whole = value => value.toLocaleString("en-US");
const shown = value => whole(Number(value.toFixed(3)));

class MapView {
  // `pointed` is called with a box that is shown, and `picked` with one that is to stay, or null.
  constructor(root, map, top, { pointed = () => {}, picked = () => {} } = {}) {
    this.root = root;
    this.map = map;
    Object.assign(this, { pointed, picked });
    this.marked = null;
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
    listPhases(pictures, map.steps.map(step => step[PHASE]));
    this.address = element("canvas", pictures, undefined, "address");
    this.address.tabIndex = 0;
    this.address.setAttribute("role", "img");
    this.address.setAttribute("aria-label", `memory of ${map.device} over time: arrow keys go`
      + " from tensor to tensor, Enter selects one");
    this.curve = element("canvas", pictures, undefined, "curve");
    element("div", pictures, "hover: name · click or Enter: select · arrow keys: the next tensor"
      + " · drag: zoom in · double click: all", "soft");
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

  listHolders(side) {
    const map = this.map;
    const live = map.boxes.filter(b => b[BEGIN] <= map.peak && map.peak < b[END]);
    live.sort((a, b) => b[SIZE] - a[SIZE] || a[OFFSET] - b[OFFSET]);
    element("h2", side, `held at the peak: ${live.length} tensors, ${bytes(map.live)}`);
    const table = element("table", element("div", side, undefined, "holders"), undefined, "list");
    this.rows = new Map();
    for (const box of live.slice(0, 200)) {
      const row = element("tr", table);
      addKey(element("td", row), data.kinds[box[KIND]][1]);
      element("td", row, bytes(box[SIZE]), "number");
      element("td", row, `${(100 * box[SIZE] / map.live).toFixed(1)} %`, "number");
      element("td", row, map.strings[box[NAME]], "name");
      row.onmouseenter = () => this.choose(box);
      row.onmouseleave = () => this.choose(this.pinned);
      row.onfocus = row.onmouseenter;
      pressed(row, () => this.pin(box));
      this.rows.set(box, row);
    }
    const rest = live.slice(200).reduce((sum, box) => sum + box[SIZE], 0);
    if (rest) element("div", side, `and ${bytes(rest)} in ${live.length - 200} others`, "soft");
  }

  listKinds(side) {
    const map = this.map, count = new Map(), held = new Map();
    for (const box of map.boxes) {
      const isLive = box[BEGIN] <= map.peak && map.peak < box[END];
      count.set(box[KIND], (count.get(box[KIND]) || 0) + 1);
      held.set(box[KIND], (held.get(box[KIND]) || 0) + (isLive ? box[SIZE] : 0));
    }
    element("h2", side, "kinds, and what they hold at the peak");
    const table = element("table", side, undefined, "list");
    data.kinds.forEach(([name, colour], kind) => {
      if (!count.has(kind)) return;
      const row = element("tr", table);
      addKey(element("td", row), colour);
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
    this.pointed(box);
    this.overlay();
  }

  pin(box) {
    this.pinned = box;
    this.choose(box);
    this.picked(box);
  }

  // Show the slots of some registers alone, or of all for null.
  mark(registers) {
    this.marked = registers;
    this.overlay();
  }

  // -- drawing -------------------------------------------------------------------------------

  draw() {
    const [pen, width, height] = fit(this.address);
    if (!width) return;
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
    pen.fillStyle = colour("wash");
    pen.fillRect(left, top, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width, height);
    pen.clip();
    for (const box of map.boxes) this.paintBox(pen, box);
    if (this.window.y1 > map.arena) this.edge(pen, this.y(map.arena), `arena ${bytes(map.arena)}`);
    pen.restore();
    this.peakLine(pen, top - 4, top + height);
    this.axes(pen);
    this.strip(pen);
  }

  paintBox(pen, box, least = 0.6) {
    const [x, y, w, h] = this.rectangle(box), { left, top, width, height } = this.place;
    if (x > left + width || x + w < left || y > top + height || y + h < top) return;
    pen.fillStyle = data.kinds[box[KIND]][1];
    pen.fillRect(x, y, Math.max(w, least), Math.max(h, least));
    if (h > 4 && w > 3) {
      pen.strokeStyle = "rgba(255,255,255,0.75)";
      pen.lineWidth = 0.8;
      pen.strokeRect(x + 0.4, y + 0.4, w - 0.8, h - 0.8);
    }
    if (h > 13 && w > 60) this.write(pen, box, x, y, w, h);
  }

  write(pen, box, x, y, w, h) {
    const name = this.map.strings[box[NAME]], from = Math.max(x, this.place.left);
    const room = Math.min(x + w, this.place.left + this.place.width) - from - 8;
    const fitting = Math.floor(room / 6.2);
    if (fitting < 6) return;
    pen.fillStyle = inkOn(data.kinds[box[KIND]][1]);
    pen.fillText(cut(name, fitting), from + 4, y + h / 2 + 4);
  }

  edge(pen, y, text) {
    pen.strokeStyle = colour("ink");
    pen.setLineDash([5, 4]);
    pen.beginPath();
    pen.moveTo(this.place.left, y);
    pen.lineTo(this.place.left + this.place.width, y);
    pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = colour("ink");
    pen.fillText(text, this.place.left + 6, y - 5);
  }

  peakLine(pen, from, to) {
    const at = this.map.peak + 0.5, x = this.x(at), { left, width } = this.place;
    if (x < left || x > left + width) return;
    pen.strokeStyle = pen.fillStyle = colour("peak");
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
    pen.fillStyle = colour("soft");
    pen.strokeStyle = colour("line");
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
    if (this.marked) {
      pen.fillStyle = colour("veil");
      pen.fillRect(left, top, width, height);
      for (const box of this.map.boxes) {
        if (this.marked.has(box[REGISTER])) this.paintBox(pen, box, 2);
      }
    }
    if (this.chosen) {
      const [x, y, w, h] = this.rectangle(this.chosen);
      pen.fillStyle = "rgba(255,255,255,0.45)";
      pen.fillRect(x, y, Math.max(w, 2), Math.max(h, 2));
      pen.strokeStyle = colour("ink");
      pen.lineWidth = 2;
      pen.strokeRect(x, y, Math.max(w, 2), Math.max(h, 2));
    }
    if (this.drag) {
      const { x0, y0, x1, y1 } = this.drag;
      pen.fillStyle = colour("veil");
      pen.fillRect(Math.min(x0, x1), Math.min(y0, y1), Math.abs(x1 - x0), Math.abs(y1 - y0));
    }
    pen.restore();
  }

  drawCurve() {
    const map = this.map, [pen, width, height] = fit(this.curve);
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
    pen.fillStyle = colour("mark");
    pen.fill();
    pen.strokeStyle = colour("c0");
    pen.lineWidth = 1.2;
    pen.stroke();
    pen.setLineDash([5, 4]);
    pen.strokeStyle = colour("ink");
    this.stroke(pen, place.left, y(map.bound), place.left + place.width, y(map.bound));
    pen.setLineDash([]);
    pen.fillStyle = colour("ink");
    pen.textAlign = "right";
    pen.fillText(`lower bound ${bytes(map.bound)}`, place.left + place.width - 4, y(map.bound) - 4);
    const at = x(map.peak + 0.5);
    pen.strokeStyle = pen.fillStyle = colour("peak");
    this.stroke(pen, at, place.top - 6, at, place.top + place.height);
    pen.beginPath();
    pen.arc(at, y(map.live), 3.5, 0, 7);
    pen.fill();
    pen.restore();
    pen.fillStyle = colour("soft");
    pen.strokeStyle = colour("line");
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
      const isInside = box[BEGIN] <= launch && launch < box[END]
        && box[OFFSET] <= offset && offset < box[OFFSET] + box[SIZE];
      if (isInside && (!best || box[SIZE] < best[SIZE])) best = box;
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
        this.pin(this.find(this.at(event)));
      }
    };
    canvas.onkeydown = event => {
      const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Enter") this.pin(this.chosen);
      if (!way || !this.map.boxes.length) return;
      event.preventDefault();
      this.sorted ??= [...this.map.boxes].sort((a, b) => a[BEGIN] - b[BEGIN] || a[END] - b[END]);
      const count = this.sorted.length, now = this.sorted.indexOf(this.chosen);
      this.choose(this.sorted[now < 0 ? 0 : (now + way + count) % count]);
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

// Draw all maps of the data into a folder of their own, and return what they are drawn by.
function drawMaps(parent, callbacks) {
  // Maps of two plans have one scale, to be compared.
  const compared = data.maps.filter(map => map.caption).map(map => map.arena);
  const grid = element("div", parent, undefined, "maps");
  const columns = Math.min(2, data.maps.length);
  grid.style.setProperty("--columns", columns);
  if (columns > 1) grid.classList.add("narrow");
  return data.maps.map(map => new MapView(element("div", grid), map,
    Math.max(1, map.arena, ...compared), callbacks));
}

// Draw now, and again when the size or the colours change.
function keepDrawn(drawAll) {
  window.addEventListener("resize", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colours.clear();
    drawAll();
  });
  drawAll();
  if (document.body.dataset.state !== "failed") document.body.dataset.state = "drawn";
}
