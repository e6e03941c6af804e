"use strict";
// The contents of the dashboard as plain data, from a response of /load. Uses no DOM, so that tests can run it.
const Figures = (() => {
  const SPAN_MS = 5 * 60 * 1000, HOUR_MS = 3600 * 1000, GAP_MS = 10000, STEP_MS = 10000, MOST_WORKERS = 100, MOST_PAUSE_MS = 30000;
  const NONE = "–", NAMES = { queue: "Waiting in the router", prefill: "Prefill", transfer: "KV transfer", decode: "Decode" };
  const STATES = { ready: "", connected: "warm", draining: "warm", withheld: "warm" };
  const KINDS = {
    found: "was discovered", gone: "left discovery", withheld: "was excluded from new work", back: "was readmitted to new work",
    ready: "became ready", lost: "was lost", role: "changed its role",
  };

  const whole = (number) => Math.round(number).toLocaleString("en");
  const percent = (share) => `${(100 * share).toFixed(share < 0.9995 && share > 0.99 ? 1 : 0)} %`;

  function ms(value) {
    if (value === null) return "unbounded";
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

  // Milliseconds until the next request: one second, longer if responses are slow, doubled with each failure.
  function pauseMs(numFailures, tookMs = 0, retryAfterS = 0) {
    const usual = Math.min(8000, Math.max(1000, 10 * tookMs));
    return Math.min(MOST_PAUSE_MS, Math.max(1000 * retryAfterS, usual * 2 ** Math.min(numFailures, 10)));
  }

  // Formats with about three digits and thousands units: 0.42, 7.5, 312, 4,210, 41.2 k, 3.1 M.
  function number(value) {
    if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
    if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
    if (value >= 100 || Number.isInteger(value)) return whole(value);
    return value >= 10 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2);
  }

  function bytes(value) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(value) / 3));
    const scaled = value / 1000 ** power;
    return `${scaled >= 100 || power === 0 ? scaled.toFixed(0) : scaled.toFixed(1)} ${units[power]}`;
  }

  const modelsLine = (load) => load.models.map((one) => `${one.id} · at most ${whole(one.max_model_len)} tokens${one.state ? ` · ${one.state}` : one.ready === false ? " · no ready workers" : ""}`).join(", ");

  const TIME_COLUMNS = ["Latency", "p50", "p90", "p99", "Count"];
  const TIMES = {
    ttft: ["First token", "TTFT, from the arrival of the request's headers"], tpot: ["Later token", "TPOT, the mean over an answer's tokens after the first"],
    itl: ["Between tokens", "from one token to the next"], queue: ["Wait", "in the router and on workers"],
    transfer: ["KV transfer", "from the grant to the last block"], exposed_transfer: ["Exposed KV transfer", "the part of the KV transfer that delayed the second token"],
  };
  function timeRows(load) {
    return Object.entries(TIMES).map(([kind, [text, title]]) => {
      const one = load.traffic[kind];
      return { key: kind, cells: [{ text, title }, ...["p50_ms", "p90_ms", "p99_ms"].map((share) => (one.num ? ms(one[share]) : NONE)), number(one.num)] };
    });
  }

  // The share of KV blocks in use on the ready workers of a role; null without any.
  function blocksUsed(load, role) {
    const some = load.workers.filter((one) => one.role === role && one.state === "ready" && one.num_blocks);
    const all = some.reduce((sum, one) => sum + one.num_blocks, 0);
    return all ? 1 - some.reduce((sum, one) => sum + one.num_available_blocks, 0) / all : null;
  }

  const POOL_COLUMNS = ["Pool", "Ready", "Requests", "Queued tokens", "KV blocks in use"];
  function poolRows(load) {
    return ["prefill", "decode"].map((role) => {
      const all = load.workers.filter((one) => one.role === role), ready = all.filter((one) => one.state === "ready");
      const sum = (name) => ready.reduce((total, one) => total + one[name], 0), used = blocksUsed(load, role);
      const wanted = load.plan?.pools[role]?.wanted;
      return { key: role, cells: [
        role[0].toUpperCase() + role.slice(1),
        { text: `${whole(ready.length)} of ${whole(all.length)}`, level: ready.length < all.length || ready.length < wanted ? "warm" : "", title: wanted === undefined ? "" : `the plan wants ${whole(wanted)}` },
        whole(sum("num_requests")), number(sum("num_queued_tokens")),
        used === null ? NONE : { text: percent(used), part: used },
      ] };
    });
  }

  const stages = (load) => Object.entries(load.stages).map(([name, number]) => ({ name: NAMES[name] ?? name, number: whole(number) }));

  const CLASS_COLUMNS = ["Class", "Priority", "Share", "In flight", "Waiting", "Oldest wait", "Refused", "TTFT goal", "TTFT met", "TPOT goal", "TPOT met"];
  function classRows(load) {
    const goal = load.plan?.quantile ?? 0.95;
    const met = (one, name) => {
      const share = one.attainment[name];
      return share === undefined ? NONE : { text: percent(share), level: share < goal ? "bad" : "", title: `in the last minute; goal: ${percent(goal)}` };
    };
    return load.classes.map((one) => ({ key: one.name, cells: [
      one.name, String(one.priority), one.share ? String(one.share) : NONE, whole(one.num_in_flight),
      { text: one.num_held ? `${whole(one.num_waiting)} (${whole(one.num_held)} for busy workers)` : whole(one.num_waiting) },
      { text: one.num_waiting ? ms(1000 * one.oldest_wait_s) : NONE, title: `maximum wait of new requests: ${ms(1000 * one.wait_limit_s)}` },
      whole(one.num_refused), one.ttft_ms ? ms(one.ttft_ms) : NONE, met(one, "ttft"), one.tpot_ms ? ms(one.tpot_ms) : NONE, met(one, "tpot"),
    ] }));
  }

  function stepTimes(model) {
    if (!model.num_steps) return "not measured yet";
    const parts = [`at least ${ms(1000 * (model.fixed_s + model.floor_s))}`];
    if (model.token_s) parts.push(`${ms(1000 * model.token_s)} per prompt token`);
    if (model.row_s || model.context_s) parts.push(`${ms(1000 * (model.row_s + 1000 * model.context_s))} per sequence of 1,000 tokens`);
    return `${parts.join(", ")} (±\u00a0${percent(model.error).replace(" ", "\u00a0")})`;
  }

  const WORKER_COLUMNS = ["Worker", "Role", "State", "Requests", "Queued tokens", "Wait", "KV blocks in use", "Tokens/s", "Step limits", "Step time"];
  function workerRow(one, several) {
    const used = one.num_blocks ? 1 - one.num_available_blocks / one.num_blocks : 0;
    const knobs = [one.batch_cap && `${whole(one.batch_cap)} sequences`, one.step_tokens && `${whole(one.step_tokens)} prompt tokens`];
    return { key: one.address, cells: [
      { text: `${one.worker_id || one.address}${several && one.model ? ` · ${one.model}` : ""}`, title: one.address },
      { text: one.home && one.home !== one.role ? `${one.role} (home: ${one.home})` : one.role, level: one.home && one.home !== one.role ? "warm" : "" },
      { text: one.reason && one.reason !== one.state ? `${one.state}: ${one.reason}` : one.state, level: STATES[one.state] ?? "bad" },
      { text: whole(one.num_requests), title: `${whole(one.num_booked_requests)} from this router` },
      whole(one.num_queued_tokens), ms(1000 * one.wait_s),
      { text: one.num_blocks ? `${percent(used)} of ${whole(one.num_blocks)}` : NONE, part: used },
      whole(one.tokens_per_s), knobs.filter(Boolean).join(", ") || NONE,
      { text: stepTimes(one.step_model), title: "step time of its engine, as estimated by the worker" },
    ] };
  }

  // The rows of matching workers, at most `most`; workers that are not ready come first.
  function workerRows(load, filter = "", most = MOST_WORKERS) {
    const words = filter.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const text = (one) => [one.worker_id, one.address, one.role, one.state, one.model].join(" ").toLowerCase();
    const found = load.workers.filter((one) => words.every((word) => text(one).includes(word)));
    const order = (one) => `${one.state === "ready" ? 1 : 0} ${one.role === "prefill" ? 0 : 1} ${one.worker_id || one.address}`;
    found.sort((a, b) => order(a).localeCompare(order(b), "en", { numeric: true }));
    const shown = found.slice(0, most);
    const part = shown.length < load.workers.length ? `${whole(shown.length)} of ` : "";
    return { rows: shown.map((one) => workerRow(one, (load.models ?? []).length > 1)), summary: `${part}${whole(load.workers.length)} workers` };
  }

  function planLines(load) {
    const plan = load.plan;
    if (!plan) return [{ text: "This router does not plan pools (--planner off)." }];
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
    lines.push(...tails("TTFT", "ttft_ms"), ...tails("TPOT", "tpot_ms"), { text: `Offered load: ${plan.requests_per_s.toFixed(2)} requests per second.` });
    if (plan.unmet) lines.unshift({ text: `The goals cannot be met: ${plan.unmet}`, level: "bad" });
    if (plan.held) lines.unshift({ text: `The plan does not change: ${plan.held}`, level: "warm" });
    return lines;
  }

  function eventLines(load) {
    if (!load.events.length) return [{ text: "No worker events yet." }];
    return load.events.map((one) => ({
      text: `${ago(one.age_s)}: ${one.role} worker ${one.worker} ${KINDS[one.kind] ?? one.kind}${one.detail ? `: ${one.detail}` : ""}`,
      level: one.kind === "lost" ? "bad" : "",
    }));
  }

  // The lowest attainment of a goal over all classes; null if no class has the goal.
  function worst(load, name) {
    const shares = load.classes.map((one) => one.attainment[name]).filter((share) => share !== undefined);
    return shares.length ? Math.min(...shares) : null;
  }

  // One point of the charts; null where there is no data.
  function sample(load) {
    const { rates, ttft, tpot, transfer } = load.traffic, of = (times, share) => (times.num ? times[share] : null);
    return {
      inFlight: load.server_load, waiting: load.stages.queue ?? 0, requests: rates.requests_per_s, failed: rates.failed_per_s,
      output: rates.output_tokens_per_s, prompt: rates.prompt_tokens_per_s,
      ttft50: of(ttft, "p50_ms"), ttft99: of(ttft, "p99_ms"), tpot50: of(tpot, "p50_ms"), tpot99: of(tpot, "p99_ms"),
      ttftMet: worst(load, "ttft"), tpotMet: worst(load, "tpot"), prefillKv: blocksUsed(load, "prefill"), decodeKv: blocksUsed(load, "decode"),
      transferBytes: rates.transfer_bytes_per_s, transfer50: of(transfer, "p50_ms"),
    };
  }

  // The points of the last hour, oldest first: all of the last minutes, and one in ten seconds before.
  function remember(points, at, point) {
    const kept = [];
    for (const one of points) {
      const isRecent = one.at > at - SPAN_MS, isApart = !kept.length || one.begins || one.at - kept.at(-1).at >= STEP_MS;
      if (one.at > at - HOUR_MS && (isRecent || isApart)) kept.push(isRecent ? one : { ...one, gapMs: 2.5 * STEP_MS });
    }
    return [...kept, { at, ...point }];
  }

  // Adds a response of /load/history where the page has no points. Times become those of `now`; `wall` is the same in Unix ms.
  // The start of the router is a point without values, which interrupts the lines.
  function joined(points, history, now, wall) {
    const of = (seconds) => now - (wall - 1000 * seconds);
    const isFree = (at) => at <= now && at > now - HOUR_MS && !points.some((one) => !one.begins && Math.abs(one.at - at) < STEP_MS);
    const past = history.points.map((one) => ({ ...one, at: of(one.at), gapMs: 2.5 * 1000 * history.step_s })).filter((one) => isFree(one.at));
    const begins = of(history.started_at), isKnown = points.some((one) => one.begins && Math.abs(one.at - begins) < STEP_MS);
    const marks = begins > now - HOUR_MS && !isKnown ? [{ at: begins, begins: true }] : [];
    return [...points, ...past, ...marks].sort((a, b) => a.at - b.at);
  }

  // The points within a span, and the span of their chart in milliseconds: all points, at least a minute.
  const within = (points, now, most) => points.filter((one) => one.at > now - most);
  const spanMs = (points, now, most = SPAN_MS) => Math.min(most, Math.max(60000, ...points.slice(0, 1).map((one) => now - one.at)));
  const spanText = (ms) => (ms < 120000 ? `${Math.round(ms / 1000)} s ago` : `${Math.round(ms / 60000)} min ago`);

  // The `d` of an SVG path through the values, with gaps where the page did not poll.
  function line(points, pick, top, now, width, height, most = SPAN_MS) {
    const span = spanMs(points, now, most);
    const parts = [];
    let before = -Infinity, gapMs = 0;
    for (const point of points) {
      const value = pick(point) ?? null;
      if (value === null) { before = -Infinity; continue; }
      const x = width * (1 - (now - point.at) / span), y = height * (1 - Math.min(1, value / (top || 1)));
      const ownMs = point.gapMs ?? GAP_MS;
      parts.push(`${point.at - before > Math.max(ownMs, gapMs) ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`);
      before = point.at;
      gapMs = ownMs;
    }
    return parts.join("");
  }

  return {
    NONE, TIME_COLUMNS, POOL_COLUMNS, CLASS_COLUMNS, WORKER_COLUMNS, ago, ms, number, bytes, percent, whole, pauseMs, modelsLine, stages, timeRows,
    poolRows, classRows, workerRows, planLines, eventLines, worst, sample, remember, joined, within, spanMs, spanText, line, SPAN_MS, HOUR_MS, GAP_MS,
  };
})();
if (typeof module !== "undefined") module.exports = Figures;
