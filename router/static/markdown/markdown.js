// Markdown as models write it: headings, lists, tables, quotes, code, text. Text -> blocks -> nodes of a tree.
const Markdown = (() => {
  const T = typeof require === "undefined" ? Tree : require("./tree.js");
  const I = typeof require === "undefined" ? Inline : require("./inline.js");
  const H = typeof require === "undefined" ? Highlight : require("./highlight.js");
  const MOST_DEPTH = 8;
  const FENCE = /^(\s*)(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
  const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
  const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
  const QUOTE = /^ {0,3}>\s?/;
  const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])(\s+|$)(.*)$/;
  const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
  const TASK = /^\[([ xX])\]\s+/;

  const indentOf = (line) => line.length - line.trimStart().length;
  const dedent = (line, width) => line.slice(Math.min(width, indentOf(line)));

  function cells(line) {
    const parts = line.trim().replace(/^\|/, "").match(/(?:\\.|`[^`]*`|[^|\\`]|[\\`])+|\|/g) ?? [];
    const found = [""];
    for (const part of parts) {
      if (part === "|") found.push("");
      else found[found.length - 1] += part;
    }
    if (found.length > 1 && !found.at(-1).trim()) found.pop(); // behind the last bar
    return found.map((cell) => cell.trim().replaceAll("\\|", "|"));
  }

  const isTable = (lines, i) => lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].includes("-")
    && DIVIDER.test(lines[i + 1]) && cells(lines[i]).length === cells(lines[i + 1]).length;

  // Whether a line begins something that ends a paragraph.
  function begins(lines, i) {
    const line = lines[i];
    const item = ITEM.exec(line);
    return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isTable(lines, i)
      || (item && item[4] !== "" && (item[2] === undefined || item[2] === "1"));
  }

  // ------------------------------------------------------------------------------------------------- lines -> blocks
  function fenceAt(lines, start) {
    const [, indent, fence, language] = FENCE.exec(lines[start]);
    const body = [];
    let i = start + 1;
    const ends = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
    for (; i < lines.length && !ends(lines[i]); i++) body.push(dedent(lines[i], indent.length));
    return { kind: "code", language, text: body.join("\n"), next: Math.min(i + 1, lines.length) };
  }

  function quoteAt(lines, start) {
    let i = start;
    while (i < lines.length && QUOTE.test(lines[i])) i++;
    return { kind: "quote", lines: lines.slice(start, i).map((line) => line.replace(QUOTE, "")), next: i };
  }

  function tableAt(lines, start) {
    const aligns = cells(lines[start + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "right") : ""));
    const rows = [];
    let i = start + 2;
    for (; i < lines.length && lines[i].trim() && lines[i].includes("|"); i++) rows.push(cells(lines[i]));
    return { kind: "table", head: cells(lines[start]), aligns, rows, next: i };
  }

  function listAt(lines, start) {
    const first = ITEM.exec(lines[start]), ordered = first[2] !== undefined, indent = first[1].length;
    const items = [];
    let i = start, width = 2;
    while (i < lines.length) {
      const item = ITEM.exec(lines[i]), inner = indentOf(lines[i]);
      if (item && inner <= indent + 1 && !RULE.test(lines[i])) {
        if ((item[2] !== undefined) !== ordered) break;
        width = lines[i].length - item[4].length;
        items.push([item[4]]);
      } else if (!lines[i].trim()) {
        const after = lines.slice(i + 1).find((line) => line.trim());
        const again = after && ITEM.exec(after);
        if (!after || !(indentOf(after) > indent + 1 || (again && indentOf(after) >= indent && (again[2] !== undefined) === ordered))) break;
        items.at(-1).push("");
      } else if (inner > indent + 1 || (lines[i - 1].trim() && !begins(lines, i))) {
        const body = items.at(-1), fence = FENCE.test(lines[i]) ? fenceAt(lines, i) : null;
        for (const end = fence?.next ?? i + 1; i < end; i++) body.push(dedent(lines[i], width));
        continue;
      } else {
        break;
      }
      i++;
    }
    return { kind: "list", ordered, first: Number(first[2] ?? 1), items, next: i };
  }

  function textAt(lines, start) {
    let i = start + 1;
    while (i < lines.length && lines[i].trim() && !begins(lines, i)) i++;
    return { kind: "text", text: lines.slice(start, i).map((line) => line.trim()).join("\n"), next: i };
  }

  function blockAt(lines, i) {
    const line = lines[i], heading = HEADING.exec(line);
    if (FENCE.test(line)) return fenceAt(lines, i);
    if (heading) return { kind: "heading", level: heading[1].length, text: heading[2], next: i + 1 };
    if (RULE.test(line)) return { kind: "rule", next: i + 1 };
    if (QUOTE.test(line)) return quoteAt(lines, i);
    if (isTable(lines, i)) return tableAt(lines, i);
    if (ITEM.test(line)) return listAt(lines, i);
    return textAt(lines, i);
  }

  function blocks(lines) {
    const found = [];
    for (let i = 0; i < lines.length; ) {
      if (!lines[i].trim()) { i++; continue; }
      const block = blockAt(lines, i);
      block.source = lines.slice(i, block.next).join("\n");
      i = block.next;
      found.push(block);
    }
    return found;
  }

  // -------------------------------------------------------------------------------------------------- blocks -> nodes
  const codeNode = ({ language, text }) => T.node("div", { class: "code" },
    T.node("div", { class: "code-head" }, T.node("span", {}, language || "text"),
      T.node("button", { type: "button", class: "quiet", "data-do": "copy-code", "aria-label": "Copy code" }, "Copy")),
    T.node("pre", { tabindex: "0" }, T.node("code", {}, H.nodes(text, language))));

  function tableNode({ head, aligns, rows }, open) {
    const cell = (tag, attributes, text, index) => T.node(tag, aligns[index] ? { ...attributes, class: aligns[index] } : attributes, I.read(text, open));
    const row = (line, isLast) => T.node("tr", {}, head.map((_, index) => cell("td", {}, line[index] ?? "", index, isLast)));
    return T.node("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" }, T.node("table", {},
      T.node("thead", {}, T.node("tr", {}, head.map((text, index) => cell("th", { scope: "col" }, text, index)))),
      T.node("tbody", {}, rows.map(row))));
  }

  function itemNode(lines, open, depth) {
    const task = TASK.exec(lines[0]), isTight = !lines.some((line, index) => !line.trim() && index > 0 && index < lines.length - 1);
    const inner = blocks([lines[0].replace(TASK, ""), ...lines.slice(1)]);
    const children = inner.flatMap((block, index) => {
      const openHere = open && index === inner.length - 1;
      return isTight && block.kind === "text" ? I.read(block.text, openHere) : [nodeOf(block, openHere, depth + 1)];
    });
    return T.node("li", {}, task ? (task[1] === " " ? "☐ " : "☑ ") : "", children);
  }

  function nodeOf(block, open, depth) {
    switch (block.kind) {
      case "code": return codeNode(block);
      case "heading": return T.node(`h${Math.min(block.level + 2, 6)}`, { class: `level-${block.level}` }, I.read(block.text, open)); // below the page's own
      case "rule": return T.node("hr");
      case "table": return tableNode(block, open);
      case "quote": return T.node("blockquote", {}, nodes(block.lines, open, depth + 1));
      case "list": {
        const items = block.items.map((lines, index) => (depth < MOST_DEPTH
          ? itemNode(lines, open && index === block.items.length - 1, depth) : T.node("li", {}, lines.join("\n"))));
        return block.ordered ? T.node("ol", { start: String(block.first) }, items) : T.node("ul", {}, items);
      }
      default: return T.node("p", {}, I.read(block.text, open));
    }
  }

  function nodes(lines, open, depth) {
    if (depth >= MOST_DEPTH) return [lines.join("\n")];
    const found = blocks(lines);
    return found.map((block, index) => nodeOf(block, open && index === found.length - 1, depth));
  }

  const linesOf = (text) => text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n");

  // The nodes of a whole text.
  const read = (text, open = false) => nodes(linesOf(text), open, 0);

  // Reads a text that grows: blocks that did not change keep their nodes, so that drawing them again costs nothing.
  function reader() {
    let before = [];
    return (text, open = false) => {
      const found = blocks(linesOf(text));
      before = found.map((block, index) => {
        const openHere = open && index === found.length - 1, old = before[index];
        if (old?.source === block.source && old.open === openHere) return old;
        return { source: block.source, open: openHere, node: nodeOf(block, openHere, 0) };
      });
      return before.map((one) => one.node);
    };
  }

  return { read, reader };
})();
if (typeof module !== "undefined") module.exports = Markdown;
