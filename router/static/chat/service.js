// Client of the service: requests, errors, and the events of streamed answers.
const Service = (() => {
  const LONGEST_WAIT_S = 60; // longer pauses are not retried automatically
  const TITLES = {
    400: "The request was rejected", 401: "An API key is required", 403: "This key does not have permission", 404: "Not found",
    413: "The conversation is too large", 429: "Too many requests", 503: "The service is not ready", 504: "The answer took too long",
  };
  const FINAL = [400, 403, 404, 413]; // retrying the same request would fail again

  class ApiError extends Error {
    // `retryAfterS`: requested pause, or 0. `isRetryable`: whether the same request may succeed later.
    constructor(title, message, { status = 0, detail = "", retryAfterS = 0, isRetryable = true } = {}) {
      super(message);
      Object.assign(this, { title, status, detail, retryAfterS, isRetryable });
    }

    // Whether the page may retry automatically.
    get isPassing() { return (this.status === 429 || this.status === 503) && this.retryAfterS > 0 && this.retryAfterS <= LONGEST_WAIT_S; }
  }

  // Seconds in a Retry-After header, given as a number or a date; 0 without one.
  function pauseOf(header, now = Date.now()) {
    if (!header) return 0;
    const seconds = /^\d+(\.\d+)?$/.test(header.trim()) ? Number(header) : (Date.parse(header) - now) / 1000;
    return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : 0;
  }

  // Converts an error body, of a response or within a stream (status 0).
  function errorOf(body, status = 0, retryAfter = "") {
    const error = body?.error ?? {};
    const message = typeof error.message === "string" && error.message ? error.message : "The service did not give a reason.";
    let title = TITLES[status] ?? (status ? "The service failed" : "The answer was interrupted");
    if (/chat template/.test(message) && /base model/.test(message)) title = "This model cannot chat";
    if (error.code === "context_length_exceeded") title = "The conversation is too long for this model";
    const retryAfterS = pauseOf(retryAfter);
    const detail = [status && `HTTP ${status}`, error.code ?? error.type, error.param && `field ${error.param}`].filter(Boolean).join(" · ");
    return new ApiError(title, message, { status, detail, retryAfterS, isRetryable: !FINAL.includes(status) });
  }

  function headers(key) {
    const bytes = String.fromCharCode(...new TextEncoder().encode(key)); // fetch accepts only characters of one byte
    return { "Content-Type": "application/json", ...(bytes && { Authorization: `Bearer ${bytes}` }) };
  }

  // Returns a successful response. Throws ApiError, or AbortError when `options.signal` aborts.
  async function ask(path, key, options = {}) {
    let response;
    try {
      response = await fetch(path, { ...options, headers: headers(key) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The service is unreachable", "The connection failed. Check that the service is running.");
    }
    if (response.ok) return response;
    const body = await response.json().catch(() => ({ error: { message: response.statusText } }));
    throw errorOf(body, response.status, response.headers.get("Retry-After"));
  }

  // Returns a function that accepts chunks of an event stream and returns the data of completed lines.
  function lineReader() {
    let rest = "";
    return (piece) => {
      const lines = (rest + piece).split("\n");
      rest = lines.pop();
      return lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()); // skips comments and empty lines
    };
  }

  // Yields the objects of a streamed answer. Throws ApiError if the stream fails or ends early.
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
      throw new ApiError("The answer was interrupted", "The connection was lost before the answer was complete.");
    } finally {
      reader.cancel().catch(() => {}); // the stream has ended, or its consumer has stopped
    }
    throw new ApiError("The answer was interrupted", "The stream ended before the answer was complete.");
  }

  return { ApiError, errorOf, pauseOf, lineReader, ask, events };
})();
if (typeof module !== "undefined") module.exports = Service;
