// Listens to the server that this page is from. A message has the parts of the page that changed, as HTML, and what was
// added to the curves: points from `since` on replace those that are here.
const merged = (old, fresh) => {
  if (!fresh.since || old.curves.length !== fresh.curves.length) return fresh;
  const kept = old.steps.findLastIndex(step => step < fresh.since) + 1;
  const joined = (before, after) => before.slice(0, kept).concat(after);
  return { ...fresh, steps: joined(old.steps, fresh.steps), curves: fresh.curves.map((curve, k) => ({ ...curve, values: joined(old.curves[k].values, curve.values) })) };
};
const mergedRun = (old, fresh) => {
  if (!old || !fresh.since) return fresh;
  const joined = name => {
    const before = rows(old[name]).filter(point => point.step < fresh.since), all = before.concat(rows(fresh[name]));
    return Object.fromEntries(Object.keys(all[0] ?? {}).map(key => [key, all.map(point => point[key])]));
  };
  return { ...fresh, training: joined("training"), "held-out": joined("held-out") };
};

const listen = addToTimeline => {
  const state = byId("live");
  let source = null, waiting = null;
  const say = (text, kind) => { state.textContent = text; state.className = kind; };
  const take = message => {
    for (const [id, text] of Object.entries(message.parts ?? {})) {
      if (id === "title") { document.title = text; continue; }
      const chosen = [...byId(id).querySelectorAll("input:checked")].map(box => box.value);
      byId(id).innerHTML = text;
      for (const box of byId(id).querySelectorAll("input")) box.checked = chosen.includes(box.value);
    }
    if (message.parts) colourSettings();
    for (const [id, chart] of Object.entries(message.charts ?? {})) page.charts[id] = merged(page.charts[id], chart);
    if (message.settings) page.settings = message.settings;
    if (message.runs) page.runs = message.runs.map((run, k) => mergedRun(page.runs[k], run));
    if (message.charts || message.runs) built.forEach(entry => entry.update?.());
    if (message.timeline) addToTimeline(message.timeline);
    document.documentElement.dataset.messages = +(document.documentElement.dataset.messages ?? 0) + 1;
  };
  const connect = () => {
    source = new EventSource(`events?at=${encodeURIComponent(page.position)}${location.search.replace("?", "&")}`);
    source.onopen = () => say("live", "running");
    source.onmessage = event => { page.position = event.lastEventId; take(JSON.parse(event.data)); };
    // The browser tries again by itself, except after an answer that it takes for final.
    source.onerror = () => {
      say("the server does not answer: trying again", "lost");
      if (source.readyState === EventSource.CLOSED) { clearTimeout(waiting); waiting = setTimeout(connect, 2000); }
    };
  };
  // A browser has few connections to one server: pages that nobody sees leave theirs to others.
  document.addEventListener("visibilitychange", () => {
    clearTimeout(waiting);
    source?.close();
    if (document.hidden) say("paused", ""); else connect();
  });
  connect();
};
