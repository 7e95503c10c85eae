// Draws a section of line charts from its specification: a legend, controls, and charts that share both.

const NO_RESULT_Y = 18; // where the points are that have no value

function lineSection(section, spec) {
  const view = { on: new Set(spec.series.flatMap((s, id) => (s.shown ? [id] : []))), zoom: {} };
  const draws = [], bar = html("div", { class: "toolbar" });
  const reset = html("button", { type: "button", class: "link", text: "Reset zoom" });
  reset.addEventListener("click", () => {
    view.zoom = {};
    redraw();
  });
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
    const scales = [["linear", "Linear"], ["log", "Log"]];
    const chosen = (name) => change(name === "log");
    bar.append(scale ? choice(text, scales, on ? "log" : "linear", chosen) : toggle(text, on, change));
  }
  const pair = html("div", { class: spec.charts.length > 1 ? "pair" : spec.name });
  section.append(legend(spec, view, redraw, bar), bar, pair);
  bar.append(reset);
  for (const chart of spec.charts) {
    const host = html("div", { class: "chart" });
    const caption = html("figcaption", {}, html("b", { text: chart.title }), html("span", { text: chart.about }));
    pair.append(html("figure", { "data-axis": chart.key }, caption, host));
    draws.push(lineChart(host, spec, chart, view, redraw));
    onWidth(host, draws.at(-1));
  }
  reset.hidden = true;
}

/** Makes one chart; returns the function that draws it again. */
function lineChart(host, spec, chart, view, redrawAll) {
  const tip = makeTip(host), axis = chart.x;
  const tickText = axis.unit === "tokens" ? countText : plainText;
  const xText = (t) => {
    const tick = axis.ticks?.find(([at]) => at === t);
    return tick ? `${axis.title} ${tick[1]}` : `${tickText(t, now.digits + 1)} ${axis.unit}`;
  };
  let now = null; // what is drawn: lines, scales, digits of the x axis, box, cursor, and the place that is read

  /** Returns the lines that are switched on, each with its points; "known" are those that have a value. */
  function visible(logX) {
    return spec.lines.filter((line) => view.on.has(line.series) && (view.faint || !line.faint)).map((line) => {
      const { label, named, method } = spec.series[line.series];
      const points = line.y.map((y, i) => ({
        x: line.x[chart.key][i], y, lo: line.lo[i] ?? null, hi: line.hi[i] ?? null, mark: line.marks[i], note: line.notes[i],
      })).filter((p) => p.x !== null && (!logX || p.x > 0));
      return { ...line, label, named, method: spec.methods[method], points, known: points.filter((p) => p.y !== null) };
    }).filter((line) => line.points.length);
  }

  /** Returns the point of a line at a place on the x axis, on its straight piece there; none outside the line. */
  function valueAt(line, place, logX, logY) {
    const next = line.known.findIndex((p) => p.x >= place);
    if (next < 0 || (next === 0 && line.known[0].x > place)) return [];
    const [a, b] = [line.known[Math.max(0, next - 1)], line.known[next]];
    const f = logX ? Math.log : (x) => x;
    const share = b.x > a.x ? (f(place) - f(a.x)) / (f(b.x) - f(a.x)) : 1;
    return [{ x: place, y: logY && a.y > 0 && b.y > 0 ? a.y * (b.y / a.y) ** share : a.y + (b.y - a.y) * share }];
  }

  /** Joins the ranges that the specification gives the visible lines, or takes the points inside the zoom. */
  function rangeY(lines, zoom, logX) {
    const ends = (line) => zoom.flatMap((place) => valueAt(line, place, logX, view.logY)); // where it enters and leaves
    const inside = (line) => [
      ...line.known.filter((p) => p.x >= zoom[0] && p.x <= zoom[1]).map((p) => [p.lo ?? p.y, p.hi ?? p.y]),
      ...ends(line).map((p) => [p.y, p.y]),
    ];
    const given = (line) => (view.full ? line.full : line.view);
    const spans = zoom ? lines.flatMap(inside) : lines.map(given).filter(Boolean);
    if (!spans.length) return { range: [1, 2], log: view.logY };
    const [low, high] = [Math.min(...spans.map((s) => s[0])), Math.max(...spans.map((s) => s[1]))];
    const log = view.logY && low > 0, pad = log ? (high / low) ** chart.pad : chart.pad * (high - low || 1);
    return { range: log ? [low / pad, high * pad] : [low - pad, high + pad], log };
  }

  function draw() {
    const focused = host.contains(document.activeElement);
    host.querySelector("svg")?.remove();
    tip.hide();
    const logX = axis.log || view.logX, lines = visible(logX), main = lines.filter((line) => !line.faint);
    const W = host.clientWidth, H = Math.round(clamp(W * chart.aspect, 270, 400));
    const root = svg("svg", { width: W, height: H, tabindex: 0, role: "group", "aria-label": describe(main) });
    host.prepend(root);
    if (focused) root.focus({ preventScroll: true });
    now = null;
    if (!lines.length) {
      const text = "No line is switched on";
      return root.append(svg("text", { class: "empty", x: W / 2, y: H / 2, "text-anchor": "middle", text }));
    }
    const labels = W >= 420 && main.length <= 12;
    const rail = lines.some((line) => line.known.length < line.points.length);
    const box = { left: 52, top: rail ? 40 : 14, right: W - (labels ? 108 : 14), bottom: H - 42 };
    const zoom = view.zoom[chart.key], { range, log } = rangeY(lines, zoom, logX);
    const x = makeScale(zoom ?? [logX ? axis.low : axis.range[0], axis.range[1]], [box.left, box.right], logX);
    const y = makeScale(range, [box.bottom, box.top], log);
    const clip = `clip-${unique++}`, plot = svg("g", { "clip-path": `url(#${clip})` }), cursor = svg("g", { class: "cursor" });
    const [width, height] = [box.right - box.left + 2, box.bottom - box.top + 4];
    const digits = drawAxes(root, x, y, box, rail);
    root.append(svg("clipPath", { id: clip }, svg("rect", { x: box.left, y: box.top - 4, width, height })), plot);
    for (const line of lines) drawLine(root, plot, line, x, y, box);
    if (labels) drawNames(root, main, x, y, box);
    root.append(cursor);
    now = { main, x, y, digits, box, cursor };
    listen(root);
  }

  function describe(lines) {
    const known = lines.filter((line) => line.known.length);
    const ends = known.map((line) => `${line.label} ends at ${significant(line.known.at(-1).y)}`);
    return `${chart.title} ${chart.about}. ${ends.join("; ")}. Left and right arrow keys read values.`;
  }

  /** Draws both axes; returns how many digits the numbers on the x axis have. */
  function drawAxes(root, x, y, box, rail) {
    const axes = svg("g", { class: "axes", "aria-hidden": "true" });
    const write = (at, height, anchor, text) => axes.append(svg("text", { x: at, y: height, "text-anchor": anchor, text }));
    const heights = y.ticks(Math.max(3, Math.round((box.bottom - box.top) / 60))), heightDigits = digitsOf(heights);
    for (const tick of heights) {
      axes.append(svg("line", { x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }));
      write(box.left - 8, y(tick) + 4, "end", plainText(tick, heightDigits));
    }
    let last = -Infinity;
    const places = x.ticks(Math.max(2, Math.round((box.right - box.left) / 80))), digits = digitsOf(places);
    for (const [t, text] of axis.ticks ?? places.map((t) => [t, tickText(t, digits)])) {
      const at = x(t);
      if (at - last < 46 || at < box.left || at > box.right + 1) continue; // as many names as fit
      last = at;
      axes.append(svg("line", { class: "tick", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 5 }));
      write(at, box.bottom + 19, "middle", text);
    }
    axes.append(svg("line", { class: "base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    write(box.right, box.bottom + 37, "end", axis.title);
    if (rail) {
      axes.append(svg("line", { class: "rail", x1: box.left, x2: box.right, y1: NO_RESULT_Y, y2: NO_RESULT_Y }));
      write(box.left - 8, NO_RESULT_Y + 4, "end", "no result");
    }
    root.append(axes);
    return digits;
  }

  function drawLine(root, plot, line, x, y, box) {
    const path = (points, key = "y") => points.map((p) => `${x(p.x).toFixed(1)},${y(p[key]).toFixed(1)}`).join("L");
    const add = (attributes) => {
      const element = withColours(svg("path", attributes), line.method);
      plot.append(element);
      return element;
    };
    const banded = line.known.filter((p) => p.lo !== null);
    if (spec.marked) {
      for (const p of banded) if (p.hi > p.lo) add({ class: "error", d: `M${path([p], "lo")}L${path([p], "hi")}` });
    } else if (banded.length > 1) {
      add({ class: "band", d: `M${path(banded, "hi")}L${path([...banded].reverse(), "lo")}Z` });
    }
    const d = line.known.length ? `M${path(line.known)}` : "";
    const curve = add({ class: line.faint ? "curve train" : "curve val", "data-series": line.series, d });
    const dash = line.faint ? "" : line.method.dash.join(" ");
    Object.assign(curve.style, { strokeWidth: line.width, opacity: line.opacity, strokeDasharray: dash });
    for (const p of line.points.filter((q) => q.mark && x.covers(q.x))) {
      if (p.mark === "dot" && (y(p.y) < box.top || y(p.y) > box.bottom)) continue; // its line is outside too
      root.append(mark(line, p, x(p.x), p.y === null ? NO_RESULT_Y : clamp(y(p.y), box.top, box.bottom)));
    }
  }

  /** Makes the mark of a point: a dot or a marker, with a ring for the best, or a cross for one that failed. */
  function mark(line, point, left, top) {
    const element = svg("g", { class: `mark ${point.mark}`, transform: `translate(${left},${top})` });
    element.append(svg("title", { text: `${line.label}: ${point.note || significant(point.y)}` }));
    if (point.mark === "best") element.append(svg("circle", { class: "ring", r: 9.5 }));
    const shape = MARKERS[line.method.marker](point.mark === "dot" ? 2.6 : 4.5);
    element.append(svg("path", { d: point.mark === "failed" ? "M-4.5,-4.5l9,9m0,-9l-9,9" : shape }));
    return withColours(element, line.method);
  }

  /** Writes names at the ends of the lines, so that no reader has to match colours. */
  function drawNames(root, lines, x, y, box) {
    const ends = lines.flatMap((line) => {
      const last = line.known.filter((p) => x.covers(p.x)).at(-1);
      const point = valueAt(line, x.domain[1], x.log, y.log)[0] ?? last; // where the line leaves the chart, or ends in it
      return point ? [{ line, point }] : [];
    });
    const wanted = ends.map(({ point }) => clamp(y(point.y), box.top, box.bottom));
    spreadOut(wanted, 14, box.top + 4, box.bottom).forEach((height, i) => {
      const { line, point } = ends[i], end = clamp(x(point.x), box.left, box.right);
      const alone = lines.filter((other) => other.method === line.method).length === 1;
      const name = alone && !line.named ? line.method.name : line.label;
      const short = name.length > 17 ? name.slice(0, 16) + "…" : name;
      const leader = !spec.marked && svg("path", { d: `M${end + 3},${wanted[i]}L${box.right + 6},${height}` });
      const text = svg("text", { x: spec.marked ? end + 14 : box.right + 9, y: height + 4, text: short });
      root.append(withColours(svg("g", { class: "end", "aria-hidden": "true" }, leader, text), line.method));
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
    const { top, bottom } = now.box, left = Math.min(from, to), width = Math.abs(to - from);
    now.cursor.replaceChildren(svg("rect", { class: "brush", x: left, width, y: top, height: bottom - top }));
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
    const rows = near.filter(({ point }) => far(point, at) < 16);
    rows.sort((a, b) => (a.point.y ?? Infinity) - (b.point.y ?? Infinity));
    now.read = at;
    cursor.replaceChildren(svg("line", { x1: x(at), x2: x(at), y1: box.top, y2: box.bottom }));
    for (const { line, point } of rows) {
      if (point.y === null || y(point.y) < box.top - 4) continue;
      cursor.append(withColours(svg("circle", { cx: x(point.x), cy: y(point.y), r: 4 }), line.method));
    }
    tip.show(x(at), box.top, html("strong", { text: xText(at) }), html("table", {}, ...rows.map(tipRow)));
  }

  /** Makes the row of the values under the pointer for one line: its value, and what else is known of it. */
  function tipRow({ line, point }) {
    const deviation = point.hi > point.lo ? ` ± ${significant(point.hi - point.y, 2)}` : "";
    const perplexity = chart.perplexity ? `ppl ${significant(Math.exp(point.y))}` : "";
    const swatch = withColours(html("i", { class: "swatch" }), line.method);
    return html("tr", {}, html("th", {}, swatch, html("span", { text: line.label })),
      html("td", { text: point.y === null ? "" : significant(point.y) + deviation }),
      html("td", { class: "dim", text: point.note || perplexity }));
  }

  return draw;
}
