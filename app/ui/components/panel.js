// Draws the element trees of elements.py. Nothing here parses HTML.
const TAGS = new Set(("a button code del em progress small span strong time div section header nav p pre h1 h2 h3 " +
  "details ul ol li dl dt dd summary table thead tbody tr th td fieldset input label legend").split(" "));
const ATTRIBUTES = new Set("class id title role tabindex href value max open scope type download name checked placeholder".split(" "));
const KEPT = new Set(["open", "data-whole"]); // what a reader unfolded outlives updates
const root = element.querySelector(".sl-panel") || element;
const marks = new Map(); // a field's id: the sentence beside it, and what was entered then
let clock = 0; // server minus client, in seconds

function allowed(name, value) {
  if (name === "href") return /^(https?:\/\/|\/(?!\/)|#)/.test(value);
  return ATTRIBUTES.has(name) || name.startsWith("data-") || name.startsWith("aria-");
}

function create(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const made = document.createElement(TAGS.has(node[0]) ? node[0] : "span");
  for (const [name, value] of Object.entries(node[1])) if (allowed(name, value)) made.setAttribute(name, value);
  for (const child of node[2]) made.appendChild(create(child));
  return made;
}

function same(dom, node) {
  if (typeof node === "string") return dom.nodeType === Node.TEXT_NODE;
  return dom.nodeType === Node.ELEMENT_NODE && dom.localName === node[0] && dom.id === (node[1].id || "");
}

function patch(dom, node) {
  if (typeof node === "string") {
    if (dom.nodeValue !== node) dom.nodeValue = node;
    return;
  }
  const wanted = node[1];
  for (const { name } of [...dom.attributes]) if (!(name in wanted) && !KEPT.has(name)) dom.removeAttribute(name);
  for (const [name, value] of Object.entries(wanted)) {
    if (!KEPT.has(name) && allowed(name, value) && dom.getAttribute(name) !== value) dom.setAttribute(name, value);
  }
  if (dom.type === "radio") dom.checked = "checked" in wanted;
  if (dom.localName === "time" && (wanted["data-since"] || wanted["data-until"])) return;
  patchChildren(dom, node[2]);
}

function patchChildren(dom, nodes) {
  nodes.forEach((node, i) => {
    const old = dom.childNodes[i];
    if (!old) dom.appendChild(create(node));
    else if (same(old, node)) patch(old, node);
    else dom.replaceChild(create(node), old);
  });
  while (dom.childNodes.length > nodes.length) dom.removeChild(dom.lastChild);
}

function span(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

function count() {
  const now = Date.now() / 1000 + clock;
  for (const time of root.querySelectorAll("time[data-since], time[data-until]")) {
    const { since, until, suffix } = time.dataset;
    const text = span(since ? now - since : until - now) + (suffix || "");
    if (time.textContent !== text) time.textContent = text;
  }
}

function draw() {
  if (!props.value) return;
  const { now, tree } = JSON.parse(props.value);
  clock = now - Date.now() / 1000;
  if (!root.firstChild) root.appendChild(create(tree));
  else patch(root.firstChild, tree);
  root.querySelectorAll("[data-limit]").forEach(narrow);
  count();
  [...marks.keys()].forEach(unmark);
  for (const { dataset } of root.querySelectorAll("[data-field]")) marks.set(dataset.field, { sentence: dataset.sentence });
  mark();
}

// Marks: the sentences of a list of corrections, beside their fields. A fold has its fields only
// while it is open, so a mark is put again whenever its field is there without it.
function mark() {
  for (const [id, wanted] of marks) {
    const field = document.getElementById(id);
    if (!field) continue;
    wanted.entered ??= entered(field);
    if (entered(field) !== wanted.entered) unmark(id);
    else if (!field.querySelector(".sl-wrong")) put(field, wanted.sentence);
  }
}

function entered(field) {
  const inputs = [...field.querySelectorAll("input, textarea")];
  const values = inputs.map((input) => (input.type === "checkbox" ? input.checked : input.value));
  return JSON.stringify([values, field.querySelectorAll(".token").length]);
}

function put(field, sentence) {
  const told = document.createElement("p");
  told.className = "sl-wrong";
  told.id = `${field.id}-wrong`;
  told.textContent = sentence;
  field.appendChild(told);
  for (const input of field.querySelectorAll("input, textarea")) {
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", told.id);
  }
}

function unmark(id) {
  marks.delete(id);
  const field = document.getElementById(id);
  if (!field) return;
  field.querySelectorAll(".sl-wrong").forEach((told) => told.remove());
  for (const input of field.querySelectorAll("[aria-invalid]")) {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
  }
}

// Gradio's folds: a button, and beside it what it hides; those of this panel's own form first.
function closedFolds() {
  const own = root.closest(".gr-accordion");
  const heads = [...document.querySelectorAll(".gr-accordion > button.label-wrap")];
  const closed = heads.filter((head) => head.nextElementSibling?.style.display === "none");
  return own ? [...closed.filter((head) => own.contains(head)), ...closed.filter((head) => !own.contains(head))] : closed;
}

async function goTo(id) {
  for (const head of closedFolds()) {
    if (document.getElementById(id)) break;
    head.click();
    for (let tries = 0; tries < 20 && !document.getElementById(id); tries++) {
      await new Promise((done) => setTimeout(done, 50));
    }
    if (!document.getElementById(id)) head.click();
  }
  const field = document.getElementById(id);
  if (!field) return;
  mark();
  field.scrollIntoView({ block: "center" });
  field.querySelector("input, textarea")?.focus();
}

// Of a long table, the rows that hold what is typed above it, and no more than its limit.
function narrow(area) {
  const [search, button] = [area.querySelector("input[type=search]"), area.querySelector("[data-all]")];
  const rows = [...area.querySelectorAll("tbody tr")];
  const wanted = search.value.trim().toLowerCase();
  const found = rows.filter((row) => row.textContent.toLowerCase().includes(wanted));
  const shown = new Set(area.dataset.whole ? found : found.slice(0, Number(area.dataset.limit)));
  for (const row of rows) row.hidden = !shown.has(row);
  const of = wanted ? `${found.length} of ${rows.length} match` : `${rows.length} in all`;
  area.querySelector(".count").textContent = shown.size < found.length ? `the first ${shown.size} shown, ${of}` : of;
  button.hidden = shown.size === found.length;
  button.textContent = `Show all ${found.length}`;
}

async function copy(button) {
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea"); // a page without TLS has no clipboard API
    area.value = text;
    document.body.appendChild(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1200);
}

root.addEventListener("input", (event) => {
  if (event.target.type === "search") narrow(event.target.closest("[data-limit]"));
});
root.addEventListener("change", (event) => {
  const { action, value } = event.target.dataset;
  if (event.target.type === "radio" && action) trigger("click", { action, value: value || "" });
});
root.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action], button[data-copy], button[data-all], button[data-goto]");
  if (!button || !root.contains(button)) return;
  if (button.dataset.goto) return goTo(button.dataset.goto);
  if (button.dataset.all !== undefined) {
    const area = button.closest("[data-limit]");
    area.dataset.whole = "yes";
    return narrow(area);
  }
  if (button.dataset.copy !== undefined) return copy(button);
  if (button.getAttribute("aria-disabled") === "true") return;
  if (button.dataset.confirm && !window.confirm(button.dataset.confirm)) return;
  button.setAttribute("aria-disabled", "true"); // until the next value says otherwise: no double click
  setTimeout(() => button.removeAttribute("aria-disabled"), 4000);
  trigger("click", { action: button.dataset.action, value: button.dataset.value || "" });
});

watch("value", draw);
draw();
const ticking = setInterval(() => (element.isConnected ? (count(), mark()) : clearInterval(ticking)), 1000);
