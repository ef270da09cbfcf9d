// Replaces the parts of the page that have changed. What comes was made, and escaped, by the server.
"use strict";

const live = document.getElementById("live");
const shown = new Map();

function show(parts) {
  for (const [name, made] of Object.entries(parts)) {
    if (shown.get(name) === made) continue;
    const old = document.getElementById(name);
    if (!old || holdsSelection(old)) continue;
    const tables = [...old.querySelectorAll(".t")];
    const chosen = tables.indexOf(document.activeElement);
    const scrolled = tables.map((one) => one.scrollLeft);
    old.outerHTML = made;
    document.getElementById(name).querySelectorAll(".t").forEach((one, at) => {
      one.scrollLeft = scrolled[at] || 0;
      if (at === chosen) one.focus({ preventScroll: true });
    });
    shown.set(name, made);
  }
}

function holdsSelection(part) {
  const chosen = document.getSelection();
  return chosen && !chosen.isCollapsed && part.contains(chosen.anchorNode);
}

function say(text, isOff) {
  if (live.textContent !== text) live.textContent = text;
  live.classList.toggle("off", isOff);
}

const events = new EventSource("events");
events.onmessage = (event) => {
  show(JSON.parse(event.data));
  document.body.dataset.looks = String(Number(document.body.dataset.looks || 0) + 1);
  say("live, once a second", false);
};
events.onerror = () => say("not live: the server does not answer, or has no room for this page", true);
