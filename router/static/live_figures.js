"use strict";
// What the live page shows, as plain data from an answer of /load. No document here: tests run this part alone.
const Figures = (() => {
  const SPAN_MS = 5 * 60 * 1000, GAP_MS = 10000, MOST_WORKERS = 100, MOST_PAUSE_MS = 30000;
  const NONE = "–", NAMES = { queue: "Waiting in the router", prefill: "Prompt", transfer: "KV transfer", decode: "Answer" };
  const STATES = { ready: "", connected: "warm", draining: "warm", withheld: "warm" };
  const KINDS = {
    found: "was found", gone: "is gone from discovery", withheld: "gets no new work", back: "gets work again",
    ready: "is ready", lost: "was lost", role: "changed its role",
  };

  const whole = (number) => Math.round(number).toLocaleString("en");
  const percent = (share) => `${(100 * share).toFixed(share < 0.9995 && share > 0.99 ? 1 : 0)} %`;

  function ms(value) {
    if (value === null) return "no end";
    if (value === 0) return "0 ms";
    if (value >= 9950) return `${(value / 1000).toFixed(0)} s`;
    if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
    return value >= 10 ? `${value.toFixed(0)} ms` : value >= 0.1 ? `${value.toFixed(1)} ms` : `${(1000 * value).toFixed(1)} µs`;
  }

  function ago(seconds) {
    if (seconds < 1.5) return "just now";
    if (seconds < 120) return `${Math.round(seconds)} s ago`;
    return seconds < 7200 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
  }

  // Milliseconds until the next question: a second, longer where an answer takes long, doubled with each failure.
  function pauseMs(numFailures, tookMs = 0, retryAfterS = 0) {
    const usual = Math.min(8000, Math.max(1000, 10 * tookMs));
    return Math.min(MOST_PAUSE_MS, Math.max(1000 * retryAfterS, usual * 2 ** Math.min(numFailures, 10)));
  }

  const stages = (load) => Object.entries(load.stages).map(([name, number]) => ({ name: NAMES[name] ?? name, number: whole(number) }));

  function classRows(load) {
    const goal = load.plan?.quantile ?? 0.95;
    const met = (one, name) => {
      const share = one.attainment[name];
      return share === undefined ? NONE : { text: percent(share), level: share < goal ? "bad" : "", title: `of the last minute; goal: ${percent(goal)}` };
    };
    return load.classes.map((one) => ({ key: one.name, cells: [
      one.name, String(one.priority), one.share ? String(one.share) : NONE, whole(one.num_in_flight),
      { text: one.num_held ? `${whole(one.num_waiting)} (${whole(one.num_held)} for busy workers)` : whole(one.num_waiting) },
      { text: one.num_waiting ? ms(1000 * one.oldest_wait_s) : NONE, title: `new ones may wait ${ms(1000 * one.wait_limit_s)}` },
      whole(one.num_refused), one.ttft_ms ? ms(one.ttft_ms) : NONE, met(one, "ttft"), one.tpot_ms ? ms(one.tpot_ms) : NONE, met(one, "tpot"),
    ] }));
  }

  function stepTimes(model) {
    if (!model.num_steps) return "not known yet";
    const parts = [`${ms(1000 * (model.fixed_s + model.floor_s))} at least`];
    if (model.token_s) parts.push(`${ms(1000 * model.token_s)} a prompt token`);
    if (model.row_s || model.context_s) parts.push(`${ms(1000 * (model.row_s + 1000 * model.context_s))} a sequence of 1,000 tokens`);
    return `${parts.join(", ")} (± ${percent(model.error)})`;
  }

  function workerRow(one) {
    const used = one.num_blocks ? 1 - one.num_available_blocks / one.num_blocks : 0;
    const knobs = [one.batch_cap && `${whole(one.batch_cap)} sequences`, one.step_tokens && `${whole(one.step_tokens)} prompt tokens`];
    return { key: one.address, cells: [
      { text: one.worker_id || one.address, title: one.address },
      { text: one.home && one.home !== one.role ? `${one.role} (home: ${one.home})` : one.role, level: one.home && one.home !== one.role ? "warm" : "" },
      { text: one.reason && one.reason !== one.state ? `${one.state}: ${one.reason}` : one.state, level: STATES[one.state] ?? "bad" },
      { text: whole(one.num_requests), title: `${whole(one.num_booked_requests)} of this router` },
      whole(one.num_queued_tokens), ms(1000 * one.wait_s),
      { text: one.num_blocks ? `${percent(used)} of ${whole(one.num_blocks)}` : NONE, part: used },
      whole(one.tokens_per_s), knobs.filter(Boolean).join(", ") || NONE,
      { text: stepTimes(one.step_model), title: "a step of its engine, by the worker's own model" },
    ] };
  }

  // Those that are not ready come first; of very many the page shows a part.
  function workerRows(load, filter = "", most = MOST_WORKERS) {
    const words = filter.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const text = (one) => [one.worker_id, one.address, one.role, one.state].join(" ").toLowerCase();
    const found = load.workers.filter((one) => words.every((word) => text(one).includes(word)));
    const order = (one) => `${one.state === "ready" ? 1 : 0} ${one.role === "prefill" ? 0 : 1} ${one.worker_id || one.address}`;
    found.sort((a, b) => order(a).localeCompare(order(b), "en", { numeric: true }));
    const shown = found.slice(0, most);
    const part = shown.length < load.workers.length ? `${whole(shown.length)} of ` : "";
    return { rows: shown.map(workerRow), told: `${part}${whole(load.workers.length)} workers` };
  }

  function planLines(load) {
    const plan = load.plan;
    if (!plan) return [{ text: "This router plans no pools (--planner off)." }];
    const lines = Object.entries(plan.pools).map(([role, pool]) => ({
      text: `${role}: ${whole(pool.present)} present, ${whole(pool.wanted)} wanted, ${whole(pool.needed)} needed. ${pool.reason}`,
      level: pool.present < pool.wanted ? "warm" : "",
    }));
    const tails = (name, key) => {
      const seen = [["predicted", plan.predicted[key]], ["measured", plan.measured[key]]].filter(([, value]) => value !== 0);
      if (!seen.length && !plan.goals[key]) return [];
      const said = seen.map(([kind, value]) => `${kind} ${ms(value)}`).join(", ") || "nothing measured yet";
      return [{ text: `${name} at p${+(100 * plan.quantile).toFixed(2)}: ${said}${plan.goals[key] ? `, the goal is ${ms(plan.goals[key])}` : ""}` }];
    };
    lines.push(...tails("TTFT", "ttft_ms"), ...tails("TPOT", "tpot_ms"), { text: `${plan.requests_per_s.toFixed(2)} requests a second are offered.` });
    if (plan.unmet) lines.unshift({ text: `The goals cannot be met: ${plan.unmet}`, level: "bad" });
    if (plan.held) lines.unshift({ text: `The plan does not change: ${plan.held}`, level: "warm" });
    return lines;
  }

  function eventLines(load) {
    if (!load.events.length) return [{ text: "Nothing has happened to a worker yet." }];
    return load.events.map((one) => ({
      text: `${ago(one.age_s)}: ${one.role} worker ${one.worker} ${KINDS[one.kind] ?? one.kind}${one.detail ? `: ${one.detail}` : ""}`,
      level: one.kind === "lost" ? "bad" : "",
    }));
  }

  // One point of the time line; the worst class counts, null where no class has such a goal.
  function sample(load) {
    const worst = (name) => {
      const shares = load.classes.map((one) => one.attainment[name]).filter((share) => share !== undefined);
      return shares.length ? Math.min(...shares) : null;
    };
    return { inFlight: load.server_load, waiting: load.stages.queue ?? 0, ttft: worst("ttft"), tpot: worst("tpot") };
  }

  // The points of the last minutes, oldest first.
  const remember = (points, at, point) => [...points.filter((one) => one.at > at - SPAN_MS), { at, ...point }];

  // What the charts show, in milliseconds: all that the page has seen, at least a minute.
  const spanMs = (points, now) => Math.min(SPAN_MS, Math.max(60000, ...points.slice(0, 1).map((one) => now - one.at)));
  const spanText = (ms) => (ms < 120000 ? `${Math.round(ms / 1000)} s ago` : `${Math.round(ms / 60000)} min ago`);

  // The `d` of an SVG path through the values, with gaps where the page did not look.
  function line(points, pick, top, now, width, height) {
    const span = spanMs(points, now);
    const parts = [];
    let before = -Infinity;
    for (const point of points) {
      const value = pick(point);
      if (value === null) { before = -Infinity; continue; }
      const x = width * (1 - (now - point.at) / span), y = height * (1 - Math.min(1, value / (top || 1)));
      parts.push(`${point.at - before > GAP_MS ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`);
      before = point.at;
    }
    return parts.join("");
  }

  return { ago, ms, percent, whole, pauseMs, stages, classRows, workerRows, planLines, eventLines, sample, remember, spanMs, spanText, line };
})();
if (typeof module !== "undefined") module.exports = Figures;
