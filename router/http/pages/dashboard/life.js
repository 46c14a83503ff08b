// One request's life: each Submit to an engine, each KV transfer and the first token, on one axis.

import { at, bytes, h, number, seconds, table } from "./draw.js";

export function drawLife(found) {
  at("life").hidden = false;
  at("choices").replaceChildren(...found.map(choice));
  at("life").scrollIntoView({ block: "nearest" });
}

export function drawLifeError(text) {
  at("life").hidden = false;
  at("choices").replaceChildren(h("p", { class: "note is-suspect" }, text));
}

function choice(row) {
  const end = Math.max(row.ended_s ?? row.age_s, 1e-6);
  const began = row.legs[0]?.began_s ?? end;
  const wait = began > end / 100 ? [lane("waits for an engine", end, [[0, began, "queued", "no engine yet"]], seconds(began))] : [];
  const lanes = row.legs.map((leg) => lane(`${leg.part === "all" ? "prompt and output" : leg.part} on ${leg.engine}`, end, [
    [leg.began_s, leg.began_s + leg.queued_s, "queued", `queued ${seconds(leg.queued_s)}`],
    [leg.began_s + leg.queued_s, leg.ended_s ?? end, leg.part, `${leg.outcome || "no end yet"}: ran ${seconds(leg.ran_s)}`],
  ], `${seconds((leg.ended_s ?? end) - leg.began_s)}${leg.outcome ? `, ${leg.outcome}` : ""}`));
  const loads = row.transfers.map((move) => lane(`KV ${move.source} → ${move.target}`, end, [
    [move.ended_s - move.seconds, move.ended_s, move.code ? "bad" : "transfer", move.code || "loaded"]],
  `${bytes(move.bytes)} in ${seconds(move.seconds)}${move.code ? `, ${move.code}` : ""}`));
  const facts = [["state", row.state], ["end", row.error ? `${row.error.code}: ${row.error.message}` : row.finish_reason ?? "–"], ["order", row.order],
    ["attempt", row.attempt + 1], ["tokens", `${number(row.prompt_tokens)} → ${number(row.output_tokens)}`],
    ["first token", seconds(row.first_token_s)], ["whole", seconds(row.ended_s ?? row.age_s)], ["generation", row.generation_id], ["trace", row.trace_id || "–"],
    ...Object.entries(row.sources).filter(([, count]) => count).map(([name, count]) => [name.replaceAll("_", " "), number(count)])];
  return h("article", {}, h("h3", { class: "clip" }, `${row.request_id} · choice ${row.choice}`),
    h("div", { class: "lanes" }, ...wait, ...lanes, ...loads, axis(end, row.first_token_s)),
    h("dl", {}, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { class: "clip", title: value }, String(value))))),
    row.decision ? decision(row.decision) : "");
}

function lane(label, end, spans, text) {
  const track = h("div", { class: "track" });
  for (const [from, to, kind, title] of spans) {
    if (!(to > from)) continue;
    const span = h("i", { class: `t-${kind}`, title });
    place(span, from, end);
    span.style.width = `${Math.max((100 * (to - from)) / end, 0.3)}%`;
    track.append(span);
  }
  return h("div", { class: "lane" }, h("span", { class: "clip", title: label }, label), track, h("span", { class: "muted small" }, text));
}

function place(node, seconds, end) {
  node.style.left = `${Math.min(Math.max((100 * seconds) / end, 0), 100)}%`;
}

function axis(end, first) {
  const track = h("div", { class: "track axis" }, h("span", {}, "0"), h("span", {}, seconds(end)));
  if (first !== null) {
    const mark = h("i", { class: "t-first", title: `first token after ${seconds(first)}` });
    place(mark, first, end);
    track.append(mark);
  }
  return h("div", { class: "lane" }, h("span", { class: "muted" }, first === null ? "no token yet" : "first token"), track,
    h("span", { class: "muted small" }, first === null ? "" : seconds(first)));
}

// A decision record: of each choice of an engine, the candidates with their figures, the winner, the reason; whatever
// fields it has.
function decision({ choices, ...rest }) {
  return h("div", {}, h("h3", {}, "Decision"), fields(rest), ...choices.map(({ candidates, ...about }) => {
    const heads = [...new Set(candidates.flatMap((each) => Object.keys(each)))];
    const rows = candidates.map((each) => h("tr", {}, heads.map((head) => h("td", {}, show(each[head])))));
    return h("div", {}, fields(about),
      rows.length ? h("div", { class: "scroll" }, table(heads.map((head) => head.replaceAll("_", " ")), rows)) : "");
  }));
}

function fields(record) {
  return h("dl", {}, Object.entries(record).map(([name, value]) => h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, show(value)))));
}

function show(value) {
  return typeof value === "number" ? number(value) : typeof value === "string" ? value : JSON.stringify(value ?? null);
}
