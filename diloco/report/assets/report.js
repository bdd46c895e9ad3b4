// Draws the curves (uPlot) and the timeline (canvas) from the JSON in this page. Nothing is fetched.
const page = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const colors = new Map();
const color = name => {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim());
  return colors.get(name);
};
const series = k => "c" + k % 8;
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

// Charts are built anew when colours change, and resized when the page is.
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
  const entry = { plot: draw(), redraw: () => { entry.plot?.destroy(); entry.plot = draw(); } };
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
const whole = value => value == null ? "–" : value.toLocaleString("en-GB");
const nats = value => value == null ? "–" : value.toFixed(4);
// Where the cursor is; the last value while it is nowhere.
const legend = format => (u, value, k, at) => format(at == null ? u.data[k].findLast(entry => entry != null) : value);
const decade = tick => tick != null && Math.abs(Math.log10(tick) - Math.round(Math.log10(tick))) < 1e-9;
const decades = { filter: (u, ticks) => ticks.map(tick => decade(tick) ? tick : null) };
const logarithmic = more => {
  const plain = axis(more);
  return { ...plain, grid: { ...plain.grid, ...decades }, ticks: { ...plain.ticks, ...decades }, values: (u, ticks) => ticks.map(tick => decade(tick) ? size(tick) : "") };
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

const drawLoss = () => {
  const { labels, steps, columns, unigram, width } = page.loss;
  const replicas = labels.length - 2;
  const entry = chart("loss", () => {
    const keep = +byId("smoothing").value;
    const lines = labels.map((label, k) => k < replicas
      ? { label, stroke: color(series(k)), width: 1.25, dash: DASHES[Math.floor(k / 8) % 4], points: { show: false } }
      : k === replicas
        ? { label, stroke: color("quiet"), width: 1.5, dash: [5, 4], points: { show: false } }
        : { label, stroke: color("ink"), width: 2.5, points: { show: true, size: 5, fill: color("ink") } });
    const data = [steps, ...columns.map((column, k) => k < replicas ? smoothed(column, keep) : column)];
    if (unigram != null) {
      lines.push({ label: "unigram model", stroke: color("quiet"), width: 1, dash: [2, 4], points: { show: false } });
      data.push(steps.map(() => unigram));
    }
    return { data, options: {
      ...base("steps", counts(), axis({ size: 46 })), scales: { x: { time: false } },
      series: [{ label: "step", value: legend(whole) }, ...lines.map(line => ({ spanGaps: true, value: legend(nats), ...line }))],
    } };
  });
  byId("smoothing").addEventListener("change", entry.redraw);
  if (width > 1) byId("loss").insertAdjacentHTML("beforebegin", `<p class="caption">Each point of a replica is the mean of ${width} steps.</p>`);
};

const drawBytes = (id, column, dataParallel, bars) => chart(id, () => {
  const { steps } = page.bytes;
  const values = page.bytes[column];
  const data = [steps, values];
  const sent = bars
    ? { paths: uPlot.paths.bars({ size: [0.6, 6, 2] }), fill: color("c0"), points: { show: steps.length < 400 ? undefined : false } }
    : { width: 2, spanGaps: true, points: { show: false } };
  const lines = [{ label: "sent", stroke: color("c0"), ...sent }];
  if (page.bytes.data_parallel != null) {
    data.push(steps.map(dataParallel));
    lines.push({ label: "data-parallel", stroke: color("c1"), width: 2, dash: [7, 4], points: { show: false } });
  }
  const all = data.slice(1).flat().filter(value => value > 0);
  const range = all.length ? [10 ** Math.floor(Math.log10(Math.min(...all)) - 0.3), 10 ** Math.ceil(Math.log10(Math.max(...all)) + 0.05)] : [1, 10];
  return { data: all.length ? data : [[]], options: {
    ...base("steps", counts(), logarithmic({ size: 64 })),
    height: Math.min(260, height()), scales: { x: { time: false }, y: { distr: 3, range } },
    series: [{ label: "step", value: legend(whole) }, ...lines.map(line => ({ value: legend(size), ...line }))],
  } };
});

const drawComparison = (id, key) => {
  const entry = chart(id, () => {
    const over = +byId("over").value, keep = key === "training" ? +byId("smoothing").value : 0;
    const tables = page.runs.map(run => {
      const points = run[key].filter(point => point[over] != null);
      return [points.map(point => point[over]), smoothed(points.map(point => point[4]), keep)];
    });
    const seeds = [...new Set(page.runs.map(run => run.seed))];
    const several = seeds.length > 1;
    const lines = page.runs.map(run => ({
      label: page.settings[run.setting] + (several ? `, seed ${run.seed}` : ""), stroke: color(series(run.setting)), width: key === "heldOut" ? 2 : 1.25,
      dash: DASHES[seeds.indexOf(run.seed) % 4], spanGaps: true, value: legend(nats), points: { show: false },
    }));
    const data = tables.some(table => table[0].length) ? uPlot.join(tables) : [[]];
    const name = ["step", "tokens", "seconds", "sent"][over];
    const show = [whole, amount, value => value == null ? "–" : seconds(value), size][over];
    const x = over === 3 ? logarithmic({ size: 34 }) : { ...counts(), ...(over === 2 && { incrs: undefined, values: (u, ticks) => ticks.map(tick => tick + " s") }) };
    const options = {
      ...base("comparison", x, axis({ size: 46 })), scales: { x: { time: false, distr: over === 3 ? 3 : 1 } },
      series: [{ label: name, value: legend(show) }, ...lines],
    };
    return { data, options };
  });
  for (const control of ["over", "smoothing"]) byId(control).addEventListener("change", entry.redraw);
};
