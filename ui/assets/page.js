// The page in the browser: sends clicks to Python; handles keys, scrolling, the theme and restarts. Its state is the DOM.
(() => {
  "use strict";
  const STREAMING = new Set(["regenerate", "edit", "digest"]); // answered in pieces, so they use another event
  const SCROLLING = ".rb-document, .scroll, .rb-prose :is(pre, table)";
  const one = (selector, from = document) => from.querySelector(selector);

  // --- clicks: every element with data-act sends its data -------------------------------------------------
  function send(trigger, element, more = {}) {
    const data = { ...element.dataset, ...more };
    trigger(STREAMING.has(data.act) ? "submit" : "click", data);
  }

  const local = {
    async copy(element) {
      try { await navigator.clipboard.writeText(element.dataset.text); } catch { copyOldWay(element.dataset.text); }
      announce("Copied.");
    },
    suggest: (element) => { fill(element.dataset.text); clickWhenReady("#rb-send"); },
    "go-library": () => tab("Library"),
    digest: (element, trigger) => { tab("Chat"); send(trigger, element); },
    "ask-document": (element, trigger) => { tab("Chat"); send(trigger, element); box().focus(); },
    attach: chooseFiles,
    "edit-open": openEditor,
    "rename-open": openRename,
    "cover-side": () => { tab("Chat"); cover("side"); },
    "cover-close": () => cover(),
    "view-close": () => viewer().close(),
    zoom: (element) => zoom(Number(element.dataset.by)),
  };

  function bind(root, trigger) {
    root.addEventListener("click", (event) => {
      const element = meant(event.target.closest("[data-act]"), root);
      if (!element || !root.contains(element) || element.disabled) return;
      event.preventDefault();
      const act = element.dataset.act;
      if (local[act]) return void local[act](element, trigger);
      if (element.dataset.confirm && !element.classList.contains("asking")) return void ask(element);
      if (element.rbEnd) setTimeout(element.rbEnd);
      if (act === "cite") choose(element);
      if (act === "cite" || act === "hood") cover("more");
      if (act === "open-chat") cover();
      if (act === "view") turned = element.dataset.turn ?? "";
      send(trigger, element);
    });
  }

  // If a redraw between press and release moves or replaces a button, browsers report no click. It still counts for the
  // pressed button if the pointer has not moved.
  let pressed = null;
  addEventListener("pointerdown", (event) => {
    const element = event.button === 0 ? event.target.closest("button") : null;
    pressed = element && { element, said: said(element), root: element.closest("[id]"), x: event.clientX, y: event.clientY };
  }, true);
  addEventListener("pointerup", (event) => {
    setTimeout(() => { pressed = null; }); // after the click, if there is one
    const { element, root, x, y } = pressed || {};
    if (!element || element.contains(event.target) || Math.hypot(event.clientX - x, event.clientY - y) > 4) return;
    (element.isConnected ? element : meant(element, root || document))?.click();
  }, true);
  const said = (element) => JSON.stringify(element.dataset);
  // Finds the element with the pressed one's data: a redraw may have given its button to another row.
  function meant(element, root) {
    if (!element || pressed?.element !== element || (element.isConnected && said(element) === pressed.said)) return element;
    return [...root.querySelectorAll("[data-act]")].find((each) => said(each) === pressed.said);
  }

  // Asks for confirmation on the button itself: a second click within four seconds confirms.
  function ask(element) {
    const before = element.innerHTML;
    clearTimeout(element.rbTimer);
    element.rbEnd = () => {
      clearTimeout(element.rbTimer);
      delete element.rbEnd; // a third click asks again
      if (element.classList.contains("asking")) { element.classList.remove("asking"); element.innerHTML = before; }
    };
    element.classList.add("asking");
    element.textContent = element.dataset.confirm;
    element.rbTimer = setTimeout(element.rbEnd, 4000);
  }

  function choose(element) {
    document.querySelectorAll(".rb-cite.chosen").forEach((each) => each.classList.remove("chosen"));
    element.classList.add("chosen");
  }

  // On a narrow page the conversations ("side") or the source ("more") cover it. Without a name, nothing covers it.
  let opener;
  function cover(name) {
    const shown = document.body.dataset.cover;
    if (name) document.body.dataset.cover = name; else delete document.body.dataset.cover;
    const close = name && one(`#rb-${name}-close button`);
    if (visible(close)) { if (!shown) opener = document.activeElement; close.focus(); }
    else if (shown && opener) { opener.focus(); opener = null; }
  }
  addEventListener("click", (event) => {
    if (event.target === document.body || event.target.closest("#rb-new")) cover();
  });

  // The viewer: Python draws a <dialog> for each page that is opened; a closed one is removed.
  const viewer = () => one("#rb-viewer dialog");
  let turned = "", reader, size = 1; // the button that turned the page, the element that opened the viewer
  function showViewer() {
    const dialog = viewer();
    if (!dialog || dialog.open) return;
    if (!turned || !reader) reader = document.activeElement;
    dialog.onclose = () => { if (dialog.isConnected) { dialog.remove(); if (reader?.isConnected) reader.focus(); } };
    dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };
    dialog.showModal();
    zoom(1);
    (turned ? one(`[data-turn=${turned}]`, dialog) ?? one(".scroll", dialog) : one("[data-act=view-close]", dialog)).focus();
    one(".rb-mark, .rb-box", dialog)?.scrollIntoView({ block: "center" });
  }
  function zoom(by) {
    size = Math.min(4, Math.max(0.5, size * by));
    viewer()?.style.setProperty("--rb-zoom", size);
  }
  const VIEWER_KEYS = { ArrowLeft: "[data-turn=back]", ArrowRight: "[data-turn=next]", "+": "[data-by='1.25']", "-": "[data-by='0.8']" };

  // Shows a form in place of an element's content, until the form is sent or closed with Escape.
  function editIn(host, field, label, sent, ...more) {
    const form = document.createElement("form"), shown = [...host.children];
    const close = () => { field.onblur = editing = null; form.remove(); shown.forEach((child) => { child.style.display = ""; }); };
    field.setAttribute("aria-label", label);
    form.append(field, ...more);
    form.onsubmit = (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (text) { close(); sent(text); }
    };
    form.onkeydown = (event) => {
      event.stopPropagation();
      if (event.key === "Escape") close();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    };
    shown.forEach((child) => { child.style.display = "none"; });
    host.append(form);
    field.focus();
    return { form, close };
  }

  let editing = null; // the question being edited; if a redraw removes its form, keepEditing opens it again
  function keepEditing() {
    if (!editing || editing.form.isConnected) return;
    const { id, trigger, area } = editing, button = one(`[data-act=edit-open][data-id="${CSS.escape(id)}"]`);
    editing = null;
    if (button) openEditor(button, trigger, area.value);
  }

  function openEditor(button, trigger, typed) {
    const turn = button.closest(".rb-turn"), { id } = button.dataset, buttons = document.createElement("div");
    const area = Object.assign(document.createElement("textarea"), { value: typed ?? one(".rb-text", turn).dataset.raw, rows: 3 });
    const cancel = Object.assign(document.createElement("button"), { type: "button", className: "rb-button outlined", textContent: "Cancel" });
    const save = Object.assign(document.createElement("button"), { type: "submit", className: "rb-button primary", textContent: "Send" });
    buttons.append(cancel, save);
    const { form, close } = editIn(turn, area, "Edit the question", (text) => trigger("submit", { act: "edit", id, text }), buttons);
    cancel.onclick = close;
    editing = { id, trigger, form, area };
  }

  function openRename(button, trigger) {
    const { id, text: value } = button.dataset, input = Object.assign(document.createElement("input"), { value, maxLength: 200 });
    const { close } = editIn(button.closest(".rb-chat"), input, "New name", (text) => trigger("click", { act: "rename", id, text }));
    input.onblur = close;
    input.select();
  }

  // --- keys ---------------------------------------------------------------------------------------------------
  const EDITED = ".rb-turn form, .rb-chat form"; // in these forms Escape closes the form only
  const box = () => one("#rb-question textarea");
  const visible = (element) => element && element.offsetParent !== null;

  addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || event.target.isContentEditable;
    if (viewer()?.open) {
      const pressed = VIEWER_KEYS[event.key] && one(VIEWER_KEYS[event.key], viewer());
      if (pressed && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); pressed.click(); }
    } else if (event.key === "Enter" && !event.isComposing && event.target === box() && !event.shiftKey) {
      event.preventDefault();
      event.stopImmediatePropagation();
      clickWhenReady("#rb-send");
    } else if (event.key === "Escape" && !event.isComposing && !event.target.closest?.(EDITED) && visible(button("#rb-stop"))) {
      button("#rb-stop").click();
    } else if (event.key === "Escape" && document.body.dataset.cover && !event.target.closest?.(EDITED)) {
      cover();
    } else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      const search = [...document.querySelectorAll(".rb-search input, .rb-search textarea")].find(visible);
      if (search) { event.preventDefault(); search.focus(); search.select(); }
    } else if (event.key === "?" && !typing) {
      listKeys();
    }
  }, true);

  const KEYS = [["Enter", "Send"], ["Shift Enter", "New line"], ["Esc", "Stop, or close what is open"], ["/", "Search"], ["← →", "Turn the page of an open document"], ["+ −", "Its size"], ["?", "This list"]];
  function listKeys() {
    let list = one("#rb-keys");
    if (!list) {
      list = Object.assign(document.createElement("dialog"), { id: "rb-keys" });
      list.setAttribute("aria-label", "Keys");
      list.innerHTML = `<dl>${KEYS.map(([key, what]) => `<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`).join("")}</dl>`;
      list.onclick = () => list.close();
      one(".gradio-container").append(list);
    }
    if (list.open) list.close(); else list.showModal();
  }

  const button = (id) => one(`button${id}`) || one(`${id} button`);

  function clickWhenReady(id) {
    // Gradio takes over the typed text shortly after the last key.
    setTimeout(() => { const found = button(id); if (visible(found) && !found.disabled) found.click(); }, 60);
  }

  function fill(text) {
    const area = box();
    Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value").set.call(area, text);
    area.dispatchEvent(new Event("input", { bubbles: true }));
    area.focus();
  }

  function tab(name) {
    [...document.querySelectorAll("button[role=tab]")].find((each) => each.textContent.trim() === name)?.click();
  }

  function copyOldWay(text) {
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }

  // --- files: chosen in the Chat tab or dropped anywhere, they go to the Library tab's upload ------------------------
  function chooseFiles() {
    const chooser = Object.assign(document.createElement("input"), { type: "file", multiple: true });
    chooser.onchange = () => upload(chooser.files);
    chooser.click();
  }
  function upload(files) {
    tab("Library");
    const again = setInterval(() => {
      const input = one("#rb-upload input[type=file]");
      if (!input) return;
      clearInterval(again);
      input.files = files;
      input.dispatchEvent(new Event("change", { bubbles: true }));
    }, 100);
  }
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files") && !event.target.closest?.("#rb-upload");
  const dropping = (is) => document.body.classList.toggle("rb-dropping", is);
  addEventListener("dragover", (event) => { if (hasFiles(event)) { event.preventDefault(); dropping(true); } });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) dropping(false); });
  addEventListener("drop", (event) => {
    dropping(false);
    if (!hasFiles(event)) return;
    event.preventDefault();
    upload(event.dataTransfer.files);
  });

  // --- scrolling: stay at the end while text arrives, unless the user scrolled up -----------------------------------
  let atEnd = true;
  function follow(list) {
    list.addEventListener("scroll", () => { atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60; }, { passive: true });
    new MutationObserver(() => { if (atEnd) list.scrollTop = list.scrollHeight; })
      .observe(list, { childList: true, subtree: true, characterData: true });
  }

  // --- announcements for screen readers, and the theme --------------------------------------------------------------
  let live;
  function announce(text) {
    if (!live) {
      live = Object.assign(document.createElement("div"), { className: "rb-hidden" });
      live.setAttribute("role", "status");
      document.body.append(live);
    }
    live.textContent = "";
    setTimeout(() => { live.textContent = text; }, 50);
  }

  const system = matchMedia("(prefers-color-scheme: dark)");
  function kept() { try { return localStorage.getItem("ragblend-theme") || "system"; } catch { return "system"; } }
  function applyTheme() {
    const dark = kept() === "dark" || (kept() === "system" && system.matches);
    document.body?.classList.toggle("dark", dark);
    document.documentElement.style.background = dark ? "#121518" : "#faf9f6";
  }
  function theme(name) {
    try { localStorage.setItem("ragblend-theme", name); } catch { /* storage is off */ }
    applyTheme();
  }
  system.addEventListener("change", applyTheme);

  // --- a restarted server does not know open pages: reload, and restore what was shown -------------
  const KEPT = "ragblend-kept";
  const fromServer = window.fetch;
  let started; // identifies the server process that served the page
  window.fetch = async (...request) => {
    const answer = await fromServer(...request);
    const now = answer.headers.get("x-ragblend-start");
    if (answer.status === 401) sayNewLink();
    else if (started && now && now !== started) loadAgain();
    started ??= now;
    return answer;
  };

  function loadAgain() {
    const chat = one(".rb-chat.current .rb-chat-open")?.dataset.id;
    try { sessionStorage.setItem(KEPT, JSON.stringify({ text: box()?.value, chat })); } catch { /* storage is off: the text is lost */ }
    location.reload();
  }

  function takeUpAgain() {
    let kept;
    try { kept = JSON.parse(sessionStorage.getItem(KEPT)); sessionStorage.removeItem(KEPT); } catch { return; }
    if (kept?.chat) one(`.rb-chat-open[data-id="${CSS.escape(kept.chat)}"]`)?.click();
    if (kept?.text) fill(kept.text);
  }

  function sayNewLink() {
    if (one("#rb-new-link")) return;
    const note = Object.assign(document.createElement("div"), { id: "rb-new-link", className: "rb-note error" });
    note.setAttribute("role", "alert");
    note.textContent = "You are signed out. Copy what you have typed; then open the new link that `ragblend ui` " +
      "printed, or reload the page if it has a password.";
    one(".gradio-container").prepend(note);
  }

  function begin() {
    applyTheme();
    let isNew = true;
    new MutationObserver(() => {
      if (isNew && one("#rb-hello .rb-welcome")) { isNew = false; takeUpAgain(); }
      keepEditing();
      showViewer();
      const list = one("#rb-scroll");
      if (list && !list.dataset.followed) { list.dataset.followed = "1"; follow(list); }
      document.querySelectorAll(SCROLLING).forEach((each) => { // scrollable text must be reachable by keyboard
        if (each.scrollHeight > each.clientHeight || each.scrollWidth > each.clientWidth) each.tabIndex = 0;
      });
      const passage = one("#rb-source .rb-mark");
      if (passage && !passage.dataset.shown) {
        passage.dataset.shown = "1";
        const frame = passage.closest(".rb-document");
        frame.scrollTop = passage.offsetTop - frame.offsetTop - 40;
      }
    }).observe(document.body, { childList: true, subtree: true });
  }
  document.readyState === "loading" ? addEventListener("DOMContentLoaded", begin) : begin();
  window.ragblend = { bind, theme, keptTheme: kept };
})();
