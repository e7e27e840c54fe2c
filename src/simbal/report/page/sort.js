// A field above a long table leaves the rows that hold each word typed into it.
for (const box of document.querySelectorAll(".scroll")) {
  const body = box.querySelector(".grid tbody");
  if (!body || body.rows.length <= 30) continue;
  const field = document.createElement("input");
  field.type = "search";
  field.className = "filter";
  field.placeholder = "rows with …";
  field.setAttribute("aria-label", `rows of ${box.getAttribute("aria-label")} with these words`);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) {
      const text = [...row.cells].filter((cell) => !cell.querySelector("a")).map((cell) => cell.textContent).join(" ");
      row.hidden = !words.every((word) => text.toLowerCase().includes(word));
    }
  });
  box.before(field);
}

// A click on a heading, or Enter on it, sorts the rows of its table: once up, once more down.
for (const button of document.querySelectorAll("th > button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement;
    const body = heading.closest("table").tBodies[0];
    const up = heading.getAttribute("aria-sort") !== "ascending";
    const key = (row) => {
      const cell = row.cells[heading.cellIndex];
      const text = cell.tagName === "TD" ? cell.firstChild?.textContent : cell.textContent; // what follows stands aside
      return cell.dataset.key ?? (text ?? "").trim();
    };
    const number = (text) => (text === "" || text === "—" ? NaN : Number(text));
    const rows = [...body.rows].map((row) => [row, key(row), number(key(row))]);
    rows.sort(([, a, x], [, b, y]) => {
      if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1; // what has no number comes last, up or down
      const order = isNaN(x) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
      return up ? order : -order;
    });
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...rows.map(([row]) => row));
  });
}
