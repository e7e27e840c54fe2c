// Loads the page again while the sweep goes on, but not under a reader's hands; what was chosen and the place are kept.
const status = document.getElementById("live");
const every = Number(status.dataset.every) * 1000;
let pressed = false;

addEventListener("pointerdown", () => { pressed = true; });
for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => { pressed = false; });

function age() {
  const seconds = Math.max(0, Math.round(Date.now() / 1000 - Number(status.dataset.written)));
  const late = seconds > 120 && seconds * 1000 > 5 * every;
  status.textContent = `Written ${seconds} s ago` + (late ? ": the sweep may have been killed" : "");
}

function again() {
  const busy = pressed || document.hidden || !getSelection().isCollapsed || document.activeElement?.tagName === "SELECT";
  if (busy) {
    setTimeout(again, 1000);
    return;
  }
  keep();
  location.reload();
}

age();
setInterval(age, 1000);
if (!status.hasAttribute("data-stopped")) setTimeout(again, every);
