// An answer in progress: requested, retried if the service asks for a pause, read to its end or stopped.
const Answering = (() => {
  const isNode = typeof require !== "undefined";
  const S = isNode ? require("./service.js") : Service;
  const N = isNode ? require("./timings.js") : Timings;
  const PATH = "/v1/chat/completions", MOST_TRIES = 5;
  const NOTES = { length: "cut at the token limit", stopped: "stopped" };

  const blank = (model) => ({ text: "", thought: "", model, note: "", times: null, error: null });

  function body(model, messages, fields) {
    return JSON.stringify({ model, messages, ...fields, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } });
  }

  // Resolves after `seconds`. Rejects with AbortError when `signal` aborts.
  function pause(seconds, signal) {
    return new Promise((resolve, reject) => {
      signal.throwIfAborted();
      const stop = () => { clearTimeout(timer); reject(new DOMException("stopped", "AbortError")); };
      const timer = setTimeout(() => { signal.removeEventListener("abort", stop); resolve(); }, 1000 * seconds);
      signal.addEventListener("abort", stop, { once: true });
    });
  }

  class Run {
    // `changed()` is called after each event. `request` and `key` do not change.
    constructor(answer, request, key, changed) {
      Object.assign(this, { answer, request, key, changed, tries: 0, problem: "", mostTries: MOST_TRIES, pausedUntil: 0, abort: new AbortController(), sentAt: performance.now() });
    }

    stop() { this.abort.abort(); }

    // State to show while no text has arrived.
    get view() {
      const now = performance.now();
      return { waitedMs: now - this.sentAt, pauseS: Math.max(0, (this.pausedUntil - now) / 1000), problem: this.problem, tries: this.tries + 1, mostTries: MOST_TRIES };
    }

    // Resolves when the answer is complete, stopped (see its note) or failed (see its error). Never rejects.
    async toEnd() {
      while (await this.failsForNow()) this.tries++;
      this.answer.times = { ...this.answer.times, totalMs: performance.now() - this.sentAt };
    }

    async failsForNow() {
      const { answer } = this, { signal } = this.abort;
      this.sentAt = performance.now();
      answer.times = N.begun();
      try {
        const response = await S.ask(PATH, this.key, { method: "POST", body: this.request, signal });
        for await (const event of S.events(response)) this.take(event);
        return false;
      } catch (error) {
        return this.failed(error, signal);
      }
    }

    async failed(error, signal) {
      const { answer } = this;
      if (error instanceof S.ApiError && error.isPassing && !answer.text && !answer.thought && this.tries + 1 < MOST_TRIES) {
        [this.problem, this.pausedUntil] = [error.message, performance.now() + 1000 * error.retryAfterS];
        this.changed();
        try {
          await pause(error.retryAfterS, signal);
          return true;
        } catch (stopped) {
          error = stopped;
        }
      }
      if (error.name === "AbortError") answer.note = NOTES.stopped;
      else answer.error = storable(error);
      return false;
    }

    take(event) {
      const { answer } = this, choice = event.choices?.[0];
      const text = choice?.delta?.content ?? "", thought = choice?.delta?.reasoning_content ?? "";
      answer.text += text;
      answer.thought += thought;
      answer.times = N.later(answer.times, performance.now() - this.sentAt, { isText: text !== "", isThought: thought !== "", usage: event.usage });
      answer.note = NOTES[choice?.finish_reason] ?? answer.note;
      this.changed();
    }
  }

  // The error as stored with the answer. Retry times are absolute, because the page may be reopened.
  function storable(error) {
    if (!(error instanceof S.ApiError)) return { title: "Something went wrong", message: String(error), status: 0, detail: "", isRetryable: true, retryAt: 0 };
    const { title, message, status, detail, isRetryable, retryAfterS } = error;
    return { title, message, status, detail, isRetryable, retryAt: retryAfterS ? Date.now() + 1000 * retryAfterS : 0 };
  }

  return { Run, blank, body };
})();
if (typeof module !== "undefined") module.exports = Answering;
