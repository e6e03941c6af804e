// Timings of an answer, by this browser's clock, and its token counts.
const Timings = (() => {
  const whole = (number) => Math.round(number).toLocaleString("en");
  const time = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : ms < 60000 ? `${(ms / 1000).toFixed(ms < 9950 ? 2 : 1)} s` : `${Math.floor(ms / 60000)} min ${Math.round((ms % 60000) / 1000)} s`);

  // Times in milliseconds since the request was sent. `pieces` approximates tokens until the service reports a count.
  const begun = () => ({ firstMs: 0, lastMs: 0, thoughtMs: 0, totalMs: 0, pieces: 0, usage: null });

  // Returns `times` after an event at `ms`. `isThought` and `isText` are what it contained.
  function later(times, ms, { isText, isThought, usage }) {
    const next = { ...times, usage: usage ?? times.usage };
    if (!isText && !isThought) return next;
    return { ...next, firstMs: times.firstMs || ms, lastMs: ms, pieces: times.pieces + 1, thoughtMs: isThought ? ms - (times.firstMs || ms) : times.thoughtMs };
  }

  const tokensOf = ({ usage, pieces }) => usage?.completion_tokens ?? pieces;

  // Tokens per second after the first; 0 if there are too few.
  function rate(times) {
    const seconds = (times.lastMs - times.firstMs) / 1000, tokens = tokensOf(times);
    return tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : 0;
  }

  // [{name, value, title}] to display.
  function shown(times) {
    const { usage } = times, about = usage ? "" : "≈ ", tokens = tokensOf(times), speed = rate(times), parts = [];
    if (times.firstMs) parts.push({ name: "TTFT", value: time(times.firstMs), title: "time to first token" });
    if (speed) parts.push({ name: "", value: `${about}${speed.toFixed(1)} tokens/s`, title: "after the first token" });
    if (tokens) parts.push({ name: "", value: `${about}${whole(tokens)} ${tokens === 1 ? "token" : "tokens"}`, title: "tokens of the answer, including thinking" });
    if (times.totalMs) parts.push({ name: "total", value: time(times.totalMs), title: "time from the request to the end of the answer" });
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    if (usage?.prompt_tokens) parts.push({ name: "prompt", value: `${whole(usage.prompt_tokens)}${cached ? ` (${whole(cached)} cached)` : ""}`, title: "tokens of the conversation before the answer" });
    return parts;
  }

  return { time, whole, begun, later, rate, shown };
})();
if (typeof module !== "undefined") module.exports = Timings;
