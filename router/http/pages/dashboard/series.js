// What two overviews of the router's totals say about the time between them. A total that falls began anew.

const WINDOW_S = 60;
const POINTS = 150;
const SOURCES = ["computed", "recomputed", "local_hit", "remote", "store"];

export function rise(now, before) {
  return Math.max(now - (typeof before === "number" ? before : 0), 0) || 0;
}

// The value below which this share of a histogram's counts lies; null: there are none.
export function quantile(bounds, counts, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let below = 0;
  for (const [i, count] of counts.entries()) {
    if (below + count >= share * total && count) {
      const low = i ? bounds[i - 1] : 0;
      return i < bounds.length ? low + (bounds[i] - low) * ((share * total - below) / count) : low;
    }
    below += count;
  }
  return bounds.at(-1);
}

const CLIENTS = new Set(["ok", "disconnected", "invalid_request_error", "model_not_found", "context_length_exceeded", "previous_response_not_found",
  "grammar_given_up", "rate_limit_exceeded"]);

// Whether an outcome is the server's failure.
export const isFailure = (outcome) => !CLIENTS.has(outcome);

// Requests of all endpoints by outcome.
export function byOutcome({ outcomes }) {
  const sums = new Map();
  for (const [, outcome, count] of outcomes) sums.set(outcome, (sums.get(outcome) ?? 0) + count);
  return sums;
}

// The share of the blocks of these engines' pools that requests and leases hold.
export function kvUse(engines) {
  const sum = (i) => engines.reduce((total, { blocks }) => total + (blocks?.[i] ?? 0), 0);
  return sum(0) ? (sum(1) + sum(2)) / sum(0) : 0;
}

export class Series {
  constructor() { this.reset(); }

  reset() {
    this.samples = [];
    this.points = {};
    this.counted = new Map(); // sources of each engine's prompt tokens, as it last reported them
    this.sums = {}; // those of all engines, by role: what an engine that is gone has computed stays counted
  }

  // Adds an overview. Another start of the router, or a clock that goes back, begins anew.
  add(overview) {
    const last = this.samples.at(-1);
    if (last && (last.since !== overview.since || overview.at < last.at)) this.reset();
    if (last && overview.at === last.at) return false;
    const { at, since, totals, latency } = overview;
    this.samples.push({ at, since, totals, latency, outcomes: byOutcome(overview), sources: this.count(overview.engines) });
    while (this.samples.length > 2 && at - this.samples[1].at > WINDOW_S) this.samples.shift();
    for (const name of ["requests", "output_tokens"]) this.point(name, this.rate(name, 5));
    for (const name of Object.keys(latency)) this.point(name, this.quantiles(name, 15).p95);
    this.point("failed", this.failed(5));
    this.point("in_flight", overview.now.in_flight);
    this.point("kv", kvUse(overview.engines));
    return true;
  }

  count(engines) {
    for (const { name, role, sources } of engines) {
      if (!sources) continue;
      const before = this.counted.get(name) ?? [];
      const began = sources.some((value, i) => value < before[i]) ? [] : before;
      this.sums[role] ??= Object.fromEntries(SOURCES.map((source) => [source, 0]));
      SOURCES.forEach((source, i) => { this.sums[role][source] += rise(sources[i], began[i]); });
      this.counted.set(name, sources);
    }
    return structuredClone(this.sums);
  }

  point(name, value) {
    const line = (this.points[name] ??= []);
    line.push(value ?? NaN);
    if (line.length > POINTS) line.shift();
  }

  get now() { return this.samples.at(-1); }

  // The sample before the window; null: there is only one yet.
  before(window = WINDOW_S) {
    const found = this.samples.findLast((sample) => this.now.at - sample.at >= window) ?? this.samples[0];
    return found === this.now ? null : found;
  }

  span(window = WINDOW_S) { return this.now.at - (this.before(window) ?? this.now).at; }

  rate(name, window = WINDOW_S) {
    const before = this.before(window);
    return before ? rise(this.now.totals[name], before.totals[name]) / this.span(window) : NaN;
  }

  failed(window = WINDOW_S) {
    const before = this.before(window);
    if (!before) return NaN;
    const bad = [...this.now.outcomes].filter(([code]) => isFailure(code));
    return bad.reduce((sum, [code, count]) => sum + rise(count, before.outcomes.get(code)), 0) / this.span(window);
  }

  // Prompt tokens of a role's engines by source; since the start where the window has none.
  sources(role) {
    const now = this.now.sources[role];
    const before = this.before()?.sources[role];
    const recent = Object.fromEntries(Object.keys(now).map((name) => [name, before ? rise(now[name], before[name]) : 0]));
    return Object.values(recent).some((value) => value) ? { values: recent, recent: true } : { values: now, recent: false };
  }

  quantiles(name, window = WINDOW_S) {
    const { bounds, counts } = this.now.latency[name];
    const before = this.before(window)?.latency[name].counts;
    const recent = before ? counts.map((count, i) => rise(count, before[i])) : counts;
    const [p50, p95, p99] = [0.5, 0.95, 0.99].map((share) => quantile(bounds, recent, share));
    return { p50, p95, p99, count: recent.reduce((sum, count) => sum + count, 0) };
  }
}
