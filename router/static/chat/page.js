// The chat page: the current conversation, running answers, and the actions of its buttons.
const $ = (id) => document.getElementById(id);
const NEAR_END_PX = 60, TICK_MS = 200, SAVE_MS = 2000, UNDO_MS = 8000, COPIED_MS = 1500;
const tab = new Settings.Kept(() => sessionStorage, {});
const shelf = new Conversations.Shelf(() => localStorage);
const isTouched = matchMedia("(pointer: coarse)");

let all = shelf.list(); // the listed conversations; a new one is added with its first question
let current = all.find(({ id }) => id === tab.get("conversation")) ?? Conversations.blank();
let editing = null; // turn whose question is being edited
let deleted = null; // conversation that Undo restores
const runs = new Map(); // id of a conversation -> {run, turn}

const turns = () => Conversations.path(current); // the shown ones

// ----------------------------------------------------------------------------------------------------------- drawing
let readers = new WeakMap(), drawnTurns = new WeakMap();
let drawing = 0;

function readerOf(answer) {
  if (!readers.has(answer)) readers.set(answer, Markdown.reader());
  return readers.get(answer);
}

// Returns the tree of a turn. Unchanged turns return the same tree, which costs nothing to draw again.
function turnTree(turn, index, shown) {
  const answer = Conversations.shownAnswer(turn), busy = runs.get(current.id), isLast = index === shown.length - 1;
  const branches = Conversations.branches(current, turn);
  const run = busy?.turn === turn ? busy.run.view : null;
  const pauseS = isLast && answer?.error?.retryAt ? Math.max(0, (answer.error.retryAt - Date.now()) / 1000) : 0;
  const view = { index, isEditing: editing === turn, isLast, isBusy: Boolean(busy), branch: branches.indexOf(turn), numBranches: branches.length, pauseS: Math.ceil(pauseS) };
  const key = JSON.stringify([view, turn.shown, turn.answers.length, turn.files.map(({ tokens }) => tokens)]), before = drawnTurns.get(turn);
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
  Tree.patch($("log"), turns().map(turnTree));
  $("empty").hidden = current.turns.length > 0;
  if (stick) toEnd();
  $("latest").hidden = atEnd();
  Composer.showContext(turns());
}
function drawSoon() { drawing ||= requestAnimationFrame(draw); }

function drawList() {
  const listed = all.filter((one) => Conversations.matches(one, $("search").value));
  Tree.patch($("conversations"), Sidebar.nodes(listed, current.id, new Set(runs.keys()), new Date().setHours(0, 0, 0, 0)));
  $("none").hidden = all.length > 0;
  $("search").hidden = $("export-all").disabled = !all.length;
  $("unmatched").textContent = all.length && !listed.length ? "No conversation contains these words." : "";
}

function showState() {
  const busy = runs.has(current.id);
  $("new").disabled = current.turns.length === 0;
  $("send").textContent = busy ? "Stop" : "Send";
  $("send").disabled = !busy && (!Access.hasModel() || Composer.isEmpty());
  Composer.showContext(turns());
}

function drawAll() {
  draw();
  drawList();
  showState();
}

// Redraw what changes with time: the wait for an answer, and the countdown to a retry.
setInterval(() => {
  const error = Conversations.shownAnswer(turns().at(-1) ?? { answers: [] })?.error;
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
  Drawer.close();
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
  if (current === conversation) open(Conversations.blank());
  drawList();
}

function download(name, type, text) {
  const link = Object.assign(document.createElement("a"), { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), UNDO_MS);
}

function exportFile(conversation) {
  download(Conversations.fileName(conversation), "text/markdown", Conversations.exported(conversation));
}

// Adds the conversations of a file. Of two versions of one, the newer is kept.
async function importFile(file) {
  const found = Conversations.unpacked(await file.text());
  if (!found) return toast(`${file.name} is not a file that “Export all” has written.`);
  const newer = found.filter(({ id, changed }) => !runs.has(id) && !(all.find((one) => one.id === id)?.changed >= changed));
  all = [...newer, ...all.filter(({ id }) => !newer.some((one) => one.id === id))];
  current = newer.find(({ id }) => id === current.id) ?? current;
  toast(`${newer.length} of ${found.length} conversations imported${newer.length < found.length ? "; the others are here already" : ""}.`);
  newer.forEach(save);
  drawAll();
}

// Another tab has changed, added or deleted conversations. Keep those with running answers.
addEventListener("storage", (event) => {
  if (event.key !== null && !event.key.startsWith(Conversations.PREFIX)) return;
  const mine = all.filter(({ id }) => runs.has(id));
  all = [...mine, ...shelf.list().filter(({ id }) => !runs.has(id))];
  if (!editing && !runs.has(current.id)) current = all.find(({ id }) => id === current.id) ?? (current.turns.length ? Conversations.blank() : current);
  drawAll();
});

// ----------------------------------------------------------------------------------------------------------- answers
// Generates another answer for a turn of the current conversation.
async function answer(turn) {
  const conversation = current, values = Preferences.values(), answer = { ...Answering.blank(Access.model()), id: Conversations.newId() };
  const messages = Conversations.messages(conversation, turn, values.system.trim());
  Conversations.dropFailed(conversation, turn);
  turn.answers.push(answer);
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

// Sends a message as the next turn, or as the turn after `before`.
function send({ question, files }, before = turns().at(-1)) {
  if (!(question.trim() || files.length) || !Access.hasModel() || runs.has(current.id)) return false;
  editing = null;
  answer(Conversations.add(current, before, question.trim(), files));
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
  drawAll();
}

function showBranch(turn, step) {
  const branches = Conversations.branches(current, turn);
  Conversations.show(current, branches[branches.indexOf(turn) + step]);
  touch(current);
  drawAll();
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
  "branch-before": (turn) => showBranch(turn, -1),
  "branch-after": (turn) => showBranch(turn, 1),
  "copy-question": (turn, button) => copyText(button, turn.question),
  "copy-answer": (turn, button) => copyText(button, Conversations.shownAnswer(turn).text),
  "copy-code": (turn, button) => copyText(button, button.closest(".code").querySelector("pre").textContent),
};

$("log").addEventListener("click", (event) => {
  const button = event.target.closest("button[data-do]"), index = button?.closest("[data-turn]").dataset.turn;
  if (button) DEEDS[button.dataset.do](turns()[index], button);
});
$("log").addEventListener("submit", (event) => {
  event.preventDefault();
  const shown = turns(), index = shown.indexOf(editing), question = event.target.querySelector("textarea").value;
  send({ question, files: editing.files }, shown[index - 1] ?? null);
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
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const busy = runs.get(current.id);
  if (busy) busy.run.stop();
  else if (send(Composer.draft())) Composer.set("", []);
});
$("prompt").addEventListener("keydown", (event) => {
  if (sends(event) && !runs.has(current.id)) $("composer").requestSubmit(); // Enter never stops an answer
  if (event.key === "ArrowUp" && Composer.isEmpty() && current.turns.length && !runs.has(current.id)) {
    event.preventDefault();
    edit(turns().at(-1));
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("settings").open || event.isComposing) return;
  if (editing) cancelEdit();
  else if (Drawer.isOpen()) Drawer.close();
  else runs.get(current.id)?.run.stop();
});
$("new").addEventListener("click", () => open(Conversations.blank()));
$("scroll").addEventListener("scroll", () => { $("latest").hidden = atEnd(); });
$("latest").addEventListener("click", toEnd);

// ---------------------------------------------------------------------------------------------------------- the list
$("sidebar").addEventListener("click", (event) => {
  const button = event.target.closest("button[data-do]");
  const one = all.find(({ id }) => id === button?.closest("[data-id]").dataset.id);
  if (one) ({ open, export: exportFile, delete: remove })[button.dataset.do](one);
});
$("search").addEventListener("input", drawList);
$("undo").addEventListener("click", () => {
  $("toast").hidden = true;
  all.push(deleted);
  save(deleted);
  open(deleted);
});
$("export-all").addEventListener("click", () => download("diptych-conversations.json", "application/json", Conversations.packed(all)));
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", () => { importFile($("import-file").files[0]); $("import-file").value = ""; });
addEventListener("pagehide", () => { for (const id of runs.keys()) { const one = all.find((each) => each.id === id); if (one) save(one); } });

Preferences.begin();
Drawer.begin();
Composer.begin(showState, toast);
drawAll();
toEnd();
Access.begin(showState);
