// The Markdown within a line of text: emphasis, code, links, line breaks. Text -> nodes of a tree.
// `open`: the text is still being written, so that what it has begun but not ended counts as ended where the text ends.
const Inline = (() => {
  const T = typeof require === "undefined" ? Tree : require("./tree.js");
  const MOST_DEPTH = 8;
  const TAGS = { "***": ["strong", "em"], "**": ["strong"], __: ["strong"], "*": ["em"], _: ["em"], "~~": ["del"] };
  const LINK = /!?\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?((?:https?:\/\/|mailto:)(?:[^\s<>()]|\([^\s<>()]*\))*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
  const LINK_BEGUN = /!?\[((?:[^[\]\\]|\\.)*)\]\([^\s()]*$/y;
  const ADDRESS = /https?:\/\/(?:[^\s<>()"'`*|\]]|\([^\s<>()"'`*|\]]*\))+/y;
  const BREAK = /<br\s*\/?>|\n/y;
  const ESCAPED = /\\([!-/:-@[-`{-~])/y;
  const MARK = /\*{1,3}|_{1,2}|~~/y;
  const WORD = /[\p{L}\p{N}_]/u;

  function at(pattern, text, index) {
    pattern.lastIndex = index;
    return pattern.exec(text);
  }

  const isSpace = (char) => char === undefined || /\s/.test(char);

  // A link leaves this page, and tells the other side nothing of it.
  const link = (address, children) => T.node("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, children);

  function opens(text, index, mark) {
    const before = text[index - 1], after = text[index + mark.length];
    return !isSpace(after) && !(mark[0] === "_" && before !== undefined && WORD.test(before));
  }

  // Where `mark` ends what begins at `index`, or -1.
  function closing(text, index, mark) {
    for (let i = index; i < text.length; i++) {
      if (text[i] === "\\") { i++; continue; }
      if (text[i] === "`") { i = codeEnd(text, i).next - 1; continue; }
      if (text[i] !== mark[0]) continue;
      let end = i;
      while (text[end] === mark[0]) end++;
      const length = end - i, fits = length === mark.length || (length > mark.length && (length > 2 || mark.length > 1));
      const after = text[end];
      if (fits && i > index && !isSpace(text[i - 1]) && !(mark[0] === "_" && after !== undefined && WORD.test(after))) return end - mark.length;
      i = end - 1;
    }
    return -1;
  }

  // The code that begins with the ticks at `index`: {code, next}; code is null where it does not end.
  function codeEnd(text, index) {
    let begin = index;
    while (text[begin] === "`") begin++;
    const ticks = text.slice(index, begin);
    for (let i = text.indexOf(ticks, begin); i >= 0; ) {
      let end = i;
      while (text[end] === "`") end++;
      if (end - i === ticks.length) return { code: text.slice(begin, i), next: end };
      i = text.indexOf(ticks, end);
    }
    return { code: null, next: begin };
  }

  const code = (text) => T.node("code", {}, /^ .*[^ ].* $/s.test(text) ? text.slice(1, -1) : text);

  // An address that stands in the text, without the full stop behind it.
  function address(text, index) {
    if (index > 0 && WORD.test(text[index - 1])) return null;
    return at(ADDRESS, text, index)?.[0].replace(/[.,;:!?_]+$/, "") ?? null;
  }

  class Reader {
    constructor(text, open, depth) {
      this.text = open ? text.replace(/[*_~`]{1,3}$/, "") : text; // a mark that has just begun
      Object.assign(this, { open, depth, nodes: [], plain: "", unclosed: new Set() });
    }

    push(made) {
      if (this.plain) this.nodes.push(this.plain);
      this.plain = "";
      this.nodes.push(made);
    }

    nested(text, open = false) { return new Reader(text, open, this.depth + 1).read(); }

    read() {
      for (let i = 0; i < this.text.length; ) {
        const next = this.special(i);
        if (next > i) i = next;
        else this.plain += this.text[i++];
      }
      if (this.plain) this.nodes.push(this.plain);
      return this.nodes;
    }

    // Read what begins at `index` and return the index behind it; `index` itself where nothing special begins.
    special(index) {
      const { text } = this;
      switch (text[index]) {
        case "\\": return this.escaped(index);
        case "`": return this.ticks(index);
        case "!": case "[": return this.link(index);
        case "*": case "_": case "~": return this.marked(index);
        case "<": case "\n": return this.lineBreak(index);
        case "h": {
          const found = address(text, index);
          if (found) this.push(link(found, [found]));
          return index + (found?.length ?? 0);
        }
        default: return index;
      }
    }

    escaped(index) {
      const found = at(ESCAPED, this.text, index);
      if (!found) return index;
      this.plain += found[1];
      return index + 2;
    }

    lineBreak(index) {
      const found = at(BREAK, this.text, index);
      if (!found) return index;
      this.push(T.node("br"));
      return index + found[0].length;
    }

    ticks(index) {
      const { code: inner, next } = codeEnd(this.text, index);
      if (inner !== null) {
        this.push(code(inner));
        return next;
      }
      if (this.open) {
        this.push(code(this.text.slice(next)));
        return this.text.length;
      }
      this.plain += this.text.slice(index, next);
      return next;
    }

    link(index) {
      const found = at(LINK, this.text, index), begun = !found && this.open ? at(LINK_BEGUN, this.text, index) : null;
      if (!found && !begun) return index;
      const label = (found ?? begun)[1];
      const children = this.depth < MOST_DEPTH ? this.nested(label) : [label];
      const inner = children.map((one) => (one.tag === "a" ? T.textOf(one) : one)); // no link within a link
      if (found) this.push(link(found[2], inner.length ? inner : [found[2]]));
      else inner.forEach((one) => this.push(one));
      return index + (found ?? begun)[0].length;
    }

    marked(index) {
      const mark = at(MARK, this.text, index)?.[0];
      if (!mark) return index;
      const begin = index + mark.length;
      if (opens(this.text, index, mark) && this.depth < MOST_DEPTH) {
        const end = this.unclosed.has(mark) ? -1 : closing(this.text, begin, mark);
        if (end >= 0 || (this.open && begin < this.text.length && mark !== "_")) {
          const inner = end >= 0 ? this.nested(this.text.slice(begin, end)) : this.nested(this.text.slice(begin), true);
          this.push(TAGS[mark].reduceRight((children, tag) => [T.node(tag, {}, children)], inner)[0]);
          return end >= 0 ? end + mark.length : this.text.length;
        }
        this.unclosed.add(mark); // none further on will be closed either
      }
      this.plain += mark;
      return begin;
    }
  }

  const read = (text, open = false) => new Reader(text, open, 0).read();
  return { read };
})();
if (typeof module !== "undefined") module.exports = Inline;
