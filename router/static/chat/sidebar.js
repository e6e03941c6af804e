// The list of conversations: a tree from their data alone.
const Sidebar = (() => {
  const { node } = typeof require === "undefined" ? Tree : require("../markdown/tree.js");
  const DAY_MS = 24 * 3600 * 1000;
  const SPANS = [[1, "Today"], [2, "Yesterday"], [7, "The last seven days"], [30, "The last month"], [Infinity, "Older"]];

  // Which part of the list a conversation of `changed` is in, `midnight` being the last one.
  function spanOf(changed, midnight) {
    const days = changed >= midnight ? 0 : Math.ceil((midnight - changed) / DAY_MS);
    return SPANS.find(([most]) => days < most)[1];
  }

  function row(one, currentId, isRunning) {
    const open = { type: "button", class: "open", "data-do": "open", ...(one.id === currentId ? { "aria-current": "true" } : {}) };
    const small = (name, label, text) => node("button", { type: "button", class: "quiet", "data-do": name, "aria-label": `${label}: ${one.title}`, title: label }, text);
    return node("li", { "data-id": one.id }, node("button", open, isRunning ? node("span", { class: "running", title: "being answered" }, "●") : null, node("span", { class: "title" }, one.title)),
      small("export", "Save as a file", "↓"), small("delete", "Delete", "×"));
  }

  // The newest first, under the days when they last went on.
  function nodes(all, currentId, runningIds, midnight) {
    const sorted = [...all].sort((a, b) => b.changed - a.changed), spans = [...new Set(sorted.map((one) => spanOf(one.changed, midnight)))];
    return spans.map((span) => node("section", {}, node("h3", {}, span),
      node("ul", {}, sorted.filter((one) => spanOf(one.changed, midnight) === span).map((one) => row(one, currentId, runningIds.has(one.id))))));
  }

  return { nodes, spanOf };
})();
if (typeof module !== "undefined") module.exports = Sidebar;
