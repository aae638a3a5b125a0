// A log that grows by chunks. Chunks that follow each other are appended; after a gap the page
// is asked for the tail again. Follows the end unless the reader has scrolled up.
const CAP = 400000; // characters kept in the page; the whole log can be downloaded
const root = element.querySelector(".sl-log") || element;
const head = document.createElement("div");
const note = document.createElement("span");
const link = document.createElement("a");
const pane = document.createElement("pre");
head.className = "log-head";
link.className = "button small";
link.textContent = "Download";
link.setAttribute("download", "");
link.hidden = true; // until the run is known, and while it has written nothing
const name = document.createElement("strong");
name.textContent = "Log";
head.append(name, note, link);
pane.tabIndex = 0;
pane.setAttribute("role", "log");
pane.setAttribute("aria-live", "off");
pane.setAttribute("aria-label", "Log of the run");
root.append(head, pane);
let run = null;
let end = 0;
let kept = 0;

function plain(text) {
  return text.replace(/\u001b\[[0-9;?]*[ -/]*[@-~]/g, "").replace(/\r\n?/g, "\n");
}

function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  if (bytes < 1048576) return `${(bytes / 1024).toFixed(1)} KiB`;
  return `${(bytes / 1048576).toFixed(1)} MiB`;
}

function append(text) {
  const following = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 40;
  const chunk = document.createElement("span");
  chunk.textContent = plain(text);
  pane.appendChild(chunk);
  kept += chunk.textContent.length;
  while (kept > CAP && pane.childNodes.length > 1) {
    kept -= pane.firstChild.textContent.length;
    pane.firstChild.remove();
  }
  if (following) pane.scrollTop = pane.scrollHeight;
}

function take() {
  if (!props.value) return;
  const chunk = JSON.parse(props.value);
  if (chunk.run !== run || chunk.reset) {
    pane.replaceChildren();
    kept = 0;
    run = chunk.run;
  } else if (chunk.end <= end) {
    return;
  } else if (chunk.start !== end) {
    trigger("input", { run });
    return;
  }
  end = chunk.end;
  if (chunk.text) append(chunk.text);
  link.href = chunk.href;
  link.hidden = !chunk.size;
  const skipped = chunk.size > 0 && chunk.reset && chunk.start > 0 ? `, the last ${size(chunk.end - chunk.start)} shown` : "";
  note.textContent = chunk.size ? `${size(chunk.size)}${skipped}` : "nothing has been written yet";
  pane.hidden = !chunk.size;
}

watch("value", take);
take();
