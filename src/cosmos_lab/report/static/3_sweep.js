// Final result over learning rate, one line a method; what diverged stands as a cross on the top rail.

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

function sweepChart(host, task, view) {
  const tip = makeTip(host);

  function draw() {
    host.querySelector("svg")?.remove();
    const W = host.clientWidth, H = Math.round(clamp(W * 0.42, 270, 380));
    const lines = task.sweep.filter((line) => view.on.has(line.method));
    const points = lines.flatMap((line) => line.points);
    const finite = points.filter((p) => p.y !== null);
    const root = svg("svg", { width: W, height: H, role: "group", "aria-label": `${task.result} over learning rate` });
    host.prepend(root);
    if (!points.length) {
      root.append(svg("text", { class: "empty", x: W / 2, y: H / 2, "text-anchor": "middle", text: "No line is switched on" }));
      return;
    }
    const failed = finite.length < points.length;
    const labels = W >= 480;
    const box = { left: 52, right: W - (labels ? 96 : 18), top: failed ? 40 : 16, bottom: H - MARGIN.bottom };
    [box.width, box.height] = [box.right - box.left, box.bottom - box.top];
    const rates = [...new Set(points.map((p) => p.lr))].sort((a, b) => a - b);
    const x = makeScale([rates[0] / 1.15, rates.at(-1) * 1.15], [box.left, box.right], true);
    const y = makeScale(yRange(finite, view.logY), [box.bottom, box.top], view.logY);
    drawAxes(root, y, rateTicks(rates, x), "learning rate", box);
    if (failed) {
      root.append(svg("line", { class: "rail", x1: box.left, x2: box.right, y1: 18, y2: 18 }));
      root.append(svg("text", { class: "railname", x: box.left - 8, y: 22, "text-anchor": "end", text: "failed" }));
    }
    for (const line of lines) drawLine(root, line, x, y);
    if (labels) drawNames(root, lines, x, y, box);
  }

  function yRange(finite, log) {
    if (!finite.length) return [1, 2];
    const low = Math.min(...finite.map((p) => p.lo)), high = Math.max(...finite.map((p) => p.hi));
    const pad = log ? (high / low) ** 0.06 : 0.06 * (high - low || 1);
    return log ? [low / pad, high * pad] : [low - pad, high + pad];
  }

  /** The rates that were tried, as far as their names fit. */
  function rateTicks(rates, x) {
    let last = -Infinity;
    return rates.filter((rate) => x(rate) - last > 46 && ((last = x(rate)), true)).map((rate) => [x(rate), rateText(rate)]);
  }

  function drawLine(root, line, x, y) {
    const method = task.methods[line.method];
    const group = dress(svg("g", { class: "sweep", "data-method": line.method }), method);
    const finite = line.points.filter((p) => p.y !== null);
    const path = svg("path", { class: "curve val", d: pathOf(finite.map((p) => [p.lr, p.y]), x, y) });
    path.style.strokeDasharray = method.dash.join(" ");
    group.append(path);
    for (const p of line.points) {
      if (p.y !== null && p.hi > p.lo) group.append(svg("path", { class: "error", d: `M${x(p.lr)},${y(p.lo)}V${y(p.hi)}` }));
      const text = `${method.name} ${rateText(p.lr)}: ${p.text}`;
      const at = [x(p.lr), p.y === null ? 18 : y(p.y)];
      const mark = svg("g", { class: p.y === null ? "mark failed" : p.best ? "mark best" : p.open ? "mark open" : "mark", transform: `translate(${at})`, tabindex: 0, role: "img", "aria-label": text });
      if (p.best) mark.append(svg("circle", { class: "ring", r: 9.5 }));
      mark.append(svg("path", { d: p.y === null ? "M-4.5,-4.5l9,9m0,-9l-9,9" : MARKERS[method.marker](4.5) }));
      mark.append(svg("circle", { class: "target", r: 14 }));
      const show = () => tip.show(at[0], at[1], html("strong", { text: `${method.name}, ${rateText(p.lr)}` }), html("div", { text: p.text }));
      for (const event of ["pointerenter", "focus"]) mark.addEventListener(event, show);
      for (const event of ["pointerleave", "blur"]) mark.addEventListener(event, () => tip.hide());
      group.append(mark);
    }
    root.append(group);
  }

  /** Each name beside the last point of its line, moved up or down until it lies on no other. */
  function drawNames(root, lines, x, y, box) {
    const taken = [];
    for (const line of lines) {
      const p = line.points.filter((q) => q.y !== null).at(-1);
      if (!p) continue;
      const method = task.methods[line.method];
      const name = method.name.length > 17 ? method.name.slice(0, 16) + "…" : method.name;
      const [left, wanted] = [x(p.lr) + 14, clamp(y(p.y), box.top, box.bottom - 4)];
      const free = (at) => taken.every(([a, b, end]) => Math.abs(b - at) >= 14 || end < left || a > left + 7.5 * name.length);
      const at = [0, 14, -14, 28, -28, 42, -42].map((d) => wanted + d).find(free) ?? wanted;
      taken.push([left, at, left + 7.5 * name.length]);
      root.append(dress(svg("g", { class: "end", "aria-hidden": "true" }, svg("text", { x: left, y: at + 4, text: name })), method));
    }
  }

  return draw;
}
