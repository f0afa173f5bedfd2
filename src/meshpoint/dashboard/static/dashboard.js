// Relative times, the theme switch, keys, and live updates that a hidden tab does not receive.
(() => {
  "use strict";

  const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

  function duration(seconds) {
    const whole = Math.max(0, Math.round(seconds));
    const index = UNITS.findIndex(([, size]) => whole >= size);
    if (index < 0) return "0 s";
    const [unit, size] = UNITS[index];
    const count = Math.floor(whole / size);
    const next = UNITS[index + 1];
    const rest = next && count < 10 ? Math.floor((whole - count * size) / next[1]) : 0;
    return rest && unit !== "min" ? `${count} ${unit} ${rest} ${next[0]}` : `${count} ${unit}`;
  }

  function describe(kind, seconds) {
    if (kind === "age") return duration(seconds);
    if (kind === "ago") return seconds < -1 ? `in ${duration(-seconds)}` : `${duration(seconds)} ago`;
    return seconds > 0 ? `overdue for ${duration(seconds)}` : `${duration(-seconds)} left`;
  }

  function showTimes() {
    const now = Date.now();
    for (const time of document.querySelectorAll("time[data-kind]")) {
      const seconds = (now - Date.parse(time.dateTime)) / 1000;
      const text = describe(time.dataset.kind, seconds);
      if (time.textContent !== text) time.textContent = text;
      if (time.dataset.kind === "left") {
        time.classList.toggle("late", seconds > 0);
        time.classList.toggle("soon", seconds <= 0 && seconds > -60);
      }
    }
  }

  // The browser keeps what people opened, and letters that were loaded once.
  Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, node) =>
    !(node.tagName === "DETAILS" && name === "open") && !(node.tagName === "TIME" && name === "class");
  Idiomorph.defaults.callbacks.beforeNodeMorphed = (old) =>
    !(old instanceof Element && old.hasAttribute("data-keep"));

  const state = document.getElementById("live-state");

  function showState(text) {
    if (state && state.textContent !== text) {
      state.textContent = text;
      state.dataset.state = text;
    }
  }

  // An event source that is closed while its tab is hidden. A browser has few connections per host.
  class VisibleSource {
    constructor(url) {
      this.url = url;
      this.listeners = [];
      this.closed = false;
      document.addEventListener("visibilitychange", () => this.update());
      this.update();
    }

    get readyState() {
      return this.closed ? EventSource.CLOSED : this.source ? this.source.readyState : EventSource.CONNECTING;
    }

    update() {
      if (this.source && (document.hidden || this.closed)) {
        this.source.close();
        this.source = null;
        showState("paused");
      } else if (!this.source && !document.hidden && !this.closed) {
        this.open();
      }
    }

    open() {
      const source = (this.source = new EventSource(this.url));
      for (const [name, listener] of this.listeners) source.addEventListener(name, listener);
      source.onopen = (event) => {
        showState("live");
        if (this.onopen) this.onopen(event);
      };
      source.onerror = () => {
        showState("reconnecting");
        if (source.readyState !== EventSource.CLOSED || this.source !== source) return;
        this.source = null; // the server refused: try again later
        setTimeout(() => this.update(), 3000);
      };
    }

    addEventListener(name, listener) {
      this.listeners.push([name, listener]);
      if (this.source) this.source.addEventListener(name, listener);
    }

    removeEventListener(name, listener) {
      this.listeners = this.listeners.filter((each) => each[0] !== name || each[1] !== listener);
      if (this.source) this.source.removeEventListener(name, listener);
    }

    close() {
      this.closed = true;
      this.update();
    }
  }

  htmx.createEventSource = (url) => new VisibleSource(url);

  const dark = matchMedia("(prefers-color-scheme: dark)");

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
    root.dataset.theme = isDark ? "light" : "dark";
    try {
      localStorage.setItem("meshpoint-theme", root.dataset.theme);
    } catch {
      // storage is disabled: the choice lasts until the next page
    }
  });

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, [contenteditable]")) return;
    const found = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    if (!found) return;
    event.preventDefault();
    if (found.tagName === "A") found.click();
    else found.focus();
  });

  // A second click would send the form again, and show that there is nothing left to do.
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.method !== "post") return;
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = "yes";
  });
  addEventListener("pageshow", () => {
    for (const form of document.querySelectorAll("form[data-sent]")) delete form.dataset.sent;
  });

  const current = document.querySelector(".menu [aria-current]");
  if (current) current.scrollIntoView({ block: "nearest", inline: "center" });

  for (const name of ["htmx:afterSwap", "htmx:sseMessage"]) {
    document.addEventListener(name, showTimes);
  }
  setInterval(showTimes, 1000);
  showTimes();
})();
