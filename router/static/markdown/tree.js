// A document as plain data, and its rendering to the DOM. A node is a string or {tag, attributes, children}. Model output
// only becomes strings of this tree, so it can never become markup. A node with `draw` fills its element itself; if `draw`
// returns false, the children are shown.
const Tree = (() => {
  const node = (tag, attributes = {}, ...children) => ({ tag, attributes, children: children.flat().filter((one) => one !== null && one !== "") });
  const shown = new WeakMap(); // element -> the node that it displays
  const drawn = new WeakMap(); // element -> the text of the node that has drawn it

  // The text of a node and its descendants.
  const textOf = (one) => (typeof one === "string" ? one : one.children.map(textOf).join(""));

  function write(text, data) {
    if (text.data === data) return;
    if (data.startsWith(text.data)) text.appendData(data.slice(text.data.length)); // preserves the user's selection
    else text.data = data;
  }

  function describe(element, wanted, had = {}) {
    for (const name of Object.keys(had)) if (!(name in wanted)) element.removeAttribute(name);
    for (const [name, value] of Object.entries(wanted)) if (had[name] !== value) element.setAttribute(name, value);
  }

  function fill(element, wanted) {
    const had = shown.get(element);
    if (had === wanted) return;
    describe(element, wanted.attributes, had?.attributes);
    if (!isDrawn(element, wanted)) patch(element, wanted.children);
    shown.set(element, wanted);
  }

  // Whether the node has drawn the element, now or before.
  function isDrawn(element, wanted) {
    const text = wanted.draw ? textOf(wanted) : null;
    if (text !== null && drawn.get(element) === text) return true;
    drawn.delete(element);
    if (!wanted.draw?.(element)) return false;
    drawn.set(element, text);
    return true;
  }

  // Updates the children of `parent` to match `wanted`, without touching unchanged ones.
  function patch(parent, wanted) {
    wanted.forEach((one, index) => {
      const present = parent.childNodes[index];
      if (typeof one === "string") {
        if (present?.nodeType === 3) write(present, one);
        else place(parent, document.createTextNode(one), present);
      } else if (present && shown.get(present)?.tag === one.tag) {
        fill(present, one);
      } else {
        const made = document.createElement(one.tag);
        fill(made, one);
        place(parent, made, present);
      }
    });
    while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
  }

  function place(parent, made, present) {
    if (present) present.replaceWith(made);
    else parent.append(made);
  }

  return { node, patch, textOf };
})();
if (typeof module !== "undefined") module.exports = Tree;
