// The panel of one request: its waterfall, and the candidates of each decision with their terms.
import { h, percent, seconds, short } from "./format.js";

const NAMES = { queue_s: "queue", compute_s: "prefill", kv_wait_s: "wait for KV", kv_transfer_s: "KV transfer", kv_admission_s: "admission", decode_s: "decode" };
const KINDS = { queue_s: "wait", compute_s: "prefill", kv_wait_s: "wait", kv_transfer_s: "kv", kv_admission_s: "wait", decode_s: "decode" };

// Returns [name, kind, begin, end] of each bar, in seconds since the receipt.
function bars(request) {
  const found = [];
  for (const attempt of request.attempts) {
    const prefix = request.attempts.length > 1 ? `attempt ${attempt.number}: ` : "";
    const placed = attempt.placed ?? attempt.lost ?? request.total;
    found.push([`${prefix}placement`, "wait", attempt.started ?? 0, placed]);
    for (const leg of attempt.legs) {
      let at = placed;
      for (const name of ["queue_s", "compute_s", "kv_wait_s", "kv_transfer_s", "kv_admission_s"]) {
        if (!leg[name]) continue;
        found.push([`${leg.worker_id} ${NAMES[name]}`, KINDS[name], at, at + leg[name]]);
        at += leg[name];
      }
      if (leg.decode_s) {
        const end = attempt.lost === null && request.last !== null ? Math.max(request.last, leg.decode_s) : at + leg.decode_s;
        found.push([`${leg.worker_id} decode`, "decode", end - leg.decode_s, end]);
      }
    }
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
  const rows = all.map(([name, kind, begin, end]) => {
    const bar = h("div", { class: `bar k-${kind}` });
    bar.style.left = `${(100 * Math.max(0, begin)) / total}%`;
    bar.style.width = `${(100 * Math.max(0, end - begin)) / total}%`;
    return h("div", { class: "bar-row" }, h("span", { class: "name", title: name }, name), h("div", { class: "track" }, bar),
      h("span", { class: "value" }, seconds(end - begin)));
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
  const terms = [["queue", placement.queue], ["pull", placement.pull], ["prefill", placement.compute], ["transfer", placement.transfer]]
    .filter(([, value]) => value).map(([name, value]) => `${name} ${seconds(value)}`);
  const predicted = placement.ttft === null ? "" : ` Predicted TTFT ${seconds(placement.ttft)}${terms.length ? ` = ${terms.join(" + ")}` : ""}.`;
  const actual = record.actuals && record.actuals.ttft_s ? ` Measured ${seconds(record.actuals.ttft_s)}.` : "";
  return `${where}.${predicted}${actual}`;
}

function candidates(record, side) {
  const rows = record.candidates.filter((candidate) => candidate.side === side);
  const excluded = Object.entries(record.excluded).map(([why, number]) => `${number} ${why}`).join(", ");
  if (!rows.length) return null;
  const names = [...new Set(rows.flatMap((candidate) => Object.keys(candidate.terms)))];
  const head = h("tr", {}, h("th", {}, `${side} candidate`), ...names.map((name) => h("th", { class: "n" }, name.replace(/_s$/, "").replaceAll("_", " "))));
  const body = rows.map((candidate) => h("tr", { class: candidate.chosen ? "chosen" : "" }, h("td", {}, `${candidate.worker}${candidate.chosen ? " ✓" : ""}`),
    ...names.map((name) => h("td", { class: "n" }, term(name, candidate.terms[name])))));
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
