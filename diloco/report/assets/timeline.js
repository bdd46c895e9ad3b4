// The timeline of one run: a lane of training and a lane per fragment for every replica, on one canvas, over seconds.
// Returns a function that takes new data.
const drawTimeline = () => {
  const frame = byId("timeline"), canvas = frame.querySelector("canvas"), tip = frame.querySelector(".tip"), bar = byId("windows");
  const LANE = 13, GAP = 2, HEAD = 20, AXIS = 22, BETWEEN = 12;
  const empty = frame.insertBefore(Object.assign(document.createElement("p"), { className: "empty" }), canvas);
  let replicas = [], end = 0, full = [0, 1], view = full, chosen = 0, drag = null, hits = [], left = 88, lanes = 1, tall = HEAD;
  // Beyond four replicas, show one at a time.
  const shown = () => replicas.length > 4 ? [replicas[chosen]] : replicas;
  const latest = ({ steps, rounds, events }) => Math.max(steps.at(-1)?.end ?? 0, events.at(-1)?.seconds ?? 0, rounds.reduce((most, round) => Math.max(most, round.applied_at), 0));
  const x = t => left + (t - view[0]) / (view[1] - view[0]) * (canvas.clientWidth - left - 2);
  const time = px => view[0] + (px - left) / (canvas.clientWidth - left - 2) * (view[1] - view[0]);

  const draw = () => {
    const width = frame.clientWidth, high = AXIS + shown().length * (tall + BETWEEN), scale = devicePixelRatio || 1;
    left = width < 560 ? 62 : 88;
    canvas.style.height = high + "px"; canvas.width = width * scale; canvas.height = high * scale;
    const g = canvas.getContext("2d");
    g.scale(scale, scale); g.font = "12px system-ui, sans-serif"; g.textBaseline = "middle";
    hits = [];
    grid(g, high);
    shown().forEach((replica, k) => lanesOf(g, replica, AXIS + k * (tall + BETWEEN)));
    if (drag) { g.globalAlpha = 0.2; g.fillStyle = color("flight"); g.fillRect(Math.min(drag.from, drag.to), AXIS, Math.abs(drag.to - drag.from), high); g.globalAlpha = 1; }
    canvas.dataset.bars = hits.length;
  };
  const grid = (g, high) => {
    const step = nice((view[1] - view[0]) / Math.max(3, (canvas.clientWidth - left) / 80));
    g.textAlign = "center";
    for (let t = Math.ceil(view[0] / step) * step; t <= view[1]; t += step) {
      g.fillStyle = color("line"); g.fillRect(Math.round(x(t)), AXIS - 4, 1, high);
      if (x(t) > left + 12 && x(t) < canvas.clientWidth - 16) { g.fillStyle = color("quiet"); g.fillText(+t.toFixed(6) + " s", x(t), 8); }
    }
  };
  const nice = rough => { const p = 10 ** Math.floor(Math.log10(rough)); return [1, 2, 5, 10].find(m => m * p >= rough) * p; };
  const clipped = (g, fill, from, to, y, h) => {
    const a = Math.max(left, x(from)), b = Math.min(canvas.clientWidth - 1, x(to));
    if (b < left || a > canvas.clientWidth) return null;
    g.fillStyle = color(fill); g.fillRect(a, y, Math.max(1, b - a), h);
    return [a, Math.max(a + 1, b)];
  };
  const lanesOf = (g, replica, top) => {
    g.textAlign = "left"; g.fillStyle = color("ink"); g.font = "600 12px system-ui, sans-serif";
    g.fillText("replica " + replica.number, 0, top + HEAD / 2);
    g.font = "11px system-ui, sans-serif"; g.fillStyle = color("quiet");
    const y = lane => top + HEAD + lane * (LANE + GAP);
    for (let lane = 0; lane < lanes; lane++) {
      g.fillStyle = color("soft"); g.fillRect(left, y(lane), canvas.clientWidth - left, LANE);
      g.fillStyle = color("quiet"); g.fillText(lane ? (left > 70 ? "fragment " : "frag. ") + (lane - 1) : "training", 0, y(lane) + LANE / 2 + 1);
    }
    steps(g, replica, y(0));
    for (const round of replica.rounds) bars(g, round, y(round.fragment + 1));
    for (const { event, seconds: at, step, settings } of replica.events) {
      if (x(at) < left) continue;
      g.fillStyle = color("ink"); g.beginPath(); g.moveTo(x(at) - 3.5, y(0) - 6); g.lineTo(x(at) + 3.5, y(0) - 6); g.lineTo(x(at), y(0) - 1); g.fill();
      hits.push({ box: [x(at) - 5, x(at) + 5, y(0) - 8, y(0)], text: `${event} after step ${step}\nat ${seconds(at)}` + (settings && `\n${settings}`) });
    }
  };
  // Every bar is at least a pixel wide: a few exposed microseconds would look like a whole step.
  const visible = exposed => exposed > 0 && x(exposed) - x(0) >= 0.5;
  const steps = (g, replica, y) => {
    for (const { start, end, exposed, step, count } of replica.steps) {
      const spot = clipped(g, "compute", start, end, y, LANE);
      if (!spot) continue;
      if (visible(exposed)) clipped(g, "exposed", end - exposed, end, y, LANE);
      if (spot[1] - spot[0] > 4) { g.fillStyle = color("page"); g.fillRect(spot[1] - 0.5, y, 1, LANE); }
      const name = count > 1 ? `steps ${step - count + 1} to ${step}` : `step ${step}`;
      hits.push({ box: [...spot, y, y + LANE], text: `${name}: ${seconds(end - start)}` + (exposed > 0 ? `\nexposed ${seconds(exposed)}` : "") });
    }
  };
  const bars = (g, round, y) => {
    const { sent_at: sent, applied_at: applied, seconds_exposed: exposed } = round;
    const arrived = sent + round.seconds;
    if (applied > arrived) clipped(g, "flight", arrived, applied, y + LANE / 2 - 0.5, 1);
    const spot = round.counted ? clipped(g, "flight", sent, arrived, y + 1, LANE - 2) : hollow(g, sent, arrived, y + 1, LANE - 2);
    if (visible(exposed)) clipped(g, "exposed", Math.max(sent, arrived - exposed), arrived, y + 1, LANE - 2);
    if (x(applied) >= left) { g.fillStyle = color("ink"); const thick = spot && spot[1] - spot[0] < 5 ? 1 : 2; g.fillRect(Math.round(x(applied)) - thick / 2, y, thick, LANE); }
    if (spot) hits.push({ box: [spot[0] - 3, Math.max(spot[1], x(applied)) + 3, y, y + LANE], text: described(round) });
  };
  // A carried round is an outline at least as wide as it is high, around its tick if nothing was sent.
  const hollow = (g, from, to, y, h) => {
    const spot = clipped(g, "flight", from, to, y, h);
    if (!spot) return null;
    const wide = Math.max(h, spot[1] - spot[0]), a = spot[1] - spot[0] < h ? (spot[0] + spot[1] - wide) / 2 : spot[0];
    g.clearRect(a, y, wide, h);
    g.strokeStyle = color("flight"); g.lineWidth = 1.5; g.strokeRect(a + 0.75, y + 0.75, wide - 1.5, h - 1.5);
    return [a, a + wide];
  };
  const described = round => [
    `fragment ${round.fragment}, round ${round.index}`,
    ...(round.counted ? [] : [round.sent_step == null ? "carried: this replica did not send in this round" : "carried: its delta was not counted"]),
    (round.sent_step == null ? "" : `sent after step ${round.sent_step}, `) + `applied after ${round.sent_step == null ? "step " : ""}${round.applied_step}`,
    `in flight ${seconds(round.seconds)}, exposed ${seconds(round.seconds_exposed)} (waited ${seconds(round.seconds_waited)})`,
    `${size(round.bytes_sent)} sent, ${size(round.bytes_received)} received, ${round.members} members, overlap ${round.overlap}`,
  ].join("\n");

  const show = (next, button) => {
    if (next === full) { view = full; return press(button); }
    const span = Math.min(Math.max(next[1] - next[0], end / 20000), full[1]);
    const from = Math.min(Math.max(full[0], next[0]), full[1] - span);
    view = [from, from + span];
    press(button);
  };
  const press = button => {
    for (const other of bar.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
    tip.hidden = true;
    draw();
  };
  const add = (text, title, window) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: text, title });
    button.addEventListener("click", () => show(window(), button));
    bar.append(button);
    return button;
  };
  let all = null, buttons = "";
  // Rebuild the buttons only if they change, so that none disappears while it is being pressed.
  const offer = windows => {
    const state = JSON.stringify([windows, replicas.length]);
    if (state === buttons) return;
    buttons = state;
    bar.replaceChildren();
    all = add("all", "0", () => full);
    windows.forEach((w, k) => add(k ? `${["", "second", "third"][k]} slowest` : "slowest sync period",
      `steps ${w.first_step} to ${w.last_step}, exposed ${seconds(w.seconds_exposed)} on all replicas`, () => [w.start, w.end]));
    if (replicas.length > 4) {
      const select = document.createElement("select");
      select.setAttribute("aria-label", "Replica");
      replicas.forEach((r, k) => select.append(new Option("replica " + r.number, k, false, k === chosen)));
      select.addEventListener("change", () => { chosen = +select.value; draw(); });
      bar.append(select);
    }
  };
  const zoom = by => { const middle = (view[0] + view[1]) / 2, half = (view[1] - view[0]) / 2 * by; show([middle - half, middle + half]); };
  const move = by => { const span = view[1] - view[0]; show([view[0] + by * span, view[1] + by * span]); };
  const keys = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), 0: () => show(full, all) };
  canvas.addEventListener("keydown", event => { if (keys[event.key]) { event.preventDefault(); keys[event.key](); } });
  canvas.addEventListener("dblclick", () => show(full, all));
  canvas.addEventListener("pointerdown", event => { drag = { from: event.offsetX, to: event.offsetX }; });
  canvas.addEventListener("pointermove", event => {
    if (drag) { drag.to = event.offsetX; draw(); }
    const hit = hits.findLast(({ box }) => event.offsetX >= box[0] && event.offsetX <= box[1] && event.offsetY >= box[2] && event.offsetY <= box[3]);
    tip.hidden = !hit;
    if (hit) {
      tip.textContent = hit.text;
      tip.style.left = Math.max(0, Math.min(event.offsetX + 14, frame.clientWidth - tip.offsetWidth)) + "px";
      tip.style.top = Math.max(0, Math.min(event.offsetY + 16, canvas.clientHeight - tip.offsetHeight)) + "px";
    }
  });
  addEventListener("pointerup", () => {
    if (!drag) return;
    const { from, to } = drag;
    drag = null;
    if (Math.abs(to - from) > 6) show([time(Math.min(from, to)), time(Math.max(from, to))]); else draw();
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  let before = 0;
  new ResizeObserver(() => { if (frame.clientWidth !== before && end) { before = frame.clientWidth; draw(); } }).observe(frame);
  built.push({ redraw: draw });
  const update = ({ replicas: columns, fragments, windows, seconds: total, left_out }) => {
    replicas = columns.map(replica => ({ ...replica, steps: rows(replica.steps), rounds: rows(replica.rounds) }));
    end = Math.max(total ?? 0, ...replicas.map(latest));
    lanes = fragments + 1; tall = HEAD + lanes * (LANE + GAP);
    const complete = view === full;
    full = [0, Math.max(end, 1e-3) * 1.005];
    empty.textContent = end ? "" : "Nothing written yet.";
    empty.hidden = end > 0; canvas.hidden = bar.hidden = !end;
    byId("left-out").hidden = !left_out;
    byId("left-out").textContent = `${whole(left_out)} rounds are not drawn; the rest are evenly spaced.`;
    offer(windows);
    if (complete) view = full;
    if (all.getAttribute("aria-pressed") == null) all.setAttribute("aria-pressed", String(complete));
    if (end) draw();
  };
  update(page.timeline);
  return update;
};
