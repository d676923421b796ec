// All topics, groups and queues, with what needs attention first.
import { card, count, h, lag, link, pill, rate, span, table, tile } from "./dom.js";

const SHOWN = 100;

export const load = (state, get) => get("/api/overview");

export function render(state) {
  const found = state.data, text = (state.local.filter || "").toLowerCase();
  const chosen = (rows, name) => rows.filter((row) => row[name].toLowerCase().includes(text));
  const total = (rows, name) => rows.reduce((sum, row) => sum + (row[name] || 0), 0);
  const groups = chosen(found.groups, "group").sort((a, b) => (b.lag ?? Infinity) - (a.lag ?? Infinity) || 0);
  const topics = chosen(found.topics, "topic").sort((a, b) => (b.rate || 0) - (a.rate || 0) || (b.messages || 0) - (a.messages || 0));
  const queues = chosen(found.queues, "queue").sort((a, b) => b.dead - a.dead || b.ready - a.ready);
  const paused = total(found.groups, "paused"), dead = total(found.queues, "dead");
  return [
    h("h1", { "data-shown": true }, "Overview"),
    h("div", { class: "tiles" },
      tile("topics", count(found.topics.length)), tile("messages per second", rate(total(found.topics, "rate"))), tile("groups", count(found.groups.length)),
      tile("lag of all groups", count(total(found.groups, "lag"))), tile("paused partitions", count(paused), paused ? "bad" : ""), tile("queues", count(found.queues.length)), tile("dead letters", count(dead), dead ? "bad" : "")),
    card("Needs attention", found.attention.length ? h("ul", { class: "attention", id: "attention" }, found.attention.map((each, at) => h("li", { class: each.level, "data-key": at }, pill(each.kind, each.level), each.name && each.kind !== "hub" ? link(`${each.kind}s`, each.name) : null, h("span", null, each.text)))) : h("p", { class: "body quiet", id: "attention" }, "Nothing: no paused partitions, no dead letters, no lag without members.")),
    h("p", { class: "bar" }, h("label", null, "Filter by name", h("input", { type: "search", "data-filter": true, placeholder: "orders" }))),
    h("div", { class: "columns" },
      card("Groups", [table("Groups", [
        ["group", false, (row) => link("groups", row.group)], ["members", true, (row) => count(row.members)], ["partitions", true, (row) => count(row.partitions)],
        ["lag", true, (row) => lag(row.lag, row.is_lag_exact)], ["state", false, (row) => stateOf(row)], ["checkpoint age", true, (row) => (row.oldest_checkpoint ? span(found.now - row.oldest_checkpoint) : "–")],
      ], cut(groups, "group"), "No groups yet."), more(groups)]),
      h("div", null, card("Topics", [table("Topics", [
        ["topic", false, (row) => link("topics", row.topic)], ["partitions", true, (row) => count(row.partitions)], ["messages", true, (row) => count(row.messages)], ["rate", true, (row) => rate(row.rate)],
      ], cut(topics, "topic"), "No topics yet."), more(topics)]),
      card("Queues", [table("Queues", [
        ["queue", false, (row) => link("queues", row.queue)], ["ready", true, (row) => some(row, "ready")], ["in flight", true, (row) => some(row, "in_flight")], ["delayed", true, (row) => some(row, "delayed")],
        ["dead", true, (row) => (row.dead ? pill(some(row, "dead"), "bad") : "0")], ["oldest", true, (row) => span(row.oldest_age_s)],
      ], cut(queues, "queue"), "No queues yet."), more(queues)]))),
  ];
}

export const some = (row, name) => (row.is_counted || row[name] < 5000 ? count(row[name]) : `${count(row[name])}+`);
const cut = (rows, name) => rows.slice(0, SHOWN).map((row) => ({ ...row, key: row[name] }));
const more = (rows) => (rows.length > SHOWN ? h("p", { class: "body quiet" }, `The first ${SHOWN} of ${count(rows.length)}: filter by name to see others.`) : null);

function stateOf(row) {
  if (row.error) return pill("error", "bad");
  if (row.paused) return pill(`${row.paused} paused`, "bad");
  if (!row.members) return pill("no members", row.lag ? "warn" : "");
  return row.unowned ? pill(`${row.unowned} without owner`, "warn") : pill("all owned", "good");
}
