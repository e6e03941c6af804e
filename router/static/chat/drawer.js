// The list of conversations as a drawer, on narrow screens.
const Drawer = (() => {
  const $ = (id) => document.getElementById(id);
  const isNarrow = matchMedia("(max-width: 860px)");

  const isOpen = () => !$("backdrop").hidden;

  function show(wanted) {
    $("backdrop").hidden = !wanted;
    $("sidebar").classList.toggle("opened", wanted);
    $("sidebar").inert = isNarrow.matches && !wanted;
    $("column").inert = isNarrow.matches && wanted;
    $("menu").setAttribute("aria-expanded", String(wanted));
  }

  function close() {
    const wasOpen = isOpen();
    show(false);
    if (wasOpen) $("menu").focus();
  }

  function begin() {
    $("menu").addEventListener("click", () => {
      show(!isOpen());
      if (isOpen()) $("sidebar").querySelector("#conversations button, #import").focus();
    });
    $("backdrop").addEventListener("click", close);
    isNarrow.addEventListener("change", () => show(false));
    show(false);
  }

  return { begin, close, isOpen };
})();
