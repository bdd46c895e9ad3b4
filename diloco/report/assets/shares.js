// Shares over a logarithmic axis, one curve a method, what the reader has asked about marked: `diloco plan`, `diloco fleet`.
const drawShares = id => chart(id, () => {
  const { share, axis: over, unit, curves, mark: [own, said] } = page.plot;
  const show = value => value == null ? "–" : prefixed(value, ["", "k", "M", "G", "T"].map(prefix => ` ${prefix}${unit}`.trimEnd()));
  const percent = value => value == null ? "–" : value.toFixed(1) + " %";
  const line = k => ({ stroke: color(series(k)), spanGaps: true, value: legend(percent) });
  const tables = curves.map(({ at, shares }) => [at, shares.map(value => 100 * value)]);
  const lines = curves.map(({ label }, k) => ({ label, width: 2, ...line(k), ...plain }));
  curves.forEach(({ label, points }, k) => {
    if (!points.length) return;
    tables.push([points.map(([at]) => at), points.map(([, value]) => 100 * value)]);
    lines.push({ label: label + ", points", ...line(k), paths: () => null, points: { show: true, size: 9, fill: color(series(k)) } });
  });
  const marked = u => {
    const x = u.valToPos(own, "x", true), { top, height: tall, left, width } = u.bbox, g = u.ctx, room = x > left + 0.3 * width;
    if (x < left || x > left + width) return;
    g.save();
    g.strokeStyle = g.fillStyle = color("exposed"); g.lineWidth = devicePixelRatio; g.setLineDash([5, 4].map(dash => dash * devicePixelRatio));
    g.beginPath(); g.moveTo(x, top); g.lineTo(x, top + tall); g.stroke();
    g.font = `${12 * devicePixelRatio}px system-ui, sans-serif`; g.textAlign = room ? "right" : "left";
    // On the left at the top, where there are no curves, if there is room.
    g.fillText(said, x + (room ? -6 : 6) * devicePixelRatio, room ? top + 18 * devicePixelRatio : top + tall - 8 * devicePixelRatio);
    g.restore();
  };
  const font = "12px system-ui, sans-serif";
  const usual = base("shares", logarithmic({ size: 34, label: over, labelFont: font, labelSize: 22 }, show), axis({ size: 52, label: share, labelFont: font, labelSize: 20, values: (u, ticks) => ticks.map(tick => tick + " %") }));
  const options = {
    ...usual, cursor: { ...usual.cursor, y: false },
    scales: { x: { time: false, distr: 3 }, y: { range: [0, 102] } }, series: [{ label: over.split(/[(,]/)[0].trim(), value: legend(show) }, ...lines],
    // The values at the own place, until the reader points elsewhere.
    hooks: { draw: [marked], ready: [u => u.setCursor({ left: u.valToPos(own, "x"), top: 0 })] },
  };
  return { data: uPlot.join(tables), options };
});
