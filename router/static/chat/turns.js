// The view of a conversation: a tree per turn that depends only on its data. `data-do` names the action of a button.
const Turns = (() => {
  const isNode = typeof require !== "undefined";
  const { node } = isNode ? require("../markdown/tree.js") : Tree;
  const M = isNode ? require("../markdown/markdown.js") : Markdown;
  const N = isNode ? require("./timings.js") : Timings;
  const C = isNode ? require("./conversations.js") : Conversations;
  const A = isNode ? require("./attachments.js") : Attachments;

  const button = (name, label, text, attributes = {}) => node("button", { type: "button", "data-do": name, ...(label ? { "aria-label": label, title: label } : {}), ...attributes }, text);
  const quiet = (name, label, text, attributes = {}) => button(name, label, text, { class: "quiet", ...attributes });
  const onlyRead = (text) => node("span", { class: "only-read" }, text);

  // `view`: {index, isEditing, isLast, isBusy, branch, numBranches, run}. `isBusy`: the conversation has a running answer.
  // `branch`: index of this turn among its versions. `run`: the running answer of this turn.
  function questionNodes(turn, view) {
    if (view.isEditing) return [editor(turn)];
    const files = turn.files?.length ? node("ul", { class: "files", "aria-label": "Attached files" }, turn.files.map((file) => fileNode(file))) : null;
    const mine = node("div", { class: "mine" }, onlyRead("You: "), files, turn.question), isBranched = view.numBranches > 1;
    return [mine, node("div", { class: isBranched ? "under mine-buttons branched" : "under mine-buttons" },
      view.isBusy ? null : quiet("edit", "Edit and send again", "Edit"), quiet("copy-question", "Copy your message", "Copy"),
      isBranched && !view.isBusy ? pager("branch", "version of this message", view.branch, view.numBranches) : null)];
  }

  function fileNode({ name, tokens, text }, remove = null) {
    const size = tokens ? `${N.whole(tokens)} tokens` : `≈ ${N.whole(A.estimate(text))} tokens`;
    return node("li", {}, node("span", { class: "name" }, name), node("span", { class: "size" }, size), remove);
  }

  // The files of the message that is being written.
  const draftFiles = (files) => files.map((file, index) => fileNode(file, quiet("remove-file", `Remove ${file.name}`, "×", { "data-index": String(index) })));

  function editor(turn) {
    return node("form", { class: "editor", "data-do": "resend" },
      node("textarea", { "aria-label": "Your message", rows: "3" }, turn.question),
      node("div", { class: "under" }, node("span", { class: "hint-kept" }, "The present version is kept."), button("cancel-edit", "", "Cancel"), node("button", { type: "submit", class: "primary" }, "Send")));
  }

  function thoughtNodes(answer, isThinking) {
    if (!answer.thought) return [];
    const ms = answer.times?.thoughtMs ?? 0;
    const title = isThinking ? "Thinking…" : ms ? `Thought for ${N.time(ms)}` : "Thoughts";
    return [node("details", { class: isThinking ? "thought busy" : "thought" }, node("summary", {}, title), node("p", {}, answer.thought.trim()))];
  }

  function waitingNodes(run) {
    const dots = [0, 1, 2].map(() => node("i"));
    if (run.pauseS) {
      const text = `${run.problem} Retrying in ${Math.ceil(run.pauseS)} s (${run.tries} of ${run.mostTries}).`;
      return [node("div", { class: "waiting" }, dots, node("span", {}, text))];
    }
    return [node("div", { class: "waiting" }, dots, node("span", {}, run.waitedMs < 1000 ? "" : `waiting for the first token, ${(run.waitedMs / 1000).toFixed(1)} s`))];
  }

  function errorNode(error, canRetry, pauseS = 0) {
    const again = pauseS > 0 ? button("retry", "", `Try again in ${Math.ceil(pauseS)} s`, { disabled: "" }) : button("retry", "", "Try again");
    return node("div", { class: "error" }, node("strong", {}, error.title), node("span", {}, error.message),
      error.detail ? node("small", {}, error.detail) : null, canRetry ? again : null);
  }

  function footNode(turn, answer, view) {
    const numbers = answer.times ? N.shown(answer.times) : [];
    const parts = numbers.map(({ name, value, title }) => node("span", { title }, name ? `${name} ` : "", node("b", {}, value)));
    if (answer.note) parts.push(node("span", { class: "note" }, answer.note));
    const buttons = [
      answer.text ? quiet("copy-answer", "Copy answer", "Copy") : null,
      view.isLast && !view.isBusy && !answer.error ? quiet("retry", "Retry: generate another answer", "Retry") : null,
      turn.answers.length > 1 && !view.isBusy ? pager("answer", "answer", turn.shown, turn.answers.length) : null,
    ];
    return node("div", { class: "under foot" }, node("span", { class: "buttons" }, buttons), parts);
  }

  function pager(name, what, index, number) {
    const off = (isOff) => (isOff ? { disabled: "" } : {});
    return node("span", { class: "pager" }, quiet(`${name}-before`, `Previous ${what}`, "‹", off(index === 0)), node("span", {}, `${index + 1} of ${number}`),
      quiet(`${name}-after`, `Next ${what}`, "›", off(index === number - 1)));
  }

  function answerNodes(turn, view, reader) {
    const answer = C.shownAnswer(turn), { run } = view;
    if (!answer) return [];
    const isThinking = Boolean(run) && !answer.text, nodes = thoughtNodes(answer, isThinking);
    if (answer.text) nodes.push(node("div", { class: "answer" }, onlyRead("Answer: "), reader(answer.text, Boolean(run))));
    else if (run && !answer.thought) nodes.push(...waitingNodes(run));
    if (answer.error) nodes.push(errorNode(answer.error, view.isLast && !view.isBusy && answer.error.isRetryable, view.pauseS));
    if (!run) nodes.push(footNode(turn, answer, view));
    return nodes;
  }

  // The tree of a turn. Each turn needs its own Markdown.reader.
  const turnNode = (turn, view, reader = M.reader()) => node("article", { class: "turn", "data-turn": String(view.index), "aria-busy": String(Boolean(view.run)) },
    questionNodes(turn, view), answerNodes(turn, view, reader));

  return { turnNode, errorNode, draftFiles };
})();
if (typeof module !== "undefined") module.exports = Turns;
