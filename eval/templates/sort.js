// Sorts a table by the clicked heading: numbers as numbers, dashes last, stable otherwise.
document.querySelectorAll("#layers th button").forEach((button) => {
  button.addEventListener("click", () => {
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
  });
});
