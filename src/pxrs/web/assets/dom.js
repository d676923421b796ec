// Builds elements, and formats values. Data becomes text nodes only: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "line", "text", "title", "path", "circle", "polygon"]);
const KEPT = new Set(["open", "value", "checked"]); // what the visitor has changed stays as it is

// An element. Attributes are given by name; an address may only lead within the page.
export function h(tag, attributes, ...children) {
  const made = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on") || name === "style" || name === "srcdoc" || name === "src") throw new Error(`no attribute ${name}`);
    if (name === "href" && !String(value).startsWith("#")) throw new Error("no address outside of the page");
    made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

// Makes `old` look like `fresh` and keeps the elements that are the same, with focus, scroll position and what is open.
export function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || key(old) !== key(fresh)) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  if (old.hasAttribute("data-keep")) return;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !KEPT.has(name)) old.removeAttribute(name);
  for (const { name, value } of [...fresh.attributes]) {
    if (!KEPT.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((child, at) => (at < before.length ? morph(before[at], child) : old.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
}

const key = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null);

// columns: [title, is a number, function of a row that gives the content]
// total: how many rows there are, if not all of them are given.
// stacks: on a narrow screen each row is a list of its cells, with the titles of the columns.
export function table(caption, columns, rows, empty = "Nothing here.", stacks = false, total = 0) {
  if (!rows.length) return h("p", { class: "body quiet" }, empty);
  const head = h("tr", null, columns.map(([title, number]) => h("th", { scope: "col", class: number ? "number" : null }, title)));
  const body = rows.map((row, at) => h("tr", { "data-key": row.key ?? at }, columns.map(([title, number, content, kind]) => h("td", { class: kind || (number ? "number" : null), "data-title": stacks ? title : null }, stacks ? h("div", null, content(row)) : content(row)))));
  const cut = total > rows.length ? h("p", { class: "body quiet" }, `Showing ${count(rows.length)} of ${count(total)}.`) : null;
  const shown = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", { "aria-label": caption, class: stacks ? "stacks" : null }, h("thead", null, head), h("tbody", null, body)));
  return cut ? [shown, cut] : shown;
}

export const card = (title, body, ...tools) => h("section", { class: "card" }, h("div", { class: "head" }, h("h2", null, title), ...tools), body);
export const tile = (name, value, level) => h("dl", { class: `tile ${level ? `is-${level}` : ""}` }, h("dt", null, name), h("dd", null, value));
export const pill = (text, level) => h("span", { class: `pill ${level || ""}` }, text);
export const link = (kind, name) => h("a", { href: `#/${kind}/${encodeURIComponent(name.toWellFormed())}` }, name);
export const facts = (pairs) => h("dl", { class: "facts" }, Object.entries(pairs).map(([name, value]) => [h("dt", null, name.replaceAll("_", " ")), h("dd", null, value === null || value === undefined ? "–" : String(value))]));

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const some = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });
export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));
export const rate = (value) => (value === null || value === undefined ? "–" : value >= 1000 ? `${whole.format(value)}/s` : `${some.format(value)}/s`);
export const lag = (value, exact) => (value === null || value === undefined ? "unknown" : exact ? whole.format(value) : `≤ ${whole.format(value)}`);
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${at ? some.format(value) : value} ${units[at]}`;
}
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0) seconds = 0;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  const hours = Math.floor((seconds % 86400) / 3600);
  return `${whole.format(Math.floor(seconds / 86400))} d${hours ? ` ${hours} h` : ""}`;
}
export const ago = (now, when) => (when ? `${span(now - when)} ago` : "–");
export function moment(seconds) {
  const found = new Date(seconds * 1000);
  return seconds === null || seconds === undefined || Number.isNaN(found.getTime()) ? "–" : found.toISOString().replace("T", " ").replace(/\.\d+Z$/, "Z");
}

// A colour class for a member: the same for the same incarnation, and different ones for those on the page.
export function colours(incarnations) {
  const sorted = [...new Set(incarnations)].sort();
  return (incarnation) => `m${Math.max(0, sorted.indexOf(incarnation)) % 8}`;
}

// Bytes of a message: as JSON if they are, as text if they are UTF-8, else in hexadecimal.
export function shown(data, view) {
  if (data === null) return h("span", { class: "quiet" }, "null");
  const raw = Uint8Array.from(atob(data.base64), (character) => character.charCodeAt(0));
  const cut = raw.length < data.bytes ? `\n… the first ${count(raw.length)} of ${count(data.bytes)} bytes` : "";
  return h("pre", null, written(raw, view, !cut) + cut);
}

export function written(raw, view, whole) {
  if (view === "hex") return hex(raw);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: whole, ignoreBOM: true }).decode(raw);
  } catch {
    return hex(raw);
  }
  if (view === "text") return text;
  try {
    JSON.parse(text);
  } catch {
    return text;
  }
  return indented(text);
}

// JSON with line breaks, and otherwise as it is: to parse and to write it again would round large numbers.
const TOKENS = /"(?:\\.|[^"\\])*"|[{}[\],:]|[^\s"{}[\],:]+/g, DEPTH_MAX = 50;
export function indented(text) {
  const tokens = text.match(TOKENS) || [], lines = [];
  let line = "", depth = 0;
  const end = () => { lines.push(line); line = "  ".repeat(depth); };
  for (const [at, token] of tokens.entries()) {
    const last = tokens[at - 1], empty = (token === "}" || token === "]") && (last === "{" || last === "[");
    if ((token === "}" || token === "]") && !empty) { depth -= 1; end(); }
    if ((last === "{" || last === "[") && !empty) { depth += 1; end(); }
    if (depth > DEPTH_MAX) return text;
    line += token === ":" ? ": " : token;
    if (token === ",") end();
  }
  return [...lines, line].join("\n");
}

// A time as somebody types it, in milliseconds since 1970: without a zone it is in UTC, as are all times of the page.
export function instant(text) {
  const given = text.trim().replace(" ", "T");
  return new Date(/^\d{4}-\d\d-\d\dT[\d:.]+$/.test(given) ? `${given}Z` : text.trim()).getTime();
}

function hex(raw) {
  const lines = [];
  for (let at = 0; at < raw.length; at += 16) {
    const part = [...raw.slice(at, at + 16)];
    const digits = part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(47);
    const text = part.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${at.toString(16).padStart(8, "0")}  ${digits}  ${text}`);
  }
  return lines.join("\n") || "(empty)";
}

// One line of bytes, for a cell.
export function brief(data, length = 80) {
  if (data === null) return h("span", { class: "quiet" }, "null");
  const raw = Uint8Array.from(atob(data.base64), (character) => character.charCodeAt(0));
  const text = written(raw.slice(0, 400), "text", false).replaceAll(/\s+/g, " ");
  return h("code", null, text.length > length ? `${text.slice(0, length)}…` : text);
}
