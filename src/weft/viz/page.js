// Search, folding, arrow keys and the overview. Without it the page folds by itself.
"use strict";
{
  const all = (what, at = document) => [...at.querySelectorAll(what)];
  const id = (name) => document.getElementById(name);
  const main = document.querySelector("main");
  const folds = all(".fold");
  const first = new Set(folds.filter((fold) => fold.open));
  const outermost = main.querySelector(".tree > li > .fold:last-child");
  const show = (which) => folds.forEach((fold) => { fold.open = which(fold); });

  for (const each of all(".tools, .keys")) each.hidden = false;
  if (folds.length < 2) for (const each of ["open", "fold"]) id(each).hidden = true;
  id("open").onclick = () => show(() => true);
  id("fold").onclick = () => show((fold) => fold === outermost);
  if (id("path")) id("path").onclick = () => { show((fold) => first.has(fold)); reveal(last()); };
  const last = () => all(".node.on").pop() ?? main;

  // A node is shown: what it is folded in opens, and it is marked.
  let at = null;
  function reveal(node) {
    for (let up = node.parentElement; up; up = up.parentElement) if (up.localName === "details") up.open = true;
    at?.classList.remove("at");
    at = node.closest(".node");
    at?.classList.add("at");
    node.scrollIntoView({ block: "center" });
  }
  const follow = () => {
    const node = id(decodeURIComponent(location.hash.slice(1)));
    if (node && main.contains(node)) reveal(node);
  };
  addEventListener("hashchange", follow);
  // A link that is followed twice changes nothing in the address.
  main.addEventListener("click", (event) => { if (event.target.matches?.("a.no")) setTimeout(follow); });
  follow();

  // Few stops: one summary of the tree takes the focus, arrow keys go to the others.
  const stops = all(".tree summary");
  let stop = stops[0];
  for (const each of stops) each.tabIndex = -1;
  if (stop) stop.tabIndex = 0;
  const focus = (next) => { if (next) { take(next); next.focus(); } };
  const take = (next) => { stop.tabIndex = -1; stop = next; stop.tabIndex = 0; };
  const fold = (summary) => summary.parentElement.parentElement.closest("details");
  const isShown = (summary) => !summary.parentElement.parentElement.closest("details:not([open])");
  const beside = (by) => {
    for (let next = stops.indexOf(stop) + by; stops[next]; next += by) if (isShown(stops[next])) return stops[next];
  };
  const tree = main.querySelector(".tree");
  tree.addEventListener("focusin", (event) => { if (event.target.localName === "summary") take(event.target); });
  tree.addEventListener("keydown", (event) => {
    if (event.target.localName !== "summary" || event.ctrlKey || event.altKey || event.metaKey) return;
    const details = stop.parentElement;
    const keys = {
      ArrowDown: () => focus(beside(1)),
      ArrowUp: () => focus(beside(-1)),
      ArrowRight: () => (details.open ? focus(beside(1)) : (details.open = true)),
      ArrowLeft: () => (details.open ? (details.open = false) : focus(fold(stop)?.firstElementChild)),
      Home: () => focus(stops[0]),
      End: () => focus(stops.filter(isShown).pop()),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  // What is folded away keeps no stop: its fold takes it.
  tree.addEventListener("toggle", () => {
    while (!isShown(stop)) take(fold(stop).firstElementChild);
  }, true);

  // Search, in the order of the tree.
  const find = id("find"), said = document.querySelector(".hits output");
  let known = null, hits = [], hit = -1;
  const bars = new Map(all(".over rect").map((bar) => [bar.dataset.n, bar]));
  const bar = (node) => bars.get(node.closest("li").querySelector(".node").id);
  function search() {
    known ??= all(".tree .node").map((node) => ({
      node, number: node.querySelector(".no")?.textContent,
      text: (node.querySelector(".text").textContent).toLowerCase().replace(/\s+/g, " "),
    }));
    const words = find.value.trim().toLowerCase().replace(/\s+/g, " ");
    const numbered = known.filter((each) => each.number === words.replace(/^#/, ""));
    hits = words ? [...new Set([...numbered, ...known.filter((each) => each.text.includes(words))])] : [];
    hit = -1;
    for (const each of bars.values()) each.classList.remove("hit");
    for (const each of hits) bar(each.node)?.classList.add("hit");
    for (const button of [id("back"), id("next")]) button.hidden = !hits.length;
    said.textContent = words && !hits.length ? "none" : "";
    step(1);
  }
  function step(by) {
    if (!hits.length) return;
    hit = (hit + by + hits.length) % hits.length;
    said.textContent = `${hit + 1} of ${hits.length}`;
    reveal(hits[hit].node);
  }
  let soon;
  find.oninput = () => { clearTimeout(soon); soon = setTimeout(search, 150); };
  find.onkeydown = (event) => { if (event.key === "Enter") step(event.shiftKey ? -1 : 1); };
  id("next").onclick = () => step(1);
  id("back").onclick = () => step(-1);

  // The overview says what is under the pointer, and goes there.
  const picture = document.querySelector(".over svg");
  if (picture) {
    const caption = document.querySelector(".over figcaption"), about = caption.textContent;
    picture.onpointermove = (event) => {
      const node = event.target.dataset.n && id(event.target.dataset.n);
      caption.textContent = node
        ? [".no", ".text", ".soft, .statistics > summary"].map((what) => node.querySelector(what)?.textContent.trim().slice(0, 90)).join("  ")
        : about;
    };
    picture.onpointerleave = () => { caption.textContent = about; };
    picture.onclick = (event) => { if (event.target.dataset.n) reveal(id(event.target.dataset.n)); };
  }
}
