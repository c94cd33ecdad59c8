// The four charts of the last ten minutes, drawn by uPlot.
import { percent, seconds } from "./format.js";

const STEP_S = 5;
const NUM_POINTS = 120;
const points = new Map();
const charts = [];
let shown = { times: [], rows: [], slo: {} };

const rate = (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 10 ? 2 : 0));

const CHARTS = [
  { id: "rate", format: rate, series: [["ok", "ok", "--good"], ["failed", "failed", "--bad"], ["refused", "refused", "--warn"]] },
  { id: "ttft", format: seconds, series: [["ttft_p50", "p50", "--prefill"], ["ttft_p95", "p95", "--hybrid"], ["slo_ttft", "SLO", "--bad", true]] },
  { id: "tpot", format: seconds, series: [["tpot_p50", "p50", "--prefill"], ["tpot_p95", "p95", "--hybrid"], ["slo_tpot", "SLO", "--bad", true]] },
  { id: "share", format: percent, range: [0, 1], series: [["attainment", "attainment", "--good"], ["hit", "prefix hits", "--prefill"], ["ceiling", "ceiling", "--dim", true]] },
];

// The canvas needs a plain colour, so an element resolves the variable for the current theme.
function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

export function addHistory(history) {
  points.clear();
  for (const point of history) points.set(point.t, point);
}

// Stores the points of a snapshot, which need not be shown.
export function addPoints(added, now) {
  for (const point of added) points.set(point.t, point);
  for (const t of points.keys()) if (t < now - STEP_S * (NUM_POINTS + 1)) points.delete(t);
}

// Shows the ten minutes that end with the point at `last`.
export function showPoints(last, slo) {
  const times = Array.from({ length: NUM_POINTS }, (_, i) => last - (NUM_POINTS - 1 - i) * STEP_S);
  shown = { times, rows: times.map((t) => points.get(t) || nearest(t)), slo };
  charts.forEach(fill);
}

function fill(chart) {
  const { times, rows, slo } = shown;
  if (!times.length) return;
  const limits = { slo_ttft: slo.ttft, slo_tpot: slo.tpot };
  const values = chart.spec.series.map(([name]) =>
    name in limits ? times.map(() => limits[name]) : rows.map((each) => (each ? each[name] : chart.spec.id === "rate" ? 0 : null)));
  chart.plot.setData([times, ...values]);
  if (chart.plot.cursor.left < 0 || chart.plot.cursor.left === undefined) chart.plot.setLegend({ idx: NUM_POINTS - 1 });
  const texts = chart.spec.series.map(([, label], i) => `${label} ${chart.spec.format(values[i][NUM_POINTS - 1])}`);
  chart.element.setAttribute("aria-label", `now: ${texts.join(", ")}`);
}

// Clocks may be adjusted between two snapshots, which shifts later points by a fraction of a step.
function nearest(t) {
  for (const [at, point] of points) if (Math.abs(at - t) < STEP_S / 2) return point;
  return null;
}

export function draw() {
  for (const chart of charts.splice(0)) chart.plot.destroy();
  for (const spec of CHARTS) {
    const element = document.getElementById(spec.id);
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const options = {
      width: Math.max(200, element.clientWidth),
      height: 160,
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: true }, y: { range: (_, low, high) => spec.range || [0, high > 0 ? high * 1.15 : 1] } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((t) => new Date(t * 1000).toLocaleTimeString("en-GB").slice(0, 5)), space: 70 },
        { ...axis, size: 58, values: (_, ticks) => ticks.map((value) => spec.format(value)) }],
      series: [{ label: "time", value: (_, t) => (t === null || t === undefined ? "–" : new Date(t * 1000).toLocaleTimeString("en-GB")) },
        ...spec.series.map(([, label, name, dashed]) => ({
          label, stroke: colour(name), width: dashed ? 1.5 : 2, dash: dashed ? [5, 4] : undefined,
          spanGaps: true, points: { show: false }, value: (_, value) => spec.format(value),
        }))],
    };
    element.setAttribute("role", "img");
    const plot = new window.uPlot(options, [[], ...spec.series.map(() => [])], element);
    const chart = { spec, element, plot };
    charts.push(chart);
    fill(chart);
  }
}

export function resize() {
  for (const { element, plot } of charts) {
    const width = Math.max(200, element.clientWidth);
    if (Math.abs(width - plot.width) > 2) plot.setSize({ width, height: 160 });
  }
}
