// The cards at the top of the dashboard, as plain data: a value, its details, and the lines of a chart. Uses no DOM.
const Cards = (() => {
  const F = typeof require === "undefined" ? Figures : require("./figures.js");
  const LEAST_TOP = { requests: 1, tokens: 1, ms: 1, share: 1, bytes: 1000 };

  const share = (value) => (value === null ? F.NONE : F.percent(value));
  const perSecond = (value) => `${F.number(value)}/s`;

  // A card of latencies: median and tail percentiles.
  function times(key, name, load, goalName) {
    const one = load.traffic[key], goal = goalOf(load, goalName);
    const late = goal && one.num && one.p90_ms > goal;
    return {
      key, name, none: one.num === 0, value: one.num ? F.ms(one.p50_ms) : "no recent answers",
      details: [
        { text: "p50", line: "first" }, { text: `p90 ${one.num ? F.ms(one.p90_ms) : F.NONE}`, level: late ? "warm" : "" },
        { text: `p99 ${one.num ? F.ms(one.p99_ms) : F.NONE}`, line: "second" }, ...(goal ? [{ text: `goal ${F.ms(goal)}` }] : []),
      ],
      lines: [`${key}50`, `${key}99`], least: LEAST_TOP.ms, scale: F.ms,
    };
  }

  // No recent answer met or missed a goal: the shares are 1 then.
  const isQuiet = (load, met) => !load.traffic.ttft.num && Math.min(...met) === 1;
  const goalOf = (load, name) => load.classes.find((one) => one.name === "default")?.[name] || 0;

  // A one-line summary: the state of each pool, and current problems.
  function summary(load) {
    const parts = ["prefill", "decode"].map((role) => {
      const pool = load.workers.filter((one) => one.role === role), ready = pool.filter((one) => one.state === "ready").length;
      const level = ready && ready === pool.length ? "good" : ready ? "warm" : pool.length ? "bad" : "";
      return { text: pool.length ? `${F.whole(ready)} of ${F.whole(pool.length)} ${role} workers ready` : `no ${role} workers`, level };
    });
    const met = [F.worst(load, "ttft"), F.worst(load, "tpot")].filter((share) => share !== null);
    if (met.length && !isQuiet(load, met)) {
      const isMissed = Math.min(...met) < (load.plan?.quantile ?? 0.95);
      parts.push({ text: isMissed ? "goals are missed" : "goals are met", level: isMissed ? "bad" : "good" });
    }
    if (load.stages.queue) parts.push({ text: `${F.whole(load.stages.queue)} ${load.stages.queue === 1 ? "request" : "requests"} waiting`, level: "warm" });
    if (load.plan?.unmet) parts.push({ text: "the plan cannot meet the goals", level: "bad" });
    return parts;
  }

  function all(load) {
    const { rates, transfer, exposed_transfer: exposed } = load.traffic, point = F.sample(load);
    const met = [point.ttftMet, point.tpotMet].filter((one) => one !== null), quantile = load.plan?.quantile ?? 0.95;
    const quiet = isQuiet(load, met), attained = (one) => share(quiet ? null : one);
    const kv = [point.decodeKv, point.prefillKv].filter((one) => one !== null);
    const cached = rates.prompt_tokens_per_s ? rates.cached_tokens_per_s / rates.prompt_tokens_per_s : null;
    return [
      {
        key: "requests", name: "Requests", value: perSecond(rates.requests_per_s), lines: ["requests", "failed"], least: LEAST_TOP.requests, scale: perSecond,
        details: [{ text: "succeeded", line: "first" }, { text: `failed ${perSecond(rates.failed_per_s)}`, line: "second", level: rates.failed_per_s ? "bad" : "" }],
      },
      {
        key: "flight", name: "In flight", value: F.whole(load.server_load), lines: ["inFlight", "waiting"], least: LEAST_TOP.requests, scale: F.whole,
        details: [{ text: "all", line: "first" }, { text: `waiting ${F.whole(point.waiting)}`, line: "second" }],
      },
      {
        key: "output", name: "Output tokens", value: perSecond(rates.output_tokens_per_s), lines: ["output", "prompt"], least: LEAST_TOP.tokens, scale: perSecond,
        details: [{ text: "output", line: "first" }, { text: `prompt ${perSecond(rates.prompt_tokens_per_s)}`, line: "second" }, ...(cached === null ? [] : [{ text: `${F.percent(cached)} cached` }])],
      },
      {
        key: "goals", name: "Goals met", none: !met.length || quiet,
        value: !met.length ? "no goals set" : quiet ? "no recent answers" : F.percent(Math.min(...met)),
        level: met.length && Math.min(...met) < quantile ? "bad" : "", lines: ["ttftMet", "tpotMet"], least: LEAST_TOP.share, scale: F.percent,
        details: [{ text: `TTFT ${attained(point.ttftMet)}`, line: "first" }, { text: `TPOT ${attained(point.tpotMet)}`, line: "second" }, { text: "last minute" }],
      },
      times("ttft", "First token (TTFT)", load, "ttft_ms"),
      times("tpot", "Later token (TPOT)", load, "tpot_ms"),
      {
        key: "kv", name: "KV blocks in use", none: !kv.length, value: kv.length ? F.percent(Math.max(...kv)) : "no ready workers",
        level: kv.length && Math.max(...kv) > 0.95 ? "warm" : "", lines: ["decodeKv", "prefillKv"], least: LEAST_TOP.share, scale: F.percent,
        details: [{ text: `decode ${share(point.decodeKv)}`, line: "first" }, { text: `prefill ${share(point.prefillKv)}`, line: "second" }],
      },
      {
        key: "transfers", name: "KV transfers", value: `${F.bytes(rates.transfer_bytes_per_s)}/s`, lines: ["transferBytes"], least: LEAST_TOP.bytes, scale: (value) => `${F.bytes(value)}/s`,
        details: [{ text: `${perSecond(rates.transfers_per_s).replace("/s", " per second")}` }, { text: `p50 ${transfer.num ? F.ms(transfer.p50_ms) : F.NONE}` }, { text: `p99 ${transfer.num ? F.ms(transfer.p99_ms) : F.NONE}` }, { text: `exposed ${exposed.num ? F.ms(exposed.p50_ms) : F.NONE}` }],
      },
    ];
  }

  // The value at the top of a card's chart: the maximum of its lines, or the card's minimum scale.
  const topOf = (card, points) => Math.max(card.least, ...points.flatMap((point) => card.lines.map((name) => point[name] ?? 0)));

  // The description of a chart for screen readers.
  const labelOf = (card, top) => `${card.name}: ${card.value}, ${card.details.map((one) => one.text).join(", ")}; the top of the chart is ${card.scale(top)}`;

  return { all, summary, topOf, labelOf };
})();
if (typeof module !== "undefined") module.exports = Cards;
