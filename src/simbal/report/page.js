"use strict";
// Draw the figures, sort and filter the tables, and keep the state of the controls across reloads.
const { figures, config } = JSON.parse(document.getElementById("charted").textContent);
const narrow = innerWidth < 600;
const drawn = new Map(); // Vega view of each figure, by name
const kept = JSON.parse(sessionStorage.getItem(location.pathname) ?? "{}"); // the page of a running sweep reloads itself
const state = { hidden: [], bands: true, seeds: false, ...kept };

// Return the rows of a dataset; must match charts.expand.
const rows = (lines) =>
  lines.flatMap((line) => {
    const lists = Object.keys(line).filter((key) => Array.isArray(line[key]));
    return line[lists[0]].map((_, place) => ({ ...line, ...Object.fromEntries(lists.map((key) => [key, line[key][place]])) }));
  });

// Change the scale of an axis. Tokens start at 0, which has no logarithm, and bands may reach below 0.
function rescale(spec, axis, log, data) {
  for (const layer of (spec.spec ?? spec).layer) {
    const channel = layer.encoding?.[axis];
    if (!channel?.scale && !channel?.field) continue;
    const least = 0.9 * Math.min(...data.filter((row) => row.y > 0).map((row) => row.y));
    if (!log) channel.scale = { zero: false, nice: axis === "y", padding: 6 };
    else if (axis === "y") channel.scale = { type: "log", domainMin: least, clamp: true, nice: false };
    else {
      channel.scale = { type: "log", nice: false };
      (layer.transform ??= []).unshift({ filter: "datum.x > 0" });
    }
  }
}

async function draw(element) {
  const name = element.dataset.figure;
  const spec = structuredClone(figures[name].spec);
  const data = rows(figures[name].rows);
  for (const button of element.parentElement.querySelectorAll("[data-scale].changed"))
    rescale(spec, button.dataset.scale, button.ariaPressed === "true", data);
  spec.datasets = { ...spec.datasets, rows: data };
  if (spec.facet) spec.spec.width = Math.floor(element.clientWidth / spec.columns) - 44;
  else Object.assign(spec, { width: "container", autosize: { type: "fit-x", contains: "padding" }, height: spec.height ?? 230 });
  for (const param of spec.params ?? []) if (param.name === "narrow") param.value = narrow;
  // ast: interpret expressions, because the content policy forbids eval; logLevel 1: errors only
  const { view } = await vegaEmbed(element, spec, { config, ast: true, logLevel: 1, renderer: "svg", actions: false });
  drawn.set(name, view);
  await show(view);
}

function show(view) {
  const known = view.getState({ signals: () => true }).signals;
  for (const [key, value] of Object.entries(state)) if (key in known) view.signal(key, value);
  return view.runAsync();
}

function change(values) {
  Object.assign(state, values);
  sessionStorage.setItem(location.pathname, JSON.stringify(state));
  for (const button of document.querySelectorAll("[data-arm]")) button.ariaPressed = !state.hidden.includes(button.dataset.arm);
  for (const view of drawn.values()) show(view);
}

for (const button of document.querySelectorAll("[data-arm]"))
  button.onclick = () => {
    const { arm } = button.dataset;
    change({ hidden: state.hidden.includes(arm) ? state.hidden.filter((other) => other !== arm) : [...state.hidden, arm] });
  };
for (const button of document.querySelectorAll("[data-scale]"))
  button.onclick = () => {
    button.ariaPressed = button.ariaPressed !== "true";
    button.classList.add("changed");
    draw(button.closest("figure").querySelector("[data-figure]"));
  };
for (const box of document.querySelectorAll("[data-show]")) {
  box.checked = state[box.dataset.show];
  box.onchange = () => change({ [box.dataset.show]: box.checked });
}

// Clicking a heading sorts the table; clicking it again reverses the order. Text sorts after numbers.
const number = (text) => (text === "" || text === "—" ? NaN : Number(text));
for (const button of document.querySelectorAll("th > button"))
  button.onclick = () => {
    const heading = button.parentElement, body = heading.closest("table").tBodies[0], up = heading.ariaSort !== "ascending";
    const key = ({ cells: { [heading.cellIndex]: cell } }) =>
      cell.dataset.key ?? (cell.tagName === "TD" ? (cell.firstChild?.textContent ?? "") : cell.textContent).trim();
    const sorted = [...body.rows].map((row) => [row, key(row), number(key(row))]);
    sorted.sort(([, a, x], [, b, y]) => {
      if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
      return (up ? 1 : -1) * (isNaN(x) ? a.localeCompare(b, "en", { numeric: true }) : x - y);
    });
    for (const other of heading.parentElement.cells) other.ariaSort = null;
    heading.ariaSort = up ? "ascending" : "descending";
    body.append(...sorted.map(([row]) => row));
  };
// The search field above a long table filters its rows by words.
for (const field of document.querySelectorAll(".filter"))
  field.oninput = () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of field.nextElementSibling.querySelectorAll("tbody tr"))
      row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  };

// A closed <details> has no width, so its figures are drawn when it opens.
const visible = (element) => !element.closest("details:not([open])") && !drawn.has(element.dataset.figure);
const drawVisible = (root) => Promise.all([...root.querySelectorAll("[data-figure]")].filter(visible).map(draw));
for (const details of document.querySelectorAll("details")) details.ontoggle = () => drawVisible(details);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((details) => (details.open = true)));
change({});
drawVisible(document).then(() => (document.documentElement.dataset.drawn = Math.round(performance.now())));
