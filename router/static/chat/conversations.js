// Conversations as this browser keeps them: an entry of its storage each, so that two tabs do not overwrite each other's.
// A conversation: {id, title, changed, turns}; a turn: {question, answers, shown}, with the answers that were made of it.
const Conversations = (() => {
  const PREFIX = "diptych.chat.", TITLE_CHARS = 60;

  const blank = (id) => ({ id, title: "", changed: 0, turns: [] });
  const isText = (value) => typeof value === "string";

  function answerOf(raw) {
    if (!isText(raw?.text)) return null;
    const error = isText(raw.error?.title) ? { isRetryable: true, detail: "", ...raw.error, message: String(raw.error.message ?? "") } : null;
    const note = raw.note || (raw.times && !raw.times.totalMs ? "the page was closed before its end" : "");
    return { thought: "", model: "", times: null, ...raw, note, error };
  }

  function turnOf(raw) {
    if (!isText(raw?.question)) return null;
    const answers = (Array.isArray(raw.answers) ? raw.answers : []).map(answerOf).filter(Boolean);
    return { question: raw.question, answers, shown: Math.min(Math.max(0, Number(raw.shown) || 0), Math.max(0, answers.length - 1)) };
  }

  // What is stored, if it is a conversation: another version of this page may have written it.
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
    const chars = [...line]; // whole characters
    return chars.length > TITLE_CHARS ? `${chars.slice(0, TITLE_CHARS - 1).join("")}…` : line;
  }

  const shownAnswer = (turn) => turn.answers[turn.shown] ?? null;

  // The messages that lead to an answer of the turn at `index`. A turn without an answer is no context.
  function messages(conversation, index, system = "") {
    const before = conversation.turns.slice(0, index).filter((turn) => shownAnswer(turn)?.text);
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...before.flatMap((turn) => [{ role: "user", content: turn.question }, { role: "assistant", content: shownAnswer(turn).text }]),
      { role: "user", content: conversation.turns[index].question },
    ];
  }

  // The conversation as Markdown, to keep or to send.
  function exported(conversation) {
    const parts = conversation.turns.flatMap((turn) => {
      const answer = shownAnswer(turn);
      const name = answer?.model ? `Answer (${answer.model})` : "Answer";
      return [`## Question\n\n${turn.question}`, answer?.text ? `## ${name}\n\n${answer.text.trim()}` : ""];
    });
    return `${[`# ${titleOf(conversation)}`, ...parts].filter(Boolean).join("\n\n")}\n`;
  }

  const fileName = (conversation) => `${titleOf(conversation).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "") || "conversation"}.md`;

  // Those of `storage`, a function because it may be forbidden to look at; where it may not be used or is full, `save` says so and the page goes on without it.
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
      } catch { /* storage is forbidden: there are none */ }
      return found.sort((a, b) => b.changed - a.changed);
    }

    // Why it could not be kept; "" if it was.
    save(conversation) {
      try {
        this.storage().setItem(PREFIX + conversation.id, JSON.stringify(conversation));
        return "";
      } catch (error) {
        return error?.name === "QuotaExceededError" ? "This browser has no room left for this conversation: delete older ones." : "This browser keeps no conversations.";
      }
    }

    remove(id) {
      try { this.storage().removeItem(PREFIX + id); } catch { /* it was never kept */ }
    }
  }

  return { PREFIX, Shelf, blank, read, titleOf, shownAnswer, messages, exported, fileName };
})();
if (typeof module !== "undefined") module.exports = Conversations;
