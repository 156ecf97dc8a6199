// What a page does whose evaluation still runs: it loads itself again, and stays as the reader left it.
const age = one("#age"), running = age.dataset.reload;
const controls = () => all("#gallery form :is(input, select)");

// Of this entry of the history, which outlasts a reload; storage is closed to files in some browsers.
function keep() {
  const values = Object.fromEntries(controls().map((part) => [part.name, part.value]));
  const shut = all("details[id]").filter((part) => !part.open).map((part) => part.id);
  history.replaceState({ values, shut, y: window.scrollY }, "");
}

function restore({ values, shut, y }) {
  controls().forEach((part) => { part.value = values[part.name] ?? part.value; });
  one("#gallery form")?.dispatchEvent(new Event("input"));
  all("details[id]").forEach((part) => { part.open = !shut.includes(part.id); });
  window.scrollTo(0, y);
}

function tell() {
  const seconds = Math.max(0, Math.round((Date.now() - age.dataset.written) / 1000));
  age.textContent = `Written ${seconds < 120 ? `${seconds} seconds` : `${Math.round(seconds / 60)} minutes`} ago.`;
}

// Who compares a pair, or types, is not disturbed.
const busy = () => one("#lightbox").open || document.activeElement?.matches("input, select");
if (history.state?.values) restore(history.state);
tell();
setInterval(tell, 1000);
if (running) setInterval(() => { if (!busy()) { keep(); location.reload(); } }, 1000 * running);
