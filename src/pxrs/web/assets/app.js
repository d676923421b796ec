// Which page is shown, and its refresh every second while it is visible.
import * as actions from "./actions.js";
import * as cluster from "./cluster.js";
import { h, morph } from "./dom.js";
import * as group from "./group.js";
import * as overview from "./overview.js";
import * as queries from "./queries.js";
import * as queue from "./queue.js";
import * as topic from "./topic.js";

const PAGES = { overview, topics: topic, groups: group, queues: queue, queries, cluster };
const REFRESH_MS = 1000;
const main = document.getElementById("main");
const status = document.getElementById("status");

const state = { page: null, name: "", kind: "", data: null, local: {}, session: { has_actions: false, is_open: true }, told: null, failures: 0 };
let waiting = null;
let turn = 0;

export async function get(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json", ...actions.headers() }, signal: AbortSignal.timeout(15000) });
  const found = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw Object.assign(new Error(found.error || `the server answered ${answer.status}`), { status: answer.status });
  return found;
}

// A page that needs a token to be read asks for it, once at a time, and goes on with it.
async function needToken(text) {
  if (document.getElementById("dialog").open) return;
  if (await actions.askToken(text)) refresh();
}

function route() {
  const [kind = "", name = ""] = location.hash.replace(/^#\/?/, "").split("/");
  let decoded = "";
  try { decoded = decodeURIComponent(name); } catch { /* a name that nobody has */ }
  state.kind = Object.hasOwn(PAGES, kind) && kind !== "overview" ? kind : "overview";
  Object.assign(state, { page: PAGES[state.kind], name: decoded, data: null, local: {}, told: null });
  state.page.begin?.(state, refresh);
  document.title = decoded ? `${decoded} – pxrs` : "pxrs";
  for (const each of document.querySelectorAll("nav a")) {
    if (each.dataset.page === state.kind) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  main.replaceChildren(h("p", { class: "quiet" }, "Loading…"));
  window.scrollTo(0, 0);
  refresh();
}

export async function refresh() {
  clearTimeout(waiting);
  turn += 1;
  const mine = turn;
  try {
    const data = await state.page.load(state, get);
    if (mine !== turn) return;
    state.data = data;
    state.failures = 0;
    tell(data.problem ? `stale data: ${data.problem}` : "live", !data.problem);
    document.getElementById("hub").textContent = data.hub || "";
    draw();
  } catch (error) {
    if (mine !== turn) return;
    state.failures += 1;
    tell(error.message, false);
    if (error.status === 401 || (error.status === 403 && !state.session.is_open)) { needToken(error.message); return; }
    if (!state.data) main.replaceChildren(h("p", { class: "problem" }, error.message));
  }
  waiting = setTimeout(() => (document.hidden ? null : refresh()), REFRESH_MS * Math.min(10, state.failures + 1));
}

export function draw() {
  if (!state.data) return;
  const fresh = h("main", { id: "main", tabindex: "-1", "data-page": state.kind }, state.told, state.page.render(state));
  if (main.querySelector("[data-shown]")) morph(main, fresh);
  else { main.replaceChildren(...fresh.childNodes); main.dataset.page = state.kind; }
}

function tell(text, isGood) {
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("is-bad", !isGood);
}

// One listener for all buttons: an element with data-do names the function, its other data are the arguments.
document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-do]");
  if (!target || target.tagName === "FORM") return;
  if (target.dataset.do === "act") actions.begin(target.dataset.action, JSON.parse(target.dataset.given), state, refresh);
  else state.page.clicked?.(target, state, { refresh, draw, get });
});
document.addEventListener("submit", (event) => {
  event.preventDefault();
  state.page.submitted?.(event.target, state, { refresh, draw, get });
});
document.addEventListener("input", (event) => {
  if (event.target.dataset.filter !== undefined) { state.local.filter = event.target.value; draw(); }
});
document.addEventListener("change", (event) => state.page.changed?.(event.target, state, { refresh, draw, get }));
document.addEventListener("visibilitychange", () => (document.hidden ? null : refresh()));
window.addEventListener("hashchange", route);

get("/api/session").then((found) => {
  state.session = found;
  document.getElementById("to-cluster").hidden = !found.has_cluster;
  document.getElementById("mode").textContent = !found.is_open ? "Access needs a token of the server." : found.has_actions ? "Actions need the token that this page was started with." : "Read-only: this page was started without a token for actions.";
  draw();
}).catch((error) => tell(error.message, false));
route();
