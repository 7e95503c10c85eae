// Draws heat maps from their specification: one panel per kind of matrix, one row per layer, one column per step.
// Cells are canvas pixels, stretched by the style sheet, so a map costs one small image at any size on screen.

function makePalette(colours) {
  const stops = colours.map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
  return (share) => {
    const at = clamp(share, 0, 1) * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(at));
    return stops[i].map((v, k) => Math.round(v + (stops[i + 1][k] - v) * (at - i)));
  };
}

function heatSection(section, spec) {
  const palette = makePalette(spec.palette);
  const metrics = html("div"), bar = html("div", { class: "toolbar" }), about = html("p", { class: "about" });
  const ramp = html("div", { class: "ramp" }), grid = html("div", { class: "heat" }), tip = makeTip(grid);
  let run = spec.runs[0], metric = run.metrics[0];
  if (spec.runs.length > 1) {
    const select = html("select", {}, ...spec.runs.map((r, i) => html("option", { value: i, text: r.label })));
    select.addEventListener("change", () => {
      run = spec.runs[+select.value];
      choose(metric.name);
    });
    bar.append(html("label", { class: "pick" }, html("span", { text: "Run" }), select));
  }
  bar.append(metrics);
  section.append(bar, about, ramp, grid);
  choose(metric.name);

  /** Shows a metric of the run, or its first if it has not logged this one. */
  function choose(name) {
    metric = run.metrics.find((m) => m.name === name) ?? run.metrics[0];
    metrics.replaceChildren(choice("Metric", run.metrics.map((m) => [m.name, m.title]), metric.name, draw));
    draw(metric.name);
  }

  function draw(name) {
    metric = run.metrics.find((m) => m.name === name);
    about.textContent = metric.about;
    grid.dataset.metric = name;
    grid.querySelectorAll("figure").forEach((figure) => figure.remove());
    const strip = html("div", { class: "strip" });
    strip.style.background = `linear-gradient(to right, ${Array.from({ length: 11 }, (_, i) => `rgb(${palette(i / 10)})`)})`;
    const [low, high, note] = metric.ramp.map((text, i) => html("span", { class: i === 2 && "dim", text }));
    ramp.replaceChildren(...(metric.constant ? [note] : [low, strip, high, note]));
    grid.append(...run.panels.map(drawPanel));
  }

  function paint(canvas, rows) {
    const scale = makeScale(metric.range, [0, 1], metric.log);
    [canvas.width, canvas.height] = [rows[0].length, rows.length];
    const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
    rows.flat().forEach((value, i) => {
      if (value !== null) image.data.set([...palette(metric.log && value <= 0 ? 0 : scale(value)), 255], 4 * i);
    });
    context.putImageData(image, 0, 0);
  }

  function drawPanel(panel) {
    const rows = panel.values[metric.name];
    const canvas = html("canvas", { "aria-hidden": "true" }), mark = html("div", { class: "cell", hidden: true });
    paint(canvas, rows);
    const what = `${metric.title} of the ${panel.about || panel.kind} matrices, ${rows.length} layers`;
    const label = { role: "group", "aria-label": `${what}. Arrow keys read cells.` };
    const frame = html("div", { class: "frame", tabindex: 0, ...label }, canvas, mark);
    frame.style.height = `${clamp(rows.length * 12, 26, 216)}px`;
    listen(frame, mark, panel, rows);
    const caption = html("figcaption", {}, html("b", { text: panel.kind }), html("span", { text: panel.about }));
    const layers = panel.layers.length > 1 ? [panel.layers[0], panel.layers.at(-1)] : panel.layers;
    const ends = (kind, texts) =>
      html("div", { class: kind, "aria-hidden": "true" }, ...texts.map((text) => html("span", { text: text ?? "" })));
    return html("figure", {}, caption, ends("layers", layers), frame, ends("ends", run.ends));
  }

  /** Shows the value of the cell under the pointer, or of the one the arrow keys reached. */
  function listen(frame, mark, panel, rows) {
    const columns = run.columns.length;
    let [row, column] = [0, columns - 1];
    function read(r, c) {
      [row, column] = [clamp(r, 0, rows.length - 1), clamp(c, 0, columns - 1)];
      const [w, h] = [frame.clientWidth / columns, frame.clientHeight / rows.length];
      const place = frame.getBoundingClientRect(), host = grid.getBoundingClientRect();
      mark.hidden = false;
      Object.assign(mark.style, { left: `${column * w}px`, top: `${row * h}px`, width: `${w}px`, height: `${h}px` });
      const value = rows[row][column], text = value === null ? "not logged" : significant(value);
      tip.show(
        place.left - host.left + (column + 1) * w, place.top - host.top + row * h,
        html("strong", { text: panel.names[row] }),
        html("div", { text: `${metric.title} ${text}` }),
        html("div", { class: "dim", text: run.columns[column] }),
      );
    }
    function leave() {
      mark.hidden = true;
      tip.hide();
    }
    frame.addEventListener("pointermove", (event) => {
      const place = frame.getBoundingClientRect();
      const [down, right] = [(event.clientY - place.top) / place.height, (event.clientX - place.left) / place.width];
      read(Math.floor(down * rows.length), Math.floor(right * columns));
    });
    frame.addEventListener("pointerleave", leave);
    frame.addEventListener("blur", leave);
    frame.addEventListener("focus", () => frame.matches(":focus-visible") && read(row, column));
    frame.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!move) return;
      event.preventDefault();
      read(row + move[0], column + move[1]);
    });
  }
}
