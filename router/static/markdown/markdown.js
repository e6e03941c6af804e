// Markdown renderer for model output. marked parses it into tokens, which become tree nodes; no HTML is generated.
const Markdown = (() => {
  const isNode = typeof require !== "undefined";
  const T = isNode ? require("./tree.js") : Tree;
  const H = isNode ? require("./highlight.js") : Highlight;
  const F = isNode ? require("./formula.js") : Formula;
  const { Lexer, Tokenizer } = isNode ? require("../vendor/marked-18.2.1/marked.umd.js") : marked;
  const MAX_DEPTH = 16; // deeper lists and quotes remain text
  const MAX_INLINE_CHARS = 10000; // marked parses emphasis in time quadratic in a paragraph's length
  const LINK = /^(?:https?:\/\/|mailto:)/i;

  // HTML and link definitions remain text, except that <br> is a line break.
  class TextTokenizer extends Tokenizer {
    html() {}
    def() {}
    tag(source) {
      const found = /^<br\s*\/?>/i.exec(source);
      return found ? { type: "br", raw: found[0] } : undefined;
    }
  }

  const lexer = () => new Lexer({ gfm: true, breaks: true, tokenizer: new TextTokenizer(), extensions: F.extensions });

  // Returns the result of `read`, or the text as one token if it nests too deeply for the stack.
  function tokens(text, read) {
    try {
      return read(lexer());
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      return [{ type: "text", raw: text, text }];
    }
  }

  const isSpace = (token) => token.type === "space" || token.type === "checkbox";
  const blocks = (text) => tokens(text, (one) => one.blockTokens(text)).filter((one) => !isSpace(one));
  const inlines = (text) => (text.length > MAX_INLINE_CHARS ? [text] : tokens(text, (one) => one.inlineTokens(text)).map(inlineNode));
  const children = (token) => token.tokens.map(inlineNode);

  // Links open in a new tab without a referrer. Other schemes, such as javascript:, remain text.
  const link = (token, inner) => (LINK.test(token.href)
    ? T.node("a", { href: token.href, target: "_blank", rel: "noopener noreferrer" }, inner.length ? inner : [token.href]) : token.raw);

  function inlineNode(token) {
    switch (token.type) {
      case "strong": case "em": case "del": return T.node(token.type, {}, children(token));
      case "codespan": return T.node("code", {}, token.text);
      case "br": return T.node("br");
      case "link": return link(token, children(token));
      case "formula": return F.node(token);
      case "image": return link(token, token.text ? [token.text] : []);
      default: return token.text ?? token.raw;
    }
  }

  function codeNode({ lang, text }) {
    const language = /^\S*/.exec(lang ?? "")[0];
    return T.node("div", { class: "code" },
      T.node("div", { class: "code-head" }, T.node("span", {}, language || "text"),
        T.node("button", { type: "button", class: "quiet", "data-do": "copy-code", "aria-label": "Copy code" }, "Copy")),
      T.node("pre", { tabindex: "0" }, T.node("code", {}, H.nodes(text, language))));
  }

  function tableNode({ header, rows }) {
    const classes = { right: { class: "right" }, center: { class: "middle" } };
    const row = (tag, attributes, cells) => T.node("tr", {}, cells.map((one) => T.node(tag, { ...attributes, ...classes[one.align] }, inlines(one.text))));
    return T.node("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, T.node("table", {},
      T.node("thead", {}, row("th", { scope: "col" }, header)),
      T.node("tbody", {}, rows.map((cells) => row("td", {}, cells)))));
  }

  function itemNode(item, depth) {
    const task = item.task ? (item.checked ? "☑ " : "☐ ") : "";
    return T.node("li", {}, task, item.tokens.filter((one) => !isSpace(one)).flatMap((one) => (one.type === "text" && !item.loose ? inlines(one.text) : [blockNode(one, depth)])));
  }

  function blockNode(token, depth) {
    if (depth > MAX_DEPTH) return token.raw;
    switch (token.type) {
      case "code": return codeNode(token);
      case "heading": return T.node(`h${Math.min(token.depth + 2, 6)}`, { class: `level-${token.depth}` }, inlines(token.text)); // below the page's headings
      case "formula": return F.node(token);
      case "hr": return T.node("hr");
      case "table": return tableNode(token);
      case "blockquote": return T.node("blockquote", {}, token.tokens.filter((one) => !isSpace(one)).map((one) => blockNode(one, depth + 1)));
      case "list": {
        const items = token.items.map((item) => itemNode(item, depth + 1));
        return token.ordered ? T.node("ol", { start: String(token.start) }, items) : T.node("ul", {}, items);
      }
      default: return T.node("p", {}, inlines(token.text ?? token.raw));
    }
  }

  // Closes the delimiters that a line has opened.
  function closed(line) {
    const whole = line.replace(/[*_~`]{1,3}$/, "").replace(/!?\[([^[\]]*)\]\([^\s()]*$/, "$1"), begun = [];
    for (const [mark] of whole.matchAll(/\\.|`+|(?:\*{1,3}|~~)(?=\S)|(?<=\S)(?:\*{1,3}|~~)/g)) {
      const last = begun.at(-1);
      if (mark === last) begun.pop();
      else if (mark[0] !== "\\" && last?.[0] !== "`") begun.push(mark);
    }
    return whole + begun.reverse().join("");
  }

  function endsWithCode(token) {
    const last = (token.items ?? token.tokens ?? []).at(-1);
    return token.type === "code" || (last !== undefined && endsWithCode(last));
  }

  // Treats a block that is still growing as if its last line were complete, so that its formatting does not flicker.
  function ended(block) {
    if (endsWithCode(block) || block.type === "table") return block;
    const begin = block.raw.trimEnd().lastIndexOf("\n") + 1;
    return blocks(block.raw.slice(0, begin) + closed(block.raw.slice(begin).trimEnd())).at(-1) ?? block;
  }

  // Returns a renderer for a growing text. Unchanged blocks keep their nodes, so drawing them again costs nothing.
  function reader() {
    let before = [];
    return (text, open = false) => {
      const found = blocks(text.replace(/\r\n?/g, "\n"));
      before = found.map((block, index) => {
        const openHere = open && index === found.length - 1, old = before[index];
        if (old?.raw === block.raw && old.open === openHere) return old;
        return { raw: block.raw, open: openHere, node: blockNode(openHere ? ended(block) : block, 0) };
      });
      return before.map((one) => one.node);
    };
  }

  // Renders a complete text.
  const read = (text, open = false) => reader()(text, open);

  return { read, reader };
})();
if (typeof module !== "undefined") module.exports = Markdown;
