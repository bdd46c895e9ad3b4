// Draws the curves (uPlot) and the timeline (canvas) from the JSON in this page, which a live page updates.
const page = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const colors = new Map();
const color = name => {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim());
  return colors.get(name);
};
const series = k => "c" + k % 8;
// Columns by name, as objects.
const rows = columns => (Object.values(columns)[0] ?? []).map((_, k) => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[k]])));
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];

const prefixed = (value, units) => {
  if (value == null) return "–";
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < units.length - 1) { value /= 1000; power += 1; }
  return String(+value.toPrecision(3)) + units[power];
};
const size = value => prefixed(value, [" B", " kB", " MB", " GB", " TB", " PB"]);
const amount = value => prefixed(value, ["", " k", " M", " G", " T"]);
const seconds = value => value < 1 ? +(value * 1000).toPrecision(3) + " ms" : +value.toPrecision(4) + " s";

// Charts are rebuilt when the color scheme changes, resized with the page, and get new data while the run continues.
const built = [];
const chart = (id, make) => {
  const place = byId(id);
  const draw = () => {
    place.replaceChildren();
    const { options, data } = make();
    if (!data[0].length) {
      place.innerHTML = '<p class="empty">Nothing written yet.</p>';
      return null;
    }
    return new uPlot({ width: place.clientWidth, ...options }, data, place);
  };
  const entry = {
    plot: draw(),
    redraw: () => { entry.plot?.destroy(); entry.plot = draw(); },
    update: () => {
      const { data } = make(), old = entry.plot?.data;
      if (!old || !data[0].length || data.length !== old.length) return entry.redraw();
      const { min, max } = entry.plot.scales.x, zoomed = min > old[0][0] || max < old[0].at(-1);
      entry.plot.setData(data, !zoomed);
      if (zoomed) entry.plot.redraw();
    },
  };
  new ResizeObserver(() => {
    if (entry.plot && place.clientWidth !== entry.plot.width) entry.plot.setSize({ width: place.clientWidth, height: entry.plot.height });
  }).observe(place);
  built.push(entry);
  return entry;
};
const axis = more => ({
  stroke: color("quiet"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line"), width: 1, size: 5 },
  font: "12px system-ui, sans-serif", ...more,
});
const height = () => Math.round(Math.min(340, Math.max(220, innerWidth * 0.4)));
const whole = value => value == null ? "–" : value.toLocaleString("en-US");
const nats = value => value == null ? "–" : value.toFixed(4);
// The last value up to the cursor, or the very last one if there is no cursor.
const legend = format => (u, value, k, at) => format(value ?? u.data[k].slice(0, at == null ? undefined : at + 1).findLast(entry => entry != null));
const decade = tick => tick != null && Math.abs(Math.log10(tick) - Math.round(Math.log10(tick))) < 1e-9;
const decades = { filter: (u, ticks) => ticks.map(tick => decade(tick) ? tick : null) };
const logarithmic = (more, show = size) => {
  const plain = axis(more);
  return { ...plain, grid: { ...plain.grid, ...decades }, ticks: { ...plain.ticks, ...decades }, values: (u, ticks) => ticks.map(tick => decade(tick) ? show(tick) : "") };
};
const base = (key, x, y) => ({
  height: height(), axes: [x, y], cursor: { drag: { x: true, y: false }, sync: { key }, points: { size: 6 } },
  legend: { markers: { width: 2, fill: null, dash: (u, k) => ({ undefined: "solid", 2: "dotted" })[u.series[k].dash?.[0]] ?? "dashed" } },
});
const INTEGERS = Array.from({ length: 36 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3));
const counts = () => axis({ size: 34, space: 70, incrs: INTEGERS, values: (u, ticks) => ticks.map(amount) });

const smoothed = (column, keep) => {
  let mean = null;
  return column.map(value => value == null ? null : (mean = mean == null ? value : keep * mean + (1 - keep) * value));
};

// How each kind of curve is drawn; k counts the curves of a chart.
const plain = { points: { show: false } };
const STYLES = {
  replica: k => ({ stroke: color(series(k)), width: 1.25, dash: DASHES[Math.floor(k / 8) % 4], ...plain }),
  "one replica": () => ({ stroke: color("quiet"), width: 1.5, dash: [5, 4], ...plain }),
  anchors: () => ({ stroke: color("ink"), width: 2.5, points: { show: true, size: 5, fill: color("ink") } }),
  reference: () => ({ stroke: color("quiet"), width: 1, dash: [2, 4], ...plain }),
  line: () => ({ stroke: color("c0"), width: 2, ...plain }),
  "data-parallel": () => ({ stroke: color("c1"), width: 2, dash: [7, 4], ...plain }),
};
const FORMATS = { nats, bytes: size, number: value => value == null ? "–" : String(+value.toPrecision(3)) };

const drawChart = id => {
  const { unit } = page.charts[id];
  const note = byId(id).parentElement.insertBefore(document.createElement("p"), byId(id));
  note.className = "caption";
  const entry = chart(id, () => {
    const { steps, curves } = page.charts[id];
    note.textContent = page.charts[id].note;
    note.hidden = !note.textContent;
    const keep = unit === "nats" ? +byId("smoothing").value : 0;
    const data = [steps, ...curves.map(({ kind, values }) => kind === "replica" ? smoothed(values, keep) : values)];
    const lines = curves.map(({ label, kind }, k) => ({ label, spanGaps: true, value: legend(FORMATS[unit]), ...STYLES[kind](k) }));
    const options = { ...base("steps", counts(), axis({ size: unit === "nats" ? 46 : 58 })), scales: { x: { time: false } }, series: [{ label: "step", value: legend(whole) }, ...lines] };
    if (unit === "nats") return { data, options };
    options.height = Math.min(260, height());
    if (unit !== "bytes") return { data, options };
    if (!curves.some(({ values }) => values.some(value => value > 0))) return { data: [[]], options };
    const range = (u, low, high) => low > 0 ? [10 ** Math.floor(Math.log10(low) - 0.3), 10 ** Math.ceil(Math.log10(high) + 0.05)] : [1, 10];
    return { data, options: { ...options, axes: [options.axes[0], logarithmic({ size: 64 })], scales: { x: { time: false }, y: { distr: 3, range } } } };
  });
  if (unit === "nats") byId("smoothing").addEventListener("change", entry.redraw);
};

// The x axes of the comparison, by column name.
const OVER = { step: ["step", whole], tokens: ["tokens", amount], seconds: ["seconds", value => value == null ? "–" : seconds(value)], bytes_sent: ["sent", size] };

const drawComparison = id => {
  const entry = chart(id, () => {
    const over = byId("over").value, keep = id === "training" ? +byId("smoothing").value : 0;
    const tables = page.runs.map(run => {
      const points = rows(run[id]).filter(point => point[over] != null);
      return [points.map(point => point[over]), smoothed(points.map(point => point.loss), keep)];
    });
    const seeds = [...new Set(page.runs.map(run => run.seed))];
    const several = seeds.length > 1;
    const lines = page.runs.map(run => ({
      label: (page.settings[run.setting] ?? run.name) + (several ? `, seed ${run.seed}` : ""), stroke: color(series(run.setting)), width: id === "held-out" ? 2 : 1.25,
      dash: DASHES[seeds.indexOf(run.seed) % 4], spanGaps: true, value: legend(nats), points: { show: false },
    }));
    const data = tables.some(table => table[0].length) ? uPlot.join(tables) : [[]];
    const [name, show] = OVER[over];
    const x = over === "bytes_sent" ? logarithmic({ size: 34 }) : { ...counts(), ...(over === "seconds" && { incrs: undefined, values: (u, ticks) => ticks.map(tick => tick + " s") }) };
    const options = {
      ...base("comparison", x, axis({ size: 46 })), scales: { x: { time: false, distr: over === "bytes_sent" ? 3 : 1 } },
      series: [{ label: name, value: legend(show) }, ...lines],
    };
    return { data, options };
  });
  for (const control of ["over", "smoothing"]) byId(control).addEventListener("change", entry.redraw);
};

const colorSettings = () => { for (const swatch of document.querySelectorAll("[data-setting]")) swatch.style.background = `var(--${series(swatch.dataset.setting)})`; };
