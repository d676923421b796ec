// A cluster: brokers, storage nodes, what lacks copies, and which node has a copy of which ledger.
import { ago, bytes, card, count, h, link, pill, table, tile } from "./dom.js";

export const load = (state, get) => get("/api/cluster");

const WORDS = { whole: ["●", "good"], "not checked": ["◐", "warn"], "being copied": ["◔", "warn"], "node is away": ["✕", "bad"], "node is retired": ["◌", "warn"] };

export function render(state) {
  const found = state.data, alive = found.nodes.filter((each) => each.is_alive);
  return [
    h("h1", { "data-shown": true }, h("small", null, "cluster"), found.cluster || "No cluster"),
    h("div", { class: "tiles" },
      tile("brokers", count(found.brokers.length), found.brokers.length ? "" : "bad"),
      tile("storage nodes", `${count(alive.length)} of ${count(found.nodes.length)}`, alive.length < found.nodes.length ? "warn" : ""),
      tile("partitions", count(found.partitions_total)),
      tile("without owner", count(found.without_owner), found.without_owner ? "bad" : ""),
      tile("not served", count(found.unserved), found.unserved ? "bad" : ""),
      tile("ledgers", count(found.ledgers_total)),
      tile("lacking copies", count(found.lacking), found.lacking ? "bad" : "")),
    card("Needs attention", found.attention.length
      ? h("ul", { class: "attention" }, found.attention.map((each) => h("li", { class: each.level }, h("span", null, each.text))))
      : h("p", { class: "body quiet" }, "Every partition has an owner and is served, and every entry has all its copies.")),
    h("div", { class: "columns" }, card("Brokers", brokers(found)), card("Storage nodes", nodes(found))),
    card("Map of copies", map(found), h("span", { class: "quiet" }, "● whole  ◐ to be checked  ◔ being copied  ◌ retired  ✕ away  – none")),
    card("Partitions", partitions(found)),
  ];
}

const brokers = (found) => table("Brokers", [
  ["broker", false, (row) => row.name || row.id], ["address", false, (row) => h("code", null, row.address)],
  ["partitions", true, (row) => count(row.partitions)], ["started", true, (row) => ago(found.now, row.started_at)],
  ["state", false, (row) => (row.is_leaving ? pill("leaving", "warn") : pill("serving", "good"))],
], found.brokers.map((row) => ({ ...row, key: row.id })), "No broker is running.", true);

function condition(row) {
  if (row.is_retired) return row.ledgers ? pill("retired, being emptied", "warn") : pill("retired, may be stopped", "good");
  if (!row.is_alive) return pill("away", row.ledgers ? "bad" : "");
  if (row.refuses) return [pill("accepts no entries", "bad"), " ", row.refuses];
  if (row.damaged) return [pill("damaged", "bad"), ` ${count(row.damaged)} entries`];
  return row.doubts ? [pill("in doubt", "bad"), ` ${count(row.doubts)} ledgers`] : pill("in use", "good");
}

const nodes = (found) => table("Storage nodes", [
  ["node", false, (row) => h("code", null, row.id)], ["address", false, (row) => h("code", null, row.address)],
  ["ledgers", true, (row) => count(row.ledgers)], ["used", true, (row) => bytes(row.used)], ["free", true, (row) => bytes(row.free)],
  ["state", false, condition],
], found.nodes.map((row) => ({ ...row, key: row.id })), "No storage node has joined yet.", true);

function map(found) {
  const mark = (row, id) => {
    const state = row.copies[id];
    if (!state) return "";
    const [sign, level] = WORDS[state] || ["?", "warn"];
    return h("span", { class: `pill ${level}`, title: state, role: "img", "aria-label": state }, sign);
  };
  return table("Map of copies", [
    ["ledger", false, (row) => [row.topic ? link("topics", row.topic) : "(deleted)", row.query === null ? `/${row.partition}, ${count(row.number)}` : `, staged by ${row.query}`]],
    ["offsets", true, (row) => `${count(row.base)} – ${row.end === null ? "" : count(row.end)}`],
    ["state", false, (row) => pill(row.state, row.state === "recovering" ? "warn" : "")],
    ...found.nodes.map((node) => [node.id, false, (row) => mark(row, node.id), "cell"]),
    ["none", true, (row) => (row.empty ? pill(count(row.empty), "bad") : "")],
  ], found.ledgers.map((row) => ({ ...row, key: row.id })), "No ledgers yet.", false, found.ledgers_total);
}

function owner(row) {
  if (!row.owner) return pill("none", "bad");
  return row.unserved === null ? row.owner : [row.owner, " ", pill("not served", "bad"), " ", row.unserved];
}

const partitions = (found) => table("Partitions", [
  ["partition", false, (row) => [link("topics", row.topic), `/${row.partition}`]],
  ["owner", false, owner], ["epoch", true, (row) => count(row.epoch)],
  ["first offset", true, (row) => count(row.start)], ["ledgers", true, (row) => count(row.ledgers)],
  ["closed", true, (row) => bytes(row.size)], ["lacking copies", true, (row) => (row.lacking ? pill(count(row.lacking), "bad") : "0")],
], found.partitions.map((row) => ({ ...row, key: `${row.topic}/${row.partition}` })), "No topics yet.", false, found.partitions_total);
