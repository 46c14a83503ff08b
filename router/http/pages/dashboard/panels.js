// The panels beside the engines: figures, latency, sources of prompt tokens, tiers, outcomes, events, requests.

import { at, bytes, h, legend, number, percent, say, seconds, sparkline, stacked, table, tabs } from "./draw.js";
import { isFailure, kvUse } from "./series.js";

const MAX_EVENTS = 200;

export function drawFigures(series, { now, engines, fallback }) {
  const [ttft, tpot] = [series.quantiles("ttft"), series.quantiles("tpot")];
  const pool = engines.reduce((sum, { blocks = [] }) => sum + (blocks[0] ?? 0), 0);
  const failed = series.failed();
  const guesses = series.rate("guesses");
  const right = guesses > 0 ? `${percent(series.rate("right_guesses") / guesses)} of guesses right` : "";
  const figures = [
    ["Requests", `${number(series.rate("requests", 5))}/s`, "", "requests"],
    ["Output tokens", `${number(series.rate("output_tokens", 5))}/s`, right, "output_tokens"],
    ["First token, p95", seconds(ttft.p95), `p50 ${seconds(ttft.p50)}`, "ttft"],
    ["Per token, p95", seconds(tpot.p95), `p50 ${seconds(tpot.p50)}`, "tpot"],
    ["In flight", number(now.in_flight), `${number(now.queued)} queued${now.parked ? `, ${now.parked} parked` : ""}`, "in_flight"],
    ["KV in use", pool ? percent(kvUse(engines)) : "–", `of ${number(pool)} blocks`, "kv"],
    ["Failures", Number.isFinite(failed) ? `${number(failed * 60)}/min` : "–", "", "failed", failed > 0 ? "bad" : ""],
  ].concat(fallback?.mode ? [["Sent elsewhere", percent(fallback.recent_share), fallback.reason || fallback.mode, ""]] : []);
  at("figures").replaceChildren(...figures.map(([label, value, more, line, kind = ""]) =>
    h("div", { class: `figure ${kind}` }, h("span", { class: "muted" }, label), h("b", {}, value),
      h("span", { class: "muted small" }, more), line ? sparkline(series.points[line], 120, 28, kind) : "")));
}

const DELAYS = [["ttft", "First token"], ["tpot", "Per output token"], ["itl", "Between tokens"], ["e2e", "Whole request"],
  ["queue", "Router's queue"], ["transfer", "KV transfer"]];

export function drawLatency(series) {
  say(at("window"), `last ${Math.round(series.span()) || 0} s`);
  const rows = DELAYS.map(([name, label]) => {
    const { p50, p95, p99, count } = series.quantiles(name);
    return h("tr", {}, h("th", { scope: "row" }, label), [p50, p95, p99].map((value) => h("td", {}, seconds(value))),
      h("td", { class: "muted" }, number(count)), h("td", { class: "line" }, sparkline(series.points[name], 64, 20)));
  });
  at("latency").replaceChildren(table(["", "p50", "p95", "p99", "count", ""], rows));
}

const SOURCES = [["computed", "computed"], ["local_hit", "in the engine's cache"], ["remote", "handed off"], ["store", "from a store or a peer"],
  ["recomputed", "computed again"]];

export function drawSources(series) {
  const roles = Object.keys(series.now.sources).map((role) => ({ role, ...series.sources(role) }));
  const total = (values) => Object.values(values).reduce((sum, value) => sum + value, 0);
  say(at("sources-window"), roles.some(({ recent }) => recent) ? at("window").textContent : "since start");
  const bars = roles.map(({ role, values }) => tier(`on ${role === "any" ? "aggregated" : role} engines`, `${number(total(values))} tokens`,
    stacked(SOURCES.map(([name, label]) => [name, values[name], `${label}: ${number(values[name])} tokens`]), total(values) || 1)));
  const rows = SOURCES.map(([name, label]) => h("tr", {}, h("th", { scope: "row" }, h("i", { class: `swatch c-${name}` }), label),
    roles.map(({ values }) => h("td", {}, total(values) ? percent(values[name] / total(values)) : "–"))));
  at("sources").replaceChildren(...bars, table(["", ...roles.map(({ role }) => (role === "any" ? "aggregated" : role))], rows));
}

const CLASSES = ["active", "leased", "cached", "quarantined"];

export function drawTiers({ engines, tiers }) {
  const pools = ["prefill", "decode", "any"].map((role) => {
    const own = engines.filter((engine) => engine.role === role && engine.blocks?.[0]);
    if (!own.length) return null;
    const sums = [0, 1, 2, 3, 4].map((i) => own.reduce((sum, { blocks }) => sum + blocks[i], 0));
    const parts = CLASSES.map((name, i) => [name, sums[i + 1], `${name}: ${number(sums[i + 1])} blocks`]);
    const share = percent((sums[1] + sums[2]) / sums[0]);
    return tier(`${role === "any" ? "aggregated" : role} engines' pools`, `${share} in use, ${percent(sums[3] / sums[0])} cached`, stacked(parts, sums[0]));
  });
  const below = Object.entries(tiers).map(([name, { bytes: held, capacity, hits, failures }]) =>
    tier(name, `${capacity ? `${bytes(held)} of ${bytes(capacity)}, ` : ""}${number(hits)} hits${failures ? `, ${number(failures)} failures` : ""}`,
      stacked([["store", held, bytes(held)]], capacity || 1)));
  at("tiers").replaceChildren(...pools.filter(Boolean), ...below,
    legend(CLASSES.map((name) => [name, name, ""])));
}

const tier = (name, text, bar) =>
  h("div", { class: "tier" }, h("span", { class: "row" }, h("span", { class: "clip", title: name }, name), h("span", { class: "muted small" }, text)), bar);

export function drawOutcomes(series, { totals, now, faults }) {
  const { outcomes } = series.now;
  const most = Math.max(1, ...[...outcomes].filter(([code]) => isFailure(code)).map(([, count]) => count));
  const codes = [...outcomes].sort((a, b) => b[1] - a[1]).slice(0, 12);
  const rows = codes.map(([code, count]) => h("tr", {}, h("th", { scope: "row", class: isFailure(code) ? "bad" : "" }, code),
    h("td", {}, number(count)), h("td", { class: "line" }, isFailure(code) ? stacked([["bad", count, ""]], most) : "")));
  const blamed = Object.entries(faults).map(([fault, count]) => `${fault} ${number(count)}`).join(", ");
  const facts = [["went on elsewhere", totals.migrations], ["started again", totals.retries], ["moved off suspects", totals.moves],
    ["failed KV loads", totals.load_failures], ["pairs that fail now", now.bad_pairs],
    ["faults", blamed || 0]];
  at("failures").replaceChildren(rows.length ? table(["outcome", "requests", ""], rows) : h("p", { class: "muted" }, "No request yet."),
    h("dl", {}, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : value)))));
}

const known = new Map();
let newest = "";

export function forgetEvents() {
  known.clear();
  newest = "";
}

export function drawEvents({ events, at: now }) {
  for (const event of events) known.set(event.number, { text: "", engine: "", count: 1, ...event, when: known.get(event.number)?.when ?? Date.now() - (now - event.at) * 1e3 });
  const rows = [...known.values()].sort((a, b) => b.number - a.number).slice(0, MAX_EVENTS);
  for (const number of [...known.keys()]) if (number < (rows.at(-1)?.number ?? 0)) known.delete(number);
  const mark = JSON.stringify(rows.slice(0, 16).map(({ number, count }) => [number, count]));
  if (mark === newest) return;
  newest = mark;
  at("events").replaceChildren(...rows.map(({ when, kind, engine, text, count }) => h("li", { class: `k-${kind}` },
    h("time", { datetime: new Date(when).toISOString() }, new Date(when).toLocaleTimeString([], { hour12: false })),
    h("span", { class: "chip" }, kind), h("span", {}, engine ? h("strong", {}, engine) : "", engine && text ? ": " : "", text, count > 1 ? h("b", { class: "times" }, ` ×${number(count)}`) : ""))));
  if (!rows.length) at("events").replaceChildren(h("li", { class: "muted" }, "Nothing has happened yet."));
}

const GROUPS = [["latest", "Latest"], ["slowest", "Slowest"], ["failed", "Failed"]];
let group = "latest";

export function drawRequests({ requests, shows_requests: shows }, open) {
  document.body.classList.toggle("anonymous", !shows); // without keys, single requests are not shown
  if (!shows) return;
  if (!at("groups").firstChild) tabs(at("groups"), GROUPS, group, (name) => { group = name; drawRequests(drawRequests.last, open); });
  drawRequests.last = { requests, shows_requests: shows };
  if (at("requests").matches(":hover, :focus-within") && at("requests").dataset.group === group) return; // rows stand still under a pointer
  at("requests").dataset.group = group;
  const rows = (requests[group] ?? []).map((row) => h("tr", {},
    h("th", { scope: "row" }, h("button", { type: "button", class: "link clip", title: row.request_id, onclick: () => open(row.generation_id) }, row.request_id)),
    h("td", { class: row.error ? "bad" : "", title: row.error?.message }, row.error?.code ?? row.finish_reason ?? "–"),
    h("td", {}, `${number(row.prompt_tokens)} → ${number(row.output_tokens)}`), h("td", {}, seconds(row.ttft_s)), h("td", {}, seconds(row.seconds)),
    h("td", { class: "muted", title: "attempts" }, row.attempt ? `×${row.attempt + 1}` : "")));
  at("requests").replaceChildren(rows.length ? table(["id", "end", "tokens", "first", "whole", ""], rows) : h("p", { class: "muted" }, "None."));
}
