// Makes tables sortable, adds the button for the colour scheme, and draws each specification into its place.

/** Sorts a table by the column with the clicked head: first ascending, then descending. */
function sortable(table) {
  const body = table.tBodies[0];
  for (const head of table.querySelectorAll("th button")) {
    const cell = head.parentElement, column = cell.cellIndex;
    head.addEventListener("click", () => {
      const up = cell.getAttribute("aria-sort") !== "ascending";
      for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
      body.append(...[...body.rows].sort((a, b) => {
        const [p, q] = [key(a), key(b)], [m, n] = [parseFloat(p), parseFloat(q)];
        if (p === "" || q === "") return (p === "") - (q === ""); // rows without a value stay at the end
        const order = Number.isNaN(m) || Number.isNaN(n) ? p.localeCompare(q) : m - n;
        return up ? order : -order;
      }));
    });
  }
}

function themeButton() {
  const button = document.getElementById("theme"), root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  function refresh() {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${dark() ? "light" : "dark"} scheme`);
  }
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; refresh(); });
  system.addEventListener("change", refresh);
  refresh();
}

themeButton();
document.querySelectorAll("table.sortable").forEach(sortable);
JSON.parse(document.getElementById("data").textContent).forEach((specs, index) => {
  for (const spec of specs)
    (spec.runs ? heatSection : lineSection)(document.querySelector(`[data-task="${index}"] [data-chart="${spec.name}"]`), spec);
});
document.documentElement.dataset.ready = "true";
