// Runs the script of a page over a document that has just enough of a browser's: node browser.js URL PATH STEPS
// STEPS is JSON: [["until", expression], ["do", statement], ["show", expression], ...]; prints a JSON line for each "show".
"use strict";
const vm = require("vm");
const [, , url, path, steps] = process.argv;
const DEADLINE_MS = 20000;

class Element {
  constructor(tag) { Object.assign(this, { tag, children: [], attributes: {}, listeners: {}, own: "", className: "", title: "", value: "", hidden: false, dataset: {}, properties: {} }); }
  get style() { return { setProperty: (name, value) => { this.properties[name] = value; } }; }
  get textContent() { return this.own + this.children.map((child) => child.textContent).join(" | "); }
  set textContent(text) { this.own = String(text); this.children = []; }
  get lastElementChild() { return this.children.at(-1); }
  append(...added) { for (const child of added) { child.parent = this; this.children.push(child); } }
  remove() { this.parent.children.splice(this.parent.children.indexOf(this), 1); }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  fire(name) { this.listeners[name]({ preventDefault() {} }); }
  focus() { document.activeElement = this; }
}

const ids = new Map();
const document = new Element("document");
document.documentElement = new Element("html");
document.createElement = (tag) => new Element(tag);
document.createElementNS = (space, tag) => new Element(tag);
document.getElementById = (id) => { if (!ids.has(id)) throw new Error(`no element has the id ${id}`); return ids.get(id); };

async function main() {
  const html = await (await fetch(new URL(path, url))).text();
  for (const [whole, tag, id] of html.matchAll(/<(\w+)[^>]*\bid="([\w-]+)"[^>]*>/g)) {
    const element = Object.assign(new Element(tag), { hidden: / hidden>/.test(whole) });
    ids.set(id, element);
  }
  const stores = () => { const kept = new Map(); return { getItem: (name) => kept.get(name) ?? null, setItem: (name, value) => kept.set(name, value) }; };
  const asked = [];
  const page = vm.createContext({
    document, console, performance, TextEncoder, AbortSignal, setTimeout, clearTimeout, setInterval,
    sessionStorage: stores(), localStorage: stores(), asked, reached: true,
    text: (id) => document.getElementById(id).textContent, get: document.getElementById,
    fetch: (path, options) => { asked.push({ path, ...options.headers }); return fetch(new URL(path, page.reached ? url : "http://127.0.0.1:1"), options); },
  });
  vm.runInContext(/<script>([\s\S]*)<\/script>/.exec(html)[1], page);
  for (const [what, code] of JSON.parse(steps)) {
    const run = () => vm.runInContext(code, page);
    const began = performance.now();
    if (what === "show") console.log(JSON.stringify(run() ?? null));
    else if (what === "do") run();
    else while (!run()) {
      if (performance.now() - began > DEADLINE_MS) throw new Error(`it never came to: ${code}\n${[...ids].map(([id, one]) => `${id}: ${one.textContent}`).join("\n")}`);
      await new Promise((resolve) => setTimeout(resolve, 10));
    }
  }
  process.exit(0);
}

main().catch((error) => { console.error(error); process.exit(1); });
