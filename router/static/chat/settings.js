// What a person sets: how answers are sampled, the system prompt, the theme. Kept in this browser; the API key in this tab only.
const Settings = (() => {
  const DEFAULTS = { model: "", system: "", temperature: "0.7", "top-p": "", "max-tokens": "1024", seed: "", stop: "", theme: "" };

  const number = (text) => (String(text).trim() === "" || !Number.isFinite(Number(text)) ? null : Number(text));

  // A line each; \n and \t are the characters, because a line cannot hold them.
  function stops(text) {
    const lines = text.split("\n").filter((line) => line !== "");
    return lines.map((line) => line.replace(/\\([nt\\])/g, (_, char) => ({ n: "\n", t: "\t", "\\": "\\" })[char]));
  }

  // The fields of a request. Empty ones are left to the service; it refuses the others that it does not take, in its own words.
  function fields(values) {
    const found = {
      temperature: number(values.temperature), top_p: number(values["top-p"]), max_tokens: number(values["max-tokens"]),
      seed: number(values.seed), stop: stops(values.stop),
    };
    return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== null && value?.length !== 0));
  }

  // The values as they were kept, `storage` being a function because it may be forbidden to look at.
  class Kept {
    constructor(storage, defaults = DEFAULTS) { Object.assign(this, { storage, defaults }); }

    get(name) {
      try { return this.storage().getItem(`diptych.${name}`) ?? this.defaults[name] ?? ""; } catch { return this.defaults[name] ?? ""; }
    }

    set(name, value) {
      try { this.storage().setItem(`diptych.${name}`, value); } catch { /* then it lasts until the page is closed */ }
    }
  }

  return { DEFAULTS, Kept, fields };
})();
if (typeof module !== "undefined") module.exports = Settings;
