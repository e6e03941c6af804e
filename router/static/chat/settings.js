// User settings: sampling, system prompt, theme. Stored in this browser; the API key in this tab only.
const Settings = (() => {
  const DEFAULTS = { model: "", system: "", temperature: "0.7", "top-p": "", "max-tokens": "1024", seed: "", stop: "", theme: "" };

  const number = (text) => (String(text).trim() === "" || !Number.isFinite(Number(text)) ? null : Number(text));

  // One stop sequence per line. \n and \t are escapes, because a line cannot contain these characters.
  function stops(text) {
    const lines = text.split("\n").filter((line) => line !== "");
    return lines.map((line) => line.replace(/\\([nt\\])/g, (_, char) => ({ n: "\n", t: "\t", "\\": "\\" })[char]));
  }

  // Request fields of the settings. Empty settings are omitted; the service validates the others.
  function fields(values) {
    const found = {
      temperature: number(values.temperature), top_p: number(values["top-p"]), max_tokens: number(values["max-tokens"]),
      seed: number(values.seed), stop: stops(values.stop),
    };
    return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== null && value?.length !== 0));
  }

  // Stored values. `storage` is a function, because even access may be forbidden.
  class Kept {
    constructor(storage, defaults = DEFAULTS) { Object.assign(this, { storage, defaults }); }

    get(name) {
      try { return this.storage().getItem(`diptych.${name}`) ?? this.defaults[name] ?? ""; } catch { return this.defaults[name] ?? ""; }
    }

    set(name, value) {
      try { this.storage().setItem(`diptych.${name}`, value); } catch { /* not stored: lost when the page is closed */ }
    }
  }

  return { DEFAULTS, Kept, fields };
})();
if (typeof module !== "undefined") module.exports = Settings;
