// One group: who owns which partition, how far it is, what holds it up, and how ownership moved.
import { button } from "./actions.js";
import { ago, card, colours, count, h, lag, link, moment, pill, table, tile } from "./dom.js";
import { picture } from "./timeline.js";

const MEMBERS_SHOWN = 12, PAUSED_SHOWN = 20;

export function begin(state) { state.local = { hours: "" }; }
export async function load(state, get) {
  const name = encodeURIComponent(state.name);
  const [group, timeline] = await Promise.all([get(`/api/groups/${name}`), get(`/api/groups/${name}/timeline?hours=${state.local.hours}`)]);
  return { ...group, timeline };
}
export function clicked(target, state, { refresh }) {
  if (target.dataset.do === "hours") { state.local.hours = target.dataset.hours; refresh(); }
}

export function render(state) {
  const found = state.data, paused = found.rows.filter((row) => row.paused).slice(0, PAUSED_SHOWN);
  const colour = colours([...found.members.map((each) => each.incarnation), ...found.timeline.rows.flatMap((row) => row.bars.map((bar) => bar.incarnation))]);
  const actions = [button(state, "reset", { group: found.group, topics: found.topics.map((each) => each.topic) }), button(state, "delete-group", { group: found.group })];
  return [
    h("h1", { "data-shown": true }, h("small", null, "group"), found.group),
    found.lag_problem && h("p", { class: "problem" }, found.lag_problem),
    h("div", { class: "tiles" }, tile("members", count(found.members.length)), tile("partitions", count(found.partitions)), tile("lag", lag(found.lag, found.is_lag_exact)), tile("generation", count(found.generation)), tile("without owner", count(found.unowned), found.unowned && found.members.length ? "warn" : ""), tile("paused", count(found.paused), found.paused ? "bad" : "")),
    paused.length ? card(found.paused > paused.length ? `Paused partitions: ${paused.length} of ${count(found.paused)}` : "Paused partitions", h("div", { class: "body", id: "paused" }, paused.map((row) => pausedRow(state, row, paused.length === 1)))) : null,
    card("Timeline of ownership", h("div", { class: "body", id: "timeline" }, found.events_problem && h("p", { class: "problem" }, `The events are not known: ${found.events_problem}`), picture(found, colour)), h("div", { class: "bar", role: "group", "aria-label": "How far back" }, [["", "all"], ["0.25", "15 min"], ["1", "1 h"], ["6", "6 h"]].map(([hours, text]) => h("button", { type: "button", "data-do": "hours", "data-hours": hours, "aria-pressed": String(state.local.hours === hours) }, text)))),
    card("Ownership", ownership(found, colour), h("div", { class: "bar" }, actions)),
    card("Members", table("Members", [["member", false, (row) => [h("span", { class: `swatch ${colour(row.incarnation)}` }), row.name, row.is_leader ? [" ", pill("leader")] : null]], ["host", false, (row) => row.host], ["pid", true, (row) => row.pid], ["partitions", true, (row) => count(row.partitions)], ["topics", false, (row) => row.topics.join(", ")], ["joined", false, (row) => ago(found.now, row.since)]], found.members.map((row) => ({ ...row, key: row.incarnation })), "No member is there.")),
    card("Events", table("Events", [["time", false, (row) => moment(row.at)], ["event", false, (row) => row.name], ["what happened", false, (row) => row.text, "long"]], found.timeline.events.map((row, at) => ({ ...row, key: `${row.at}${row.name}${at}` })), "No event of the last hours is kept.")),
  ];
}

// A row for each partition, a column for each member: the epoch stands where the owner is.
function ownership(found, colour) {
  const members = found.members.slice(0, MEMBERS_SHOWN);
  const columns = [["topic", false, (row) => link("topics", row.topic)], ["partition", true, (row) => row.partition]];
  for (const member of members) columns.push([member.name, false, (row) => owned(row, member, colour), "cell"]);
  if (found.members.length > members.length || !members.length) columns.push(["owner", false, (row) => (row.owner_name ? (row.is_owner_there ? row.owner_name : `${row.owner_name} (gone)`) : "nobody")]);
  columns.push(["epoch", true, (row) => count(row.epoch)], ["checkpoint", true, (row) => count(row.checkpoint)], ["end", true, (row) => count(row.end)], ["lag", true, (row) => lag(row.lag, row.is_lag_exact)], ["checkpoint written", true, (row) => ago(found.now, row.when)], ["state", false, (row) => stateOf(row)]);
  return table("Ownership of partitions", columns, found.rows.map((row) => ({ ...row, key: `${row.topic_id}/${row.partition}` })), "The group reads nothing.", false, found.partitions);
}

function owned(row, member, colour) {
  if (row.owner === member.incarnation) return h("span", { class: `owner ${colour(member.incarnation)}`, title: `owned by ${member.name} with epoch ${row.epoch}` }, row.epoch);
  if (row.target === member.incarnation) return h("span", { class: "owner coming", title: `moves to ${member.name}` }, "→");
  return null;
}

function stateOf(row) {
  if (row.paused) return pill(row.paused.skip ? "skipping" : "paused", "bad");
  if (!row.owner) return pill("free", "warn");
  return row.is_owner_there ? pill("owned", "good") : pill("owner gone", "warn");
}

function pausedRow(state, row, open) {
  const given = { group: state.data.group, topic: row.topic_id, partition: row.partition, offset: row.paused.offset };
  return h("article", { "data-key": `${row.topic_id}/${row.partition}` },
    h("h3", null, `${row.topic}/${row.partition} at offset ${count(row.paused.offset)}`),
    h("p", null, row.paused.error, " ", h("span", { class: "quiet" }, row.paused.by ? `(${row.paused.by}, ${ago(state.data.now, row.paused.when)})` : "")),
    row.paused.traceback ? h("details", { open }, h("summary", null, "Traceback"), h("pre", null, row.paused.traceback)) : null,
    state.session.has_actions ? h("p", { class: "bar" }, button(state, "retry", given), button(state, "skip", given)) : null,
    state.session.has_actions || row.paused.skip ? null : h("p", null, "Continue with ", h("code", null, row.paused.commands[0]), " or ", h("code", null, row.paused.commands[1])));
}
