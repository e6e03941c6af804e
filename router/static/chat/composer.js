// The message that is being written: its text, attached files, and the context that it and the conversation use.
const Composer = (() => {
  const $ = (id) => document.getElementById(id);
  const tab = new Settings.Kept(() => sessionStorage, {});
  let files = [], changed = () => {}, problem = () => {};

  const draft = () => ({ question: $("prompt").value.trim(), files });
  const isEmpty = () => !draft().question && !files.length;

  function fit() {
    $("prompt").style.height = "auto";
    $("prompt").style.height = `${$("prompt").scrollHeight}px`;
  }

  function set(text, newFiles = files) {
    files = newFiles;
    $("prompt").value = text;
    tab.set("draft", text);
    fit();
    Tree.patch($("files"), Turns.draftFiles(files));
    $("files").hidden = !files.length;
    changed();
  }

  async function attach(added) {
    const problems = [];
    for (const one of added) {
      try {
        const file = await Attachments.read(one, files);
        set($("prompt").value, [...files, file]);
        count(file);
      } catch (error) {
        problems.push(error.message);
      }
    }
    if (problems.length) problem(problems.join(" "));
    $("prompt").focus();
  }

  async function count(file) {
    try {
      const tokens = await Access.count(file.text);
      Object.assign(file, { tokens });
      set($("prompt").value);
    } catch { /* the estimate remains */ }
  }

  // Shows how much of the context the `turns` and the draft use.
  function showContext(turns) {
    const used = Context.used(turns, draft()), most = Access.maxTokens(), { text, share, state } = Context.shown(used, most);
    $("context").hidden = !used.tokens;
    $("context").className = state;
    $("context-text").textContent = state === "full" ? `${text}: too long` : text;
    $("context-meter").hidden = !most;
    $("context-meter").value = share;
  }

  // `onChange()` follows each change of the draft. `onProblem(text)` shows why a file was not attached.
  function begin(onChange, onProblem) {
    [changed, problem] = [onChange, onProblem];
    $("prompt").addEventListener("input", () => set($("prompt").value));
    $("attach").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", () => { attach([...$("file").files]); $("file").value = ""; });
    $("files").addEventListener("click", (event) => {
      const index = event.target.closest("[data-index]")?.dataset.index;
      if (index !== undefined) set($("prompt").value, files.filter((_, each) => each !== Number(index)));
      $("prompt").focus();
    });
    document.addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
    document.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      attach([...event.dataTransfer.files]);
    });
    set(tab.get("draft"));
  }

  return { begin, draft, isEmpty, set, showContext };
})();
