// Text files attached to a message: {name, text, tokens}. `tokens` is 0 until the service has counted them.
const Attachments = (() => {
  const MOST_BYTES = 512 * 1024; // of all files of a message
  const KIB = 1024, CHARS_PER_TOKEN = 4;

  const bytesOf = (files) => files.reduce((sum, { text }) => sum + new Blob([text]).size, 0);
  const size = (bytes) => (bytes < KIB ? `${bytes} B` : bytes < KIB * KIB ? `${Math.ceil(bytes / KIB)} KiB` : `${(bytes / KIB / KIB).toFixed(1)} MiB`);

  // Estimated number of tokens of a text.
  const estimate = (text) => Math.ceil(text.length / CHARS_PER_TOKEN);
  const tokensOf = (files) => files.reduce((sum, { text, tokens }) => sum + (tokens || estimate(text)), 0);

  // Reads a File. `before` are the files that the message has already. Throws Error with a message for the user.
  async function read(file, before) {
    if (bytesOf(before) + file.size > MOST_BYTES) throw new Error(`${file.name} (${size(file.size)}) is too large: the files of a message may have ${size(MOST_BYTES)} in total.`);
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (!text.includes("\0")) return { name: file.name, text, tokens: 0 };
    } catch { /* other encodings, images and archives */ }
    throw new Error(`${file.name} is not a text file in UTF-8.`);
  }

  // The file as a fenced block that nothing in it can end.
  function fenced({ name, text }) {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([marks]) => marks.length));
    const fence = "`".repeat(longest + 1), kind = /\.(\w+)$/.exec(name)?.[1] ?? "";
    return `File ${name}:\n${fence}${kind}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  }

  // The content of the message that asks `question` about `files`.
  const content = ({ question, files = [] }) => [...files.map(fenced), question].filter(Boolean).join("\n\n");

  return { MOST_BYTES, read, content, estimate, tokensOf };
})();
if (typeof module !== "undefined") module.exports = Attachments;
