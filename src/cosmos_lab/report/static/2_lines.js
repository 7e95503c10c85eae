// Loss curves: validation solid, training faint, the spread over seeds as a band.

const MARGIN = { left: 48, top: 14, bottom: 42 };

/** The curves of a series on one axis, as lists of [x, y, low, high]. */
function pointsOf(curve, axis, logX) {
  const points = [];
  for (let i = 0; i < curve.y.length; i++) {
    const x = curve[axis][i];
    if (x !== null && (!logX || x > 0)) points.push([x, curve.y[i], curve.lo[i] ?? null, curve.hi[i] ?? null]);
  }
  return points;
}

/** What is drawn of each visible series: the line a reader compares, and the faint ones behind it. */
function visible(task, view, axis) {
  return task.series.flatMap((series, id) => {
    if (!view.on.has(id)) return [];
    const method = task.methods[series.method];
    const train = series.train.map((curve) => pointsOf(curve, axis, view.logX)).filter((points) => points.length);
    const main = series.val ? pointsOf(series.val, axis, view.logX) : train[0] ?? [];
    const faint = view.training && series.val ? train : [];
    const broken = series.val ? series.val.nan || series.status === "diverged" : series.train.some((curve) => curve.nan);
    return main.length || faint.length ? [{ id, series, method, main, faint, broken }] : [];
  });
}

/** The range of x and y that shows what matters: unless the reader asks for all, the first steep part is cut off. */
function ranges(lines, view, axis) {
  const xs = lines.flatMap((line) => [...line.main, ...line.faint.flat()].map((p) => p[0]));
  let low = view.logX ? xs.reduce((a, b) => Math.min(a, b)) : 0;
  let high = xs.reduce((a, b) => Math.max(a, b));
  const zoom = view.zoom[axis];
  if (zoom) [low, high] = zoom;
  const from = view.full || zoom ? low : view.logX ? low * (high / low) ** 0.3 : low + 0.12 * (high - low);
  let bottom = Infinity, top = -Infinity;
  for (const line of lines)
    for (const points of view.full || !line.main.length ? [line.main, ...line.faint] : [line.main])
      for (const [x, y, a, b] of points)
        if (x >= from && x <= high) {
          bottom = Math.min(bottom, a ?? y);
          top = Math.max(top, b ?? y);
        }
  for (const line of lines)
    for (const [x, y] of line.faint.flat()) if (x >= from && x <= high) bottom = Math.min(bottom, y);
  if (bottom > top) for (const line of lines) for (const [, y] of line.main) [bottom, top] = [Math.min(bottom, y), Math.max(top, y)];
  if (bottom > top) [bottom, top] = [1, 2];
  if (view.logY && bottom > 0) {
    const pad = (top / bottom) ** 0.05;
    return { x: [low, high], y: [bottom / pad, top * pad] };
  }
  const pad = 0.05 * (top - bottom || 1);
  return { x: [low, high], y: [bottom - pad, top + pad] };
}

const pathOf = (points, x, y) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");

function bandOf(points, x, y) {
  const upper = points.map((p) => `${x(p[0]).toFixed(1)},${y(p[3]).toFixed(1)}`);
  const lower = points.map((p) => `${x(p[0]).toFixed(1)},${y(p[2]).toFixed(1)}`).reverse();
  return `M${upper.join("L")}L${lower.join("L")}Z`;
}

/** Where the ticks of the x axis lie and what they say; times in the unit that suits the longest. */
function xAxis(x, axis, width) {
  const n = Math.max(2, Math.round(width / 80));
  if (axis === "tokens") return { title: "tokens", ticks: x.ticks(n).map((t) => [x(t), countText(t)]), say: (t) => `${countText(t)} tokens` };
  const [unit, name, title] = timeUnit(x.domain[1]);
  const inUnits = makeScale(x.domain.map((t) => t / unit), x.range, x.log);
  return {
    title: `wall-clock ${title}`,
    ticks: inUnits.ticks(n).map((t) => [inUnits(t), String(+t.toPrecision(3))]),
    say: (t) => `${+(t / unit).toPrecision(3)} ${name}`,
  };
}

/** Grid, ticks and the title of the x axis. */
function drawAxes(root, y, xTicks, xTitle, box) {
  const axes = svg("g", { class: "axes", "aria-hidden": "true" });
  for (const tick of y.ticks(Math.max(3, Math.round(box.height / 60)))) {
    axes.append(svg("line", { x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }));
    axes.append(svg("text", { x: box.left - 8, y: y(tick) + 4, "text-anchor": "end", text: String(+tick.toPrecision(4)) }));
  }
  for (const [at, text] of xTicks) {
    axes.append(svg("line", { class: "tick", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 5 }));
    axes.append(svg("text", { x: at, y: box.bottom + 19, "text-anchor": "middle", text }));
  }
  axes.append(svg("line", { class: "base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  axes.append(svg("text", { class: "title", x: box.right, y: box.bottom + 37, "text-anchor": "end", text: xTitle }));
  root.append(axes);
}

/** Names at the ends of the lines, so that no reader has to match colours. */
function drawEndLabels(root, lines, x, y, box) {
  const ends = lines.filter((line) => line.main.length).map((line) => {
    const inside = line.main.filter((p) => p[0] <= x.domain[1] * (1 + 1e-9));
    return { line, point: inside.at(-1) ?? line.main[0] };
  });
  const wanted = ends.map(({ point }) => clamp(y(point[1]), box.top, box.bottom));
  const placed = spreadOut(wanted, 14, box.top + 4, box.bottom);
  ends.forEach(({ line, point }, i) => {
    const alone = lines.filter((other) => other.method === line.method).length === 1;
    const text = alone ? line.method.name : line.series.label;
    const end = clamp(x(point[0]), box.left, box.right);
    const group = dress(svg("g", { class: "end", "aria-hidden": "true" }), line.method);
    group.append(svg("path", { d: `M${end + 3},${wanted[i]}L${box.right + 6},${placed[i]}` }));
    group.append(svg("text", { x: box.right + 9, y: placed[i] + 4, text: text.length > 17 ? text.slice(0, 16) + "…" : text }));
    root.append(group);
  });
}

/** One chart of the loss over tokens or time; returns the function that draws it again. */
function lineChart(host, task, view, axis, redrawAll) {
  const tip = makeTip(host);
  let current = null;

  function draw() {
    host.querySelector("svg")?.remove();
    tip.hide();
    const W = host.clientWidth, H = Math.round(clamp(W * 0.68, 270, 400));
    const lines = visible(task, view, axis);
    const labels = W >= 420 && lines.length > 0 && lines.length <= 12;
    const box = { left: MARGIN.left, top: MARGIN.top, right: W - (labels ? 108 : 14), bottom: H - MARGIN.bottom };
    [box.width, box.height] = [box.right - box.left, box.bottom - box.top];
    const root = svg("svg", { width: W, height: H, tabindex: 0, role: "group", "aria-label": describe(lines) });
    host.prepend(root);
    if (!lines.length) {
      root.append(svg("text", { class: "empty", x: W / 2, y: H / 2, "text-anchor": "middle", text: "No curve is switched on" }));
      current = null;
      return;
    }
    const range = ranges(lines, view, axis);
    if (!view.zoom[axis] && !view.zoom.tokens) range.y = commonY() ?? range.y;
    const x = makeScale(range.x, [box.left, box.right], view.logX && range.x[0] > 0);
    const y = makeScale(range.y, [box.bottom, box.top], view.logY && range.y[0] > 0);
    const scaleX = xAxis(x, axis, box.width);
    drawAxes(root, y, scaleX.ticks, scaleX.title, box);
    const clip = `clip-${unique++}`;
    root.append(svg("clipPath", { id: clip }, svg("rect", { x: box.left, y: box.top - 4, width: box.width + 2, height: box.height + 4 })));
    const plot = svg("g", { "clip-path": `url(#${clip})` });
    root.append(plot);
    drawLines(plot, lines, x, y);
    if (labels) drawEndLabels(root, lines, x, y, box);
    const cursor = svg("g", { class: "cursor" });
    root.append(cursor);
    current = { lines, x, y, box, cursor, root, say: scaleX.say };
    listen(root);
  }

  /** The loss axis of the chart by tokens serves both charts, so that heights can be compared across them. */
  function commonY() {
    const lines = visible(task, view, "tokens");
    return lines.length ? ranges(lines, view, "tokens").y : null;
  }

  function describe(lines) {
    const ends = lines.filter((l) => l.main.length).map((l) => `${l.series.label} ends at ${significant(l.main.at(-1)[1])}`);
    const over = axis === "time" ? "wall-clock time" : "tokens";
    return `${task.loss} over ${over}. ${ends.join("; ")}. Left and right arrow keys read values.`;
  }

  function listen(root) {
    let start = null;
    const at = (event) => event.clientX - root.getBoundingClientRect().left;
    root.addEventListener("pointermove", (event) => {
      if (start !== null) select(start, at(event));
      else read(current.x.invert(clamp(at(event), current.box.left, current.box.right)));
    });
    root.addEventListener("pointerleave", () => start === null && clear());
    root.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button) return;
      start = at(event);
      root.setPointerCapture(event.pointerId);
    });
    root.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [a, b] = [start, at(event)].sort((p, q) => p - q).map((p) => current.x.invert(clamp(p, current.box.left, current.box.right)));
      const far = Math.abs(at(event) - start) > 12;
      start = null;
      if (far) view.zoom[axis] = [a, b];
      redrawAll();
    });
    root.addEventListener("keydown", (event) => {
      const xs = [...new Set(current.lines.flatMap((line) => line.main.map((p) => p[0])))].sort((a, b) => a - b);
      const here = xs.indexOf(current.read ?? NaN);
      const next = { ArrowRight: here + 1, ArrowLeft: here < 0 ? xs.length - 1 : here - 1, Home: 0, End: xs.length - 1 }[event.key];
      if (event.key === "Escape") clear();
      if (next === undefined || !xs.length) return;
      event.preventDefault();
      read(xs[clamp(next, 0, xs.length - 1)]);
    });
    root.addEventListener("blur", clear);
  }

  function select(from, to) {
    const { box, cursor } = current;
    const [a, b] = [from, to].map((p) => clamp(p, box.left, box.right)).sort((p, q) => p - q);
    tip.hide();
    cursor.replaceChildren(svg("rect", { class: "brush", x: a, width: b - a, y: box.top, height: box.height }));
  }

  function clear() {
    tip.hide();
    current?.cursor.replaceChildren();
    if (current) current.read = null;
  }

  /** The read-out at the logged point nearest to a place on the x axis. */
  function read(where) {
    const { lines, x, y, box, cursor, say } = current;
    const near = lines.filter((line) => line.main.length).map((line) => {
      const point = line.main.reduce((a, b) => (Math.abs(x(b[0]) - x(where)) < Math.abs(x(a[0]) - x(where)) ? b : a));
      return { line, point, distance: Math.abs(x(point[0]) - x(where)) };
    });
    if (!near.length) return;
    const nearest = near.reduce((a, b) => (b.distance < a.distance ? b : a)).point[0];
    const rows = near.filter(({ point }) => Math.abs(x(point[0]) - x(nearest)) < 16).sort((a, b) => a.point[1] - b.point[1]);
    current.read = nearest;
    cursor.replaceChildren(svg("line", { x1: x(nearest), x2: x(nearest), y1: box.top, y2: box.bottom }));
    for (const { line, point } of rows)
      if (y(point[1]) >= box.top - 4) cursor.append(dress(svg("circle", { cx: x(point[0]), cy: y(point[1]), r: 4 }), line.method));
    tip.show(x(nearest), box.top, html("strong", { text: say(nearest) }), tipTable(rows));
  }

  function tipTable(rows) {
    const table = html("table");
    for (const { line, point } of rows) {
      const spread = point[2] !== null ? ` ± ${significant(point[3] - point[1], 2)}` : "";
      table.append(html("tr", {},
        html("th", {}, dress(html("i", { class: "swatch" }), line.method), html("span", { text: line.series.label })),
        html("td", { text: significant(point[1]) + spread }),
        line.series.val ? html("td", { class: "dim", text: `ppl ${significant(Math.exp(point[1]))}` }) : null));
    }
    return table;
  }

  return draw;
}

function drawLines(plot, lines, x, y) {
  const order = [...lines].sort((a, b) => a.series.best - b.series.best);
  for (const line of order)
    for (const points of line.faint) {
      const path = dress(svg("path", { class: "curve train", "data-series": line.id, d: pathOf(points, x, y) }), line.method);
      path.style.opacity = 0.28 / Math.sqrt(line.faint.length); // many seeds must not drown the line that counts
      plot.append(path);
    }
  for (const line of order)
    if (line.main.length > 1 && line.main[0][2] !== null)
      plot.append(dress(svg("path", { class: "band", "data-series": line.id, d: bandOf(line.main, x, y) }), line.method));
  for (const line of order) {
    const main = svg("path", { class: line.series.shown ? "curve val" : "curve val minor", "data-series": line.id, d: pathOf(line.main, x, y) });
    main.style.strokeDasharray = line.method.dash.join(" ");
    plot.append(dress(main, line.method));
    const last = line.main.at(-1);
    if (line.main.length === 1) plot.append(dress(svg("circle", { class: "dot", cx: x(last[0]), cy: y(last[1]), r: 3 }), line.method));
    if (line.broken && last) {
      const [cx, cy] = [x(last[0]), Math.max(y(last[1]), y(y.domain[1]) + 6)];
      plot.append(dress(svg("path", { class: "cross", d: `M${cx - 5},${cy - 5}l10,10m0,-10l-10,10` }, svg("title", { text: `${line.series.label} diverged here` })), line.method));
    }
  }
}
