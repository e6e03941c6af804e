// Syntax highlighting of comments, strings, numbers and keywords common to most languages. Text -> tree nodes.
const Highlight = (() => {
  const T = typeof require === "undefined" ? Tree : require("./tree.js");
  const MOST_CHARS = 20000; // longer code is not highlighted, because it is redrawn while it grows
  const WORDS = new Set(("abstract and as assert async await bool break case catch char class const continue def default del delete do done double elif"
    + " else end enum except export extends extern false False fi final finally float fn for foreach from func function global go if impl implements import in"
    + " include int interface is lambda let local long loop match mod module mut namespace new nil None nonlocal not null nullptr of or package pass private"
    + " protected pub public raise return self short signed sizeof static string struct super switch template then this throw trait true True try type typedef"
    + " typeof undefined union unsafe unsigned until use using val var virtual void when where while with yield").split(" "));
  const SQL = new Set(("all and as asc avg between by case count create delete desc distinct drop else end exists from full group having in index inner insert"
    + " into is join key left like limit max min not null offset on or order outer primary right select set sum table then union unique update values view when"
    + " where with").split(" "));
  const HASH = new Set(["bash", "console", "dockerfile", "ini", "makefile", "perl", "powershell", "py", "python", "r", "rb", "ruby", "sh", "shell", "toml", "yaml", "yml", "zsh"]);
  const SLASHES = new Set(["c", "c++", "cc", "cpp", "cs", "csharp", "css", "dart", "go", "h", "hpp", "java", "javascript", "js", "jsx", "json", "jsonc", "kotlin", "kt", "php",
    "rs", "rust", "scala", "scss", "swift", "ts", "tsx", "typescript", "zig"]);
  const DASHES = new Set(["haskell", "hs", "lua", "sql"]);
  const TEXTS = `"""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|"(?:[^"\\\\\\n]|\\\\.)*(?:"|$|(?=\\n))|'(?:[^'\\\\\\n]|\\\\.)*'|\`(?:[^\`\\\\]|\\\\.)*(?:\`|$)`;
  const REST = `|\\b\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?\\w*|[\\p{L}_$][\\p{L}\\p{N}_$]*`;

  function pattern(language) {
    const slashes = "\\/\\*[\\s\\S]*?(?:\\*\\/|$)|\\/\\/[^\\n]*";
    const comment = HASH.has(language) ? "(?<![^\\s;(])#[^\\n]*" : SLASHES.has(language) ? slashes : DASHES.has(language) ? "--[^\\n]*" : "";
    return comment ? new RegExp(`(${comment})|(${TEXTS})${REST}`, "gu") : null;
  }

  function kindOf(found, words, fold) {
    if (found[1] !== undefined) return "comment";
    if (found[2] !== undefined) return "string";
    if (/^\d/.test(found[0])) return "number";
    return words.has(fold ? found[0].toLowerCase() : found[0]) ? "word" : "";
  }

  function nodes(text, language) {
    const name = language.toLowerCase(), search = text.length <= MOST_CHARS ? pattern(name) : null;
    if (!search) return [text];
    const made = [], isSql = name === "sql";
    let done = 0;
    for (const found of text.matchAll(search)) {
      const kind = kindOf(found, isSql ? SQL : WORDS, isSql);
      if (!kind) continue;
      if (found.index > done) made.push(text.slice(done, found.index));
      made.push(T.node("span", { class: `code-${kind}` }, found[0]));
      done = found.index + found[0].length;
    }
    return [...made, text.slice(done)];
  }

  return { nodes };
})();
if (typeof module !== "undefined") module.exports = Highlight;
