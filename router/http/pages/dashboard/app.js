// Asks the router once a second, with the key of this tab, and draws what it answers. It changes nothing there.

import { at, h, say } from "./draw.js";
import { drawLife, drawLifeError } from "./life.js";
import { drawEvents, drawFigures, drawLatency, drawOutcomes, drawRequests, drawSources, drawTiers, forgetEvents } from "./panels.js";
import { Series } from "./series.js";
import { drawTopology } from "./topology.js";

const PERIOD_MS = 1000;
const PATIENCE_MS = 5000;
const MAX_PAUSE_MS = 10000;
const KEY = "pdkv-key";
const THEME = "pdkv-theme";

const series = new Series();
let timer = 0;
let misses = 0;
let answeredAt = 0;
let since = 0;

class Locked extends Error {}

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { authorization: `Bearer ${key}` };
  const reply = await fetch(path, { headers, cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (reply.status === 401 || reply.status === 403) throw new Locked(key === null ? "" : reply.status === 403 ? "This key is not an admin's." : "This key is not known.");
  const body = await reply.json();
  if (!reply.ok) throw new Error(body?.error?.message ?? `status ${reply.status}`);
  return body;
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return; // the page asks again when it is seen
  try {
    const overview = await ask("admin/overview");
    misses = 0;
    answeredAt = Date.now();
    unlock();
    draw(overview);
  } catch (error) {
    if (error instanceof Locked) { lock(error.message); return; }
    misses += 1;
    stale(error);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, misses ? Math.min(PERIOD_MS * 2 ** misses, MAX_PAUSE_MS) : PERIOD_MS);
}

function draw(overview) {
  if (overview.since !== since) forgetEvents();
  since = overview.since;
  series.add(overview);
  say(at("model"), overview.model);
  say(at("about"), `${overview.connector || "no engine yet"} · ${overview.version}`);
  document.title = `${overview.fault ? "✗ " : ""}${overview.model} · pdkv`;
  const [word, kind] = overview.fault ? ["not serving", "bad"] : overview.now.draining ? ["stopping", "warn"]
    : Object.keys(overview.problems).length ? ["degraded", "warn"] : ["serving", "good"];
  state(word, kind);
  banners(overview);
  drawFigures(series, overview);
  drawTopology(overview);
  drawLatency(series);
  drawSources(series);
  drawTiers(overview);
  drawOutcomes(series, overview);
  drawEvents(overview);
  drawRequests(overview, open);
  document.body.classList.remove("stale");
}

function state(word, kind) {
  say(at("state"), word);
  at("state").className = `state ${kind}`;
}

function banners({ fault, problems }) {
  const texts = [fault, ...Object.entries(problems).slice(0, 4).map(([name, why]) => `${name}: ${why}`)].filter(Boolean);
  at("banners").replaceChildren(...texts.map((text, i) => h("p", { class: `banner ${fault && !i ? "bad" : "warn"}` }, text)));
}

function stale(error) {
  document.body.classList.add("stale");
  const late = answeredAt ? `no answer for ${Math.round((Date.now() - answeredAt) / 1000)} s` : "no answer";
  state(late, "bad");
  const why = error.name === "TimeoutError" ? `it did not answer within ${PATIENCE_MS / 1000} s` : error.message;
  at("banners").replaceChildren(h("p", { class: "banner bad" }, `The router cannot be asked: ${why}. What is below is from before.`));
}

function lock(why) {
  sessionStorage.removeItem(KEY);
  series.reset();
  forgetEvents();
  at("data").hidden = true;
  at("lock").hidden = true;
  at("key").hidden = false;
  at("banners").replaceChildren();
  say(at("why"), why || "This server needs the key of an admin.");
  state("locked", "warn");
  at("secret").focus();
}

function unlock() {
  at("key").hidden = true;
  at("data").hidden = false;
  at("lock").hidden = sessionStorage.getItem(KEY) === null;
}

async function open(id) {
  at("life").hidden = false;
  try {
    drawLife((await ask(`admin/requests/${encodeURIComponent(id)}`)).requests);
  } catch (error) {
    if (error instanceof Locked) lock(error.message);
    else drawLifeError(error.message);
  }
}

function show(theme) {
  say(at("theme"), { light: "Light", dark: "Dark" }[theme] ?? "Auto");
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

at("theme").addEventListener("click", () => {
  const next = { "": "light", light: "dark", dark: "" }[document.documentElement.dataset.theme ?? ""];
  localStorage.setItem(THEME, next);
  show(next);
});
at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("secret").value.trim());
  at("secret").value = "";
  poll();
});
at("lock").addEventListener("click", () => { clearTimeout(timer); lock(""); });
at("find").addEventListener("submit", (event) => {
  event.preventDefault();
  if (at("id").value.trim()) open(at("id").value.trim());
});
at("close").addEventListener("click", () => { at("life").hidden = true; });
document.addEventListener("visibilitychange", poll);
show(localStorage.getItem(THEME) ?? "");
poll();
