// The panel of one request: its waterfall, and the candidates of each decision with their terms.
import { h, percent, seconds, short } from "./format.js";

const KINDS = { queue: "wait", prefill: "prefill", "wait for first KV": "wait", "KV transfer": "kv", "KV admission": "wait", decode: "decode" };

// Returns [name, kind, begin, end, value] of each bar, in seconds since the receipt.
function bars(request) {
  const found = [];
  for (const attempt of request.attempts) {
    const prefix = request.attempts.length > 1 ? `attempt ${attempt.number}: ` : "";
    const placed = attempt.placed ?? attempt.lost ?? request.total;
    found.push([`${prefix}placement`, "wait", attempt.started ?? 0, placed]);
    for (const leg of attempt.legs)
      for (const phase of leg.phases) found.push([`${leg.worker} ${phase.name}`, KINDS[phase.name], phase.begin, phase.end, phase.reported]);
    if (attempt.lost !== null) found.push([`${prefix}lost: ${attempt.lost_reason}`, "lost", placed, attempt.lost]);
    else if (!attempt.legs.length && attempt.placed !== null) {
      const first = request.first ?? request.total;
      const where = attempt.placement || {};
      found.push([`${where.prefill || where.decode || ""} prefill`, "prefill", placed, Math.max(placed, first)]);
      if (request.first !== null) found.push([`${where.decode || ""} decode`, "decode", Math.max(placed, first), request.last ?? request.total]);
    }
  }
  return found;
}

export function showWaterfall(element, request) {
  const all = bars(request);
  const total = Math.max(request.total, 1e-6, ...all.map((bar) => bar[3]));
  const rows = all.map(([name, kind, begin, end, value = end - begin]) => {
    const bar = h("div", { class: `bar k-${kind}` });
    bar.style.left = `${(100 * Math.max(0, begin)) / total}%`;
    bar.style.width = `${(100 * Math.max(0, end - begin)) / total}%`;
    return h("div", { class: "bar-row" }, h("span", { class: "name", title: name }, name), h("div", { class: "track" }, bar),
      h("span", { class: "value" }, seconds(value)));
  });
  element.replaceChildren(...rows);
}

export function describeRequest(request) {
  const parts = [`${request.phase}; ${request.prompt} prompt tokens (${request.cached} cached), ${request.output} of at most ${request.max_tokens} output tokens`];
  if (request.ttft !== null) parts.push(`TTFT ${seconds(request.ttft)}${request.ttft_slo ? ` (SLO ${seconds(request.ttft_slo)})` : ""}`);
  if (request.tpot !== null) parts.push(`TPOT ${seconds(request.tpot)}${request.tpot_slo ? ` (SLO ${seconds(request.tpot_slo)})` : ""}`);
  if (request.message) parts.push(request.message);
  const lost = request.attempts.filter((attempt) => attempt.lost !== null).map((attempt) => attempt.lost_problem);
  return [...parts, ...lost].join(". ");
}

export function showDecisions(element, decisions) {
  element.replaceChildren(...decisions.flatMap(decision));
}

function decision(record) {
  const title = `Attempt ${record.attempt}, policy ${record.policy}`;
  return [h("h3", {}, title), h("p", { class: record.rejection ? "bad" : "hint" }, verdict(record)), ...["prefill", "decode"].map((side) => candidates(record, side))]
    .filter(Boolean);
}

function verdict(record) {
  const { placement, rejection } = record;
  if (rejection) {
    const limit = rejection.limit_s !== null && rejection.limit_s !== undefined ? ` Predicted ${seconds(rejection.predicted_s)}, limit ${seconds(rejection.limit_s)}.` : "";
    return `Refused (${rejection.reason}): ${rejection.message}.${limit} Retry after ${seconds(rejection.retry_after_s)}.`;
  }
  if (!placement) return "No answer is recorded.";
  const where = placement.prefill && placement.decode ? `prefill on ${placement.prefill}, decode on ${placement.decode}` : `all on ${placement.decode || placement.prefill}`;
  const terms = record.predicted.map((part) => `${part.label} ${seconds(part.seconds)}`);
  const predicted = placement.ttft === null ? "" : ` Predicted TTFT ${seconds(placement.ttft)}${terms.length ? ` = ${terms.join(" + ")}` : ""}.`;
  const actual = record.actuals && record.actuals.ttft_s ? ` Measured ${seconds(record.actuals.ttft_s)}.` : "";
  return `${where}.${predicted}${actual}`;
}

function candidates(record, side) {
  const rows = record.candidates.filter((candidate) => candidate.side === side);
  const excluded = Object.entries(record.excluded).map(([why, number]) => `${number} ${why}`).join(", ");
  if (!rows.length) return null;
  const columns = record.columns.filter(({ name }) => rows.some((candidate) => name in candidate.terms));
  const head = h("tr", {}, h("th", {}, `${side} candidate`), ...columns.map(({ label, meaning }) => h("th", { class: "n", title: meaning }, label)));
  const body = rows.map((candidate) => h("tr", { class: candidate.chosen ? "chosen" : "" }, h("td", {}, `${candidate.worker}${candidate.chosen ? " ✓" : ""}`),
    ...columns.map(({ name }) => h("td", { class: "n" }, term(name, candidate.terms[name])))));
  const caption = excluded ? h("caption", { class: "hint" }, `excluded: ${excluded}`) : null;
  return h("div", { class: "scroll low", tabindex: "0", role: "region", "aria-label": `${side} candidates` }, h("table", {}, caption, h("thead", {}, head), h("tbody", {}, ...body)));
}

function term(name, value) {
  if (value === undefined || value === null) return "";
  if (typeof value !== "number") return String(value);
  if (name.endsWith("_s")) return seconds(value);
  return Number.isInteger(value) ? value.toLocaleString("en") : name.endsWith("share") ? percent(value) : value.toPrecision(3);
}

export const titleOf = (id) => `Request ${short(id)}`;
