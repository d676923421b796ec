// One queue: how many items are in each state, and the items of one state.
import { button } from "./actions.js";
import { ago, brief, card, count, facts, h, moment, rate, shown, span, table, tile } from "./dom.js";
import { some } from "./overview.js";

const STATES = [["dead", "dead"], ["ready", "ready"], ["inflight", "in flight"], ["delayed", "delayed"]];

export function begin(state) { state.local = { state: "dead", chosen: new Set(), view: "json" }; }
export async function load(state, get) {
  const name = encodeURIComponent(state.name);
  const [queue, listed] = await Promise.all([get(`/api/queues/${name}`), get(`/api/queues/${name}/items?state=${state.local.state}`)]);
  return { ...queue, listed, of: state.local.state };
}
export function clicked(target, state, { refresh, draw }) {
  if (target.dataset.do === "state") { state.local.state = target.dataset.state; state.local.chosen.clear(); refresh(); }
  if (target.dataset.do === "view") { state.local.view = target.dataset.view; draw(); }
}
export function changed(target, state, { draw }) {
  if (target.dataset.item === undefined) return;
  if (target.checked) state.local.chosen.add(target.dataset.item); else state.local.chosen.delete(target.dataset.item);
  draw();
}

export function render(state) {
  const found = state.data, items = found.listed.items, isDead = found.of === "dead";
  const ids = items.map((item) => item.id).filter((id) => state.local.chosen.has(id));
  const given = ids.length ? { queue: found.queue, ids } : { queue: found.queue }, which = ids.length ? `${ids.length} chosen` : "all";
  const tools = isDead && found.dead ? [button(state, "requeue", given, `Put back ${which}`), button(state, "purge", given, `Remove ${which}`)] : [];
  return [
    h("h1", { "data-shown": true }, h("small", null, "queue"), found.queue),
    h("div", { class: "tiles" }, tile("ready", some(found, "ready")), tile("in flight", some(found, "in_flight")), tile("delayed", some(found, "delayed")), tile("dead", some(found, "dead"), found.dead ? "bad" : ""), tile("oldest item", span(found.oldest_age_s)), tile("put, at least", rate(found.rate_in)), tile("done, at least", rate(found.rate_out))),
    card("Items", list(state, items, isDead),
      h("div", { class: "bar", role: "group", "aria-label": "State" }, STATES.map(([value, text]) => h("button", { type: "button", "data-do": "state", "data-state": value, "aria-pressed": String(found.of === value) }, text))),
      h("div", { class: "bar", role: "group", "aria-label": "View" }, ["json", "text", "hex"].map((view) => h("button", { type: "button", "data-do": "view", "data-view": view, "aria-pressed": String(state.local.view === view) }, view))),
      h("div", { class: "bar" }, tools),
      isDead && found.dead && !state.session.has_actions ? h("p", { class: "body" }, "Put them back with ", h("code", null, found.retry)) : null),
    card("Settings", h("div", { class: "body" }, facts({ ...found.settings, created: moment(found.settings.created) })), button(state, "delete-queue", { queue: found.queue })),
  ];
}

function list(state, items, isDead) {
  const now = state.data.now, view = state.local.view;
  const columns = [["id", false, (row) => h("code", null, row.id)]];
  if (isDead && state.session.has_actions) columns.unshift(["", false, (row) => h("input", { type: "checkbox", "data-item": row.id, "aria-label": `Choose ${row.id}` })]);
  if (isDead) columns.push(["died", false, (row) => ago(now, row.died_at)], ["deliveries", true, (row) => count(row.deliveries)], ["error", false, (row) => [row.error || "–", row.traceback ? h("details", null, h("summary", null, "Traceback"), h("pre", null, row.traceback)) : null], "long"]);
  else columns.push(["put", false, (row) => ago(now, row.put_at)], ["priority", true, (row) => row.priority], ["deliveries", true, (row) => count(row.deliveries)]);
  if (state.data.of === "delayed") columns.push(["due", false, (row) => (row.due_at > now ? `in ${span(row.due_at - now)}` : "now")]);
  if (state.data.of === "inflight") columns.push(["taken by", false, (row) => h("code", null, row.taker)]);
  columns.push(["key", false, (row) => brief(row.name, 30)], ["value", false, (row) => shown(row.value, view)]);
  return [table("Items", columns, items.map((row) => ({ ...row, name: row.key, key: `${row.id}/${view}` })), "No item is in this state.", true), state.data.listed.is_more ? h("p", { class: "body quiet" }, `The first ${items.length}.`) : null];
}
