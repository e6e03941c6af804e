// Access to the service: its models, and the API key, which is requested if the service requires one.
const Access = (() => {
  const $ = (id) => document.getElementById(id);
  const RETRY_MS = 3000;
  const tab = new Settings.Kept(() => sessionStorage, {}), kept = new Settings.Kept(() => localStorage);
  let models = [], finding = 0, triedKey = "", changed = () => {};

  const key = () => $("key").value.trim();

  // Ask for the key after an error with status 401.
  function lock(error) {
    const refused = key() !== "";
    $("unlock").classList.toggle("refused", refused);
    $("unlock-title").textContent = refused ? "The API key was rejected" : "An API key is required";
    $("unlock-why").textContent = `${error.message} The key is stored in this tab only.`;
    if (!$("unlock").hidden) return; // keep what is being typed
    $("unlock").hidden = false;
    $("composer").inert = true;
    $("unlock-key").value = key();
    $("unlock-key").focus();
  }

  function unlock() {
    if ($("unlock").hidden) return;
    $("unlock").hidden = true;
    $("unlock-key").value = "";
    $("composer").inert = false;
    $("prompt").focus();
  }

  function showModels() {
    const wanted = kept.get("model");
    $("model").replaceChildren(...models.map(({ id, ready, state }) => new Option(ready === false && !state ? `${id} (not ready)` : id, id)));
    if (models.some(({ id }) => id === wanted)) $("model").value = wanted;
    $("model").disabled = models.length < 2;
    showModel();
  }

  const chosen = () => models.find(({ id }) => id === $("model").value);

  function showModel() {
    const one = chosen();
    $("model").title = one?.max_model_len ? `${one.id}: at most ${Timings.whole(one.max_model_len)} tokens, including the answer` : "";
    document.title = `Diptych: ${$("model").value}`;
  }

  function cannotFind(error) {
    if (error.status === 401) { // the form asks for the key
      $("banner").hidden = true;
      if (!models.length) $("model").replaceChildren(new Option("locked"));
      lock(error);
      return;
    }
    Tree.patch($("banner"), Turns.errorNode({ title: "", detail: "", ...error, message: error.message }, false).children); // announced once
    $("banner").hidden = false;
    finding = setTimeout(find, Math.max(RETRY_MS, 1000 * (error.retryAfterS ?? 0)));
  }

  // Request the models until the service returns them.
  async function find() {
    clearTimeout(finding);
    triedKey = key();
    try {
      models = (await (await Service.ask("/v1/models", triedKey)).json()).data;
      showModels();
      $("banner").hidden = true;
      unlock();
    } catch (error) {
      cannotFind(error);
    }
    changed();
  }

  // The number of tokens of a text. Throws ApiError.
  async function count(text) {
    const body = JSON.stringify({ model: $("model").value, prompt: text, add_special_tokens: false });
    return (await (await Service.ask("/tokenize", key(), { method: "POST", body })).json()).count;
  }

  function begin(onChange) {
    changed = onChange;
    $("key").value = tab.get("key");
    $("key").addEventListener("input", () => tab.set("key", $("key").value));
    $("model").addEventListener("change", () => { kept.set("model", $("model").value); showModel(); changed(); });
    document.addEventListener("visibilitychange", () => { if (!document.hidden && models.length) find(); }); // models load and unload
    $("settings").addEventListener("close", () => { if (!models.length || key() !== triedKey) find(); });
    $("unlock").addEventListener("submit", (event) => {
      event.preventDefault();
      $("key").value = $("unlock-key").value.trim();
      tab.set("key", $("key").value);
      find().then(() => $("unlock-key").select());
    });
    find();
  }

  return { begin, key, lock, hasModel: () => models.length > 0, model: () => $("model").value, maxTokens: () => chosen()?.max_model_len ?? 0, count };
})();
