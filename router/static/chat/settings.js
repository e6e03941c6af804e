// User settings: sampling, system prompt and its presets, theme. Stored in this browser; the API key in this tab only.
// Sampling settings are empty by default: the service's defaults apply.
const Settings = (() => {
  const DEFAULTS = { model: "", system: "", temperature: "", "top-p": "", "max-tokens": "", seed: "", stop: "", theme: "" };

  const NAME_CHARS = 40;
  const PRESETS = [
    { name: "Brief", text: "Answer in as few words as possible." },
    { name: "Step by step", text: "Think step by step. State the result at the end." },
    { name: "Code review", text: "Review the code of the user. List its defects, the most severe first, each with a correction." },
  ];

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

  // The user's presets, {name, text}, from their stored form.
  function presets(stored) {
    try {
      return JSON.parse(stored).filter((one) => typeof one?.name === "string" && typeof one.text === "string");
    } catch {
      return [];
    }
  }

  // Adds a system prompt to the user's presets. Its first line is its name; a preset of that name is replaced.
  function withPreset(own, text) {
    const name = [...text.trim().split("\n")[0]].slice(0, NAME_CHARS).join("");
    return [...own.filter((one) => one.name !== name), { name, text: text.trim() }];
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

  return { DEFAULTS, PRESETS, Kept, fields, presets, withPreset };
})();
if (typeof module !== "undefined") module.exports = Settings;
