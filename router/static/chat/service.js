// Talks to the service: questions and errors in its own words, and the events of an answer that is streamed.
const Service = (() => {
  const LONGEST_WAIT_S = 60; // what asks for a longer pause than this is not asked again by itself
  const TITLES = {
    400: "The request was refused", 401: "An API key is needed", 403: "This key may not do that", 404: "Not found",
    413: "The conversation is too large", 429: "Too many requests", 503: "The service is not ready", 504: "The answer took too long",
  };
  const FINAL = [400, 403, 404, 413]; // the same request would fail again

  class ApiError extends Error {
    // `retryAfterS`: the pause that the service asks for, 0: none; `isRetryable`: the same request may succeed later.
    constructor(title, message, { status = 0, detail = "", retryAfterS = 0, isRetryable = true } = {}) {
      super(message);
      Object.assign(this, { title, status, detail, retryAfterS, isRetryable });
    }

    // Whether the page may wait and ask again on its own.
    get isPassing() { return (this.status === 429 || this.status === 503) && this.retryAfterS > 0 && this.retryAfterS <= LONGEST_WAIT_S; }
  }

  // Seconds that a header Retry-After names, as a number or as a date; 0: none.
  function pauseOf(header, now = Date.now()) {
    if (!header) return 0;
    const seconds = /^\d+(\.\d+)?$/.test(header.trim()) ? Number(header) : (Date.parse(header) - now) / 1000;
    return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : 0;
  }

  // The error of an answer's body (of a response, or within a stream: status 0).
  function errorOf(body, status = 0, retryAfter = "") {
    const error = body?.error ?? {};
    const message = typeof error.message === "string" && error.message ? error.message : "The service gave no reason.";
    let title = TITLES[status] ?? (status ? "The service failed" : "The answer broke off");
    if (/chat template/.test(message) && /base model/.test(message)) title = "This model cannot chat";
    if (error.code === "context_length_exceeded") title = "The conversation is too long for this model";
    const retryAfterS = pauseOf(retryAfter);
    const detail = [status && `HTTP ${status}`, error.code ?? error.type, error.param && `field ${error.param}`].filter(Boolean).join(" · ");
    return new ApiError(title, message, { status, detail, retryAfterS, isRetryable: !FINAL.includes(status) });
  }

  function headers(key) {
    const bytes = String.fromCharCode(...new TextEncoder().encode(key)); // fetch takes no character beyond a byte
    return { "Content-Type": "application/json", ...(bytes && { Authorization: `Bearer ${bytes}` }) };
  }

  // The response, if it is a good one. Raises ApiError; AbortError when `options.signal` ended it.
  async function ask(path, key, options = {}) {
    let response;
    try {
      response = await fetch(path, { ...options, headers: headers(key) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The service cannot be reached", "Is it running? The connection failed before an answer came.");
    }
    if (response.ok) return response;
    const body = await response.json().catch(() => ({ error: { message: response.statusText } }));
    throw errorOf(body, response.status, response.headers.get("Retry-After"));
  }

  // Takes pieces of a stream of events and returns the data of the lines that are complete.
  function lineReader() {
    let rest = "";
    return (piece) => {
      const lines = (rest + piece).split("\n");
      rest = lines.pop();
      return lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()); // no comments, no empty lines
    };
  }

  // The objects of a streamed answer. Raises ApiError where it ends too early or says that it failed.
  async function* events(response) {
    const reader = response.body.getReader(), decoder = new TextDecoder(), linesOf = lineReader();
    try {
      while (true) {
        const { done, value } = await reader.read();
        if (done) break;
        for (const data of linesOf(decoder.decode(value, { stream: true }))) {
          if (data === "[DONE]") return;
          const event = JSON.parse(data);
          if (event.error) throw errorOf(event);
          yield event;
        }
      }
    } catch (error) {
      if (error.name === "AbortError" || error instanceof ApiError) throw error;
      throw new ApiError("The answer broke off", "The connection was lost before the answer was complete.");
    } finally {
      reader.cancel().catch(() => {}); // nothing is left to read, or the reader has stopped
    }
    throw new ApiError("The answer broke off", "The stream ended before the answer was complete.");
  }

  return { ApiError, errorOf, pauseOf, lineReader, ask, events };
})();
if (typeof module !== "undefined") module.exports = Service;
