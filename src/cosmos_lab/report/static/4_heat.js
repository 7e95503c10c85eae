// Diagnostics of COSMOS: one panel a kind of matrix, one row a layer, one column a step. Cells are canvas pixels,
// stretched by the style sheet, so a map costs one small image whatever its size on screen.

const METRIC_TEXT = {
  energy: ["Energy", "Share of the gradient’s energy that lies in the tracked subspace, |GU|² / |G|²."],
  drift: ["Drift", "How far the subspace turned in one step, 1 − |U′ₜ Uₜ₋₁|² / r: 0 is no turn, 1 is a new subspace."],
  update_rms: ["Update RMS", "Root mean square of the update’s entries, before the learning rate."],
  ratio: ["Ratio", "Size of the SOAP half of the update over the size of the MUON half."],
};
const KIND_TEXT = { q: "query", k: "key", v: "value", o: "output", qkv: "query, key, value", gate: "MLP gate", up: "MLP up", down: "MLP down" };

/** The range of colours: the middle 98 % of the cells, on a log axis where they span more than a factor of 20. */
function heatScale(heat, metric) {
  const cells = heat.panels.flatMap((panel) => panel.values[metric].flat()).filter((v) => v !== null).sort((a, b) => a - b);
  if (!cells.length) return null;
  const at = (share) => cells[Math.round(share * (cells.length - 1))];
  let [low, high] = [at(0.01), at(0.99)];
  const log = low > 0 && high / low > 20;
  if (!(high > low)) [low, high] = [cells[0], cells.at(-1)];
  const constant = low === high;
  const scale = makeScale([low, high], [0, 1], log);
  scale.constant = constant;
  scale.clipped = [cells[0] < scale.domain[0], cells.at(-1) > scale.domain[1]];
  return scale;
}

function makePalette(colours) {
  const stops = colours.map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
  return (share) => {
    const at = clamp(share, 0, 1) * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(at));
    return stops[i].map((v, k) => Math.round(v + (stops[i + 1][k] - v) * (at - i)));
  };
}

function paint(canvas, rows, scale, palette) {
  canvas.width = rows[0].length;
  canvas.height = rows.length;
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  rows.flat().forEach((value, i) => {
    if (value !== null) image.data.set([...palette(scale(value)), 255], 4 * i);
  });
  context.putImageData(image, 0, 0);
}

/** A colour of zero or below on a log scale is the lowest; makeScale would give nan. */
const safe = (scale) => (value) => (scale.log && value <= 0 ? 0 : scale(value));

function heatMap(section, task, colours) {
  const palette = makePalette(colours);
  const state = { run: 0, metric: task.heats[0].metrics[0] };
  const bar = html("div", { class: "toolbar" });
  const about = html("p", { class: "about" });
  const ramp = html("div", { class: "ramp" });
  const grid = html("div", { class: "heat" });
  const tip = makeTip(grid);
  section.append(bar, about, ramp, grid);

  const metrics = html("div");
  if (task.heats.length > 1) {
    const select = html("select", {}, ...task.heats.map((heat, i) => html("option", { value: i, text: heat.label })));
    select.addEventListener("change", () => {
      state.run = +select.value;
      controls();
    });
    bar.append(html("label", { class: "pick" }, html("span", { text: "Run" }), select));
  }
  bar.append(metrics);

  /** The metrics that the chosen run logged. */
  function controls() {
    const known = task.heats[state.run].metrics;
    if (!known.includes(state.metric)) state.metric = known[0];
    const choose = (metric) => {
      state.metric = metric;
      draw();
    };
    metrics.replaceChildren(choice("Metric", known.map((metric) => [metric, METRIC_TEXT[metric][0]]), state.metric, choose));
    draw();
  }

  function draw() {
    const heat = task.heats[state.run], scale = heatScale(heat, state.metric);
    about.textContent = METRIC_TEXT[state.metric][1];
    grid.dataset.metric = state.metric;
    grid.querySelectorAll("figure").forEach((figure) => figure.remove());
    if (!scale) return;
    drawRamp(scale);
    for (const panel of heat.panels) grid.append(drawPanel(heat, panel, scale));
  }

  function drawRamp(scale) {
    const stops = Array.from({ length: 11 }, (_, i) => `rgb(${palette(i / 10)})`);
    const strip = html("div", { class: "strip" });
    strip.style.background = `linear-gradient(to right, ${stops})`;
    const [low, high] = scale.domain, middle = scale.invert(0.5);
    if (scale.constant) return ramp.replaceChildren(html("span", { text: `${significant(middle)} everywhere` }));
    ramp.replaceChildren(
      html("span", { text: (scale.clipped[0] ? "≤ " : "") + significant(low, 3) }), strip,
      html("span", { text: (scale.clipped[1] ? "≥ " : "") + significant(high, 3) }),
      html("span", { class: "dim", text: scale.log ? `logarithmic, middle ${significant(middle, 3)}` : "linear" }));
  }

  function drawPanel(heat, panel, scale) {
    const rows = panel.values[state.metric], known = rows.flat().filter((v) => v !== null);
    const canvas = html("canvas", { "aria-hidden": "true" });
    paint(canvas, rows, safe(scale), palette);
    const mark = html("div", { class: "cell", hidden: true });
    const range = known.length ? `from ${significant(known.reduce((a, b) => Math.min(a, b)), 3)} to ${significant(known.reduce((a, b) => Math.max(a, b)), 3)}` : "no values";
    const name = `${METRIC_TEXT[state.metric][0]} of the ${KIND_TEXT[panel.kind] ?? panel.kind} matrices, ${rows.length} layers, ${range}. Arrow keys read cells.`;
    const frame = html("div", { class: "frame", tabindex: 0, role: "group", "aria-label": name }, canvas, mark);
    frame.style.height = `${clamp(rows.length * 12, 26, 216)}px`;
    watch(frame, mark, heat, panel, rows);
    const layers = html("div", { class: "layers", "aria-hidden": "true" }, html("span", { text: panel.layers[0] ?? "" }), panel.layers.length > 1 ? html("span", { text: panel.layers.at(-1) ?? "" }) : null);
    const ends = html("div", { class: "ends", "aria-hidden": "true" }, html("span", { text: when(heat, 0) }), html("span", { text: when(heat, heat.steps.length - 1) }));
    const caption = html("figcaption", {}, html("b", { text: panel.kind }), html("span", { text: KIND_TEXT[panel.kind] ?? "" }));
    return html("figure", {}, caption, layers, frame, ends);
  }

  const when = (heat, i) => (heat.tokens[i] === null ? `step ${heat.steps[i]}` : countText(heat.tokens[i]));

  /** Shows the value of the cell under the pointer, or of the one the arrow keys reached. */
  function watch(frame, mark, heat, panel, rows) {
    let [row, column] = [0, heat.steps.length - 1];
    function read() {
      const [w, h] = [frame.clientWidth / heat.steps.length, frame.clientHeight / rows.length];
      mark.hidden = false;
      Object.assign(mark.style, { left: `${column * w}px`, top: `${row * h}px`, width: `${w}px`, height: `${h}px` });
      const value = rows[row][column], place = frame.getBoundingClientRect(), host = grid.getBoundingClientRect();
      const at = heat.tokens[column] === null ? `step ${heat.steps[column]}` : `step ${heat.steps[column]}, ${countText(heat.tokens[column])} tokens`;
      tip.show(place.left - host.left + (column + 1) * w, place.top - host.top + row * h,
        html("strong", { text: panel.names[row] }),
        html("div", { text: `${METRIC_TEXT[state.metric][0]} ${value === null ? "not logged" : significant(value)}` }),
        html("div", { class: "dim", text: at }));
    }
    function leave() {
      mark.hidden = true;
      tip.hide();
    }
    frame.addEventListener("pointermove", (event) => {
      const place = frame.getBoundingClientRect();
      column = clamp(Math.floor(((event.clientX - place.left) / place.width) * heat.steps.length), 0, heat.steps.length - 1);
      row = clamp(Math.floor(((event.clientY - place.top) / place.height) * rows.length), 0, rows.length - 1);
      read();
    });
    frame.addEventListener("pointerleave", leave);
    frame.addEventListener("blur", leave);
    frame.addEventListener("focus", () => frame.matches(":focus-visible") && read());
    frame.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!move) return;
      event.preventDefault();
      row = clamp(row + move[0], 0, rows.length - 1);
      column = clamp(column + move[1], 0, heat.steps.length - 1);
      read();
    });
  }

  controls();
}
