// Browsers start no workers for a page that is opened from disk. The search's worker then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const load = (source) => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        Object.assign(script, { src: source, onload: resolve, onerror: reject })
        inside.document.body.append(script)
      })
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
      this.ready = load(new URL(url, location.href).href)
      this.send = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }

    postMessage(data) {
      this.ready.then(() => this.send(data))
    }

    terminate() {}
  }
}
