// Conversations in this browser's storage, one entry each, so that two tabs do not overwrite each other's.
// A conversation: {id, title, changed, turns}. A turn: {question, answers, shown}; `shown` is the index of an answer.
const Conversations = (() => {
  const PREFIX = "diptych.chat.", TITLE_CHARS = 60;

  const blank = (id) => ({ id, title: "", changed: 0, turns: [] });
  const isText = (value) => typeof value === "string";

  function answerOf(raw) {
    if (!isText(raw?.text)) return null;
    const error = isText(raw.error?.title) ? { isRetryable: true, detail: "", ...raw.error, message: String(raw.error.message ?? "") } : null;
    const note = raw.note || (raw.times && !raw.times.totalMs ? "the page was closed before the answer was complete" : "");
    return { thought: "", model: "", times: null, ...raw, note, error };
  }

  function turnOf(raw) {
    if (!isText(raw?.question)) return null;
    const answers = (Array.isArray(raw.answers) ? raw.answers : []).map(answerOf).filter(Boolean);
    return { question: raw.question, answers, shown: Math.min(Math.max(0, Number(raw.shown) || 0), Math.max(0, answers.length - 1)) };
  }

  // Parses a stored conversation; null if invalid, because another version of this page may have written it.
  function read(text) {
    try {
      const raw = JSON.parse(text);
      if (!isText(raw?.id) || !Array.isArray(raw.turns)) return null;
      return { id: raw.id, title: String(raw.title ?? ""), changed: Number(raw.changed) || 0, turns: raw.turns.map(turnOf).filter(Boolean) };
    } catch {
      return null;
    }
  }

  function titleOf(conversation) {
    const line = conversation.turns[0]?.question.trim().replace(/\s+/g, " ") ?? "";
    const chars = [...line]; // whole code points
    return chars.length > TITLE_CHARS ? `${chars.slice(0, TITLE_CHARS - 1).join("")}…` : line;
  }

  const shownAnswer = (turn) => turn.answers[turn.shown] ?? null;

  // The messages for an answer to turn `index`. Turns without an answer are omitted.
  function messages(conversation, index, system = "") {
    const before = conversation.turns.slice(0, index).filter((turn) => shownAnswer(turn)?.text);
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...before.flatMap((turn) => [{ role: "user", content: turn.question }, { role: "assistant", content: shownAnswer(turn).text }]),
      { role: "user", content: conversation.turns[index].question },
    ];
  }

  // Exports the conversation as Markdown.
  function exported(conversation) {
    const parts = conversation.turns.flatMap((turn) => {
      const answer = shownAnswer(turn);
      const name = answer?.model ? `Answer (${answer.model})` : "Answer";
      return [`## Question\n\n${turn.question}`, answer?.text ? `## ${name}\n\n${answer.text.trim()}` : ""];
    });
    return `${[`# ${titleOf(conversation)}`, ...parts].filter(Boolean).join("\n\n")}\n`;
  }

  const fileName = (conversation) => `${titleOf(conversation).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "") || "conversation"}.md`;

  // Conversations in `storage`, a function because even access may be forbidden. `save` reports if storage is forbidden or full.
  class Shelf {
    constructor(storage) { this.storage = storage; }

    list() {
      const found = [];
      try {
        for (let i = 0; i < this.storage().length; i++) {
          const name = this.storage().key(i);
          const one = name.startsWith(PREFIX) ? read(this.storage().getItem(name)) : null;
          if (one) found.push(one);
        }
      } catch { /* storage is forbidden */ }
      return found.sort((a, b) => b.changed - a.changed);
    }

    // Returns why the conversation could not be saved; "" on success.
    save(conversation) {
      try {
        this.storage().setItem(PREFIX + conversation.id, JSON.stringify(conversation));
        return "";
      } catch (error) {
        return error?.name === "QuotaExceededError" ? "This browser's storage is full. Delete older conversations." : "This browser does not allow this page to store conversations.";
      }
    }

    remove(id) {
      try { this.storage().removeItem(PREFIX + id); } catch { /* it was never stored */ }
    }
  }

  return { PREFIX, Shelf, blank, read, titleOf, shownAnswer, messages, exported, fileName };
})();
if (typeof module !== "undefined") module.exports = Conversations;
