// The dialog with the user's settings.
const Preferences = (() => {
  const $ = (id) => document.getElementById(id);
  const FIELDS = Object.keys(Settings.DEFAULTS).filter((name) => name !== "model");
  const kept = new Settings.Kept(() => localStorage);

  const values = () => Object.fromEntries(Object.keys(Settings.DEFAULTS).map((name) => [name, kept.get(name)]));
  const own = () => Settings.presets(kept.get("presets"));

  function set(name, text) {
    $(name).value = text;
    keep(name, text);
  }

  function keep(name, text) {
    kept.set(name, text);
    show();
  }

  // Shows the theme, and the preset that the system prompt has.
  function show() {
    document.documentElement.dataset.theme = $("theme").value;
    const all = [...Settings.PRESETS, ...own()], text = $("system").value.trim();
    $("preset").replaceChildren(new Option("Presets…", ""), ...all.map((one) => new Option(one.name, one.text)));
    $("preset").value = all.some((one) => one.text === text) ? text : "";
    $("save-preset").disabled = !text || $("preset").value !== "";
    $("delete-preset").disabled = !own().some((one) => one.text === text);
  }

  const keepPresets = (presets) => keep("presets", JSON.stringify(presets));

  function begin() {
    for (const name of FIELDS) {
      $(name).value = kept.get(name);
      $(name).addEventListener("input", () => keep(name, $(name).value));
    }
    $("preset").addEventListener("change", () => set("system", $("preset").value));
    $("save-preset").addEventListener("click", () => keepPresets(Settings.withPreset(own(), $("system").value)));
    $("delete-preset").addEventListener("click", () => keepPresets(own().filter((one) => one.text !== $("system").value.trim())));
    $("reset").addEventListener("click", () => FIELDS.forEach((name) => set(name, Settings.DEFAULTS[name])));
    $("open-settings").addEventListener("click", () => $("settings").showModal());
    $("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
    show();
  }

  return { begin, values };
})();
