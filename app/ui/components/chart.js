// Charts that grow: points are appended, the reader's zoom stays. Plotly comes with the page.
const root = element.querySelector(".sl-chart") || element;
const FONT = { family: "system-ui, sans-serif", size: 12, color: "#7c8594" };
const GRID = "rgba(127,135,150,0.22)";
let run = null;
let last = 0;
let figures = new Map();

function axis(title, extra) {
  return { title: { text: title, standoff: 8 }, gridcolor: GRID, zerolinecolor: GRID, linecolor: GRID, automargin: true, ...extra };
}

function open(figure) {
  const box = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const plot = document.createElement("div");
  caption.textContent = figure.title;
  if (figure.note) {
    const note = document.createElement("span");
    note.textContent = figure.note;
    caption.append(note);
  }
  plot.className = "plot";
  box.classList.toggle("small", Boolean(figure.small));
  box.append(caption, plot);
  root.appendChild(box);
  new ResizeObserver(() => plot.data && plot.offsetWidth && window.Plotly.Plots.resize(plot)).observe(plot);
  return { plot, series: new Map() };
}

function merge(known, fresh) {
  const kept = known.series.get(fresh.name) || { ...fresh, points: new Map() };
  fresh.x.forEach((x, i) => kept.points.set(x, fresh.y[i]));
  known.series.set(fresh.name, kept);
}

function traces(known) {
  return [...known.series.values()].map((s) => {
    const points = [...s.points.entries()].sort((a, b) => a[0] - b[0]);
    return {
      name: s.name, showlegend: !s.quiet && known.series.size > 1, x: points.map((p) => p[0]), y: points.map((p) => p[1]),
      type: "scatter", mode: s.marks ? "lines+markers" : "lines",
      line: { color: s.color, width: s.marks ? 1.5 : 1.75, dash: s.marks ? "dot" : "solid" }, marker: { size: 5 },
      hovertemplate: "%{y:.4~g}<extra>%{fullData.name}, step %{x}</extra>",
    };
  });
}

function band(low, high) {
  return { type: "rect", xref: "paper", x0: 0, x1: 1, y0: low, y1: high, layer: "below", fillcolor: "rgba(0,114,178,0.13)", line: { width: 0 } };
}

function layout(figure) {
  return {
    uirevision: run, height: figure.small ? 190 : 270, margin: { l: 48, r: 12, t: 28, b: 40 }, font: FONT,
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", hovermode: "x unified",
    hoverlabel: { bgcolor: "#20242c", bordercolor: "#20242c", font: { color: "#f2f4f7", size: 12 } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    xaxis: axis(figure.x || "optimiser step", { rangemode: "tozero" }), yaxis: axis(figure.y, figure.range ? { range: figure.range } : { rangemode: "nonnegative" }),
    shapes: figure.band ? [band(...figure.band)] : [],
  };
}

function draw(figure) {
  const known = figures.get(figure.id);
  figure.series.forEach((fresh) => merge(known, fresh));
  window.Plotly.react(known.plot, traces(known), layout(figure), { displaylogo: false, displayModeBar: false });
}

function take() {
  if (!props.value) return;
  if (!window.Plotly) return setTimeout(take, 100);
  const fresh = JSON.parse(props.value);
  if (fresh.run !== run || fresh.after === 0) {
    root.replaceChildren();
    figures = new Map();
    run = fresh.run;
  } else if (fresh.after !== last) {
    if (fresh.after > last) trigger("input", { run });
    return;
  }
  last = fresh.last;
  // All boxes first: the grid settles before Plotly measures them.
  for (const figure of fresh.figures) if (!figures.has(figure.id)) figures.set(figure.id, open(figure));
  fresh.figures.forEach(draw);
  root.dataset.points = last;
}

watch("value", take);
take();
