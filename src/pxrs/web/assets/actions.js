// Actions: ask for the token once, show what the action would do, do it after a confirmation.
import { count, h, instant, table } from "./dom.js";

const dialog = document.getElementById("dialog");
const NAMES = { retry: "Retry", skip: "Skip", reset: "Reset", "delete-group": "Delete the group", requeue: "Put back", purge: "Remove for good", "delete-queue": "Delete the queue", "delete-topic": "Delete the topic" };
const DANGEROUS = new Set(["skip", "reset", "delete-group", "purge", "delete-queue", "delete-topic"]);
let token = null; // in the memory of this page alone

export const headers = () => (token ? { "X-Pxrs-Token": token } : {});

// Asks for the token; false if the visitor does not give one.
export async function askToken(text) {
  const form = await ask("Token", h("label", null, text, h("input", { type: "password", name: "token", id: "token", required: true, autocomplete: "off" })), "Continue", false);
  if (form) token = form.elements.token.value;
  return form !== null;
}

// A button that begins an action; nothing if the page only shows.
export function button(state, action, given, text) {
  if (!state.session.has_actions) return null;
  return h("button", { type: "button", "data-do": "act", "data-action": action, "data-given": JSON.stringify(given) }, text || NAMES[action]);
}

async function post(path, body, state) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json", "X-Pxrs-Token": token || "" }, body: JSON.stringify(body) });
  const found = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (answer.status === 403 && state.session.is_open) token = null;
  if (!answer.ok) throw new Error(found.error || `the server answered ${answer.status}`);
  return found;
}

// Shows the dialog; resolves with the form when it is submitted, with null when it is cancelled.
function ask(title, content, confirm, dangerous) {
  const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), content,
    h("div", { class: "bar" }, h("button", { type: "button", "data-cancel": true }, "Cancel"), h("button", { type: "submit", class: dangerous ? "danger" : "main", id: "confirm" }, confirm)));
  dialog.replaceChildren(form);
  return new Promise((resolve) => {
    const end = (found) => { dialog.onclose = null; dialog.close(); dialog.replaceChildren(); resolve(found); };
    form.addEventListener("submit", (event) => { event.preventDefault(); event.stopPropagation(); end(form); });
    form.querySelector("[data-cancel]").addEventListener("click", () => end(null));
    dialog.onclose = () => (dialog.open ? null : resolve(null)); // the event of an earlier dialog may arrive late
    dialog.showModal();
  });
}

export async function begin(action, given, state, refresh) {
  try {
    if (action === "reset" && !given.to) {
      const chosen = await ask(`Reset group ${given.group}`, resetFields(given), "Preview", false);
      if (!chosen) return;
      given = { group: given.group, to: position(chosen) };
      if (chosen.elements.topic.value) given.topic = chosen.elements.topic.value;
    }
    if (token === null && !(await askToken("Token for actions, from the file given as --actions-token-file"))) return;
    const preview = await post(`/api/actions/${action}/preview`, given, state);
    const rows = preview.rows.map((row) => ({ ...row, key: `${row.topic}/${row.partition}` }));
    const detail = rows.length ? table("Messages to be repeated or skipped", [["topic", false, (row) => row.topic], ["partition", true, (row) => row.partition], ["checkpoint", true, (row) => count(row.checkpoint)], ["new", true, (row) => count(row.offset)], ["repeated", true, (row) => count(row.repeated)], ["skipped", true, (row) => count(row.skipped)]], rows, "", false, preview.row_count) : null;
    if (!(await ask(NAMES[action], [h("p", { id: "preview" }, preview.text), detail], NAMES[action], DANGEROUS.has(action)))) return;
    const done = await post(`/api/actions/${action}`, { plan: preview.plan, confirmed: true }, state);
    state.told = h("p", { class: "done", role: "status", "data-key": "told" }, done.text);
    if (action.startsWith("delete-")) location.hash = "#/";
  } catch (error) {
    state.told = h("p", { class: "problem", role: "alert", "data-key": "told" }, error.message);
  }
  refresh();
}

function resetFields(given) {
  return h("div", { class: "bar" },
    h("label", null, "To", h("select", { name: "to" }, ["earliest", "latest", "offset", "time"].map((each) => h("option", null, each)))),
    h("label", null, "Offset, or time (UTC)", h("input", { name: "at", placeholder: "120 or 2026-01-31T12:00" })),
    h("label", null, "Topic", h("select", { name: "topic" }, h("option", { value: "" }, "all"), (given.topics || []).map((each) => h("option", null, each)))));
}

function position(form) {
  const { to, at } = form.elements;
  if (to.value === "offset") return at.value.trim();
  if (to.value !== "time") return to.value;
  const found = instant(at.value);
  return Number.isNaN(found) ? at.value : new Date(found).toISOString();
}
