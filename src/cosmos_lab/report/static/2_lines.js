// Draws a section of line charts from its specification: a legend, controls, and charts that share both.

const RAIL = 18; // height of the points that have no value
const MARKERS = {
  o: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  s: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}Z`,
  "^": (r) => `M0,${-1.2 * r}L${1.15 * r},${r}H${-1.15 * r}Z`,
  v: (r) => `M0,${1.2 * r}L${1.15 * r},${-r}H${-1.15 * r}Z`,
  "<": (r) => `M${-1.2 * r},0L${r},${-1.15 * r}V${1.15 * r}Z`,
  D: (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0Z`,
  P: (r) => `M${-r / 2},${-1.2 * r}h${r}v${0.7 * r}h${0.7 * r}v${r}h${-0.7 * r}v${0.7 * r}h${-r}v${-0.7 * r}h${-0.7 * r}v${-r}h${0.7 * r}Z`,
  X: (r) => `M0,${-0.5 * r}l${0.7 * r},${-0.7 * r}l${0.6 * r},${0.6 * r}l${-0.7 * r},${0.7 * r}l${0.7 * r},${0.7 * r}l${-0.6 * r},${0.6 * r}l${-0.7 * r},${-0.7 * r}l${-0.7 * r},${0.7 * r}l${-0.6 * r},${-0.6 * r}l${0.7 * r},${-0.7 * r}l${-0.7 * r},${-0.7 * r}l${0.6 * r},${-0.6 * r}Z`,
};

function lineSection(section, spec) {
  const view = { on: new Set(spec.series.flatMap((s, id) => (s.shown ? [id] : []))), zoom: {} };
  const draws = [], bar = html("div", { class: "toolbar" });
  const reset = html("button", { type: "button", class: "link", text: "Reset zoom", onclick: () => { view.zoom = {}; redraw(); } });
  function redraw() {
    reset.hidden = !Object.keys(view.zoom).length;
    draws.forEach((draw) => draw());
  }
  for (const { key, text, on, scale } of spec.controls) {
    const change = (value) => {
      view[key] = value;
      if (key === "logX") view.zoom = {};
      redraw();
    };
    view[key] = on;
    bar.append(scale ? choice(text, [["linear", "Linear"], ["log", "Log"]], on ? "log" : "linear", (v) => change(v === "log")) : toggle(text, on, change));
  }
  const pair = html("div", { class: spec.charts.length > 1 ? "pair" : spec.name });
  section.append(legend(spec, view, redraw, bar), bar, pair);
  bar.append(reset);
  for (const chart of spec.charts) {
    const host = html("div", { class: "chart" });
    pair.append(html("figure", { "data-axis": chart.key }, html("figcaption", {}, html("b", { text: chart.title }), html("span", { text: chart.about })), host));
    draws.push(lineChart(host, spec, chart, view, redraw));
    onWidth(host, draws.at(-1));
  }
  reset.hidden = true;
}

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
    const button = html("button", { type: "button", class: many ? "chip rate" : "chip", "data-series": id, title: `${label}${state && ` (${state})`}: click to show or hide, double-click to show it alone` },
      many ? null : sample(spec, spec.methods[method]), html("span", { text: many ? short : label }),
      best && many ? html("span", { class: "star", text: "★", "aria-label": "best rate" }) : null, state ? html("span", { class: "dim", text: state }) : null);
    button.addEventListener("click", () => set([id], !view.on.has(id)));
    button.addEventListener("dblclick", () => only([id]));
    chips.set(id, button);
    return dress(button, spec.methods[method]);
  }

  spec.methods.forEach((method, index) => {
    const ids = all.filter((id) => spec.series[id].method === index);
    if (!many) return box.append(...ids.map(chip));
    const head = dress(html("button", { type: "button", class: "chip head" }, sample(spec, method), html("span", { text: method.name })), method);
    head.addEventListener("click", () => {
      const any = ids.some((id) => view.on.has(id));
      set(any ? ids : ids.filter((id) => spec.series[id].shown), !any);
    });
    heads.push([ids, head]);
    box.append(html("div", { class: "row" }, head, ...ids.map(chip)));
  });
  box.classList.toggle("rows", many);
  const quick = { ...(many ? { "Best rates": all.filter((id) => spec.series[id].shown) } : {}), All: all, None: [] };
  const links = Object.entries(quick).map(([text, ids]) => html("button", { type: "button", class: "link", text, onclick: () => only(ids) }));
  if (!spec.marked) bar.append(html("div", { class: "quick", role: "group", "aria-label": "Show" }, ...links));
  refresh();
  return box;
}

/** Draws a short piece of a method's line, with its marker if the chart shows markers. */
function sample(spec, method) {
  const line = svg("path", { class: "line", d: "M1,7H25", "stroke-dasharray": method.dash.join(" ") });
  const marker = spec.marked && svg("path", { class: "marker", transform: "translate(13,7)", d: MARKERS[method.marker](4) });
  return svg("svg", { class: "sample", width: 26, height: 14, "aria-hidden": "true" }, line, marker);
}

/** Makes one chart; returns the function that draws it again. */
function lineChart(host, spec, chart, view, redrawAll) {
  const tip = makeTip(host), axis = chart.x;
  const tickText = axis.unit === "tokens" ? countText : (t) => String(+t.toPrecision(3));
  const xText = (t) => (axis.ticks ? `${axis.title} ${axis.ticks.find(([at]) => at === t)[1]}` : `${tickText(t)} ${axis.unit}`);
  let now = null; // what is drawn: lines, scales, box, cursor, and the place that is read

  function visible(logX) {
    return spec.lines.flatMap((line) => {
      if (!view.on.has(line.series) || (line.faint && !view.faint)) return [];
      const points = line.y.map((y, i) => ({ x: line.x[chart.key][i], y, lo: line.lo[i] ?? null, hi: line.hi[i] ?? null, mark: line.marks[i], note: line.notes[i] }));
      const kept = points.filter((p) => p.x !== null && (!logX || p.x > 0));
      const series = spec.series[line.series];
      return kept.length ? [{ ...line, id: line.series, label: series.label, named: series.named, method: spec.methods[series.method], points: kept, known: kept.filter((p) => p.y !== null) }] : [];
    });
  }

  /** Returns the point of a line at a place on the x axis, between two logged ones if need be; none outside the line. */
  function valueAt(line, place) {
    const next = line.known.findIndex((p) => p.x >= place);
    if (next < 0 || (next === 0 && line.known[0].x > place)) return [];
    const [a, b] = [line.known[Math.max(0, next - 1)], line.known[next]];
    const share = b.x > a.x ? (place - a.x) / (b.x - a.x) : 1;
    return [{ x: place, y: a.y + (b.y - a.y) * share }];
  }

  /** Joins the ranges that the specification gives the visible lines, or takes the points inside the zoom. */
  function rangeY(lines, zoom) {
    const ends = (line) => zoom.flatMap((place) => valueAt(line, place)).map((p) => [p.y, p.y]);
    const inside = (line) => [...line.known.filter((p) => p.x >= zoom[0] && p.x <= zoom[1]).map((p) => [p.lo ?? p.y, p.hi ?? p.y]), ...ends(line)];
    const spans = zoom ? lines.flatMap(inside) : lines.map((line) => (view.full ? line.full : line.view)).filter(Boolean);
    const [low, high] = spans.length ? [Math.min(...spans.map((s) => s[0])), Math.max(...spans.map((s) => s[1]))] : [1, 2];
    const log = view.logY && low > 0, pad = log ? (high / low) ** chart.pad : chart.pad * (high - low || 1);
    return { range: log ? [low / pad, high * pad] : [low - pad, high + pad], log };
  }

  function draw() {
    host.querySelector("svg")?.remove();
    tip.hide();
    const logX = axis.log || view.logX, lines = visible(logX), main = lines.filter((line) => !line.faint);
    const W = host.clientWidth, H = Math.round(clamp(W * chart.aspect, 270, 400));
    const root = svg("svg", { width: W, height: H, tabindex: 0, role: "group", "aria-label": describe(main) });
    host.prepend(root);
    now = null;
    if (!lines.length) return root.append(svg("text", { class: "empty", x: W / 2, y: H / 2, "text-anchor": "middle", text: "No line is switched on" }));
    const labels = W >= 420 && main.length <= 12, rail = lines.some((line) => line.known.length < line.points.length);
    const box = { left: 52, top: rail ? 40 : 14, right: W - (labels ? 108 : 14), bottom: H - 42 };
    const zoom = view.zoom[chart.key], { range, log } = rangeY(lines, zoom);
    const x = makeScale(zoom ?? [logX ? axis.low : axis.range[0], axis.range[1]], [box.left, box.right], logX);
    const y = makeScale(range, [box.bottom, box.top], log);
    const clip = `clip-${unique++}`, plot = svg("g", { "clip-path": `url(#${clip})` }), cursor = svg("g", { class: "cursor" });
    drawAxes(root, x, y, box, rail);
    root.append(svg("clipPath", { id: clip }, svg("rect", { x: box.left, y: box.top - 4, width: box.right - box.left + 2, height: box.bottom - box.top + 4 })), plot);
    for (const line of lines) drawLine(root, plot, line, x, y, box);
    if (labels) drawNames(root, main, x, y, box);
    root.append(cursor);
    now = { main, x, y, box, cursor };
    listen(root);
  }

  function describe(lines) {
    const ends = lines.filter((line) => line.known.length).map((line) => `${line.label} ends at ${significant(line.known.at(-1).y)}`);
    return `${chart.title} ${chart.about}. ${ends.join("; ")}. Left and right arrow keys read values.`;
  }

  function drawAxes(root, x, y, box, rail) {
    const axes = svg("g", { class: "axes", "aria-hidden": "true" });
    const write = (at, height, anchor, text) => axes.append(svg("text", { x: at, y: height, "text-anchor": anchor, text }));
    for (const tick of y.ticks(Math.max(3, Math.round((box.bottom - box.top) / 60)))) {
      axes.append(svg("line", { x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }));
      write(box.left - 8, y(tick) + 4, "end", String(+tick.toPrecision(4)));
    }
    let last = -Infinity;
    for (const [t, text] of axis.ticks ?? x.ticks(Math.max(2, Math.round((box.right - box.left) / 80))).map((t) => [t, tickText(t)])) {
      const at = x(t);
      if (at - last < 46 || at < box.left || at > box.right + 1) continue; // as many names as fit
      last = at;
      axes.append(svg("line", { class: "tick", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 5 }));
      write(at, box.bottom + 19, "middle", text);
    }
    axes.append(svg("line", { class: "base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    write(box.right, box.bottom + 37, "end", axis.title);
    if (rail) {
      axes.append(svg("line", { class: "rail", x1: box.left, x2: box.right, y1: RAIL, y2: RAIL }));
      write(box.left - 8, RAIL + 4, "end", "no result");
    }
    root.append(axes);
  }

  function drawLine(root, plot, line, x, y, box) {
    const at = (p, key = "y") => `${x(p.x).toFixed(1)},${y(p[key]).toFixed(1)}`;
    const banded = line.known.filter((p) => p.lo !== null);
    if (spec.marked) {
      for (const p of banded) if (p.hi > p.lo) plot.append(dress(svg("path", { class: "error", d: `M${at(p, "lo")}L${at(p, "hi")}` }), line.method));
    } else if (banded.length > 1) {
      const d = `M${banded.map((p) => at(p, "hi")).join("L")}L${banded.map((p) => at(p, "lo")).reverse().join("L")}Z`;
      plot.append(dress(svg("path", { class: "band", d }), line.method));
    }
    const path = svg("path", { class: line.faint ? "curve train" : "curve val", "data-series": line.id, d: line.known.length ? `M${line.known.map((p) => at(p)).join("L")}` : "" });
    Object.assign(path.style, { strokeWidth: line.width, opacity: line.opacity, strokeDasharray: line.faint ? "" : line.method.dash.join(" ") });
    plot.append(dress(path, line.method));
    for (const p of line.points.filter((q) => q.mark && x.covers(q.x))) {
      if (p.mark === "dot" && (y(p.y) < box.top || y(p.y) > box.bottom)) continue; // its line is outside too
      const mark = svg("g", { class: `mark ${p.mark}`, transform: `translate(${x(p.x)},${p.y === null ? RAIL : clamp(y(p.y), box.top, box.bottom)})` }, svg("title", { text: `${line.label}: ${p.note || significant(p.y)}` }));
      if (p.mark === "best") mark.append(svg("circle", { class: "ring", r: 9.5 }));
      mark.append(svg("path", { d: p.mark === "failed" ? "M-4.5,-4.5l9,9m0,-9l-9,9" : MARKERS[line.method.marker](p.mark === "dot" ? 2.6 : 4.5) }));
      root.append(dress(mark, line.method));
    }
  }

  /** Writes names at the ends of the lines, so that no reader has to match colours. */
  function drawNames(root, lines, x, y, box) {
    const ends = lines.flatMap((line) => {
      const last = line.known.filter((p) => x.covers(p.x)).at(-1);
      const point = valueAt(line, x.domain[1])[0] ?? last; // where the line leaves the chart, or ends in it
      return point ? [{ line, point }] : [];
    });
    const wanted = ends.map(({ point }) => clamp(y(point.y), box.top, box.bottom));
    spreadOut(wanted, 14, box.top + 4, box.bottom).forEach((height, i) => {
      const { line, point } = ends[i], end = clamp(x(point.x), box.left, box.right);
      const name = !line.named && lines.filter((other) => other.method === line.method).length === 1 ? line.method.name : line.label;
      const leader = !spec.marked && svg("path", { d: `M${end + 3},${wanted[i]}L${box.right + 6},${height}` });
      const text = svg("text", { x: spec.marked ? end + 14 : box.right + 9, y: height + 4, text: name.length > 17 ? name.slice(0, 16) + "…" : name });
      root.append(dress(svg("g", { class: "end", "aria-hidden": "true" }, leader, text), line.method));
    });
  }

  function listen(root) {
    let start = null;
    const at = (event) => clamp(event.clientX - root.getBoundingClientRect().left, now.box.left, now.box.right);
    root.addEventListener("pointermove", (event) => (start === null ? read(now.x.invert(at(event))) : select(start, at(event))));
    root.addEventListener("pointerleave", () => start === null && clear());
    root.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button) return;
      start = at(event);
      root.setPointerCapture(event.pointerId);
    });
    root.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const ends = [start, at(event)].sort((p, q) => p - q);
      start = null;
      if (ends[1] - ends[0] <= 12) return clear();
      view.zoom[chart.key] = ends.map(now.x.invert);
      redrawAll();
    });
    root.addEventListener("keydown", (event) => {
      const xs = [...new Set(now.main.flatMap((line) => line.points.map((p) => p.x)).filter(now.x.covers))].sort((a, b) => a - b);
      const here = xs.indexOf(now.read ?? NaN);
      const next = { ArrowRight: here + 1, ArrowLeft: here < 0 ? xs.length - 1 : here - 1, Home: 0, End: xs.length - 1 }[event.key];
      if (event.key === "Escape") clear();
      if (next === undefined || !xs.length) return;
      event.preventDefault();
      read(xs[clamp(next, 0, xs.length - 1)]);
    });
    root.addEventListener("blur", clear);
  }

  function select(from, to) {
    tip.hide();
    now.cursor.replaceChildren(svg("rect", { class: "brush", x: Math.min(from, to), width: Math.abs(to - from), y: now.box.top, height: now.box.bottom - now.box.top }));
  }

  function clear() {
    tip.hide();
    now?.cursor.replaceChildren();
    if (now) now.read = null;
  }

  /** Shows the values at the nearest point that was logged inside the chart. */
  function read(place) {
    const { main, x, y, box, cursor } = now, far = (p, at) => Math.abs(x(p.x) - x(at));
    const near = main.flatMap((line) => {
      const points = line.points.filter((p) => x.covers(p.x));
      return points.length ? [{ line, point: points.reduce((a, b) => (far(b, place) < far(a, place) ? b : a)) }] : [];
    });
    if (!near.length) return clear();
    const at = near.reduce((a, b) => (far(b.point, place) < far(a.point, place) ? b : a)).point.x;
    const rows = near.filter(({ point }) => far(point, at) < 16).sort((a, b) => (a.point.y ?? Infinity) - (b.point.y ?? Infinity));
    now.read = at;
    cursor.replaceChildren(svg("line", { x1: x(at), x2: x(at), y1: box.top, y2: box.bottom }));
    for (const { line, point } of rows)
      if (point.y !== null && y(point.y) >= box.top - 4) cursor.append(dress(svg("circle", { cx: x(point.x), cy: y(point.y), r: 4 }), line.method));
    tip.show(x(at), box.top, html("strong", { text: xText(at) }), html("table", {}, ...rows.map(({ line, point }) => html("tr", {},
      html("th", {}, dress(html("i", { class: "swatch" }), line.method), html("span", { text: line.label })),
      html("td", { text: point.y === null ? "" : significant(point.y) + (point.hi > point.lo ? ` ± ${significant(point.hi - point.y, 2)}` : "") }),
      html("td", { class: "dim", text: point.note || (chart.perplexity ? `ppl ${significant(Math.exp(point.y))}` : "") })))));
  }

  return draw;
}
