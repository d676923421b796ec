// One topic: its partitions, settings, readers and messages.
import { button } from "./actions.js";
import { brief, bytes, card, count, facts, h, instant, lag, link, moment, rate, shown, span, table, tile } from "./dom.js";

const VIEWS = ["json", "text", "hex"];

export function begin(state) { state.local = { view: "json", found: null, problem: null, query: "limit=20" }; }
export async function load(state, get) {
  const data = await get(`/api/topics/${encodeURIComponent(state.name)}`);
  if (state.local.found === null && state.local.problem === null) await search(state, get);
  return data;
}

async function search(state, get) {
  try {
    state.local.found = await get(`/api/topics/${encodeURIComponent(state.name)}/messages?${state.local.query}`);
    state.local.problem = null;
  } catch (error) { state.local.found = null; state.local.problem = error.message; }
}

export async function submitted(form, state, { draw, get }) {
  const { how, what, partition, limit } = form.elements, query = new URLSearchParams({ limit: limit.value });
  if (partition.value !== "") query.set("partition", partition.value);
  if (how.value === "offset") query.set("offset", what.value || "0");
  if (how.value === "key") query.set("key", what.value);
  if (how.value === "time") query.set("time", instant(what.value) / 1000);
  state.local.query = query.toString();
  await search(state, get);
  draw();
}

export async function clicked(target, state, { draw, get }) {
  if (target.dataset.do === "view") state.local.view = target.dataset.view;
  if (target.dataset.do === "next") {
    const query = new URLSearchParams(state.local.query);
    query.delete("time");
    query.set("partition", target.dataset.partition);
    query.set("offset", target.dataset.offset);
    state.local.query = query.toString();
    await search(state, get);
  }
  draw();
}

export function render(state) {
  const found = state.data;
  return [
    h("h1", { "data-shown": true }, h("small", null, "topic"), found.topic),
    found.problem && h("p", { class: "problem" }, found.problem),
    h("div", { class: "tiles" }, tile("messages", count(found.messages)), tile("rate", rate(found.rate)), tile("bytes", bytes(found.bytes)), tile("partitions", count(found.partitions)), tile("readers", count(found.readers.length))),
    h("div", { class: "columns" },
      card("Partitions", table("Partitions", [["partition", true, (row) => row.partition], ["start", true, (row) => count(row.start)], ["end", true, (row) => count(row.end)], ["messages", true, (row) => count(row.end - row.start)], ["bytes", true, (row) => bytes(row.bytes)], ["rate", true, (row) => rate(row.rate)]], found.rows.map((row) => ({ ...row, key: row.partition })), "No partitions.", false, found.partitions)),
      h("div", null,
        card("Readers", table("Readers", [["group", false, (row) => link("groups", row.group)], ["members", true, (row) => count(row.members)], ["lag", true, (row) => lag(row.lag, row.is_lag_exact)]], found.readers.map((row) => ({ ...row, key: row.group })), "No group reads it.")),
        found.queries.length ? card("Written by queries", h("p", { class: "body" }, found.queries.join(", "))) : null,
        card("Settings", h("div", { class: "body" }, facts(readable(found.settings))), button(state, "delete-topic", { topic: found.topic })))),
    card("Messages", messages(state), h("div", { class: "bar", role: "group", "aria-label": "View" }, VIEWS.map((view) => h("button", { type: "button", "data-do": "view", "data-view": view, "aria-pressed": String(state.local.view === view) }, view)))),
  ];
}

// Settings with their units.
function readable(settings) {
  const text = (name, value) => (value === null ? null : name.endsWith("_s") ? span(value) : name.endsWith("_bytes") ? bytes(value) : value);
  return Object.fromEntries(Object.entries(settings).map(([name, value]) => [name.replace(/_s$/, ""), text(name, value)]));
}

function messages(state) {
  const { found, problem, view } = state.local;
  const form = h("form", { class: "body bar", "data-do": "search", id: "search" },
    h("label", null, "From", h("select", { name: "how" }, [["last", "the last messages"], ["offset", "an offset"], ["time", "a time"], ["key", "messages with a key"]].map(([value, text]) => h("option", { value }, text)))),
    h("label", null, "Offset, time (UTC) or key", h("input", { name: "what", placeholder: "120, 2026-01-31T12:00, customer-7" })),
    h("label", null, "Partition", h("input", { name: "partition", inputmode: "numeric", size: "6", placeholder: "all" })),
    h("label", null, "At most", h("input", { name: "limit", inputmode: "numeric", size: "4", value: "20" })),
    h("button", { type: "submit", class: "main" }, "Show"));
  if (problem) return [form, h("p", { class: "body problem" }, problem)];
  if (!found) return [form, h("p", { class: "body quiet" }, "Loading…")];
  const rows = found.messages.map((row) => ({ ...row, key: `${row.partition}/${row.offset}/${view}`, name: row.key }));
  const next = Object.entries(found.next);
  return [form,
    found.left_out ? h("p", { class: "body quiet" }, `${count(found.left_out)} more partitions have messages that were not read: select a partition.`) : null,
    found.searched ? h("p", { class: "body quiet" }, `Searched ${count(found.searched)} messages for the key.`) : null,
    table("Messages", [
      ["partition", true, (row) => row.partition], ["offset", true, (row) => count(row.offset)], ["time", false, (row) => moment(row.time)], ["key", false, (row) => brief(row.name, 40)],
      ["value", false, (row) => shown(row.value, view)],
      ["headers", false, (row) => (row.headers.length ? h("details", null, h("summary", null, count(row.header_count)), row.headers.map((header) => h("div", null, h("code", null, header.name), shown(header.value, view)))) : "–")],
    ], rows, "No messages.", true),
    next.length ? h("p", { class: "body bar" }, next.slice(0, 8).map(([partition, offset]) => h("button", { type: "button", "data-do": "next", "data-partition": partition, "data-offset": offset }, `Next of partition ${partition}, from ${count(offset)}`))) : null];
}
