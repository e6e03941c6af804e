// Polls /load and updates the page. Text is changed only where it differs, so that the user's selection is preserved.
const $ = (id) => document.getElementById(id);
const ANSWER_MS = 10000, LATE_MS = 4000, CLOCK_MS = 500;
const WIDTH = 300, HEIGHT = 48, SVG = "http://www.w3.org/2000/svg";

let load = null, seenAt = 0, points = [];
let model = "", models = []; // the selected model of several; "" for all
let paused = false, locked = false, asking = false, numFailures = 0, timer = 0;

function stored(storage, name) {
  try { return storage().getItem("diptych." + name); } catch { return null; } // storage may be forbidden
}
function keep(name, value) {
  try { sessionStorage.setItem("diptych." + name, value); } catch { /* not stored: lost when the page is closed */ }
}
let key = stored(() => sessionStorage, "key") ?? "";
document.documentElement.dataset.theme = stored(() => localStorage, "theme") ?? "";

// ------------------------------------------------------------------------------------------------- asking the router
function headers() {
  const bytes = String.fromCharCode(...new TextEncoder().encode(key.trim())); // fetch accepts only characters of one byte
  return bytes ? { Authorization: `Bearer ${bytes}` } : {};
}

async function ask() {
  clearTimeout(timer);
  if (paused || document.hidden || asking) return;
  [asking, locked] = [true, false];
  const began = performance.now();
  const asked = model;
  let retryAfterS = 0, answer = null;
  try {
    const response = await fetch(asked ? `/load?model=${encodeURIComponent(asked)}` : "/load", { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    retryAfterS = Number(response.headers.get("Retry-After")) || 0;
    if (response.status === 401 || response.status === 403) {
      lock(response.status);
    } else if (response.ok) {
      answer = await response.json();
    } else {
      const said = await response.json().catch(() => null);
      fail(said?.error?.message ?? `The router returned HTTP ${response.status}.`);
    }
  } catch (error) {
    fail(error.name === "TimeoutError" ? "The router takes too long to respond." : "The router does not respond.");
  }
  asking = false;
  if (answer && numFailures) say("The router responds again.");
  if (answer) numFailures = 0;
  if (asked !== model) return ask(); // another model was selected in the meantime
  if (!locked) timer = setTimeout(ask, Figures.pauseMs(numFailures, performance.now() - began, retryAfterS));
  if (answer) take(answer);
}

function take(answer) {
  const now = performance.now();
  [load, seenAt] = [answer, now];
  if (!points.length || now - points.at(-1).at > Figures.GAP_MS) recall(); // a new page, or one that did not poll
  points = Figures.remember(points, now, Figures.sample(load));
  if (!model) models = load.models.map((one) => one.id);
  $("problem").hidden = $("unlock").hidden = true;
  $("picture").hidden = false;
  draw();
}

// Fetches the points that the router recorded while this page did not poll.
async function recall() {
  const asked = model;
  try {
    const path = asked ? `/load/history?model=${encodeURIComponent(asked)}` : "/load/history";
    const response = await fetch(path, { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    if (!response.ok || asked !== model) return;
    points = Figures.joined(points, await response.json(), performance.now(), Date.now());
    if (load) draw();
  } catch { /* the charts begin now */ }
}

function fail(message) {
  numFailures++;
  if (numFailures === 1) say(message);
  write($("problem"), load ? `${message} The data shown is out of date.` : message);
  $("problem").hidden = false;
  showAge();
}

function lock(status) {
  const titles = { 401: key ? "The API key was rejected" : "An API key is required", 403: "This key does not have permission" };
  const whys = { 401: "This service requires an API key.", 403: "Use a key with admin = true." };
  locked = true;
  $("problem").hidden = $("picture").hidden = true;
  write($("unlock-title"), titles[status]);
  write($("unlock-why"), `${whys[status]} The key is stored in this tab only.`);
  $("unlock").hidden = false;
  $("key").focus();
  say(titles[status]);
  showAge();
}

// ----------------------------------------------------------------------------------------------------------- drawing
function say(text) { $("said").textContent = text; }
function write(element, text) { if (element.textContent !== text) element.textContent = text; }

// Gives `parent` one child per item, and updates each with `fill`.
function each(parent, tag, items, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(document.createElement(tag));
  items.forEach((item, index) => fill(parent.children[index], item, index));
}

function cell(element, value, index, columns) {
  const { text, title = "", level = "", part } = typeof value === "string" ? { text: value } : value;
  write(element, text);
  if (element.title !== title) element.title = title;
  element.dataset.none = text === Figures.NONE; // hidden on narrow screens
  element.className = part === undefined ? level : `${level} meter`.trim();
  if (part !== undefined) element.style.setProperty("--part", part.toFixed(3));
  if (columns) element.dataset.label = columns[index]; // shown next to the value on narrow screens
}

function table(name, columns, rows) {
  each($(`${name}-head`), "th", columns, (head, text) => {
    head.scope = "col";
    head.setAttribute("role", "columnheader");
    write(head, text);
  });
  each($(name), "tr", rows, (row, { cells }) => {
    if (!row.children.length) {
      const first = document.createElement("th");
      first.scope = "row";
      first.setAttribute("role", "rowheader");
      row.setAttribute("role", "row");
      row.append(first);
    }
    each(row, "td", cells, (element, value, index) => {
      if (index) element.setAttribute("role", "cell");
      cell(element, value, index, columns);
    });
  });
}

function made(tag, className, ...children) {
  const element = document.createElement(tag);
  element.className = className;
  element.append(...children);
  return element;
}

function card(element, one) {
  if (!element.children.length) {
    const chart = document.createElementNS(SVG, "svg");
    chart.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    chart.setAttribute("preserveAspectRatio", "none");
    chart.setAttribute("role", "img");
    for (const name of ["first", "second"]) {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      chart.append(path);
    }
    element.append(made("h3", ""), made("p", "big"), made("ul", ""), made("p", "top"), chart);
    element.className = "card";
  }
  const [name, big, details, topLine, chart] = element.children, now = performance.now(), shown = Figures.within(points, now, spanOf()), top = Cards.topOf(one, shown);
  write(name, one.name);
  write(big, one.value);
  big.className = ["big", one.none ? "none" : "", one.level ?? ""].filter(Boolean).join(" ");
  each(details, "li", one.details, (item, { text, line = "", level = "" }) => {
    write(item, text);
    item.className = `${line} ${level}`.trim();
  });
  write(topLine, `max ${one.scale(top)}`);
  one.lines.forEach((pick, index) => chart.children[index].setAttribute("d", Figures.line(shown, (point) => point[pick] ?? null, top, now, WIDTH, HEIGHT, spanOf())));
  chart.setAttribute("aria-label", Cards.labelOf(one, top));
}

const spanOf = () => ($("span").value === "hour" ? Figures.HOUR_MS : Figures.SPAN_MS);

function drawPicker() {
  const picker = $("model");
  $("model-row").hidden = models.length < 2;
  each(picker, "option", ["", ...models], (option, name) => {
    if (option.value !== name || !option.textContent) option.value = name;
    write(option, name || "All models");
  });
  if (picker.value !== model) picker.value = model;
}

function draw() {
  drawPicker();
  write($("models"), Figures.modelsLine(load));
  each($("summary"), "li", Cards.summary(load), (item, line) => cell(item, line));
  document.title = `Diptych: ${load.models.map((one) => one.id).join(", ")}`;
  each($("cards"), "article", Cards.all(load), card);
  each($("stages"), "div", Figures.stages(load), (tile, one) => {
    if (!tile.children.length) tile.append(document.createElement("dt"), document.createElement("dd"));
    write(tile.children[0], one.name);
    write(tile.children[1], one.number);
  });
  table("times", Figures.TIME_COLUMNS, Figures.timeRows(load));
  table("pools", Figures.POOL_COLUMNS, Figures.poolRows(load));
  table("classes", Figures.CLASS_COLUMNS, Figures.classRows(load));
  each($("plan"), "li", Figures.planLines(load), (item, line) => cell(item, line));
  drawWorkers();
  each($("events"), "li", Figures.eventLines(load), (item, line) => cell(item, line));
  showAge();
}

function drawWorkers() {
  const { rows, summary } = Figures.workerRows(load, $("filter").value);
  table("workers", Figures.WORKER_COLUMNS, rows);
  write($("workers-shown"), summary);
}

function showAge() {
  const oldMs = load ? performance.now() - seenAt : 0, isLate = oldMs > LATE_MS;
  const age = !load ? "no data yet" : isLate ? `data from ${Figures.ago(oldMs / 1000)}` : "up to date";
  const why = paused ? "paused" : numFailures ? `retrying, ${numFailures} failed` : "";
  write($("age"), locked ? "locked" : [age, why].filter(Boolean).join(", "));
  $("age").className = isLate && !paused ? "muted late" : "muted";
}

// ----------------------------------------------------------------------------------------------------------- actions
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  keep("key", key);
  ask();
});
$("model").addEventListener("change", () => {
  [model, points] = [$("model").value, []]; // charts must not mix models
  if (!locked) ask();
});
$("span").addEventListener("change", () => { if (load) draw(); });
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  showAge();
  if (!locked) ask();
});
$("filter").addEventListener("input", () => { if (load) drawWorkers(); });
document.addEventListener("visibilitychange", () => { if (!locked) ask(); }); // a hidden page does not poll
setInterval(() => { if (!document.hidden) showAge(); }, CLOCK_MS);
ask();
