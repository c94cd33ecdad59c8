// The live view: receives snapshots, and shows them. No value of a snapshot is ever used as markup.
import { addHistory, addPoints, draw as drawCharts, resize as resizeCharts, showPoints } from "./charts.js";
import { describeRequest, showDecisions, showWaterfall, titleOf } from "./details.js";
import { cells, clock, count, h, keyed, percent, row, seconds, short, size, speed } from "./format.js";
import { messageOf, Stream } from "./stream.js";
import { drawTopology } from "./topology.js";

const STALE_MS = 3500;
const byId = (id) => document.getElementById(id);
const page = { width: 0, last: null, shown: null, lastAt: performance.now(), refusal: "", paused: false, selected: "", fetching: false };

const stream = new Stream({
  history: addHistory,
  snapshot: (snapshot) => {
    page.last = snapshot;
    page.lastAt = performance.now();
    page.refusal = "";
    addPoints(snapshot.points, snapshot.now);
    if (!page.paused) show(snapshot);
  },
  refused: (message) => { page.refusal = message; checkAge(); },
});

function show(snapshot) {
  page.shown = snapshot;
  byId("model").textContent = `${snapshot.model} · ${snapshot.version}`;
  document.title = `${snapshot.problem ? "⚠ " : ""}${snapshot.model} – Baton`;
  state(snapshot.problem ? snapshot.problem : "serving", snapshot.problem ? "bad" : "good");
  showTiles(snapshot);
  drawTopology(snapshot);
  showPoints(snapshot.points.at(-1).t, snapshot.slo);
  showRequests(snapshot);
  showDecisionList(snapshot);
  showEvents(snapshot);
  showWorkers(snapshot);
  showSelected(snapshot);
  const { gateway, scheduler } = snapshot;
  byId("processes").textContent = `gateway ${gateway.process_id}, pid ${gateway.pid} on ${gateway.host}, ${gateway.address}; ` +
    (scheduler ? `scheduler ${scheduler.process_id}, pid ${scheduler.pid} on ${scheduler.host}` : "no scheduler answers");
  byId("logout").hidden = !snapshot.has_login;
  document.body.dataset.shown = String(Number(document.body.dataset.shown || 0) + 1);
}

function state(text, kind) {
  const element = byId("state");
  if (element.textContent !== text) element.textContent = text;
  element.className = `state ${kind}`;
  document.body.classList.toggle("stale", kind === "warn");
}

function judged(value, limit) {
  return limit === null || limit === undefined || value === null ? "" : value <= limit ? "good" : "bad";
}

function showTiles({ figures: f, slo, open_requests: open, queue }) {
  const limit = (value) => (value === null || value === undefined ? "no SLO" : `SLO ${seconds(value)}`);
  const tiles = [
    ["requests/s", f.rate.toFixed(f.rate < 10 ? 2 : 0), `${count(f.ok)} ok, ${count(f.failed)} failed, ${count(f.refused)} refused`, f.failed ? "bad" : ""],
    ["open requests", count(open), `${count(queue.waiting)} wait for a placement`, ""],
    ["TTFT p95", seconds(f.ttft_p95), `p50 ${seconds(f.ttft_p50)}, ${limit(slo.ttft)}`, judged(f.ttft_p95, slo.ttft)],
    ["TPOT p95", seconds(f.tpot_p95), `p50 ${seconds(f.tpot_p50)}, ${limit(slo.tpot)}`, judged(f.tpot_p95, slo.tpot)],
    ["SLO attainment", percent(f.attainment), f.attainment === null ? "no request had an SLO" : "of requests with an SLO", f.attainment === null ? "" : f.attainment >= 0.99 ? "good" : "bad"],
    ["prefix hits", percent(f.hit), `ceiling ${percent(f.ceiling)}`, ""],
    ["tokens/s", count(Math.round(f.tokens)), "output, last 10 to 15 s", ""],
  ];
  keyed(byId("tiles"), tiles, (tile) => tile[0], ([name]) => h("div", { class: "tile" }, h("div", { class: "name" }, name), h("div", { class: "value" }), h("div", { class: "more" })),
    (element, [, value, more, kind]) => {
      element.className = `tile ${kind}`;
      element.children[1].textContent = value;
      element.children[2].textContent = more;
    });
}

const REQUEST_COLUMNS = [["id", ""], ["phase", ""], ["where", ""], ["prompt", "n"], ["cached", "n"], ["output", "n"], ["ttft", "n"], ["tpot", "n"], ["age", "n"]];
const PHASES = { waiting: "warn", prefill: "", decode: "", finished: "good", cancelled: "dim" };

function requestButton(id) {
  return h("button", { type: "button", class: "link", title: id, onclick: () => select(id) }, short(id));
}

function showRequests({ open, ended, queue }) {
  const seen = new Set(open.map((request) => request.id));
  const waiting = queue.requests.filter((request) => !seen.has(request.id));
  keyed(byId("requests"), [...waiting, ...open, ...ended], (request) => request.id, (request) => {
    const element = row(REQUEST_COLUMNS, { "data-request": request.id });
    element.firstChild.append(requestButton(request.id));
    return element;
  }, (element, request) => {
    element.classList.toggle("selected", request.id === page.selected);
    const attempts = request.num_attempts > 1 ? ` (${request.num_attempts} attempts)` : "";
    cells(element, {
      phase: [request.phase + attempts, PHASES[request.phase] ?? "bad"],
      where: request.prefill && request.decode ? `${request.prefill} → ${request.decode}` : request.decode || request.prefill || "–",
      prompt: count(request.prompt), cached: count(request.cached),
      output: count(request.output), ttft: [seconds(request.ttft), request.met === false ? "bad" : ""], tpot: seconds(request.tpot), age: seconds(request.age),
    });
  });
  byId("queue-text").textContent = queue.waiting
    ? `Admission queue: ${count(queue.waiting)} wait for a placement, the first for ${seconds(queue.oldest)}.${queue.requests[0].why ? ` Last answer: ${queue.requests[0].why}` : ""}`
    : "Admission queue: empty.";
}

function showDecisionList({ decisions, refusals }) {
  keyed(byId("decision-list"), decisions, (each) => `${each.id} ${each.attempt} ${each.at}`, (each) => {
    const element = row([["at", "dim"], ["id", ""], ["answer", "text"], ["ttft", "n"]]);
    element.children[1].append(requestButton(each.id));
    return element;
  }, (element, each) => {
    const placement = each.placement;
    const where = placement ? (placement.prefill && placement.decode ? `${placement.prefill} → ${placement.decode}` : placement.decode || placement.prefill) : "";
    const again = each.attempt > 1 ? ` (attempt ${each.attempt})` : "";
    cells(element, { at: clock(each.at), answer: placement ? where + again : [`${each.reason}: ${each.message}`, "bad"], ttft: placement ? seconds(placement.ttft) : "–" });
  });
  keyed(byId("refusals"), refusals, (each) => each.reason, () => row([["reason", ""], ["count", "n"], ["message", "text"]]),
    (element, each) => cells(element, { reason: each.reason, count: count(each.count), message: each.message }));
}

function showEvents({ events }) {
  keyed(byId("events"), events, (event) => event.number, (event) => h("li", {}, h("time", {}, clock(event.at)), h("span", { class: event.severity }, event.text)), () => {});
}

const WORKER_COLUMNS = [["id", ""], ["role", ""], ["state", ""], ["pid", "n"], ["epoch", "dim"], ["running", "n"], ["waiting", "n"], ["prefill_tokens", "n"], ["leases", "n"],
  ["tier", ""], ["total", "n"], ["free", "n"], ["cached", "n"], ["used", "n"], ["receiving", "n"], ["quarantined", "n"], ["memory", "n"]];
const STATES = { ready: "good", draining: "warn", unhealthy: "bad" };

function showWorkers({ workers, links }) {
  keyed(byId("workers"), workers, (worker) => worker.id, (worker) => row(WORKER_COLUMNS, { "data-worker": worker.id }), (element, worker) => {
    const { blocks } = worker;
    cells(element, {
      id: worker.id, role: worker.role, state: [worker.state, STATES[worker.state] || ""], pid: worker.pid, epoch: worker.epoch,
      running: count(worker.running), waiting: count(worker.waiting), prefill_tokens: count(worker.prefill_tokens), leases: count(worker.leases), tier: worker.tier,
      total: count(blocks.total), free: count(blocks.free), cached: count(blocks.cached), used: count(blocks.used), receiving: count(blocks.receiving),
      quarantined: [count(blocks.quarantined), blocks.quarantined ? "bad" : ""], memory: size(blocks.total * worker.block_bytes),
    });
  });
  keyed(byId("links"), links, (link) => `${link.reader} ${link.owner}`, () => row([["link", ""], ["transport", ""], ["speed", "n"], ["inflight", "n"], ["state", "text"]]),
    (element, link) => cells(element, {
      link: `${link.reader} reads ${link.owner}`, transport: link.transport || "unknown", speed: speed(link.speed), inflight: size(link.inflight),
      state: link.problem ? [link.problem, "bad"] : ["ok", "good"],
    }));
}

function showSelected(snapshot) {
  if (page.selected) return void refreshSelected();
  const why = snapshot.why;
  byId("detail-title").textContent = why ? `Last decision: ${short(why.id)}` : "Last decision";
  if (!why) return;
  const request = [...snapshot.open, ...snapshot.ended].find((each) => each.id === why.id);
  byId("detail-text").textContent = `${request ? `${request.phase}. ` : ""}Choose a request to see its waterfall. Esc returns to the last decision.`;
  if (page.shownDecision === why.number) return;
  page.shownDecision = why.number;
  byId("waterfall").replaceChildren();
  showDecisions(byId("decisions"), why.decisions);
}

async function refreshSelected() {
  const id = page.selected;
  if (page.fetching || (page.details && page.details.id === id && page.isFinal)) return;
  page.fetching = true;
  try {
    const answer = await fetch(`/live/requests/${encodeURIComponent(id)}`, { cache: "no-store" });
    if (id !== page.selected) return;
    if (!answer.ok) {
      page.isFinal = answer.status === 404;
      page.details = { id };
      byId("detail-text").textContent = page.isFinal ? "This request is no longer remembered." : await messageOf(answer);
      return;
    }
    const request = await answer.json();
    page.isFinal = page.details && page.details.id === id && page.details.phase === request.phase && !["waiting", "prefill", "decode"].includes(request.phase);
    page.details = request;
    byId("detail-title").textContent = titleOf(request.id);
    byId("detail-text").textContent = describeRequest(request);
    showWaterfall(byId("waterfall"), request);
    showDecisions(byId("decisions"), request.decisions);
  } catch { /* the stream tells that the gateway does not answer */ } finally {
    page.fetching = false;
    if (page.selected && page.selected !== id) refreshSelected();
  }
}

function select(id) {
  page.selected = id;
  page.details = null;
  page.isFinal = false;
  page.shownDecision = -1;
  for (const element of byId("requests").children) element.classList.toggle("selected", element.dataset.request === id);
  if (id) refreshSelected();
  else if (page.shown) showSelected(page.shown);
}

function togglePause() {
  page.paused = !page.paused;
  byId("pause").setAttribute("aria-pressed", String(page.paused));
  byId("pause").textContent = page.paused ? "Resume" : "Pause";
  if (!page.paused && page.last) show(page.last);
  checkAge();
}

function toggleTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("baton-theme", root.dataset.theme); } catch { /* storage is switched off */ }
  drawCharts();
}

function checkAge() {
  const age = performance.now() - page.lastAt;
  if (page.paused) state("paused", "");
  else if (page.refusal) state(page.refusal, "warn");
  else if (age > STALE_MS) state(`no answer for ${Math.round(age / 1000)} s${page.shown ? "; the figures are old" : ""}`, "warn");
}

const LEGEND = [["used", "used"], ["cached", "cached"], ["receiving", "receiving"], ["quarantined", "quarantined"], ["free", "free"]];
byId("legend").append("KV blocks:", ...LEGEND.map(([name, text]) => h("span", {}, h("i", { class: `b-${name}` }), text)));
byId("pause").addEventListener("click", togglePause);
byId("theme").addEventListener("click", toggleTheme);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") select("");
  else if (event.key === "p") togglePause();
  else if (event.key === "t") toggleTheme();
});
document.addEventListener("visibilitychange", () => { // a hidden page costs nothing
  if (document.hidden) stream.close(); else stream.open();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
new ResizeObserver(([{ contentRect }]) => { // of the width: each new row changes the height
  if (contentRect.width === page.width) return;
  page.width = contentRect.width;
  resizeCharts();
  if (page.shown) drawTopology({ ...page.shown, flows: [] }); // the flows were shown already
}).observe(document.querySelector("main"));
drawCharts();
setInterval(checkAge, 500);
stream.open();
