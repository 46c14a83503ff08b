// The engines: few as cards with their flows, many as a dense grid that is shaded by load.

import { at, bytes, h, number, percent, say, svg, tabs } from "./draw.js";
import { kvUse } from "./series.js";

const MANY = 16;
const SIDES = [["prefill", "Prefill"], ["decode", "Decode"], ["any", "Aggregated"]];
const TROUBLE = new Set(["dead", "refused", "suspect", "ejected"]);
const SHADES = [["kv", "KV in use"], ["requests", "Requests"], ["waiting", "Waiting"]];

const view = { nodes: new Map(), shape: "", selected: "", shade: "kv", last: null };

const NOTHING = { requests: 0, running: 0, waiting: 0, prefill_tokens: 0, deaths: 0, blocks: [] };

// The engine with its state in a word, and why.
function read(engine, problems) {
  const { life, refused, suspicion, draining, ejected } = engine;
  const [state, why] = refused ? ["refused", refused] : life !== "ready" ? [life, ""] : suspicion ? ["suspect", suspicion]
    : draining ? ["draining", ""] : ejected ? ["ejected", "others are preferred for a while"] : ["ready", problems.get(engine.name) ?? ""];
  return { ...NOTHING, ...engine, state, why };
}

export function drawTopology(overview) {
  const problems = new Map(Object.entries(overview.problems));
  const engines = overview.engines.map((engine) => read(engine, problems));
  view.last = { overview, engines };
  const many = engines.length > MANY;
  const shape = JSON.stringify([many, engines.map(({ name, role }) => [name, role]).sort()]);
  if (shape !== view.shape) build(engines, many, shape);
  const most = Math.max(1, ...engines.map((engine) => engine[view.shade] ?? 0));
  for (const engine of engines) update(engine, many, most);
  drawFlows(overview.flows, engines, many);
  const bad = engines.filter(({ state }) => TROUBLE.has(state)).length;
  const shown = engines.length < overview.num_engines ? `, ${engines.length} shown` : "";
  say(at("count"), `${overview.num_engines}${shown}${bad ? ` · ${bad} in trouble` : ""}`);
  drawDetail();
}

function build(engines, many, shape) {
  Object.assign(view, { shape, nodes: new Map() });
  const named = [...engines].sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  const side = ([role, label]) => {
    const own = named.filter((engine) => engine.role === role);
    if (!own.length) return null;
    const nodes = own.map((engine) => (many ? cell(engine) : card(engine)));
    return h("div", { class: `side s-${role}` },
      h("h3", {}, label, h("span", { class: "muted" }, ` ${own.length}`)), h("div", { class: many ? "cells" : "cards" }, nodes));
  };
  const sides = SIDES.map(side);
  const links = sides[0] && sides[1] ? h("div", { class: "flows", id: "flows" }) : null;
  at("topology").replaceChildren(h("div", { class: `topology ${many ? "many" : "few"}${links ? "" : " alone"}` },
    ...[sides[0], links, sides[1], sides[2]].filter(Boolean)));
  at("shades").hidden = !many;
  tabs(at("shades"), SHADES, view.shade, (name) => { view.shade = name; drawTopology(view.last.overview); });
}

function select(name) {
  view.selected = view.selected === name ? "" : name;
  drawTopology(view.last.overview);
}

function cell({ name }) {
  const node = h("button", { type: "button", class: "cell", onclick: () => select(name) });
  view.nodes.set(name, { node });
  return node;
}

function card({ name }) {
  const parts = { state: h("span", { class: "chip" }), bar: h("div", { class: "bar" }), use: h("b"), load: h("span", { class: "muted" }) };
  parts.classes = ["active", "leased", "cached", "quarantined"].map((kind) => h("i", { class: `c-${kind}` }));
  parts.bar.append(...parts.classes);
  const node = h("button", { type: "button", class: "card", onclick: () => select(name) },
    h("span", { class: "row" }, h("strong", { class: "clip", title: name }, name), parts.state), parts.bar,
    h("span", { class: "row small" }, parts.load, parts.use));
  view.nodes.set(name, { node, ...parts });
  return node;
}

function update(engine, many, most) {
  const { node, state, classes, use, load } = view.nodes.get(engine.name);
  node.className = `${many ? "cell" : "card"} is-${engine.state}`;
  node.setAttribute("aria-pressed", String(view.selected === engine.name));
  const words = `${engine.name}: ${engine.state}, ${percent(kvUse([engine]))} of KV, ${engine.requests} requests, ${engine.waiting} waiting`;
  if (many) {
    const share = view.shade === "kv" ? kvUse([engine]) : engine[view.shade] / most;
    node.style.setProperty("--load", `${Math.round(100 * Math.min(share, 1))}%`);
    node.title = words;
    node.setAttribute("aria-label", words);
    return;
  }
  say(state, engine.state === "ready" && !engine.why ? "" : engine.state === "ready" ? "degraded" : engine.state);
  classes.forEach((part, i) => { part.style.width = `${engine.blocks[0] ? (100 * engine.blocks[i + 1]) / engine.blocks[0] : 0}%`; });
  say(use, percent(kvUse([engine])));
  say(load, `${engine.running} run · ${engine.waiting} wait`);
}

function drawFlows(flows, engines, many) {
  const box = at("flows");
  if (!box) return;
  const roles = new Map(engines.map(({ name, role }) => [name, role]));
  const across = flows.pairs.filter(([from, to]) => roles.get(from) === "prefill" && roles.get(to) === "decode" && from !== to);
  const [handed, moved, local] = [flows.handed, flows.bytes, flows.local].map((total) => total / flows.seconds);
  const label = h("div", { class: "total" }, h("b", {}, `${number(handed)}/s`), h("span", { class: "muted" }, "hand-offs"),
    h("b", {}, `${bytes(moved)}/s`), h("span", { class: "muted" }, "KV"));
  if (local > 0) label.append(h("b", {}, `${number(local)}/s`), h("span", { class: "muted" }, "on one"));
  const lines = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  const tops = many ? bandOf(handed) : curvesOf(across);
  lines.append(...tops);
  box.replaceChildren(lines, label);
}

const curve = (from, to, width, kind, title) =>
  svg("path", { d: `M0,${from} C45,${from} 55,${to} 100,${to}`, "stroke-width": width, class: `flow ${kind}`, "vector-effect": "non-scaling-stroke" }, svg("title", {}, title));

function bandOf(rate) {
  return [curve(50, 50, rate > 0 ? 10 : 2, rate > 0 ? "" : "idle", `${number(rate)} hand-offs a second`)];
}

function curvesOf(across) {
  const middles = (role) => {
    const names = [...document.querySelectorAll(`.s-${role} .card strong`)].map((node) => node.textContent);
    return new Map(names.map((name, i) => [name, (100 * (i + 0.5)) / names.length]));
  };
  const [left, right] = [middles("prefill"), middles("decode")];
  const most = Math.max(1, ...across.map((pair) => pair[2]));
  const used = new Map(across.map((pair) => [JSON.stringify(pair.slice(0, 2)), pair]));
  const lines = [];
  for (const [from, y1] of left)
    for (const [to, y2] of right) {
      const pair = used.get(JSON.stringify([from, to]));
      const chosen = [from, to].includes(view.selected) ? "chosen" : "";
      const title = `${from} → ${to}: ${pair ? pair[2] : 0} choices lately`;
      lines.push(curve(y1, y2, pair ? 1.5 + (6 * pair[2]) / most : 1, pair ? chosen : "idle", title));
    }
  return lines;
}

const CLASSES = ["active", "leased", "cached", "quarantined", "free"];

function drawDetail() {
  const { overview, engines } = view.last;
  const engine = engines.find(({ name }) => name === view.selected);
  const box = at("detail");
  if (!engine) {
    const bad = engines.filter(({ state, why }) => TROUBLE.has(state) || why).slice(0, 6);
    box.replaceChildren(...bad.map(({ name, state, why }) => h("p", { class: `note is-${state}` }, h("strong", {}, name), ` ${state}${why ? `: ${why}` : ""}`)));
    return;
  }
  const facts = [["state", engine.state], ["role", engine.role], ["requests", engine.requests], ["running", engine.running],
    ["waiting", engine.waiting], ["tokens to compute", number(engine.prefill_tokens)], ["deaths", engine.deaths],
    ...CLASSES.map((kind, i) => [`${kind} blocks`, number(engine.blocks[i + 1] ?? 0)])];
  const peers = overview.flows.pairs.filter(([from, to]) => from === engine.name || to === engine.name).slice(0, 5)
    .map(([from, to, count]) => h("li", {}, `${from} → ${to}: ${number(count / overview.flows.seconds)}/s`));
  box.replaceChildren(h("h3", {}, engine.name), engine.why ? h("p", { class: `note is-${engine.state}` }, engine.why) : "",
    h("dl", {}, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))),
    peers.length ? h("ul", { class: "peers" }, peers) : "");
}
