// The curves as CSV, made from the data in this page.
const csv = lines => lines.map(line => line.map(value => value == null ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value).join(",")).join("\n") + "\n";

const tableOfRun = () => {
  const curves = Object.entries(page.charts).flatMap(([id, chart]) => chart.curves.map(curve => ({ name: `${id}: ${curve.label}`, at: new Map(chart.steps.map((step, k) => [step, curve.values[k]])) })));
  const steps = [...new Set(Object.values(page.charts).flatMap(chart => chart.steps))].sort((a, b) => a - b);
  return [["step", ...curves.map(curve => curve.name)], ...steps.map(step => [step, ...curves.map(curve => curve.at.get(step))])];
};
const tableOfRuns = () => [
  ["run", "seed", "loss of", "step", "tokens", "seconds", "bytes_sent", "loss"],
  ...page.runs.flatMap(run => ["training", "held-out"].flatMap(kind => rows(run[kind]).map(point => [run.name, run.seed, kind, point.step, point.tokens, point.seconds, point.bytes_sent, point.loss]))),
];

const offerTable = () => byId("table")?.addEventListener("click", () => {
  const text = csv(page.kind === "run" ? tableOfRun() : tableOfRuns());
  const file = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  Object.assign(document.createElement("a"), { ["href"]: file, download: document.title.split(" – ")[0].replace(/[^\w.-]+/g, "-") + ".csv" }).click();
  setTimeout(() => URL.revokeObjectURL(file), 10_000);
});
