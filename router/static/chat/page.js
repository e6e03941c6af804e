// The chat page: the current conversation, running answers, and the actions of its buttons.
const $ = (id) => document.getElementById(id);
const NEAR_END_PX = 60, TICK_MS = 200, SAVE_MS = 2000, UNDO_MS = 8000, COPIED_MS = 1500;
const kept = new Settings.Kept(() => localStorage), tab = new Settings.Kept(() => sessionStorage, {});
const shelf = new Conversations.Shelf(() => localStorage);
const isTouched = matchMedia("(pointer: coarse)"), isNarrow = matchMedia("(max-width: 860px)");

let all = shelf.list(); // the listed conversations; a new one is added with its first question
let current = all.find(({ id }) => id === tab.get("conversation")) ?? fresh();
let editing = null; // turn whose question is being edited
let deleted = null; // conversation that Undo restores
const runs = new Map(); // id of a conversation -> {run, turn}

function fresh() { return Conversations.blank(`${Date.now().toString(36)}${Math.random().toString(36).slice(2, 10)}`); }

// ----------------------------------------------------------------------------------------------------------- drawing
let readers = new WeakMap(), drawnTurns = new WeakMap();
let drawing = 0;

function readerOf(answer) {
  if (!readers.has(answer)) readers.set(answer, Markdown.reader());
  return readers.get(answer);
}

// Returns the tree of a turn. Unchanged turns return the same tree, which costs nothing to draw again.
function turnTree(turn, index) {
  const answer = Conversations.shownAnswer(turn), busy = runs.get(current.id), isLast = index === current.turns.length - 1;
  const run = busy?.turn === turn ? busy.run.view : null;
  const pauseS = isLast && answer?.error?.retryAt ? Math.max(0, (answer.error.retryAt - Date.now()) / 1000) : 0;
  const view = { index, isEditing: editing === turn, isLast, isBusy: Boolean(busy), numLater: current.turns.length - 1 - index, pauseS: Math.ceil(pauseS) };
  const key = JSON.stringify([view, turn.shown, turn.answers.length]), before = drawnTurns.get(turn);
  if (!run && before?.key === key) return before.tree;
  const tree = Turns.turnNode(turn, { ...view, run }, answer ? readerOf(answer) : undefined);
  drawnTurns.set(turn, { key: run ? "" : key, tree });
  return tree;
}

const atEnd = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < NEAR_END_PX;
const toEnd = () => { $("scroll").scrollTop = $("scroll").scrollHeight; };

function draw() {
  cancelAnimationFrame(drawing);
  drawing = 0;
  const stick = atEnd();
  Tree.patch($("log"), current.turns.map(turnTree));
  $("empty").hidden = current.turns.length > 0;
  if (stick) toEnd();
  $("latest").hidden = atEnd();
}
function drawSoon() { drawing ||= requestAnimationFrame(draw); }

function drawList() {
  Tree.patch($("conversations"), Sidebar.nodes(all, current.id, new Set(runs.keys()), new Date().setHours(0, 0, 0, 0)));
  $("none").hidden = all.length > 0;
}

function showState() {
  const busy = runs.has(current.id);
  $("new").disabled = current.turns.length === 0;
  $("send").textContent = busy ? "Stop" : "Send";
  $("send").disabled = !busy && (!Access.hasModel() || !$("prompt").value.trim());
}

function drawAll() {
  draw();
  drawList();
  showState();
}

// Redraw what changes with time: the wait for an answer, and the countdown to a retry.
setInterval(() => {
  const error = Conversations.shownAnswer(current.turns.at(-1) ?? { answers: [] })?.error;
  if (runs.has(current.id) || (error?.retryAt ?? 0) > Date.now() - 2 * TICK_MS) draw();
}, TICK_MS);

$("katex").addEventListener("load", () => { // draw formulas that were shown as source
  [readers, drawnTurns] = [new WeakMap(), new WeakMap()];
  draw();
});

// ----------------------------------------------------------------------------------------------------- conversations
function save(conversation) {
  const problem = shelf.save(conversation);
  if (problem) toast(problem);
}

function open(conversation) {
  [current, editing] = [conversation, null];
  tab.set("conversation", current.id);
  drawAll();
  toEnd();
  closeDrawer();
  if (!isTouched.matches) $("prompt").focus();
}

function toast(text, undo = null) {
  deleted = undo;
  $("toast-text").textContent = text;
  $("undo").hidden = !undo;
  $("toast").hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { $("toast").hidden = true; }, UNDO_MS);
}

function remove(conversation) {
  runs.get(conversation.id)?.run.stop();
  all = all.filter((one) => one !== conversation);
  shelf.remove(conversation.id);
  toast(`“${conversation.title}” deleted.`, conversation);
  if (current === conversation) open(fresh());
  drawList();
}

function exportFile(conversation) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([Conversations.exported(conversation)], { type: "text/markdown" }));
  link.download = Conversations.fileName(conversation);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), UNDO_MS);
}

// Another tab has changed, added or deleted conversations. Keep those with running answers.
addEventListener("storage", (event) => {
  if (event.key !== null && !event.key.startsWith(Conversations.PREFIX)) return;
  const mine = all.filter(({ id }) => runs.has(id));
  all = [...mine, ...shelf.list().filter(({ id }) => !runs.has(id))];
  if (!editing && !runs.has(current.id)) current = all.find(({ id }) => id === current.id) ?? (current.turns.length ? fresh() : current);
  drawAll();
});

// ----------------------------------------------------------------------------------------------------------- answers
function settings() { return Object.fromEntries(Object.keys(Settings.DEFAULTS).map((name) => [name, kept.get(name)])); }

// Generates another answer for a turn of the current conversation.
async function answer(turn) {
  const conversation = current, values = settings(), answer = Answering.blank(Access.model());
  const messages = Conversations.messages(conversation, conversation.turns.indexOf(turn), values.system.trim());
  turn.answers = [...turn.answers.filter((one) => one.text), answer]; // drop failed answers
  turn.shown = turn.answers.length - 1;
  let savedAt = performance.now();
  const run = new Answering.Run(answer, Answering.body(answer.model, messages, Settings.fields(values)), Access.key(), () => {
    if (conversation === current) drawSoon();
    if (performance.now() - savedAt < SAVE_MS) return;
    savedAt = performance.now();
    if (all.includes(conversation)) save(conversation);
  });
  runs.set(conversation.id, { run, turn });
  touch(conversation);
  drawAll();
  toEnd();
  await run.toEnd();
  runs.delete(conversation.id);
  if (answer.error?.status === 401) Access.lock(answer.error);
  if (all.includes(conversation)) touch(conversation); // unless it was deleted while the answer was generated
  drawAll();
  if (conversation === current) $("said").textContent = answer.error ? `${answer.error.title}. ${answer.error.message}` : answer.text || "No text";
}

function touch(conversation) {
  Object.assign(conversation, { changed: Date.now(), title: Conversations.titleOf(conversation) });
  if (!all.includes(conversation)) all.push(conversation);
  tab.set("conversation", current.id);
  save(conversation);
}

function send(question, index = current.turns.length) {
  if (!question.trim() || !Access.hasModel() || runs.has(current.id)) return false;
  const turn = { question: question.trim(), answers: [], shown: 0 };
  current.turns = [...current.turns.slice(0, index), turn];
  editing = null;
  answer(turn);
  return true;
}

function edit(turn) {
  editing = turn;
  draw();
  const field = $("log").querySelector(".editor textarea");
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length);
}

function cancelEdit() {
  editing = null;
  draw();
  $("prompt").focus();
}

function turnTo(turn, index) {
  turn.shown = index;
  save(current);
  draw();
}

// Copies text. Browsers provide navigator.clipboard only on https and localhost.
async function clip(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = document.body.appendChild(document.createElement("textarea"));
  field.className = "only-read";
  field.value = text;
  field.select();
  const isDone = document.execCommand("copy");
  field.remove();
  if (!isDone) throw new Error("not allowed");
}

async function copyText(button, text) {
  const before = button.textContent;
  try {
    await clip(text);
    button.firstChild.data = "Copied";
  } catch {
    button.firstChild.data = "Copying is not allowed";
  }
  setTimeout(() => { if (button.firstChild) button.firstChild.data = before; }, COPIED_MS);
}

const DEEDS = {
  "retry": (turn) => { if (!runs.has(current.id)) { answer(turn); $("prompt").focus(); } },
  "edit": edit,
  "cancel-edit": cancelEdit,
  "answer-before": (turn) => turnTo(turn, turn.shown - 1),
  "answer-after": (turn) => turnTo(turn, turn.shown + 1),
  "copy-question": (turn, button) => copyText(button, turn.question),
  "copy-answer": (turn, button) => copyText(button, Conversations.shownAnswer(turn).text),
  "copy-code": (turn, button) => copyText(button, button.closest(".code").querySelector("pre").textContent),
};

$("log").addEventListener("click", (event) => {
  const button = event.target.closest("button[data-do]"), index = button?.closest("[data-turn]").dataset.turn;
  if (button) DEEDS[button.dataset.do](current.turns[index], button);
});
$("log").addEventListener("submit", (event) => {
  event.preventDefault();
  send(event.target.querySelector("textarea").value, current.turns.indexOf(editing));
});
$("log").addEventListener("keydown", (event) => {
  if (event.target.closest(".editor textarea") && sends(event)) event.target.form.requestSubmit();
});

// Whether a key press sends the text: Enter, except on touch screens, where it is the only way to start a new line.
function sends(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouched.matches) return false;
  event.preventDefault();
  return true;
}

// ------------------------------------------------------------------------------------------------------ the composer
function fitPrompt() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

function setPrompt(text) {
  $("prompt").value = text;
  tab.set("draft", text);
  fitPrompt();
  showState();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const busy = runs.get(current.id);
  if (busy) busy.run.stop();
  else if (send($("prompt").value)) setPrompt("");
});
$("prompt").addEventListener("input", () => setPrompt($("prompt").value));
$("prompt").addEventListener("keydown", (event) => {
  if (sends(event) && !runs.has(current.id)) $("composer").requestSubmit(); // Enter never stops an answer
  if (event.key === "ArrowUp" && !$("prompt").value && current.turns.length && !runs.has(current.id)) {
    event.preventDefault();
    edit(current.turns.at(-1));
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("settings").open || event.isComposing) return;
  if (editing) cancelEdit();
  else if (!$("backdrop").hidden) closeDrawer();
  else runs.get(current.id)?.run.stop();
});
$("new").addEventListener("click", () => open(fresh()));
$("scroll").addEventListener("scroll", () => { $("latest").hidden = atEnd(); });
$("latest").addEventListener("click", toEnd);

// --------------------------------------------------------------------------- the list, a drawer on narrow screens
function showDrawer(isOpen) {
  $("backdrop").hidden = !isOpen;
  $("sidebar").classList.toggle("opened", isOpen);
  $("sidebar").inert = isNarrow.matches && !isOpen;
  $("column").inert = isNarrow.matches && isOpen;
  $("menu").setAttribute("aria-expanded", String(isOpen));
}

function closeDrawer() {
  const wasOpen = !$("backdrop").hidden;
  showDrawer(false);
  if (wasOpen) $("menu").focus();
}

$("menu").addEventListener("click", () => {
  showDrawer($("backdrop").hidden);
  if (!$("backdrop").hidden) $("sidebar").querySelector("button")?.focus();
});
$("backdrop").addEventListener("click", closeDrawer);
isNarrow.addEventListener("change", () => showDrawer(false));
$("sidebar").addEventListener("click", (event) => {
  const button = event.target.closest("button[data-do]");
  const one = all.find(({ id }) => id === button?.closest("[data-id]").dataset.id);
  if (one) ({ open, export: exportFile, delete: remove })[button.dataset.do](one);
});
$("undo").addEventListener("click", () => {
  $("toast").hidden = true;
  all.push(deleted);
  save(deleted);
  open(deleted);
});

// ------------------------------------------------------------------------------------------------------ the settings
const FIELDS = Object.keys(Settings.DEFAULTS).filter((name) => name !== "model");

function showTheme() { document.documentElement.dataset.theme = $("theme").value; }

for (const name of FIELDS) {
  $(name).value = kept.get(name);
  $(name).addEventListener("input", () => { kept.set(name, $(name).value); showTheme(); });
}
$("reset").addEventListener("click", () => {
  for (const name of FIELDS) {
    $(name).value = Settings.DEFAULTS[name];
    kept.set(name, Settings.DEFAULTS[name]);
  }
  showTheme();
});
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
addEventListener("pagehide", () => { for (const id of runs.keys()) { const one = all.find((each) => each.id === id); if (one) save(one); } });

showTheme();
showDrawer(false);
setPrompt(tab.get("draft"));
drawAll();
toEnd();
Access.begin(showState);
