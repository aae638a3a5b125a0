// Decoding, step by step. Updates carry only new steps; `seq` says whether one was missed.
// Every token's text goes through textContent.
const root = element.querySelector(".sl-tokens") || element;
const make = (tag, cls, text) => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
};
const title = make("div", "tv-title");
const flow = make("div", "tv-flow");
const empty = make("p", "tv-empty");
const message = make("p", "tv-message");
const scrub = make("div", "tv-scrub");
const range = make("input");
const detail = make("div", "tv-detail");
const numbers = make("dl", "tv-numbers");
const summary = make("p", "tv-summary");
flow.tabIndex = 0;
flow.setAttribute("role", "log");
flow.setAttribute("aria-live", "off");
range.type = "range";
range.min = 0;
range.setAttribute("aria-label", "Decoding step");
numbers.setAttribute("role", "status");
numbers.setAttribute("aria-label", "Acceptance and speed");
detail.setAttribute("aria-live", "polite");
scrub.append(range, detail);
root.append(title, flow, empty, message, scrub, numbers, summary);

let run = null;
let seq = -1;
let missed = false;
let chosen = -1;
let steps = [];
let nodes = [];
let following = true;
let latest = null; // the update that the next frame paints; several may come before it

function token(kind, text, tip) {
  const node = make(kind === "rejected" || kind === "unverified" ? "del" : "span", `tok ${kind}`);
  const struck = node.localName === "del";
  if (text === "") {
    node.classList.add("bare");
    node.dataset.glyph = "◦";
    tip += ", no text of its own";
  }
  // A visible mark for a line break or a tab; the break itself stays, but not in struck tokens.
  for (const part of text.split(/(\n|\t)/)) {
    if (part === "\n" || part === "\t") {
      const mark = make("span", "ws", struck ? "" : part);
      mark.dataset.glyph = part === "\n" ? "⏎" : "⇥";
      node.appendChild(mark);
    } else if (part) node.appendChild(document.createTextNode(part));
  }
  node.title = tip;
  return node;
}

function group(step) {
  const node = make("span", "tv-step");
  node.tabIndex = -1;
  const speculated = step.drafted.length > 0;
  const rejected = () => step.drafted.slice(step.accepted).forEach((t, i) =>
    node.appendChild(token(i ? "unverified" : "rejected", t.text,
      i ? "drafted after a rejected token: unused" : "draft token, rejected")));
  let struck = false;
  for (const t of step.emitted) {
    if (t.source === "draft") node.appendChild(token("accepted", t.text, "draft token, accepted"));
    else {
      if (!struck) rejected();
      struck = true;
      node.appendChild(token(root.dataset.plain ? "plain" : "own", t.text,
        speculated ? "the verifier's own token" : "the verifier's own token, nothing was drafted"));
    }
  }
  if (!struck) rejected();
  return node;
}

function shown(text) {
  return text === "" ? "◦" : "“" + text.replace(/\n/g, "⏎").replace(/\t/g, "⇥") + "”";
}

function percent(p) {
  return p === null || p === undefined ? "" : ` ${(100 * p).toFixed(p < 0.1 ? 1 : 0)} %`;
}

function describe(i) {
  const step = steps[i];
  detail.replaceChildren();
  if (!step) {
    detail.textContent = steps.length ? "← → walk through the steps" : "";
    return;
  }
  detail.appendChild(make("strong", "", `Step ${i + 1} of ${steps.length}`));
  const add = (text, cls) => detail.appendChild(make("span", cls, text));
  if (!step.drafted.length) add("nothing drafted");
  step.drafted.forEach((t, k) => {
    const cls = k < step.accepted ? "accepted" : k === step.accepted ? "rejected" : "unverified";
    const word = cls === "accepted" ? "accepted" : cls === "rejected" ? "rejected" : "unused";
    const odds = [["draft", t.p_draft], ["verifier", t.p_verifier]].filter((o) => o[1] !== null && o[1] !== undefined)
      .map(([who, p]) => who + percent(p)).join(", ");
    add(`${shown(t.text)} ${word}${odds ? ` (${odds})` : ""}`, `pill ${cls}`);
  });
  for (const t of step.emitted) if (t.source !== "draft") add(`${shown(t.text)} the verifier's own`, "pill own");
  const times = [["draft", step.draft_ms], ["verify", step.verify_ms]].filter((o) => o[1] !== null && o[1] !== undefined)
    .map(([what, ms]) => `${what} ${ms.toFixed(1)} ms`);
  if (times.length) add(times.join(", "), "quiet");
  if (step.context_len) add(`context ${step.context_len} tokens`, "quiet");
}

function choose(i, focus) {
  if (chosen >= 0 && nodes[chosen]) nodes[chosen].classList.remove("chosen");
  chosen = Math.max(-1, Math.min(i, nodes.length - 1));
  flow.classList.toggle("scrubbed", chosen >= 0);
  if (chosen >= 0) {
    nodes[chosen].classList.add("chosen");
    if (focus) nodes[chosen].focus({ preventScroll: true });
    nodes[chosen].scrollIntoView({ block: "nearest" });
  }
  range.value = chosen < 0 ? nodes.length - 1 : chosen;
  describe(chosen);
}

function append(fresh) {
  if (!fresh.length) return;
  if (!nodes.length) flow.replaceChildren();
  const batch = document.createDocumentFragment();
  for (const step of fresh) {
    const node = group(step);
    steps.push(step);
    nodes.push(node);
    batch.appendChild(node);
  }
  flow.appendChild(batch);
  range.max = Math.max(0, nodes.length - 1);
  if (chosen < 0) range.value = range.max;
}

function number(name, value, help) {
  const cell = make("div", "tv-number");
  cell.title = help;
  cell.append(make("dt", "", name), make("dd", "", value));
  return cell;
}

function positions(values) {
  const cell = make("div", "tv-number tv-positions");
  const list = make("dd");
  cell.title = "share of drafting steps in which this position and all before it were accepted";
  values.forEach((p, k) => {
    const bar = make("span", "tv-position");
    const fill = make("span", "tv-fill");
    fill.style.height = `${Math.round(100 * p)}%`;
    bar.append(fill, make("span", "tv-position-text", `${k + 1}: ${Math.round(100 * p)} %`));
    list.appendChild(bar);
  });
  cell.append(make("dt", "", "Accepted by position"), list);
  return cell;
}

function count(update) {
  const n = update.numbers;
  numbers.setAttribute("aria-busy", String(update.state === "streaming" || update.state === "waiting"));
  numbers.replaceChildren();
  if (!n || !n.tokens) return;
  const cells = [number("Speed", n.tokens_per_second ? `${n.tokens_per_second.toFixed(1)} tokens/s` : "–", "tokens a second, first token to last")];
  if (n.drafted) {
    cells.unshift(
      number("Acceptance length", n.acceptance_length.toFixed(2), "tokens a drafting step yields: accepted drafts plus the verifier's own"),
      number("Acceptance rate", `${(100 * n.acceptance_rate).toFixed(0)} %`, "accepted share of all drafted tokens"));
  }
  if (!root.dataset.plain) {
    cells.push(number("Per verifier pass", steps.length ? `${(n.tokens / steps.length).toFixed(2)} tokens` : "–", "tokens emitted for each pass through the verifier"));
  }
  cells.push(number("Answer", `${n.tokens} tokens`, "tokens emitted"));
  if (n.drafted && n.per_position && n.per_position.length) cells.push(positions(n.per_position));
  numbers.append(...cells);
  summary.textContent = n.drafted ? `Accepted ${n.accepted} of ${n.drafted} draft tokens.` : "";
}

const STATES = { waiting: "waiting for the first token", streaming: "decoding", done: "done", stopped: "stopped", failed: "failed" };

function reset(update) {
  run = update.run;
  steps = [];
  nodes = [];
  chosen = -1;
  missed = false;
  following = true;
  flow.replaceChildren();
  flow.classList.remove("scrubbed");
  summary.textContent = "";
  describe(-1);
}

// A new state for what is shown already, e.g. after Stop.
function settle(update) {
  const mark = title.querySelector(".chip");
  if (!["waiting", "streaming"].includes(root.dataset.state)) return;
  latest = latest && { ...latest, state: update.state };
  if (mark) {
    mark.className = `chip ${update.state}`;
    mark.textContent = STATES[update.state] || update.state;
  }
  message.hidden = !update.message;
  message.textContent = update.message;
  numbers.setAttribute("aria-busy", "false");
  root.dataset.state = update.state;
}

function take() {
  root.toggleAttribute("data-off", !props.value);
  if (!props.value) return;
  const update = JSON.parse(props.value);
  if (update.seq === null) return settle(update);
  if (update.plain) root.dataset.plain = "1";
  else delete root.dataset.plain;
  flow.setAttribute("aria-label", update.title || "Answer");
  if (update.reset) reset(update);
  else if (update.run !== run || update.seq > seq + 1) missed = true;
  if (!missed && (update.reset || update.seq === seq + 1)) append(update.steps || []);
  seq = update.seq;
  if (!nodes.length) flow.textContent = update.text || ""; // no trace: the bare answer
  flow.hidden = !update.run;
  scrub.hidden = nodes.length === 0;
  root.dataset.state = update.state || "";
  root.dataset.steps = nodes.length;
  if (!latest) requestAnimationFrame(paint);
  latest = update;
  if (missed && update.run && ["done", "stopped"].includes(update.state)) trigger("input", { run: update.run });
}

// What needs layout or rebuilds many nodes: once a frame.
function paint() {
  const update = latest;
  latest = null;
  title.replaceChildren(make("strong", "", update.title || "Answer"),
    ...(update.run && update.state ? [make("span", `chip ${update.state}`, STATES[update.state] || update.state)] : []));
  empty.hidden = Boolean(update.run);
  empty.textContent = update.run ? "" : update.message || "";
  message.hidden = !update.run || !update.message;
  message.className = `tv-message ${update.state === "failed" ? "error" : ""}`;
  message.textContent = update.message || "";
  count(update);
  if (chosen < 0) describe(-1);
  if (following && chosen < 0) flow.scrollTop = flow.scrollHeight;
}

flow.addEventListener("scroll", () => {
  following = flow.scrollHeight - flow.scrollTop - flow.clientHeight < 60;
});
flow.addEventListener("click", (event) => {
  const step = event.target.closest(".tv-step");
  if (step) choose(nodes.indexOf(step), true);
});
root.addEventListener("keydown", (event) => {
  if (event.target === range) return;
  const last = nodes.length - 1;
  const moves = { ArrowRight: chosen + 1, ArrowLeft: chosen < 0 ? last : Math.max(0, chosen - 1), Home: 0, End: last };
  if (event.key === "Escape") choose(-1);
  else if (event.key in moves && nodes.length) choose(moves[event.key], true);
  else return;
  event.preventDefault();
});
range.addEventListener("input", () => choose(Number(range.value), false));

watch("value", take);
take();
