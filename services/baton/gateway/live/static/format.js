// Formats values for people, and builds elements. Text is always set as text, never as markup.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name === "onclick") element.addEventListener("click", value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function s(tag, properties = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

// Updates the children of `parent` so that each item has one. Elements are kept, so that the focus stays.
export function keyed(parent, items, keyOf, make, update) {
  const known = parent.byKey || new Map();
  const next = new Map();
  for (const item of items) {
    const key = String(keyOf(item));
    if (next.has(key)) continue;
    const element = known.get(key) || make(item);
    update(element, item);
    next.set(key, element);
  }
  for (const [key, element] of known) if (next.get(key) !== element) element.remove();
  let cursor = parent.firstChild;
  for (const element of next.values()) {
    if (element === cursor) cursor = cursor.nextSibling;
    else parent.insertBefore(element, cursor);
  }
  parent.byKey = next;
}

// Sets the cells of a table row by name. A value is a text, or an array of a text and a class.
export function cells(row, values) {
  for (const [name, given] of Object.entries(values)) {
    const [text, kind] = Array.isArray(given) ? given : [given, ""];
    const cell = row.querySelector(`[data-name="${name}"]`);
    if (cell.textContent !== String(text)) cell.textContent = text;
    const wanted = [cell.dataset.base, kind].filter(Boolean).join(" ");
    if (cell.className !== wanted) cell.className = wanted;
  }
}

export function row(columns, properties = {}) {
  const element = h("tr", properties);
  for (const [name, base] of columns) {
    const cell = h("td", { "data-name": name, "data-base": base, class: base });
    element.append(cell);
  }
  return element;
}

export const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(value >= 10 ? 1 : 2)} s`;
  if (value >= 0.1) return `${(value * 1e3).toFixed(0)} ms`;
  if (value >= 0.001) return `${(value * 1e3).toFixed(1)} ms`;
  return value > 0 ? `${(value * 1e6).toFixed(0)} µs` : "0 ms";
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(value * 100).toFixed(1)} %`);

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (bytes >= 1024 && index < units.length - 1) { bytes /= 1024; index += 1; }
  return `${index && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[index]}`;
}

export const speed = (bytes) => (bytes ? `${bytes >= 1e9 ? (bytes / 1e9).toFixed(2) + " GB/s" : (bytes / 1e6).toFixed(1) + " MB/s"}` : "unmeasured");

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");

export const short = (id) => id.slice(0, 8);
