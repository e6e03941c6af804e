// How much of the model's context the conversation uses: counted by the service up to the last answer, then estimated.
const Context = (() => {
  const isNode = typeof require !== "undefined";
  const A = isNode ? require("./attachments.js") : Attachments;
  const C = isNode ? require("./conversations.js") : Conversations;
  const N = isNode ? require("./timings.js") : Timings;
  const NEARLY = 0.8;

  const tokensOf = ({ question, files }) => A.estimate(question) + A.tokensOf(files);

  // Tokens of the shown `turns` and of `draft`, {question, files}, and whether a part of them is an estimate.
  function used(turns, draft) {
    const usages = turns.map((turn) => C.shownAnswer(turn)?.times?.usage), last = usages.findLastIndex(Boolean);
    const counted = last < 0 ? 0 : usages[last].prompt_tokens + usages[last].completion_tokens;
    const rest = [...turns.slice(last + 1), draft].reduce((sum, one) => sum + tokensOf(one), 0);
    return { tokens: counted + rest, isEstimate: rest > 0 };
  }

  // What to show: {text, share, state}. `most` is the context length of the model; 0 if unknown.
  function shown({ tokens, isEstimate }, most) {
    const about = isEstimate ? "≈ " : "", share = most ? Math.min(1, tokens / most) : 0;
    const text = `${about}${N.whole(tokens)}${most ? ` of ${N.whole(most)}` : ""} tokens`;
    return { text, share, state: !most || tokens < NEARLY * most ? "" : tokens < most ? "nearly" : "full" };
  }

  return { used, shown };
})();
if (typeof module !== "undefined") module.exports = Context;
