// Draws the cluster: gateway, workers by role, links with their speed, and KV as it moves.
import { keyed, s, size, speed } from "./format.js";

const NODE = { width: 196, height: 78 };
const GAP = 16;
const MIN_GAP = 72; // a link's speed fits between two nodes
const SIDE_LABEL = 230;
const MIN_WIDE = 660;
const BEND = 46;
const MAX_LABELS = 12;
const MAX_NARROW_LABELS = 4;
const MAX_DOTS = 80;
const FLIGHT_MS = 900;
const STATES = ["used", "cached", "receiving", "quarantined", "free"];
const reduced = matchMedia("(prefers-reduced-motion: reduce)");

const svg = document.getElementById("topology");
const layers = { wires: s("g"), labels: s("g"), nodes: s("g"), dots: s("g") };
svg.append(layers.wires, layers.nodes, layers.labels, layers.dots);
let dots = [];
let wires = new Map();

function columnOf(worker) {
  return worker.role === "prefill" ? 1 : worker.role === "decode" ? 3 : 2;
}

// Returns the position of each node by id, and the size of the drawing.
function layout(workers, width) {
  const columns = [1, 2, 3].map((column) => workers.filter((worker) => columnOf(worker) === column)).filter((each) => each.length);
  const places = new Map();
  // hybrid workers read from each other, so a last column of them needs space for these wires and their labels
  const margin = columns.length && columns.at(-1).length > 1 && columnOf(columns.at(-1)[0]) === 2 ? SIDE_LABEL : 8;
  const last = width - NODE.width - margin;
  const left = NODE.width + 24;
  const slack = last - left - (columns.length - 1) * (NODE.width + MIN_GAP);
  if (width >= MIN_WIDE && slack >= 0) {
    const first = columns.length > 1 ? left + Math.min(80, slack) : last;
    const step = columns.length > 1 ? (last - first) / (columns.length - 1) : 0;
    const rows = Math.max(1, ...columns.map((each) => each.length));
    const height = rows * (NODE.height + GAP) + GAP;
    places.set("", { x: 4, y: height / 2 - NODE.height / 2 });
    columns.forEach((column, i) => column.forEach((worker, j) => {
      const top = (height - column.length * (NODE.height + GAP) + GAP) / 2;
      const bend = i === columns.length - 1 && margin < SIDE_LABEL ? -1 : 1;
      places.set(worker.id, { x: first + i * step, y: top + j * (NODE.height + GAP), bend });
    }));
    return { places, height, isNarrow: false };
  }
  const perRow = Math.max(1, Math.floor((width + GAP) / (Math.min(NODE.width, width / 2 - GAP) + GAP)));
  let y = 4;
  places.set("", { x: width / 2 - NODE.width / 2, y });
  y += NODE.height + 36;
  for (const column of columns) {
    for (let i = 0; i < column.length; i += perRow) {
      const part = column.slice(i, i + perRow);
      const nodeWidth = Math.min(NODE.width, (width - GAP * (part.length - 1)) / part.length);
      const left = (width - part.length * nodeWidth - (part.length - 1) * GAP) / 2;
      part.forEach((worker, j) => places.set(worker.id, { x: left + j * (nodeWidth + GAP), y, width: nodeWidth }));
      y += NODE.height + (columnOf(column[0]) === 2 ? 2 * GAP : GAP);
    }
    y += 30;
  }
  return { places, height: y, isNarrow: true };
}

function curve(from, to, isNarrow) {
  const fromWidth = from.width || NODE.width;
  const toWidth = to.width || NODE.width;
  if (isNarrow) {
    const [x1, x2] = [from.x + fromWidth / 2, to.x + toWidth / 2];
    if (from.y === to.y) { // between two workers of one row
      const [y, low] = [from.y + NODE.height, from.y + NODE.height + BEND - 10];
      return `M${x1} ${y}C${x1} ${low} ${x2} ${low} ${x2} ${y}`;
    }
    const [y1, y2] = from.y < to.y ? [from.y + NODE.height, to.y] : [from.y, to.y + NODE.height];
    const middle = (y1 + y2) / 2;
    return `M${x1} ${y1}C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}`;
  }
  if (from.x === to.x) { // between two workers of one column
    const x = from.bend > 0 ? from.x + fromWidth : from.x;
    const [y1, y2] = [from.y + NODE.height * 0.4, to.y + NODE.height * 0.6];
    const rows = Math.abs(from.y - to.y) / (NODE.height + GAP);
    const far = x + from.bend * (BEND + 30 * Math.min(2, rows - 1));
    return `M${x} ${y1}C${far} ${y1} ${far} ${y2} ${x} ${y2}`;
  }
  const forward = from.x < to.x;
  const [x1, x2] = forward ? [from.x + fromWidth, to.x] : [from.x, to.x + toWidth];
  const [y1, y2] = [from.y + NODE.height / 2, to.y + NODE.height / 2 + (forward ? 0 : 12)];
  const middle = (x1 + x2) / 2;
  return `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
}

function makeNode() {
  const group = s("g");
  group.append(s("rect", { class: "box", rx: 8, height: NODE.height }), s("circle", { r: 5, cx: 14, cy: 17 }),
    s("text", { x: 26, y: 21, class: "title", "font-weight": 600 }), s("text", { x: 12, y: 40, class: "dim first" }),
    s("g", { class: "bar" }), s("text", { x: 12, y: 71, class: "dim second" }));
  return group;
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function cut(text, width) {
  const most = Math.floor(width / 6.6);
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function updateNode(group, node) {
  const width = node.width;
  group.setAttribute("transform", `translate(${node.x} ${node.y})`);
  const box = group.querySelector("rect.box");
  box.setAttribute("width", width);
  box.setAttribute("class", `box ${node.role} ${node.state === "ready" ? "" : "off"}`);
  group.querySelector("circle").setAttribute("class", `s-${node.state}`);
  set(group.querySelector(".title"), cut(node.title, width - 30));
  set(group.querySelector(".first"), cut(node.first, width - 16));
  set(group.querySelector(".second"), cut(node.second, width - 16));
  const bar = group.querySelector(".bar");
  let x = 12;
  const parts = node.blocks ? STATES.map((state) => [state, node.blocks[state] / Math.max(1, node.blocks.total)]) : [];
  keyed(bar, parts, ([state]) => state, ([state]) => s("rect", { class: `b-${state}`, y: 47, height: 9 }), (part, [, share]) => {
    const wide = share * (width - 24);
    part.setAttribute("x", x);
    part.setAttribute("width", Math.max(0, wide));
    x += wide;
  });
}

export function drawTopology(snapshot) {
  const width = svg.parentElement.clientWidth - 28;
  if (width < 100) return;
  const { places, height, isNarrow } = layout(snapshot.workers, width);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const gateway = { id: "", ...places.get(""), width: NODE.width, role: "gateway", title: "gateway", state: snapshot.problem ? "lost" : "ready",
    first: `${snapshot.open_requests} open, ${snapshot.queue.waiting} waiting`, second: snapshot.scheduler ? `scheduler pid ${snapshot.scheduler.pid}` : "no scheduler answers" };
  const nodes = snapshot.workers.map((worker) => ({
    ...places.get(worker.id), id: worker.id, width: places.get(worker.id).width || NODE.width, role: worker.role, state: worker.state, blocks: worker.blocks,
    title: worker.id, first: `${worker.role}, ${worker.state}`,
    second: `${worker.running} running, ${worker.waiting} waiting`,
  }));
  keyed(layers.nodes, [gateway, ...nodes], (node) => node.id, makeNode, updateNode);

  const roles = new Map(snapshot.workers.map((worker) => [worker.id, worker.role]));
  const flows = new Map(snapshot.flows.map((flow) => [`${flow.from} ${flow.to}`, flow]));
  const links = snapshot.links.filter((link) => places.has(link.owner) && places.has(link.reader))
    .map((link) => ({ ...link, key: `${link.owner} ${link.reader}`, flow: flows.get(`${link.owner} ${link.reader}`) }))
    .filter((link) => (roles.get(link.owner) !== "decode" && roles.get(link.reader) !== "prefill") || link.inflight || link.flow || link.problem);
  const requests = snapshot.workers.filter((worker) => worker.role !== "decode").map((worker) => ({ key: ` ${worker.id}`, owner: "", reader: worker.id }));
  wires = new Map();
  keyed(layers.wires, [...requests, ...links], (wire) => wire.key, () => s("path"), (path, wire) => {
    path.setAttribute("d", curve(places.get(wire.owner), places.get(wire.reader), isNarrow));
    const moving = wire.inflight || (wire.flow && (wire.flow.prefilling || wire.flow.handoffs || wire.flow.bytes));
    path.setAttribute("class", `wire ${wire.problem ? "broken" : moving ? "moving" : ""}`);
    wires.set(wire.key, path);
  });
  const labelled = links.length <= (isNarrow ? MAX_NARROW_LABELS : MAX_LABELS) ? links : links.filter((link) => link.problem || link.inflight);
  keyed(layers.labels, labelled, (link) => link.key, () => s("text", { class: "speed" }), (label, link) => {
    const path = wires.get(link.key);
    const [owner, reader] = [places.get(link.owner), places.get(link.reader)];
    const isAside = !isNarrow && owner.x === reader.x;
    const at = path.getPointAtLength(path.getTotalLength() * (isNarrow ? 0.5 : isAside ? 0.4 : 0.3 + 0.4 * (rank(link, links) % 3) / 2));
    label.setAttribute("x", at.x + (isAside ? 6 * owner.bend : 0));
    const isBelow = isNarrow && owner.y === reader.y && owner.x > reader.x; // the other direction's label is above
    label.setAttribute("y", at.y + (isAside ? 4 : isBelow ? 14 : -5));
    label.setAttribute("class", isAside ? `speed ${owner.bend > 0 ? "right" : "left"}` : "speed");
    const moved = link.inflight ? `, ${size(link.inflight)} in flight` : link.flow && link.flow.bytes ? `, ${size(link.flow.bytes)} read` : "";
    set(label, link.problem ? "broken" : speed(link.speed) + moved);
  });
  svg.setAttribute("aria-label", describe(snapshot));
  if (!reduced.matches) for (const flow of snapshot.flows) launch(flow);
}

function rank(link, links) {
  return links.filter((each) => each.owner === link.owner).findIndex((each) => each.key === link.key);
}

function describe(snapshot) {
  const workers = snapshot.workers.map((worker) => `${worker.id}: ${worker.role}, ${worker.state}, ${worker.running} running`);
  return `Cluster: ${workers.join("; ") || "no workers"}`;
}

// Starts dots along the wires of one flow: requests to the prefill worker, then KV to the decode worker.
function launch(flow) {
  const number = Math.min(6, flow.handoffs + (flow.prefilling ? 1 : 0) + (flow.bytes && !flow.handoffs ? 1 : 0));
  for (let i = 0; i < number && dots.length < MAX_DOTS; i += 1) {
    const delay = (i * 900) / number;
    addDot(` ${flow.from}`, "dot request", delay);
    addDot(`${flow.from} ${flow.to}`, "dot", delay + FLIGHT_MS * 0.6);
  }
}

function addDot(key, kind, delay) {
  if (!wires.has(key)) return;
  const circle = s("circle", { r: 4.5, class: kind, visibility: "hidden" });
  layers.dots.append(circle);
  dots.push({ key, circle, begin: performance.now() + delay });
  if (dots.length === 1) requestAnimationFrame(move);
}

function move(now) {
  dots = dots.filter(({ key, circle, begin }) => {
    const share = (now - begin) / FLIGHT_MS;
    const path = wires.get(key);
    if (share > 1 || !path) {
      circle.remove();
      return false;
    }
    if (share >= 0) {
      const at = path.getPointAtLength(path.getTotalLength() * share);
      circle.setAttribute("cx", at.x);
      circle.setAttribute("cy", at.y);
      circle.setAttribute("visibility", "visible");
    }
    return true;
  });
  if (dots.length) requestAnimationFrame(move);
}
