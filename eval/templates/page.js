// What a page does beyond showing itself: sort, filter, search, pick methods, compare a pair.
// Works on the page's own elements; asks for nothing but the pictures that the page names.
"use strict";
const one = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// Tables: numbers as numbers, dashes last, stable otherwise.
function sortTable(button) {
  const head = button.parentElement, row = head.parentElement, column = head.cellIndex;
  const body = row.closest("table").tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending";
  [...row.cells].forEach((cell) => cell.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = (line) => line.cells[column].dataset.value ?? line.cells[column].textContent.trim();
  const compare = (first, second) => {
    const a = key(first), b = key(second);
    if (a === "-" || b === "-") return (a === "-") - (b === "-");
    const numbers = a !== "" && b !== "" && !isNaN(a) && !isNaN(b);
    return (numbers ? a - b : a.localeCompare(b)) * (up ? 1 : -1);
  };
  body.append(...[...body.rows].sort(compare));
}

const holds = (text, words) => words.every((word) => text.includes(word));
const wordsOf = (input) => input.value.toLowerCase().split(/\s+/).filter(Boolean);

function startLayers() {
  const table = one("#layer-table"), input = one("input[name=layer]");
  if (!table) return;
  all("th button", table).forEach((button) => button.addEventListener("click", () => sortTable(button)));
  const rows = [...table.tBodies[0].rows], status = one("output", input.form);
  const filter = (accept) => {
    rows.forEach((row) => { row.hidden = !accept(row); });
    status.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  const search = () => filter((row) => holds(row.textContent.toLowerCase(), wordsOf(input)));
  input.addEventListener("input", search);
  search();
  all(".segment").forEach((segment) => segment.addEventListener("click", () => {
    const row = rows.find((line) => line.cells[0].textContent === segment.dataset.layer);
    input.value = row.cells[1].textContent;
    filter((line) => line === row);
    one("#all-layers").open = true;
    input.scrollIntoView({ block: "center" });
  }));
}

// The list of all pairs.
function startGallery(open) {
  const gallery = one("#gallery"), form = one("form", gallery), grid = one(".grid", gallery);
  const pairs = all(".pair", gallery), { search, metric, order, least, most } = form.elements;
  const picks = all("#picks input");
  const worst = (pair) => {
    const better = metric.selectedOptions[0].dataset.better;
    const values = all(`.side:not([hidden]) img[data-m-${metric.value}]`, pair)
      .map((image) => Number(image.getAttribute(`data-m-${metric.value}`)));
    return values.length ? Math[better === "higher" ? "min" : "max"](...values) : NaN;
  };
  const compare = (a, b) => {
    if (order.value === "given") return a.dataset.index - b.dataset.index;
    const [x, y] = [worst(a), worst(b)];
    if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
    const sign = (metric.selectedOptions[0].dataset.better === "higher") === (order.value === "worst") ? 1 : -1;
    return x === y ? a.dataset.index - b.dataset.index : (x < y ? -sign : sign);
  };
  const bounded = (pair) => {
    const value = worst(pair);
    return !(least.value !== "" && !(value >= Number(least.value)))
      && !(most.value !== "" && !(value <= Number(most.value)));
  };
  const apply = () => {
    const shown = picks.filter((pick) => pick.checked).map((pick) => pick.value);
    if (picks.length) all(".side, .pair .numbers").forEach((part) => {
      part.hidden = part.dataset.side !== "original" && !shown.includes(part.dataset.side);
    });
    pairs.forEach((pair) => {
      const text = `${pair.dataset.name} ${one(".prompt", pair).textContent}`.toLowerCase();
      pair.hidden = !(holds(text, wordsOf(search)) && bounded(pair));
    });
    grid.append(...[...pairs].sort(compare));
    form.querySelector("output").textContent = `${pairs.filter((pair) => !pair.hidden).length} of ${pairs.length}`;
  };
  [form, ...picks].forEach((part) => part.addEventListener("input", apply));
  form.addEventListener("submit", (event) => event.preventDefault());
  if (picks.length) apply();
  all(".pair").forEach((pair) => {
    const show = (event) => open(pair, event.target.closest(".side")?.dataset.side);
    all("img", pair).forEach((image) => image.addEventListener("click", show));
    one(".compare", pair).addEventListener("click", show);
  });
  return {
    pair: (index) => pairs.find((pair) => pair.dataset.index === index),
    shown: () => all(".pair:not([hidden])", grid),
    all: pairs,
  };
}

// The measured picture behind one that is shown: in a data block of this page, or the file itself.
function fullSource(reference, image) {
  if (!reference) return image.src;
  return "data:image/webp;base64," + document.getElementById(reference.slice(1)).textContent;
}

class Lightbox {
  constructor() {
    this.dialog = one("#lightbox");
    [this.stage, this.box, this.under, this.over, this.divider] =
      [".stage", ".box", ".under", ".over", ".divider"].map((name) => one(name, this.dialog));
    [this.split, this.gain, this.left, this.right] =
      ["split", "gain", "left", "right"].map((name) => one(`[name=${name}]`, this.dialog));
    this.view = "slider"; this.zoom = "fit"; this.flipped = false; this.list = []; this.at = 0;
    this.listen();
  }

  listen() {
    const press = (name, act) => all(`[data-${name}]`, this.dialog).forEach((button) => {
      if (button !== this.dialog) button.addEventListener("click", () => act(button.dataset[name]));
    });
    press("view", (view) => this.look(view));
    press("zoom", (zoom) => this.magnify(zoom));
    press("step", (step) => this.step(Number(step)));
    press("close", () => this.dialog.close());
    this.split.addEventListener("input", () => this.place());
    this.gain.addEventListener("input", () => this.paint());
    this.left.addEventListener("change", () => this.load());
    this.right.addEventListener("change", () => this.load());
    this.stage.addEventListener("scroll", () => this.place());
    this.stage.addEventListener("pointerdown", (event) => this.drag(event));
    this.under.addEventListener("load", () => this.fit());
    window.addEventListener("resize", () => this.dialog.open && this.fit());
    this.dialog.addEventListener("keydown", (event) => this.key(event));
  }

  open(pair, side, gallery) {
    const own = gallery.pair(pair.dataset.index), shown = gallery.shown();
    this.list = shown.includes(own) ? shown : gallery.all;
    this.at = this.list.indexOf(own);
    if (!this.dialog.open) this.dialog.showModal();
    this.show(side);
    this.stage.focus();
  }

  step(by) {
    this.at = (this.at + by + this.list.length) % this.list.length;
    this.show();
  }

  show(side) {
    const pair = this.list[this.at], sides = all(".side", pair);
    const names = sides.map((part) => part.dataset.side);
    const keep = [this.left.value, side && side !== names[0] ? side : this.right.value];
    [this.left, this.right].forEach((select, index) => {
      select.replaceChildren(...names.map((name) => new Option(name, name)));
      const visible = sides.find((part, place) => place > 0 && !part.hidden);
      const first = index ? (visible ?? sides[1]).dataset.side : names[0];
      select.value = names.includes(keep[index]) ? keep[index] : first;
    });
    one(".sources", this.dialog).hidden = names.length < 3;
    one("#lightbox-title", this.dialog).textContent = `Pair ${pair.dataset.name}`;
    one(".position", this.dialog).textContent = `${this.at + 1} of ${this.list.length}`;
    this.flipped = false;
    this.load();
  }

  image(select) {
    return one(`.side[data-side="${CSS.escape(select.value)}"] img`, this.list[this.at]);
  }

  load() {
    const pair = this.list[this.at], first = this.image(this.left), second = this.image(this.right);
    this.size = [Number(first.getAttribute("width")), Number(first.getAttribute("height"))];
    // A page with lossy pictures brings the difference of the measured ones, amplified already.
    this.stored = this.view === "difference" ? pair.dataset.difference : undefined;
    this.under.src = this.stored ? fullSource(this.stored) : fullSource(second.dataset.full, second);
    this.over.src = fullSource(first.dataset.full, first);
    this.under.alt = second.alt; this.over.alt = first.alt;
    this.box.classList.toggle("pixels", first.classList.contains("small") || Number(this.zoom) > 1);
    const text = [one(".prompt", pair).cloneNode(true)];
    const numbers = all(".numbers", pair).find((part) => part.dataset.side === this.right.value);
    if (numbers) { const copy = numbers.cloneNode(true); copy.hidden = false; text.push(copy); }
    one(".text", this.dialog).replaceChildren(...text);
    this.look(this.view, false);
    this.fit();
  }

  look(view, reload = true) {
    if (view === "flicker" && this.view === "flicker" && reload) this.flipped = !this.flipped;
    const fresh = view !== this.view;
    this.view = view;
    this.dialog.dataset.view = view;
    all("button[data-view]", this.dialog).forEach((button) =>
      button.setAttribute("aria-pressed", String(button.dataset.view === view)));
    if (reload && fresh) this.load(); else this.paint();
  }

  paint() {
    const { view, over, box } = this, gain = Number(this.gain.value);
    over.style.mixBlendMode = view === "difference" ? "difference" : "normal";
    over.style.visibility = (view === "flicker" && this.flipped) || (view === "difference" && this.stored) ? "hidden" : "visible";
    const given = this.stored ? Number(this.dialog.dataset.gain) : 1;
    box.style.filter = view === "difference" ? `brightness(${gain / given})` : "none";
    one("[name=times]", this.dialog).textContent = `${gain} times`;
    this.divider.hidden = view !== "slider";
    const names = { slider: [this.left.value, this.right.value], flicker: [(this.flipped ? this.right : this.left).value, ""], difference: ["difference", ""] };
    [".tag.left", ".tag.right"].forEach((tag, index) => { one(tag, this.dialog).textContent = names[view][index]; });
    this.place();
  }

  fit() {
    const [width, height] = this.size, { stage, box } = this;
    const most = Math.min((stage.clientWidth - 1) / width, (stage.clientHeight - 1) / height);
    // 1:1 is a pixel of the picture on a pixel of the screen.
    const scale = this.zoom === "fit" ? most : Number(this.zoom) / window.devicePixelRatio;
    box.style.width = `${width * scale}px`;
    box.style.height = `${height * scale}px`;
    // In the middle, but on whole pixels of the screen: between two of them every picture is blurred.
    const frame = stage.getBoundingClientRect(), dots = window.devicePixelRatio;
    const whole = (start, room) => Math.ceil((start + Math.max(0, room / 2)) * dots) / dots - start;
    box.style.marginLeft = `${whole(frame.left + 1, stage.clientWidth - width * scale)}px`;
    box.style.marginTop = `${whole(frame.top + 1, stage.clientHeight - height * scale)}px`;
    this.place();
  }

  magnify(zoom) {
    const { stage } = this;
    const x = (stage.scrollLeft + stage.clientWidth / 2) / stage.scrollWidth;
    const y = (stage.scrollTop + stage.clientHeight / 2) / stage.scrollHeight;
    this.zoom = zoom;
    all("button[data-zoom]", this.dialog).forEach((button) =>
      button.setAttribute("aria-pressed", String(button.dataset.zoom === zoom)));
    this.dialog.classList.toggle("zoomed", zoom !== "fit");
    this.load();
    stage.scrollTo(x * stage.scrollWidth - stage.clientWidth / 2, y * stage.scrollHeight - stage.clientHeight / 2);
  }

  // The divider stands still on the screen while zoomed pictures move under it.
  place() {
    const stage = this.stage.getBoundingClientRect(), box = this.box.getBoundingClientRect();
    const left = Math.max(stage.left, box.left), right = Math.min(stage.right, box.right);
    const x = left + (right - left) * Number(this.split.value) / 100 - box.left;
    this.over.style.clipPath = this.view === "slider" ? `inset(0 ${box.width - x}px 0 0)` : "none";
    this.divider.style.left = `${x}px`;
  }

  drag(event) {
    const { stage } = this;
    if (event.button !== 0 || event.pointerType === "touch" && this.zoom !== "fit") return;
    const from = [event.clientX, event.clientY, stage.scrollLeft, stage.scrollTop];
    const panning = this.zoom !== "fit" && event.target !== this.divider;
    if (!panning && this.view !== "slider") return;
    const move = (now) => {
      if (panning) { stage.scrollTo(from[2] + from[0] - now.clientX, from[3] + from[1] - now.clientY); return; }
      const frame = stage.getBoundingClientRect(), box = this.box.getBoundingClientRect();
      const left = Math.max(frame.left, box.left), right = Math.min(frame.right, box.right);
      this.split.value = 100 * (now.clientX - left) / (right - left);
      this.place();
    };
    stage.setPointerCapture(event.pointerId);
    stage.addEventListener("pointermove", move);
    stage.addEventListener("lostpointercapture", () => stage.removeEventListener("pointermove", move), { once: true });
    move(event);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const zooms = all("button[data-zoom]", this.dialog).map((button) => button.dataset.zoom);
    const nearer = (by) => this.magnify(zooms[Math.max(0, Math.min(zooms.length - 1, zooms.indexOf(this.zoom) + by))]);
    const slide = (by) => { this.split.value = Number(this.split.value) + by; this.place(); };
    const typing = event.target.matches("input, select") || this.zoom !== "fit" && event.target === this.stage;
    const keys = {
      j: () => this.step(1), k: () => this.step(-1), s: () => this.look("slider"), f: () => this.look("flicker"),
      d: () => this.look("difference"), z: () => this.magnify(this.zoom === "1" ? "fit" : "1"),
      "+": () => nearer(1), "-": () => nearer(-1),
      ...(typing ? {} : { ArrowLeft: () => slide(-5), ArrowRight: () => slide(5) }),
    };
    if (!(event.key in keys) || event.target.matches("select")) return;
    event.preventDefault();
    keys[event.key]();
  }
}

// A link to a folded part opens it; on paper everything is open.
function unfold() {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let part = target.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
  target.scrollIntoView();
}

const lightbox = new Lightbox();
const gallery = one("#gallery") && startGallery((pair, side) => lightbox.open(pair, side, gallery));
startLayers();
all(".controls, .compare, .needs-script").forEach((part) => { part.hidden = false; });
document.documentElement.classList.add("started");
window.addEventListener("hashchange", unfold);
// A second click on a link leaves the address as it is.
all(".contents a").forEach((link) => link.addEventListener("click", () => setTimeout(unfold)));
unfold();
