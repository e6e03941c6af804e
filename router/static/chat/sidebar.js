// The list of conversations, as a tree that depends only on their data.
const Sidebar = (() => {
  const { node } = typeof require === "undefined" ? Tree : require("../markdown/tree.js");
  const DAY_MS = 24 * 3600 * 1000;
  const SPANS = [[1, "Today"], [2, "Yesterday"], [7, "Previous 7 days"], [30, "Previous 30 days"], [Infinity, "Older"]];

  // The section of a conversation that was last changed at `changed`. `midnight` is the most recent midnight.
  function spanOf(changed, midnight) {
    const days = changed >= midnight ? 0 : Math.ceil((midnight - changed) / DAY_MS);
    return SPANS.find(([most]) => days < most)[1];
  }

  function row(one, currentId, isRunning) {
    const open = { type: "button", class: "open", "data-do": "open", ...(one.id === currentId ? { "aria-current": "true" } : {}) };
    const small = (name, label, text) => node("button", { type: "button", class: "quiet", "data-do": name, "aria-label": `${label}: ${one.title}`, title: label }, text);
    return node("li", { "data-id": one.id }, node("button", open, isRunning ? node("span", { class: "running", title: "answer in progress" }, "●") : null, node("span", { class: "title" }, one.title)),
      small("export", "Save as a file", "↓"), small("delete", "Delete", "×"));
  }

  // The sections of the listed conversations, newest first.
  function nodes(all, currentId, runningIds, midnight) {
    const sorted = [...all].sort((a, b) => b.changed - a.changed), spans = [...new Set(sorted.map((one) => spanOf(one.changed, midnight)))];
    return spans.map((span) => node("section", {}, node("h2", {}, span),
      node("ul", {}, sorted.filter((one) => spanOf(one.changed, midnight) === span).map((one) => row(one, currentId, runningIds.has(one.id))))));
  }

  return { nodes, spanOf };
})();
if (typeof module !== "undefined") module.exports = Sidebar;
