// Streaming queries that write to topics: their last batch, their lag, how long batches take.
import { ago, card, count, h, link, pill, span, table, tile } from "./dom.js";

export const load = (state, get) => get("/api/queries");

export function render(state) {
  const found = state.data.queries, dead = found.filter((each) => each.is_of_dead_letters);
  const letters = dead.reduce((sum, each) => sum + each.writes.reduce((all, topic) => all + (topic.messages || 0), 0), 0);
  return [
    h("h1", { "data-shown": true }, "Streaming queries"),
    h("div", { class: "tiles" }, tile("queries", count(found.length)), tile("lag", count(found.reduce((sum, each) => sum + (each.lag || 0), 0))), tile("running", count(found.filter((each) => each.members).length)), tile("dead letters", count(letters), letters ? "bad" : "")),
    card("Queries", table("Queries", [
      ["query", false, (row) => h("code", null, row.query)],
      ["group", false, (row) => row.groups.map((name) => [link("groups", name), " "])],
      ["reads", false, (row) => row.reads.map((topic) => [topic.is_there ? link("topics", topic.topic) : topic.topic, " "])],
      ["writes", false, (row) => row.writes.map((topic) => [topic.is_there ? link("topics", topic.topic) : topic.topic, " ", row.is_of_dead_letters ? pill(`${count(topic.messages)} dead`, topic.messages ? "bad" : "") : null, " "])],
      ["batch", true, (row) => count(row.batch)], ["rows", true, (row) => count(row.batches.at(-1)?.rows)], ["state", false, (row) => pill(row.state, row.state === "published" ? "good" : "warn")],
      ["committed", true, (row) => ago(state.data.now, row.committed_at)], ["lag", true, (row) => count(row.lag)],
      ["between batches", true, (row) => span(row.batches.findLast((each) => each.took_s !== null)?.took_s)], ["last batches", false, (row) => bars(row.batches)],
    ], found.map((row) => ({ ...row, key: row.writes.map((each) => each.topic).join() + row.query })), "No query has written to a topic of this hub.", true)),
  ];
}

// The seconds between the commits of the last batches that this page has seen.
function bars(batches) {
  const times = batches.map((each) => each.took_s).filter((each) => each !== null).slice(-16);
  if (!times.length) return h("span", { class: "quiet" }, "–");
  const most = Math.max(...times, 0.001);
  return h("svg", { class: "spark", width: times.length * 5, height: 22, viewBox: `0 0 ${times.length * 5} 22`, role: "img", "aria-label": `Seconds between batches: ${times.map((each) => each.toFixed(2)).join(", ")}` }, times.map((each, at) => h("rect", { x: at * 5, width: 4, y: 22 - Math.max(1, (each / most) * 22), height: Math.max(1, (each / most) * 22) })));
}
