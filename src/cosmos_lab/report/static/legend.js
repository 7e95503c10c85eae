// Makes the legend of a section of line charts: buttons that show and hide its series, and the shapes of markers.

const MARKERS = {
  o: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  s: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}Z`,
  "^": (r) => `M0,${-1.2 * r}L${1.15 * r},${r}H${-1.15 * r}Z`,
  v: (r) => `M0,${1.2 * r}L${1.15 * r},${-r}H${-1.15 * r}Z`,
  "<": (r) => `M${-1.2 * r},0L${r},${-1.15 * r}V${1.15 * r}Z`,
  D: (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0Z`,
  P: (r) => {
    const arm = 0.7 * r; // of a plus
    return `M${-r / 2},${-1.2 * r}h${r}v${arm}h${arm}v${r}h${-arm}v${arm}h${-r}v${-arm}h${-arm}v${-r}h${arm}Z`;
  },
  X: (r) => {
    const [a, b] = [0.7 * r, 0.6 * r]; // the length of an arm of a diagonal cross, and its width
    return `M0,${-0.5 * r}l${a},${-a}l${b},${b}l${-a},${a}l${a},${a}l${-b},${b}l${-a},${-a}l${-a},${a}l${-b},${-b}l${a},${-a}l${-a},${-a}l${b},${-b}Z`;
  },
};

/** Makes buttons that switch series on and off; a method with several series gets a row of buttons. */
function legend(spec, view, redraw, bar) {
  const box = html("div", { class: "legend", role: "group", "aria-label": "Series shown" });
  const chips = new Map(), heads = [], all = spec.series.map((_, id) => id);
  const many = spec.series.length > spec.methods.length;

  function set(ids, on) {
    for (const id of ids) on ? view.on.add(id) : view.on.delete(id);
    refresh();
    redraw();
  }
  function only(ids) {
    view.on.clear();
    set(ids, true);
  }
  function refresh() {
    for (const [id, chip] of chips) chip.setAttribute("aria-pressed", String(view.on.has(id)));
    for (const [ids, head] of heads) {
      const n = ids.filter((id) => view.on.has(id)).length;
      head.setAttribute("aria-pressed", n === 0 ? "false" : n === ids.length ? "true" : "mixed");
    }
  }
  function chip(id) {
    const { label, short, method, best, status } = spec.series[id], state = status === "done" ? "" : status;
    const title = `${label}${state && ` (${state})`}: click to show or hide, double-click to show it alone`;
    const button = html("button", { type: "button", class: many ? "chip rate" : "chip", "data-series": id, title },
      !many && sample(spec, spec.methods[method]),
      html("span", { text: many ? short : label }),
      best && many && html("span", { class: "star", text: "★", "aria-label": "best rate" }),
      state && html("span", { class: "dim", text: state }));
    button.addEventListener("click", () => set([id], !view.on.has(id)));
    button.addEventListener("dblclick", () => only([id]));
    chips.set(id, button);
    return withColours(button, spec.methods[method]);
  }

  spec.methods.forEach((method, index) => {
    const ids = all.filter((id) => spec.series[id].method === index);
    if (!many) return box.append(...ids.map(chip));
    const name = html("span", { text: method.name });
    const head = withColours(html("button", { type: "button", class: "chip head" }, sample(spec, method), name), method);
    head.addEventListener("click", () => {
      const any = ids.some((id) => view.on.has(id));
      set(any ? ids : ids.filter((id) => spec.series[id].shown), !any);
    });
    heads.push([ids, head]);
    box.append(html("div", { class: "row" }, head, ...ids.map(chip)));
  });
  box.classList.toggle("rows", many);
  const quick = { ...(many ? { "Best rates": all.filter((id) => spec.series[id].shown) } : {}), All: all, None: [] };
  const links = Object.entries(quick).map(([text, ids]) =>
    html("button", { type: "button", class: "link", text, onclick: () => only(ids) }));
  if (!spec.marked) bar.append(html("div", { class: "quick", role: "group", "aria-label": "Show" }, ...links));
  refresh();
  return box;
}

/** Draws a short piece of a method's line, with its marker if the chart shows markers. */
function sample(spec, method) {
  const line = svg("path", { class: "line", d: "M1,7H25", "stroke-dasharray": method.dash.join(" ") });
  const d = MARKERS[method.marker](4);
  const marker = spec.marked && svg("path", { class: "marker", transform: "translate(13,7)", d });
  return svg("svg", { class: "sample", width: 26, height: 14, "aria-hidden": "true" }, line, marker);
}
