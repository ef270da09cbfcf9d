// Draws the server's data, and redraws sections that changed. All data is inserted as text: names
// chosen by callers cannot become markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "rect", "line", "text", "polyline", "title"]);

function el(name, attributes, ...content) {
  const made = DRAWN.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...content.filter((one) => one !== null));
  return made;
}

// --- values

const whole = (count) => count.toLocaleString("en-US");
const percent = (share) => (share === null ? "-" : `${(100 * share).toFixed(1)}%`);
const ratio = (part, of) => (of ? part / of : null);

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${bytes.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function time(seconds) {
  for (const [unit, of] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (seconds >= 1.5 * of) return `${(seconds / of).toFixed(1)} ${unit}`;
  return `${seconds.toFixed(0)} s`;
}

function millis(seconds) {
  if (seconds === null) return "-";
  return `${seconds < 0.1 ? Number((1000 * seconds).toPrecision(2)) : (1000 * seconds).toFixed(0)} ms`;
}

// --- parts

function bar(share, label = "") {
  if (share === null) return label;
  const width = Math.min(100, Math.max(0, 100 * share)).toFixed(1);
  const box = { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" };
  const made = el("span", {});
  made.append(
    el("svg", box, el("rect", { class: "rail", width: 100, height: 8 }), el("rect", { class: "full", width, height: 8 })),
    ` ${label}`);
  return made;
}

function table(caption, heads, rows, words = 1) {
  const style = (at) => (at >= words ? { class: "n" } : {});
  const row = (cells) => el("tr", {}, ...cells.map((cell, at) =>
    at ? el("td", style(at), cell) : el("th", { scope: "row" }, cell)));
  const none = el("tr", {}, el("td", { colspan: heads.length }, "none yet"));
  return el("div", { class: "t", role: "region", tabindex: 0, "aria-label": caption },
    el("table", {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...heads.map((head, at) => el("th", { scope: "col", ...style(at) }, head)))),
      el("tbody", {}, ...(rows.length ? rows.map(row) : [none]))));
}

const note = (text) => el("p", { class: "note" }, text);

// --- charts; a table beside each has the same data

const WIDTH = 360, HEIGHT = 180, LEFT = 42, RIGHT = 66, TOP = 10, BOTTOM = 26, LINES = 4;
const yOf = (share) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * Math.min(1, Math.max(0, share));
const label = (x, y, style, text, anchor = "start") =>
  el("text", { x: x.toFixed(1), y: y.toFixed(1), class: style, "text-anchor": anchor }, text);
const below = (x, text) => label(x, HEIGHT - BOTTOM + 16, "axis", text, "middle");
const line = (points, number) => el("polyline", {
  points: points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" "), class: `line line${number % LINES}` });

function chart(title, parts) {
  const frame = [0, 50, 100].flatMap((share) => {
    const y = yOf(share / 100).toFixed(1);
    return [el("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, class: "grid" }),
      label(LEFT - 6, Number(y) + 4, "axis", `${share} %`, "end")];
  });
  return el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img" }, el("title", {}, title), ...frame, ...parts);
}

// Hit ratios by times a tier's size, a line for each tier: [[tier, [[scale, ratio], ...]], ...].
function whatIfChart(curves) {
  const known = curves.filter(([, curve]) => curve.length > 1);
  if (!known.length) return null;
  const scales = [...new Set(known.flatMap(([, curve]) => curve.map(([scale]) => scale)))].sort((a, b) => a - b);
  const xOf = (scale) => LEFT + (WIDTH - LEFT - RIGHT) * scales.indexOf(scale) / (scales.length - 1);
  const parts = scales.map((scale) => below(xOf(scale), `${scale}x`));
  const ends = known.map(([tier, curve], number) => {
    const points = curve.map(([scale, share]) => [xOf(scale), yOf(share)]);
    parts.push(line(points, number));
    return [points.at(-1)[1], number, tier];
  }).sort((a, b) => a[0] - b[0]);
  let free = 0;
  for (const [end, number, tier] of ends) {
    const y = Math.max(end, free); // below the label above it, so that both can be read
    free = y + 12;
    parts.push(label(WIDTH - RIGHT + 6, y + 4, `label label${number % LINES}`, tier));
  }
  return chart("Hit ratio by times the size of each tier", parts);
}

// The hit ratio over the last seconds; gaps without lookups.
function trendChart(ratios, seconds) {
  const latest = ratios.findLast((one) => one !== null);
  if (ratios.length < 2 || latest === undefined) return null;
  const ago = seconds >= 90 ? `${(seconds / 60).toFixed(0)} min` : `${seconds.toFixed(0)} s`;
  const step = (WIDTH - LEFT - RIGHT) / (ratios.length - 1);
  const parts = [below(LEFT, `-${ago}`), below(WIDTH - RIGHT, "now")];
  let points = [];
  [...ratios, null].forEach((share, at) => {
    if (share !== null) points.push([LEFT + step * at, yOf(share)]);
    else if (points.length) {
      if (points.length < 2) points.push([points[0][0] + 1.5, points[0][1]]);
      parts.push(line(points, 0));
      points = [];
    }
  });
  parts.push(label(WIDTH - RIGHT + 6, yOf(latest) + 4, "label", percent(latest)));
  return chart(`Hit ratio over the last ${ago}`, parts);
}

// --- derived values: rates since a snapshot of about a minute ago; null if unknown

const SHOWN_FLOWS = 12;
const FAULTS = { // counters of errors and of overload
  corrupt_chunks: "copies dropped after failed verification",
  put_invalid_chunks: "put frames that failed a check",
  lost_chunks: "copies that were missing on their tier",
  failed_copies: "copies to a lower tier that failed",
  get_late_chunks: "chunks not loaded by their deadline",
  put_refused_chunks: "chunks refused at a put",
  unanswered_lookups: "lookups that Redis did not answer in time",
  shed_calls: "calls refused under overload",
  expired_leases: "leases that expired",
  peer_failures: "requests without an answer from another server",
  unreadable_chunks: "copies that this server cannot decode",
};

// The quantile of a histogram, in seconds, by linear interpolation within a bucket.
function quantile(counts, bounds, share) {
  let left = share * counts.reduce((one, other) => one + other, 0), below = 0;
  if (!left) return null;
  for (const [at, bound] of bounds.entries()) {
    if (counts[at] && left <= counts[at]) return below + (bound - below) * left / counts[at];
    left -= counts[at];
    below = bound;
  }
  return below;
}

function view({ now, recent, ratios, ratios_s, bounds_s, tiers, found, tenants, prefixes, nodes, ...server }) {
  const span = Math.max(1e-3, now.at_s - recent.at_s), counts = now.counts;
  const lately = (name) => counts[name] - recent.counts[name];
  const rate = (name) => lately(name) / span;
  const faults = Object.entries(FAULTS).map(([name, what]) => [what, lately(name), counts[name]]);
  const before = new Map(recent.flows.map(([source, target, , bytes]) => [`${source} ${target}`, bytes]));
  const ways = now.flows.map(([source, target, chunks, bytes]) =>
    [source, target, (bytes - (before.get(`${source} ${target}`) || 0)) / span, chunks]);
  ways.push(["engines", "cpu", rate("put_bytes"), counts.put_stored_chunks],
    ["tiers", "engines", rate("get_bytes"), counts.get_chunks]);
  ways.sort((one, other) => other[2] - one[2] || other[3] - one[3]);
  const latency = Object.entries(now.calls).map(([name, all]) => {
    const some = all.map((count, at) => count - recent.calls[name][at]);
    const [calls, total] = [some, all].map((one) => one.reduce((a, b) => a + b));
    return [name, calls / span, ...[0.5, 0.9, 0.99].map((share) => quantile(some, bounds_s, share)), total];
  });
  return {
    now: { ...server, recent_s: span, hit_ratio: ratio(lately("lookup_ready_chunks"), lately("lookup_chunks")),
      lookups_per_s: rate("lookups"), get_bytes_per_s: rate("get_bytes"), put_bytes_per_s: rate("put_bytes"),
      faults: faults.reduce((sum, [, some]) => sum + some, 0) },
    tiers,
    hits: { ratios, ratios_s, tenants, asked: counts.lookup_chunks,
      tiers: tiers.map(({ name }) => [name, found[name] || 0]),
      missed: counts.lookup_chunks - counts.lookup_ready_chunks },
    flows: { ways: ways.slice(0, SHOWN_FLOWS), evicted: counts.evicted_chunks, dropped: counts.dropped_victims },
    latency,
    "what-if": tiers.filter(({ curve }) => curve.length).map(({ name, curve }) => [name, curve]),
    faults: { down: tiers.filter(({ reason }) => reason).map(({ name, reason }) => [name, reason]), counts: faults },
    prefixes, nodes,
  };
}

// --- sections: a title, and a function from the data of that name to elements

const SECTIONS = {
  now: ["Now", (now) => {
    const facts = [
      ["server", `${now.state}, ${now.version}`], ["uptime", time(now.uptime_s)],
      ["hit ratio", percent(now.hit_ratio)], ["lookups", `${now.lookups_per_s.toFixed(1)}/s`],
      ["delivered", `${size(now.get_bytes_per_s)}/s`], ["stored", `${size(now.put_bytes_per_s)}/s`],
      ["chunks", whole(now.chunks)], ["sessions", whole(now.sessions)],
      ["leases", whole(now.leases)], ["faults", whole(now.faults)],
    ];
    return [el("dl", {}, ...facts.map(([name, value]) => el("div", {},
      el("dt", {}, name), el("dd", { id: `now-${name.replace(" ", "-")}` }, value)))),
    note(`Rates over the last ${time(now.recent_s)}.`)];
  }],
  tiers: ["Tiers", (tiers) => [table("Tiers, fastest first",
    ["tier", "filled", "state", "used", "limit", "chunks", "load speed", "codec", "policy"],
    tiers.map((one) => {
      const share = ratio(one.used_bytes, one.capacity_bytes);
      return [one.name, bar(share, percent(share)),
        el("span", { class: one.reason ? "bad" : "good" }, one.reason || "serving"),
        size(one.used_bytes), size(one.capacity_bytes), whole(one.chunks),
        one.load_bytes_per_s ? `${size(one.load_bytes_per_s)}/s` : "-", one.codec, one.policy];
    }), 3)]],
  hits: ["Hit ratio", (hits) => {
    const found = [...hits.tiers, ["not found", hits.missed]].map(([name, count]) => {
      const share = ratio(count, hits.asked);
      return [name, bar(share), whole(count), percent(share)];
    });
    const tenants = hits.tenants.map(([name, ready, asked]) => {
      const share = ratio(ready, asked);
      return [name, bar(share), whole(ready), whole(asked), percent(share)];
    });
    return [trendChart(hits.ratios, hits.ratios_s),
      table("Lookups by tier that served them, since the start", ["tier", "share", "chunks", "of all looked up"], found, 2),
      table("By tenant, since the start", ["tenant", "share", "found", "looked up", "hit ratio"], tenants, 2)];
  }],
  flows: ["Flows between tiers", ({ ways, evicted, dropped }) => {
    const most = Math.max(0, ...ways.map((way) => way[2]));
    return [table("Bytes between tiers; chunks since the start", ["path", "share", "rate", "chunks"],
      ways.map(([source, target, rate, chunks]) =>
        [`${source} → ${target}`, bar(ratio(rate, most)), `${size(rate)}/s`, whole(chunks)]), 2),
    note(`${whole(evicted)} evictions since the start; ${whole(dropped)} chunks left all tiers.`)];
  }],
  latency: ["Latency", (calls) => [table("Calls of engines, recent", ["call", "rate", "p50", "p90", "p99", "calls"],
    calls.map(([name, rate, p50, p90, p99, count]) =>
      [name, `${rate.toFixed(1)}/s`, millis(p50), millis(p90), millis(p99), whole(count)])),
  note("Server time of calls over gRPC and the Unix socket; calls since the start.")]],
  "what-if": ["Hit ratio at other sizes", (curves) => {
    if (!curves.length) return [note("Unknown until there are more lookups.")];
    const scales = [...new Set(curves.flatMap(([, curve]) => curve.map(([scale]) => scale)))].sort((a, b) => a - b);
    const rows = curves.map(([tier, curve]) => [tier, ...scales.map((scale) => percent(new Map(curve).get(scale) ?? null))]);
    return [whatIfChart(curves), table("Hit ratio by size of the tier", ["tier", ...scales.map((one) => `${one}x size`)], rows)];
  }],
  faults: ["Faults", ({ down, counts }) => {
    const rows = [...counts].sort((a, b) => !a[2] - !b[2]).map(([what, lately, all]) =>
      [what, lately ? el("span", { class: "bad" }, whole(lately)) : "0", whole(all)]);
    const named = down.map(([tier, reason]) => el("li", { class: "bad" }, `${tier} is disabled: ${reason}`));
    return [named.length ? el("ul", {}, ...named) : note("Every tier is in use."),
      table("Faults since the start", ["fault", "recent", "total"], rows)];
  }],
  prefixes: ["Top prefixes", (prefixes) => [table("Most used prefixes",
    ["ends with", "model", "tenant", "tiers", "tokens", "hits"],
    prefixes.map((row) => [...row.slice(0, 4), whole(row[4]), whole(row[5])]), 4)]],
  nodes: ["Nodes", (nodes) => [nodes.length ? table("Known servers", ["node", "address", "state"], nodes, 3)
    : note("This server uses no node directory.")]],
};

// --- updates

const live = document.getElementById("live");
const shown = new Map();

function show(raw) {
  const data = view(raw);
  for (const [name, [title, draw]] of Object.entries(SECTIONS)) {
    const text = JSON.stringify(data[name]);
    const old = document.getElementById(name);
    if (shown.get(name) === text || (old && holdsSelection(old))) continue;
    const made = el("section", { id: name, "aria-labelledby": `${name}-title` },
      el("h2", { id: `${name}-title` }, title), ...draw(data[name]).filter((one) => one !== null));
    if (old) replace(old, made);
    else document.querySelector("main").append(made);
    shown.set(name, text);
  }
}

function replace(old, made) {
  const tables = [...old.querySelectorAll(".t")];
  const chosen = tables.indexOf(document.activeElement);
  const scrolled = tables.map((one) => one.scrollLeft);
  old.replaceWith(made);
  made.querySelectorAll(".t").forEach((one, at) => {
    one.scrollLeft = scrolled[at] || 0;
    if (at === chosen) one.focus({ preventScroll: true });
  });
}

function holdsSelection(part) {
  const chosen = document.getSelection();
  return chosen && !chosen.isCollapsed && part.contains(chosen.anchorNode);
}

function setStatus(text, isOff) {
  if (live.textContent !== text) live.textContent = text;
  live.classList.toggle("off", isOff);
}

// A page beyond the limit of live pages stays a static snapshot.
fetch("data").then((answer) => answer.json()).then((data) => { if (!shown.size) show(data); });
const events = new EventSource("events");
events.onmessage = (event) => {
  show(JSON.parse(event.data));
  document.body.dataset.looks = String(Number(document.body.dataset.looks || 0) + 1);
  setStatus("live, once a second", false);
};
events.onerror = () => setStatus("not live: no response, or too many open pages", true);
