// Conversations in this browser's storage, one entry each, so that two tabs do not overwrite each other's.
// A conversation: {id, title, changed, turns}. Its turns form a tree: a turn follows the answer (or the turn without one)
// whose id is `after`, or begins the conversation (""). Turns with the same `after` are branches, one of which is shown.
// A turn: {id, after, isShown, question, files, answers, shown}; `shown` is the index of an answer.
const Conversations = (() => {
  const A = typeof require === "undefined" ? Attachments : require("./attachments.js");
  const PREFIX = "diptych.chat.", TITLE_CHARS = 60, FORMAT = "diptych-conversations";

  const newId = () => `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 10)}`;
  const blank = (id = newId()) => ({ id, title: "", changed: 0, turns: [] });
  const isText = (value) => typeof value === "string";
  const listOf = (value) => (Array.isArray(value) ? value : []);

  function answerOf(raw) {
    if (!isText(raw?.text)) return null;
    const error = isText(raw.error?.title) ? { isRetryable: true, detail: "", ...raw.error, message: String(raw.error.message ?? "") } : null;
    const note = raw.note || (raw.times && !raw.times.totalMs ? "the page was closed before the answer was complete" : "");
    return { id: newId(), thought: "", model: "", times: null, ...raw, note, error };
  }

  function turnOf(raw) {
    if (!isText(raw?.question)) return null;
    const answers = listOf(raw.answers).map(answerOf).filter(Boolean);
    const files = listOf(raw.files).filter((file) => isText(file?.name) && isText(file.text)).map(({ name, text, tokens }) => ({ name, text, tokens: Number(tokens) || 0 }));
    const shown = Math.min(Math.max(0, Number(raw.shown) || 0), Math.max(0, answers.length - 1));
    return { id: isText(raw.id) ? raw.id : newId(), after: raw.after, isShown: raw.isShown !== false, question: raw.question, files, answers, shown };
  }

  // Turns without `after` are a list, as written by earlier versions.
  function linked(turns) {
    turns.forEach((turn, index) => { if (!isText(turn.after)) turn.after = index ? endOf(turns[index - 1]) : ""; });
    return turns;
  }

  // Parses a stored conversation; null if invalid, because another version of this page may have written it.
  function read(text) {
    try {
      const raw = JSON.parse(text);
      if (!isText(raw?.id) || !Array.isArray(raw.turns)) return null;
      return { id: raw.id, title: String(raw.title ?? ""), changed: Number(raw.changed) || 0, turns: linked(raw.turns.map(turnOf).filter(Boolean)) };
    } catch {
      return null;
    }
  }

  const shownAnswer = (turn) => turn.answers[turn.shown] ?? null;
  const endOf = (turn) => shownAnswer(turn)?.id ?? turn.id;

  // The shown turns, from the first to the last.
  function path(conversation) {
    const byEnd = grouped(conversation.turns), found = [];
    for (let end = ""; byEnd.has(end); end = endOf(found.at(-1))) {
      const all = byEnd.get(end);
      byEnd.delete(end); // an imported tree might contain a cycle
      found.push(all.findLast(({ isShown }) => isShown) ?? all.at(-1));
    }
    return found;
  }

  function grouped(turns) {
    const found = new Map();
    for (const turn of turns) found.set(turn.after, [...(found.get(turn.after) ?? []), turn]);
    return found;
  }

  // The alternatives to a turn, itself included.
  const branches = (conversation, turn) => conversation.turns.filter(({ after }) => after === turn.after);

  function show(conversation, turn) {
    for (const one of branches(conversation, turn)) one.isShown = one === turn;
  }

  // Adds and shows a turn that follows `before`, or begins the conversation if `before` is undefined.
  function add(conversation, before, question, files) {
    const turn = { id: newId(), after: before ? endOf(before) : "", isShown: true, question, files, answers: [], shown: 0 };
    conversation.turns.push(turn);
    show(conversation, turn);
    return turn;
  }

  // Drops the failed answers of a turn that nothing follows.
  function dropFailed(conversation, turn) {
    const used = new Set(conversation.turns.map(({ after }) => after));
    turn.answers = turn.answers.filter(({ id, text }) => text || used.has(id));
  }

  function titleOf(conversation) {
    const first = path(conversation)[0], line = (first?.question || first?.files[0]?.name || "").trim().replace(/\s+/g, " ");
    const chars = [...line]; // whole code points
    return chars.length > TITLE_CHARS ? `${chars.slice(0, TITLE_CHARS - 1).join("")}…` : line;
  }

  // The messages for an answer to a shown turn. Earlier turns without an answer are omitted.
  function messages(conversation, turn, system = "") {
    const turns = path(conversation), before = turns.slice(0, turns.indexOf(turn)).filter((one) => shownAnswer(one)?.text);
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...before.flatMap((one) => [{ role: "user", content: A.content(one) }, { role: "assistant", content: shownAnswer(one).text }]),
      { role: "user", content: A.content(turn) },
    ];
  }

  // Whether a conversation contains all words of `search`, in any branch.
  function matches(conversation, search) {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return true;
    const texts = conversation.turns.flatMap((turn) => [turn.question, ...turn.files.map(({ name }) => name), ...turn.answers.map(({ text }) => text)]);
    const text = texts.join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  }

  // Exports the shown turns as Markdown.
  function exported(conversation) {
    const parts = path(conversation).flatMap((turn) => {
      const answer = shownAnswer(turn);
      const name = answer?.model ? `Answer (${answer.model})` : "Answer";
      return [`## Question\n\n${A.content(turn)}`, answer?.text ? `## ${name}\n\n${answer.text.trim()}` : ""];
    });
    return `${[`# ${titleOf(conversation)}`, ...parts].filter(Boolean).join("\n\n")}\n`;
  }

  const fileName = (conversation) => `${titleOf(conversation).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "") || "conversation"}.md`;

  // All conversations with all branches, as a file that `unpacked` reads.
  const packed = (all) => `${JSON.stringify({ format: FORMAT, version: 1, conversations: all })}\n`;

  // The conversations of such a file; null if it is another file.
  function unpacked(text) {
    try {
      const raw = JSON.parse(text);
      return raw?.format === FORMAT ? listOf(raw.conversations).map((one) => read(JSON.stringify(one))).filter((one) => one?.turns.length) : null;
    } catch {
      return null;
    }
  }

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

  return { PREFIX, Shelf, newId, blank, read, path, branches, show, add, dropFailed, titleOf, shownAnswer, messages, matches, exported, fileName, packed, unpacked };
})();
if (typeof module !== "undefined") module.exports = Conversations;
