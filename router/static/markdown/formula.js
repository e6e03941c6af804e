// Formulas in TeX: extensions of marked that find them, and their nodes, which KaTeX draws once it is loaded.
// $x$ and \(x\) are within a line; $$x$$ and \[x\] are displayed. A dollar sign before a space or a price remains text.
const Formula = (() => {
  const T = typeof require === "undefined" ? Tree : require("./tree.js");
  const INLINE = /^(?:\$(?![\s$])((?:\\[^\n]|[^\\\n$]){0,999}?(?:\\[^\n]|[^\\\s$]))\$(?![\p{L}\p{N}])|\\\(([^]{1,2000}?)\\\))/u;
  const DISPLAY = /^(?:\$\$((?:\\[^]|[^\\$]){1,2000}?)\$\$|\\\[([^]{1,2000}?)\\\])/;
  const BLOCK = new RegExp(`^ {0,3}(?:${DISPLAY.source.slice(1)})[ \\t]*(?:\\n|$)`);
  const OPTIONS = { output: "htmlAndMathml", strict: "ignore", throwOnError: true, trust: false, maxSize: 20, maxExpand: 500 };

  function token(source, pattern, isDisplay) {
    const found = pattern.exec(source);
    return found ? { type: "formula", raw: found[0], text: found[0].trim(), tex: found[1] ?? found[2], isDisplay } : undefined;
  }

  const extensions = {
    block: [(source) => token(source, BLOCK, true)],
    inline: [(source) => token(source, DISPLAY, true) ?? token(source, INLINE, false)],
    startBlock: [(source) => source.search(/^ {0,3}(?:\$\$|\\\[)|\n[ \t]*\n/m)], // or the end of the paragraph
    startInline: [(source) => source.search(/\$|\\[([]/)],
  };

  // Draws a formula into `element`. False if KaTeX is not loaded or does not understand it: its source is shown then.
  function draw(element, { tex, isDisplay }) {
    if (typeof katex === "undefined") return false;
    try {
      katex.render(tex, element, { ...OPTIONS, displayMode: isDisplay });
      return true;
    } catch {
      return false;
    }
  }

  function node(found) {
    const wide = { class: "formula display", tabindex: "0", role: "group", "aria-label": "Formula" };
    return { ...T.node("span", found.isDisplay ? wide : { class: "formula" }, found.text), draw: (element) => draw(element, found) };
  }

  return { extensions, node };
})();
if (typeof module !== "undefined") module.exports = Formula;
