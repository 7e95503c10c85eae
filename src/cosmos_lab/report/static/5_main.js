// Puts legends, controls and charts into the places the page left for them.

/** Buttons that switch series on and off; a method with several rates gets a row of its own. */
function legend(task, view, redraw) {
  const box = html("div", { class: "legend", role: "group", "aria-label": "Series shown" });
  const chips = new Map(), heads = [];
  const many = task.series.length > task.methods.length;

  function set(ids, on) {
    for (const id of ids) on ? view.on.add(id) : view.on.delete(id);
    refresh();
    redraw();
  }
  function refresh() {
    for (const [id, chip] of chips) chip.setAttribute("aria-pressed", String(view.on.has(id)));
    for (const [ids, head] of heads) {
      const n = ids.filter((id) => view.on.has(id)).length;
      head.setAttribute("aria-pressed", n === 0 ? "false" : n === ids.length ? "true" : "mixed");
    }
  }
  function chip(id, text, small) {
    const series = task.series[id], method = task.methods[series.method];
    const state = series.status === "done" ? "" : ` (${series.status})`;
    const button = html("button", { type: "button", class: small ? "chip rate" : "chip", "data-series": id, title: `${series.label}${state}: click to show or hide, double-click to show it alone` },
      small ? null : sample(method), html("span", { text }), series.best && many ? html("span", { class: "star", text: "★", "aria-label": "best rate" }) : null,
      state ? html("span", { class: "dim", text: series.status }) : null);
    button.addEventListener("click", () => set([id], !view.on.has(id)));
    button.addEventListener("dblclick", () => { view.on.clear(); set([id], true); });
    chips.set(id, button);
    return dress(button, method);
  }

  task.methods.forEach((method, index) => {
    const ids = task.series.flatMap((series, id) => (series.method === index ? [id] : []));
    if (!many) return box.append(...ids.map((id) => chip(id, task.series[id].label, false)));
    const head = dress(html("button", { type: "button", class: "chip head" }, sample(method), html("span", { text: method.name })), method);
    head.addEventListener("click", () => {
      const any = ids.some((id) => view.on.has(id));
      set(any ? ids : ids.filter((id) => task.series[id].shown), !any);
    });
    heads.push([ids, head]);
    box.append(html("div", { class: "row" }, head, ...ids.map((id) => chip(id, task.series[id].rate, true))));
  });
  if (many) box.classList.add("rows");
  const all = task.series.map((_, id) => id);
  const quick = [["All", all], ["None", []]];
  if (many) quick.unshift(["Best rates", all.filter((id) => task.series[id].shown)]);
  const links = quick.map(([text, ids]) => html("button", { type: "button", class: "link", text, onclick: () => { view.on.clear(); set(ids, true); } }));
  refresh();
  return [box, html("div", { class: "quick", role: "group", "aria-label": "Show" }, ...links)];
}

/** A short piece of a method's line, with its marker where the chart shows one. */
function sample(method, marked = false) {
  const line = svg("path", { class: "line", d: "M1,7H25" });
  line.style.strokeDasharray = method.dash.join(" ");
  const marker = marked && svg("path", { class: "marker", transform: "translate(13,7)", d: MARKERS[method.marker](4) });
  return svg("svg", { class: "sample", width: 26, height: 14, "aria-hidden": "true" }, line, marker);
}

function curves(section, task) {
  const view = { on: new Set(task.series.flatMap((s, id) => (s.shown ? [id] : []))), logX: false, logY: false, training: true, full: false, zoom: { tokens: null, time: null } };
  const draws = [];
  const reset = html("button", { type: "button", class: "link", text: "Reset zoom", hidden: true, onclick: () => { view.zoom = { tokens: null, time: null }; redraw(); } });
  const redraw = () => {
    reset.hidden = !view.zoom.tokens && !view.zoom.time;
    draws.forEach((draw) => draw());
  };
  const scales = [["linear", "Linear"], ["log", "Log"]];
  const [box, quick] = legend(task, view, redraw);
  section.append(box, html("div", { class: "toolbar" },
    choice("Loss", scales, "linear", (v) => { view.logY = v === "log"; redraw(); }),
    choice("Tokens and time", scales, "linear", (v) => { view.logX = v === "log"; view.zoom = { tokens: null, time: null }; redraw(); }),
    task.validated ? toggle("Training loss", true, (on) => { view.training = on; redraw(); }) : null,
    toggle("Full range", false, (on) => { view.full = on; redraw(); }), quick, reset));
  const pair = html("div", { class: "pair" });
  section.append(pair);
  for (const [axis, title] of [["tokens", "by tokens"], ["time", "by wall-clock time"]]) {
    const host = html("div", { class: "chart" });
    pair.append(html("figure", { "data-axis": axis }, html("figcaption", {}, html("b", { text: task.loss }), html("span", { text: title })), host));
    const draw = lineChart(host, task, view, axis, redraw);
    draws.push(draw);
    onWidth(host, draw);
  }
}

function sweep(section, task) {
  const finite = task.sweep.flatMap((line) => line.points.map((p) => p.y)).filter((y) => y !== null);
  const wide = finite.length > 0 && Math.max(...finite) > 2.5 * Math.min(...finite);
  const view = { on: new Set(task.sweep.map((line) => line.method)), logY: wide };
  const host = html("div", { class: "chart" });
  const draw = sweepChart(host, task, view);
  const buttons = task.sweep.map((line) => {
    const method = task.methods[line.method];
    const button = dress(html("button", { type: "button", class: "chip", "aria-pressed": "true", "data-method": line.method }, sample(method, true), html("span", { text: method.name })), method);
    button.addEventListener("click", () => {
      const on = !view.on.has(line.method);
      on ? view.on.add(line.method) : view.on.delete(line.method);
      button.setAttribute("aria-pressed", String(on));
      draw();
    });
    return button;
  });
  section.append(html("div", { class: "toolbar" },
    html("div", { class: "legend", role: "group", "aria-label": "Lines shown" }, ...buttons), choice("Scale", [["linear", "Linear"], ["log", "Log"]], wide ? "log" : "linear", (v) => { view.logY = v === "log"; draw(); })),
    html("figure", {}, html("figcaption", {}, html("b", { text: task.result }), html("span", { text: "by learning rate; a ring marks the best" })), host));
  onWidth(host, draw);
}

/** Tables sort by the column whose head is clicked: first the best way up, then the other. */
function sortable(table) {
  const body = table.tBodies[0];
  for (const head of table.querySelectorAll("th button")) {
    const cell = head.parentElement, column = cell.cellIndex;
    head.addEventListener("click", () => {
      const up = cell.getAttribute("aria-sort") !== "ascending";
      for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
      const rows = [...body.rows].sort((a, b) => {
        const [p, q] = [key(a), key(b)], [m, n] = [parseFloat(p), parseFloat(q)];
        if (p === "" || q === "") return (p === "") - (q === ""); // what has no value stays at the end
        const order = Number.isNaN(m) || Number.isNaN(n) ? p.localeCompare(q) : m - n;
        return up ? order : -order;
      });
      body.append(...rows);
    });
  }
}

function themeButton() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const refresh = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to the ${dark() ? "light" : "dark"} scheme`); };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; refresh(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  refresh();
}

const data = JSON.parse(document.getElementById("data").textContent);
themeButton();
document.querySelectorAll("table.sortable").forEach(sortable);
data.tasks.forEach((task, index) => {
  const place = (name) => document.querySelector(`[data-task="${index}"] [data-chart="${name}"]`);
  for (const [name, draw] of [["curves", curves], ["sweep", sweep], ["heat", (section) => heatMap(section, task, data.heat)]]) {
    const section = place(name);
    if (section) draw(section, task);
  }
});
document.documentElement.dataset.ready = "true";
