// Asks for /load again and again, and writes it into the page. Text is changed only where it differs, so that what a
// reader has selected stays selected.
const $ = (id) => document.getElementById(id);
const ANSWER_MS = 10000, LATE_MS = 4000, CLOCK_MS = 500;
const WIDTH = 600, HEIGHT = 120;

let load = null, seenAt = 0, points = [];
let paused = false, locked = false, asking = false, numFailures = 0, timer = 0;

function stored(storage, name) {
  try { return storage().getItem("diptych." + name); } catch { return null; } // storage may be forbidden
}
function keep(name, value) {
  try { sessionStorage.setItem("diptych." + name, value); } catch { /* then it lasts until the page is closed */ }
}
let key = stored(() => sessionStorage, "key") ?? "";
document.documentElement.dataset.theme = stored(() => localStorage, "theme") ?? "";

// ------------------------------------------------------------------------------------------------- asking the router
function headers() {
  const bytes = String.fromCharCode(...new TextEncoder().encode(key.trim())); // fetch takes no character beyond a byte
  return bytes ? { Authorization: `Bearer ${bytes}` } : {};
}

async function ask() {
  clearTimeout(timer);
  if (paused || document.hidden || asking) return;
  [asking, locked] = [true, false];
  const began = performance.now();
  let retryAfterS = 0, answer = null;
  try {
    const response = await fetch("/load", { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    retryAfterS = Number(response.headers.get("Retry-After")) || 0;
    if (response.status === 401 || response.status === 403) {
      lock(response.status);
    } else if (response.ok) {
      answer = await response.json();
    } else {
      const said = await response.json().catch(() => null);
      fail(said?.error?.message ?? `The router answers HTTP ${response.status}.`);
    }
  } catch (error) {
    fail(error.name === "TimeoutError" ? "The router takes too long to answer." : "The router does not answer.");
  }
  asking = false;
  if (answer && numFailures) say("The router answers again.");
  if (answer) numFailures = 0;
  if (!locked) timer = setTimeout(ask, Figures.pauseMs(numFailures, performance.now() - began, retryAfterS));
  if (answer) take(answer);
}

function take(answer) {
  const now = performance.now();
  [load, seenAt] = [answer, now];
  points = Figures.remember(points, now, Figures.sample(load));
  $("problem").hidden = $("unlock").hidden = true;
  $("picture").hidden = false;
  draw();
}

function fail(message) {
  numFailures++;
  if (numFailures === 1) say(message);
  write($("problem"), load ? `${message} What you see is old.` : message);
  $("problem").hidden = false;
  showAge();
}

function lock(status) {
  const titles = { 401: key ? "The API key was refused" : "An API key is needed", 403: "This key may not look" };
  const whys = { 401: "This service shows its load only to those who have its key.", 403: "Use a key with admin = true." };
  locked = true;
  $("problem").hidden = $("picture").hidden = true;
  write($("unlock-title"), titles[status]);
  write($("unlock-why"), `${whys[status]} The key is kept in this tab only.`);
  $("unlock").hidden = false;
  $("key").focus();
  say(titles[status]);
  showAge();
}

// ----------------------------------------------------------------------------------------------------------- drawing
function say(text) { $("said").textContent = text; }
function write(element, text) { if (element.textContent !== text) element.textContent = text; }

// Make the children of `parent` as many as `items`, and let `fill` bring each up to date.
function each(parent, tag, items, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(document.createElement(tag));
  items.forEach((item, index) => fill(parent.children[index], item));
}

function cell(element, value) {
  const { text, title = "", level = "", part } = typeof value === "string" ? { text: value } : value;
  write(element, text);
  if (element.title !== title) element.title = title;
  element.className = part === undefined ? level : `${level} meter`.trim();
  if (part !== undefined) element.style.setProperty("--part", part.toFixed(3));
}

function table(body, rows) {
  each(body, "tr", rows, (row, { cells }) => {
    if (!row.children.length) {
      const name = document.createElement("th");
      name.scope = "row";
      row.append(name);
    }
    each(row, "td", cells, cell);
  });
}

function chart(name, lines, top, label) {
  const paths = $(`chart-${name}`).children, now = performance.now();
  lines.forEach((pick, index) => paths[index].setAttribute("d", Figures.line(points, pick, top, now, WIDTH, HEIGHT)));
  $(`chart-${name}`).setAttribute("aria-label", label);
  write($(`since-${name}`), Figures.spanText(Figures.spanMs(points, now)));
}

function draw() {
  each($("stages"), "div", [{ name: "In flight", number: Figures.whole(load.server_load) }, ...Figures.stages(load)], (tile, one) => {
    if (!tile.children.length) tile.append(document.createElement("dt"), document.createElement("dd"));
    write(tile.children[0], one.name);
    write(tile.children[1], one.number);
  });
  drawPast(points.at(-1));
  table($("classes"), Figures.classRows(load));
  each($("plan"), "li", Figures.planLines(load), cell);
  drawWorkers();
  each($("events"), "li", Figures.eventLines(load), cell);
  showAge();
}

function drawPast(last) {
  const most = Math.max(...points.map((one) => one.inFlight), 1), share = (value) => (value === null ? "no goal" : Figures.percent(value));
  write($("now-in-flight"), Figures.whole(last.inFlight));
  write($("now-waiting"), Figures.whole(last.waiting));
  write($("now-ttft"), share(last.ttft));
  write($("now-tpot"), share(last.tpot));
  write($("top-requests"), `top: ${Figures.whole(most)}`);
  chart("requests", [(one) => one.inFlight, (one) => one.waiting], most, `${last.inFlight} requests in flight, ${last.waiting} of them wait; at most ${most} in flight lately`);
  chart("goals", [(one) => one.ttft, (one) => one.tpot], 1, `Share of requests that met their goals: TTFT ${share(last.ttft)}, TPOT ${share(last.tpot)}`);
}

function drawWorkers() {
  const { rows, told } = Figures.workerRows(load, $("filter").value);
  table($("workers"), rows);
  write($("workers-shown"), told);
}

function showAge() {
  const oldMs = load ? performance.now() - seenAt : 0, isLate = oldMs > LATE_MS;
  const age = !load ? "no picture yet" : isLate ? `picture from ${Figures.ago(oldMs / 1000)}` : "up to date";
  const why = paused ? "paused" : numFailures ? `trying again, ${numFailures} failed` : "";
  write($("age"), locked ? "locked" : [age, why].filter(Boolean).join(", "));
  $("age").className = isLate && !paused ? "muted late" : "muted";
}

// ------------------------------------------------------------------------------------------------------ what is done
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  keep("key", key);
  ask();
});
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  showAge();
  if (!locked) ask();
});
$("filter").addEventListener("input", () => { if (load) drawWorkers(); });
document.addEventListener("visibilitychange", () => { if (!locked) ask(); }); // a hidden page asks no more
setInterval(() => { if (!document.hidden) showAge(); }, CLOCK_MS);
ask();
