// Polls the server for new data: HTML for the parts of the page that may change, and the data of the curves.
const listen = updateTimeline => {
  const state = byId("live");
  const shown = {};
  let timer = null;
  const say = (text, kind) => { state.textContent = text; state.className = kind; };
  const update = ({ parts, title, data }) => {
    document.title = title;
    for (const [id, text] of Object.entries(parts)) {
      if (shown[id] === text) continue;
      shown[id] = text;
      const checked = [...byId(id).querySelectorAll("input:checked")].map(box => box.value);
      byId(id).innerHTML = text;
      for (const box of byId(id).querySelectorAll("input")) box.checked = checked.includes(box.value);
    }
    colorSettings();
    Object.assign(page, data);
    built.forEach(entry => entry.update?.());
    if (data.timeline) updateTimeline(data.timeline);
    document.documentElement.dataset.updates = +(document.documentElement.dataset.updates ?? 0) + 1;
  };
  const poll = async () => {
    const began = performance.now();
    try {
      const answer = await fetch(`data${location.search}`, { headers: page.version ? { "If-None-Match": page.version } : {} });
      if (answer.status === 200) { update(await answer.json()); page.version = answer.headers.get("ETag"); }
      else if (answer.status !== 304) throw new Error(await answer.text());
      say("live", "running");
    } catch {
      say("the server does not respond: trying again", "lost");
    }
    // A long run takes time to read and to draw: poll it less often.
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(poll, Math.max(1000, 5 * (performance.now() - began)));
  };
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (document.hidden) say("paused", ""); else poll();
  });
  poll();
};
