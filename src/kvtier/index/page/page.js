"use strict";
// The page of `kvtier index serve`. It reads /workers and /models every two seconds while it is visible, and
// /prefixes less often. Names come from strangers: everything is written as text, never as markup.

const THEMES = ["system", "light", "dark"];
const TIERS = ["gpu", "cpu", "storage"];
const TITLES = { gpu: "GPU", cpu: "CPU", storage: "storage" };
const STATES = ["degraded", "repairing", "exact"]; // the worst first
const COLOURS = { exact: "good", repairing: "warn", degraded: "bad" };
const INTERVAL = 2000; // milliseconds between two readings, and more where an answer takes long
const SEARCH_INTERVAL = 10000;
const TIMEOUT = 20000;
const FIRST_ROWS = 24; // more when asked for
const EVENTS = [
  ["gaps", "gap", "gaps"], ["lost_batches", "lost batch", "lost batches"],
  ["restarts", "restart", "restarts"], ["reconnects", "reconnect", "reconnects"],
  ["digest_mismatches", "mismatch", "mismatches"],
  ["skipped_events", "unreadable event", "unreadable events"],
];

let theme = "system";
try {
  theme = localStorage.getItem("kvtier-theme") || "system";
} catch { /* storage is switched off: the choice lasts as long as the page */ }
applyTheme(THEMES.includes(theme) ? theme : "system");

function applyTheme(chosen) {
  theme = chosen;
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
}

// -- reading ---------------------------------------------------------------------------------------

/** Keep ids and sequence numbers beyond what a JavaScript number can say as they were written. */
function exactNumber(key, value, context) {
  return typeof value === "number" && !Number.isSafeInteger(value) && Number.isInteger(value) && context
    ? context.source : value;
}

async function read(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT), cache: "no-store" });
  const text = await answer.text();
  if (!answer.ok) {
    let why = "";
    try { why = JSON.parse(text).error; } catch { /* an answer of a proxy */ }
    throw new Error(`/${path}: ${answer.status} ${why}`.trim());
  }
  return text ? JSON.parse(text, exactNumber) : null;
}

/** One row for each publisher, with its rates since the reading before. */
class Fleet {
  rows = [];
  before = new Map();

  take(instances, now) {
    const seen = new Map();
    this.rows = instances.flatMap((instance) => Object.entries(instance.listeners).map(
      ([rank, listener]) => this.row(instance, rank, listener, now, seen)));
    this.before = seen;
  }

  row(instance, rank, listener, now, seen) {
    const { model_name: model, routing_group: group, block_size: size } = instance;
    const key = JSON.stringify([model, group, String(instance.instance_id), rank]);
    const counters = listener.counters || {};
    const batches = counters.batches ?? null;
    const old = this.before.get(key);
    const passed = old ? (now - old.now) / 1000 : 0;
    const isNew = !old || old.batches === null || batches === null || batches < old.batches || passed <= 0;
    seen.set(key, { now, batches });
    const several = Object.keys(instance.listeners).length > 1 || rank !== "0" || listener.ranks.length > 1;
    const blocks = Object.fromEntries(TIERS.map((tier) => [tier, listener.tiers[tier] || 0]));
    return {
      key, model, group, counters, blocks,
      name: String(instance.instance_id),
      ranks: several ? `rank ${listener.ranks.join(", ")}` : "",
      endpoint: listener.endpoint,
      connected: listener.status === "active",
      state: STATES.includes(listener.state) ? listener.state : "degraded",
      reason: listener.last_error || listener.reason || "",
      lag: listener.lag ?? null,
      rate: isNew ? null : (batches - old.batches) / passed,
      size: size || 0,
      held: TIERS.reduce((sum, tier) => sum + blocks[tier], 0) * (size || 0),
    };
  }
}

// -- writing ---------------------------------------------------------------------------------------

const collator = new Intl.Collator(undefined, { numeric: true });
const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

function count(number) {
  return number < 100000 ? whole.format(number) : short.format(number);
}

function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; number >= 1024 && at < units.length - 1; at++) number /= 1024;
  return `${at && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[at]}`;
}

function seconds(value) {
  if (value === null) return "–";
  if (value < 1) return `${Math.max(0, Math.round(value * 1000))} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${count(Math.round(value))} s`;
}

function rate(value) {
  if (value === null) return "–";
  return value < 10 ? value.toFixed(1) : count(Math.round(value));
}

function plural(number, one, many) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

function trouble(counters) {
  const happened = EVENTS.filter(([name]) => counters[name]);
  return happened.map(([name, one, many]) => plural(counters[name], one, many)).join(", ");
}

/** Return an element; its children are elements or text. */
function make(tag, css, ...children) {
  const made = document.createElement(tag);
  if (css) made.className = css;
  made.append(...children);
  return made;
}

function at(id) {
  return document.getElementById(id);
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function tile(label, value, detail) {
  const box = make("div", "tile", make("p", "", label), make("p", "value", value));
  if (detail) box.append(make("p", "detail", detail));
  return box;
}

function cell(column, text) {
  const made = make("td", "", text);
  made.dataset.column = column;
  return made;
}

function longCell(column, text) {
  const made = cell(column, text);
  made.classList.toggle("long", text.length > 12);
  return made;
}

/** Return a bar of what an engine holds on each tier, as long as its share of the largest engine. */
function heldBar(row, largest) {
  const bar = make("span", "held");
  for (const tier of TIERS) {
    const part = make("i", tier);
    part.style.width = `${largest ? (100 * row.blocks[tier] * row.size) / largest : 0}%`;
    bar.append(part);
  }
  return bar;
}

function engineRow(row, largest, fleet) {
  const name = make("td", "", make("bdi", "name", row.name));
  name.firstChild.title = row.name;
  const where = [fleet.models > 1 ? row.model : "", row.group === "default" ? "" : row.group, row.ranks];
  if (where.some(Boolean)) name.append(make("bdi", "where", where.filter(Boolean).join(" · ")));
  name.append(make("bdi", "where", row.endpoint), heldBar(row, largest));
  const state = make("span", "state", make("span", `pill ${COLOURS[row.state]}`, row.state));
  if (!row.connected) state.append(" ", make("span", "pill warn", "not connected"));
  if (row.reason) state.append(make("bdi", "why", row.reason));
  const replica = make("td", "", state);
  const line = make("tr", "", name, replica);
  for (const tier of TIERS) {
    line.append(cell(TITLES[tier], row.size ? count(row.blocks[tier] * row.size) : "–"));
  }
  line.append(cell("batches/s", rate(row.rate)), cell("lag", seconds(row.lag)));
  line.append(longCell("stream", trouble(row.counters) || "no gap"));
  return line;
}

const ORDERS = {
  worst: (a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state) || a.connected - b.connected,
  name: () => 0,
  held: (a, b) => b.held - a.held,
  rate: (a, b) => (b.rate ?? -1) - (a.rate ?? -1),
};

function showEngines(fleet) {
  const wanted = at("filter").value.trim().toLowerCase();
  const texts = (row) => [row.name, row.model, row.group, row.endpoint, row.state, row.reason];
  const isWanted = (row) => !wanted || texts(row).some((text) => text.toLowerCase().includes(wanted));
  const found = fleet.rows.filter(isWanted);
  const order = ORDERS[at("order").value] || ORDERS.worst;
  found.sort((a, b) => order(a, b) || collator.compare(a.name, b.name) || collator.compare(a.key, b.key));
  const largest = fleet.rows.reduce((most, row) => Math.max(most, row.held), 0);
  at("rows").replaceChildren(...found.slice(0, mostRows).map((row) => engineRow(row, largest, fleet)));
  const rest = found.length - mostRows;
  at("more").hidden = rest <= 0;
  say(at("more"), `show more (${plural(rest, "engine", "engines")})`);
  at("none").hidden = found.length > 0 || !wanted;
}

function showHead(fleet, models) {
  const rows = fleet.rows;
  const exact = rows.filter((row) => row.state === "exact").length;
  say(at("verdict"), !rows.length ? "No engine yet"
    : exact < rows.length ? `${count(exact)} of ${plural(rows.length, "engine", "engines")} exact`
    : rows.length === 1 ? "1 engine, exact" : `${count(exact)} engines, all exact`);
  document.title = rows.length ? `${exact}/${rows.length} exact · kvtier index` : "kvtier index";
  const tokensOn = (tier) => rows.reduce((total, row) => total + row.blocks[tier] * row.size, 0);
  const rates = rows.map((row) => row.rate).filter((value) => value !== null);
  const lags = rows.map((row) => row.lag).filter((value) => value !== null);
  const sum = (name) => rows.reduce((total, row) => total + (row.counters[name] || 0), 0);
  const used = models.reduce((total, model) => total + model.bytes, 0);
  const budget = models.reduce((total, model) => total + model.budget, 0);
  at("tiles").replaceChildren(
    tile("tokens held", count(TIERS.reduce((total, tier) => total + tokensOn(tier), 0)),
      TIERS.map((tier) => `${TITLES[tier]} ${count(tokensOn(tier))}`).join(" · ")),
    tile("batches a second", rates.length ? rate(rates.reduce((total, value) => total + value, 0)) : "–",
      lags.length ? `largest lag ${seconds(Math.max(...lags))}` : "no batch yet"),
    tile("gaps in streams", count(sum("gaps")),
      [plural(sum("lost_batches"), "lost batch", "lost batches"),
        plural(sum("restarts"), "restart", "restarts")].join(" · ")),
    tile("index memory", bytes(used), models.length ? `of ${bytes(budget)}` : "nothing is kept"));
}

const LOSSES = [
  ["dropped", "found no room"], ["refused", "refused"], ["ignored", "of other groups"],
  ["orphans_dropped", "without their parents"],
];

function modelRow(model, fleet) {
  const name = make("td", "", make("bdi", "name", model.model_name));
  if (model.routing_group !== "default") name.append(make("bdi", "where", model.routing_group));
  const isOfModel = (row) => row.model === model.model_name && row.group === model.routing_group;
  const lost = LOSSES.filter(([key]) => model[key]).map(([key, words]) => `${count(model[key])} ${words}`);
  return make("tr", "", name,
    cell("engines", count(fleet.rows.filter(isOfModel).length)),
    cell("block", model.block_size ? `${model.block_size} tokens` : "not known yet"),
    cell("blocks known", count(model.blocks)),
    cell("index memory", `${bytes(model.bytes)} of ${bytes(model.budget)}`),
    longCell("not taken in", lost.join(", ") || "nothing"));
}

function showModels(fleet, models) {
  at("model-rows").replaceChildren(...models.map((model) => modelRow(model, fleet)));
}

function chainOf(prefix, longest, model, several) {
  const [deepest] = prefix.steps;
  const track = make("div", "track");
  for (const [number, step] of prefix.steps.entries()) {
    const part = make("i");
    part.style.width = `${(100 * step.tokens) / longest}%`;
    part.style.opacity = String(0.35 + (0.65 * (number + 1)) / prefix.steps.length);
    part.title = `${count(step.tokens)} tokens: ${step.workers} engines`;
    track.append(part);
  }
  const words = prefix.steps.map((step) => `${count(step.tokens)} tokens in ${step.workers} engines`);
  const tiers = TIERS.filter((tier) => deepest[tier]).map((tier) => `${deepest[tier]} on ${TITLES[tier]}`);
  const id = several ? `${model} · ` : "";
  const line = make("p", "", make("span", "", words.join(", ")), make("span", "soft", tiers.join(", ")));
  return make("div", "chain", line, track, make("bdi", "where", `${id}last block ${prefix.last_block}`));
}

function showPrefixes(models) {
  const found = models.flatMap((model) => model.prefixes.map((prefix) => [prefix, model]));
  found.sort(([a], [b]) => b.steps[0].tokens - a.steps[0].tokens);
  const sampled = models.reduce((sum, model) => sum + model.sampled, 0);
  const prompts = plural(sampled, "sampled prompt", "sampled prompts");
  say(at("sampled"), found.length ? `What several engines hold of ${prompts}: one line for each beginning.`
    : `No two engines hold a beginning of the ${prompts}.`);
  const top = found.slice(0, 20);
  const longest = top.length ? top[0][0].steps[0].tokens : 0;
  const several = models.length > 1;
  at("chains").replaceChildren(
    ...top.map(([prefix, model]) => chainOf(prefix, longest, model.model_name, several)));
}

// -- the loop --------------------------------------------------------------------------------------

const fleet = new Fleet();
let models = [];
let mostRows = FIRST_ROWS;
let timer = 0;
let isReading = false;
let searched = -Infinity;
let readAt = null;

function show() {
  fleet.models = models.length;
  showHead(fleet, models);
  showEngines(fleet);
  showModels(fleet, models);
  for (const id of ["engines", "models", "prefixes"]) at(id).hidden = !fleet.rows.length;
  at("empty").hidden = fleet.rows.length > 0;
}

function showFreshness(problem) {
  document.querySelector("main").classList.toggle("stale", Boolean(problem) && readAt !== null);
  at("problem").hidden = !problem;
  if (problem) say(at("problem"), `${problem}. ${readAt ? "What is shown is old." : ""}`);
  const when = readAt === null ? "" : readAt.toLocaleTimeString();
  const words = problem ? "last read" : "live · read";
  say(at("live"), readAt === null ? "no answer yet" : `${words} at ${when}`);
}

const PROBLEMS = { TimeoutError: "The index does not answer", TypeError: "The index cannot be reached" };

/** Read everything once; return the milliseconds until the next reading. */
async function update() {
  const start = performance.now();
  try {
    const [instances, listed] = await Promise.all([read("workers"), read("models")]);
    models = listed;
    fleet.take(instances, performance.now());
    readAt = new Date();
    show();
    if (performance.now() - searched > SEARCH_INTERVAL && fleet.rows.length) {
      showPrefixes(await read("prefixes"));
      searched = performance.now();
    }
    await read("health");
    showFreshness("");
  } catch (error) {
    showFreshness(PROBLEMS[error.name] || String(error.message));
  }
  return Math.max(INTERVAL, 5 * (performance.now() - start));
}

async function loop() {
  clearTimeout(timer);
  if (isReading || document.hidden) return;
  isReading = true;
  const pause = await update();
  isReading = false;
  timer = setTimeout(loop, pause);
}

document.addEventListener("DOMContentLoaded", () => {
  say(at("address"), new URL(".", location.href).href);
  const button = at("theme");
  say(button, `theme: ${theme}`);
  button.addEventListener("click", () => {
    applyTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
    say(button, `theme: ${theme}`);
    try {
      localStorage.setItem("kvtier-theme", theme);
    } catch { /* as above */ }
  });
  at("more").addEventListener("click", () => {
    mostRows *= 4;
    showEngines(fleet);
  });
  at("filter").addEventListener("input", () => showEngines(fleet));
  at("order").addEventListener("change", () => showEngines(fleet));
  loop();
});
document.addEventListener("visibilitychange", loop);
