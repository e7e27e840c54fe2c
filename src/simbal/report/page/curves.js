// Draws the curves in #curves over the static figures, which stay for paper and where no script runs.
// What a reader has chosen stands in history.state, so that it outlives a reload.
const charts = JSON.parse(document.getElementById("curves").textContent);
const state = { off: {}, logX: {}, logY: {}, zoom: {}, panel: {}, ...history.state };
const views = [];

const keep = () => history.replaceState(state, "");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function element(tag, className, text, parent) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  parent?.append(made);
  return made;
}

function toggle(text, className, parent, isOn, flip) {
  const button = element("button", className, text, parent);
  button.type = "button";
  button.show = () => button.setAttribute("aria-pressed", String(isOn()));
  button.addEventListener("click", () => {
    flip();
    keep();
    drawAll();
  });
  button.show();
  return button;
}

function short(value) {
  if (value === null || value === undefined) return "";
  for (const [size, letter] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(4)) + letter;
  }
  return String(Number(value.toPrecision(4)));
}

// Marks of a logarithmic axis: multiples of powers of ten, or even steps where it spans less than one power.
function logMarks(u, axis, low, high) {
  const marks = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    for (const times of high / low > 300 ? [1] : [1, 2, 3, 5, 7]) marks.push(power * times);
  }
  const inside = marks.filter((mark) => mark >= low && mark <= high);
  if (inside.length > 2) return inside;
  const step = 10 ** Math.floor(Math.log10((high - low) / 2));
  const even = [];
  for (let mark = Math.ceil(low / step) * step; mark <= high; mark += step) even.push(mark);
  const every = Math.ceil(even.length / 5);
  return even.filter((_, place) => place % every === 0);
}

function swatch(curve, parent) {
  const line = element("span", "line", "", parent);
  line.style.borderColor = `var(--arm${curve.color})`;
  line.style.borderTopStyle = curve.dashed ? "dashed" : "solid";
}

// The points that a scale can show, with one column for each of `columns`.
function table(xs, columns, logX, logY) {
  const kept = xs.map((_, place) => place).filter((place) => !logX || xs[place] > 0);
  const value = (column, place) => (logY && column[place] <= 0 ? null : column[place]);
  return [kept.map((place) => xs[place]), ...columns.map((column) => kept.map((place) => value(column, place)))];
}

// uPlot's data, and its series: of each arm the mean and the ends of its band.
function lines(view) {
  const { chart, curves, logX, logY } = view;
  const tables = [], series = [{}], bands = [];
  for (const curve of curves) {
    const stroke = css(`--arm${curve.color}`), show = !state.off[curve.arm];
    const dash = curve.dashed ? [6, 4] : undefined;
    const columns = curve.low ? [curve.y, curve.low, curve.high] : [curve.y];
    tables.push(table(curve.x ?? view.xs, columns, logX, logY));
    series.push({ label: curve.arm, stroke, show, dash, width: 2, spanGaps: true, points: { size: 5 } });
    if (curve.low) {
      bands.push({ series: [series.length + 1, series.length], fill: stroke + "29" });
      const end = { label: "", show, width: 0, spanGaps: true, points: { show: false } };
      series.push({ ...end }, { ...end });
    }
  }
  return { data: uPlot.join(tables), series, bands };
}

function axis(label, log) {
  const made = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 0.5 }, ticks: { show: false }, label };
  Object.assign(made, { labelSize: 18, labelFont: "12px system-ui, sans-serif", font: "11px system-ui, sans-serif" });
  made.values = (u, marks) => marks.map(short);
  return log ? { ...made, splits: logMarks, filter: (u, marks) => marks } : made;
}

function options(view, series, bands) {
  const { chart, box, logX, logY } = view, width = box.clientWidth;
  const margin = (u, low, high) => {
    if (low === null) return logY ? [1, 10] : [0, 1];
    if (logY) return [low / 1.03, high * 1.03];
    const more = (high - low || Math.abs(high) || 1) * 0.05;
    return [low >= 0 && low < more ? 0 : low - more, high + more];
  };
  return {
    width,
    height: Math.max(200, Math.min(300, Math.round(width * 0.58))),
    legend: { show: false },
    cursor: { drag: { x: true, y: true, uni: 24 }, points: { size: 7 } },
    scales: { x: { time: false, distr: logX ? 3 : 1 }, y: { distr: logY ? 3 : 1, range: margin } },
    axes: [{ ...axis(chart.x, logX), size: 26 }, { ...axis(chart.y, logY), size: 54 }],
    series,
    bands,
    hooks: { setSelect: [(u) => zoomed(view, u)] },
  };
}

function zoomed(view, u) {
  const { left, top, width, height } = u.select;
  if (!width || !height) return;
  const x = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
  const y = [u.posToVal(top + height, "y"), u.posToVal(top, "y")];
  state.zoom[view.chart.name] = { x, y };
  keep();
  view.buttons.forEach((button) => button.show());
}

function draw(view) {
  const { chart, box } = view;
  view.plot?.destroy();
  view.plot = null;
  view.logX = state.logX[chart.name] ?? false;
  view.logY = state.logY[chart.name] ?? chart.logY;
  const panel = chart.panels[Math.min(state.panel[chart.name] ?? 0, chart.panels.length - 1)];
  view.curves = panel.curves;
  view.xs = panel.x;
  view.legend.replaceChildren();
  for (const curve of view.curves) {
    const flip = () => { state.off[curve.arm] = !state.off[curve.arm]; };
    const name = toggle("", "name", view.legend, () => !state.off[curve.arm], flip);
    swatch(curve, name);
    element("span", "", curve.arm, name);
  }
  const { data, series, bands } = lines(view);
  const plot = new uPlot(options(view, series, bands), data, box);
  plot.over.addEventListener("dblclick", () => unzoom(view));
  const zoom = state.zoom[chart.name];
  if (zoom) {
    plot.batch(() => {
      plot.setScale("x", { min: zoom.x[0], max: zoom.x[1] });
      plot.setScale("y", { min: zoom.y[0], max: zoom.y[1] });
    });
  }
  view.plot = plot;
  view.drawnWidth = box.clientWidth;
  view.buttons.forEach((button) => button.show());
}

function unzoom(view) {
  delete state.zoom[view.chart.name];
  keep();
  view.buttons.forEach((button) => button.show());
}

function drawAll() {
  views.forEach(draw);
}

function addView(chart) {
  const figure = document.getElementById(`figure-${chart.name}`);
  const tools = element("div", "tools", ""), legend = element("div", "legend", "");
  const box = element("div", "chart", "");
  const view = { chart, box, legend, buttons: [] };
  const log = (name, key, own) => toggle(name, "", tools, () => state[key][chart.name] ?? own, () => {
    state[key][chart.name] = !(state[key][chart.name] ?? own);
    delete state.zoom[chart.name];
  });
  if (chart.panels.length > 1) {
    const select = element("select", "", "", tools);
    select.setAttribute("aria-label", `panel of ${chart.name}`);
    chart.panels.forEach(({ title }) => element("option", "", title, select));
    select.selectedIndex = Math.min(state.panel[chart.name] ?? 0, chart.panels.length - 1);
    select.addEventListener("change", () => {
      state.panel[chart.name] = select.selectedIndex;
      keep();
      draw(view);
    });
  }
  view.buttons = [log("log x", "logX", false), log("log y", "logY", chart.logY)];
  const whole = element("button", "", "whole", tools);
  whole.type = "button";
  whole.show = () => { whole.hidden = !state.zoom[chart.name]; };
  whole.addEventListener("click", () => {
    unzoom(view);
    draw(view);
  });
  view.buttons.push(whole);
  figure.querySelector("h3").after(tools, legend, box);
  figure.classList.add("drawn");
  views.push(view);
}

if (charts.length) {
  charts.forEach(addView);
  drawAll();
  addEventListener("resize", () => views.filter((view) => view.box.clientWidth !== view.drawnWidth).forEach(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
}

// A browser would go back to its place before the curves have their heights.
let scrolled;
history.scrollRestoration = "manual";
if (state.scroll) scrollTo(0, state.scroll);
addEventListener("scroll", () => {
  state.scroll = scrollY;
  clearTimeout(scrolled);
  scrolled = setTimeout(keep, 150);
});
