// Small helpers: elements, number formats, scales, controls. Nothing here knows what is drawn.

const SVG = "http://www.w3.org/2000/svg";

/** Makes an HTML element; attributes that are null or false are left out, "text" is set as text, never as markup. */
const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") element.textContent = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter(Boolean));
  return element;
}

/** Hands a method's colours for an element to the style sheet; returns the element. */
function withColours(element, method) {
  element.classList.add("m");
  element.style.setProperty("--light", method.light);
  element.style.setProperty("--dark", method.dark);
  return element;
}

const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

function significant(x, digits = 4) {
  if (!Number.isFinite(x)) return "–";
  if (x === 0) return "0";
  const power = Math.floor(Math.log10(Math.abs(x)));
  if (power >= 7 || power < -4) return x.toExponential(digits - 1);
  return x.toFixed(clamp(digits - 1 - power, 0, 12));
}

const plainText = (x, digits) => String(+x.toPrecision(digits));

function countText(x, digits) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(x) >= 0.9995 * size) return `${plainText(x / size, digits)} ${unit}`;
  return plainText(x, digits);
}

/** Returns how many digits round numbers need to be shown as they are: at least 3. */
function digitsOf(numbers) {
  let digits = 3;
  const rounded = (x) => Math.abs(+x.toPrecision(digits) - x) > 1e-9 * Math.abs(x);
  while (digits < 12 && numbers.some(rounded)) digits++;
  return digits;
}

/** Returns round numbers that cover [low, high] in about n steps. */
function linearTicks(low, high, n) {
  const raw = (high - low) / Math.max(1, n);
  if (!(raw > 0)) return [low];
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 2.5, 5, 10].find((k) => k * unit >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}

/** Returns powers of ten, or their 1-2-5 steps, or (within less than a decade) round numbers. */
function logTicks(low, high, n) {
  const decades = Math.log10(high / low);
  if (decades < 0.9) return linearTicks(low, high, n).filter((t) => t > 0);
  const digits = decades > 2.5 ? [1] : [1, 2, 5], every = Math.max(1, Math.ceil(decades / n));
  const ticks = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
    if (p % every === 0) for (const d of digits) ticks.push(d * 10 ** p);
  return ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
}

/** Makes a map from values to pixels, with its inverse and ticks. */
function makeScale([low, high], [from, to], log) {
  if (!(high > low)) [low, high] = log ? [low / 1.1, low * 1.1] : [low - 0.5, low + 0.5];
  const [f, g] = log ? [Math.log, Math.exp] : [(x) => x, (x) => x];
  const k = (to - from) / (f(high) - f(low));
  const scale = (x) => from + (f(x) - f(low)) * k;
  scale.invert = (p) => g(f(low) + (p - from) / k);
  scale.ticks = (n) => (log ? logTicks : linearTicks)(low, high, n);
  scale.domain = [low, high];
  scale.log = log;
  scale.covers = (x) => x >= low && x <= high;
  return scale;
}

/** Moves labels apart along one axis so that none covers another: wanted positions, least distance, limits. */
function spreadOut(wanted, gap, low, high) {
  const order = wanted.map((y, i) => [y, i]).sort((a, b) => a[0] - b[0]);
  let last = low - gap;
  for (const item of order) last = item[0] = Math.max(item[0], last + gap);
  let next = high + gap;
  for (const item of order.reverse()) next = item[0] = Math.min(item[0], next - gap);
  const placed = [];
  for (const [y, i] of order) placed[i] = y;
  return placed;
}

/** Makes a button that is pressed or not. */
function toggle(text, pressed, change) {
  const button = html("button", { type: "button", class: "toggle", "aria-pressed": String(pressed), text });
  button.addEventListener("click", () => {
    const now = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(now));
    change(now);
  });
  return button;
}

let unique = 0;

/** Makes one choice of several, as native radio buttons, so that arrow keys work. */
function choice(legend, options, chosen, change) {
  const name = `choice-${unique++}`;
  const box = html("fieldset", { class: "choice" }, html("legend", { text: legend }));
  for (const [value, text] of options) {
    const input = html("input", { type: "radio", name, value, checked: value === chosen, onchange: () => change(value) });
    box.append(html("label", {}, input, html("span", { text })));
  }
  return box;
}

/** Calls draw now and whenever the width of the element changes. */
function onWidth(element, draw) {
  let width = -1;
  new ResizeObserver(() => {
    if (element.clientWidth && element.clientWidth !== width) {
      width = element.clientWidth;
      draw();
    }
  }).observe(element);
}

/** Makes a box for the values under the pointer, placed beside a point and kept inside its host. */
function makeTip(host) {
  const box = html("div", { class: "tip", hidden: true, role: "status" });
  host.append(box);
  return {
    show(x, y, ...children) {
      box.replaceChildren(...children);
      box.hidden = false;
      const left = x + 14 + box.offsetWidth > host.clientWidth ? x - 14 - box.offsetWidth : x + 14;
      box.style.left = `${clamp(left, 0, Math.max(0, host.clientWidth - box.offsetWidth))}px`;
      box.style.top = `${clamp(y, 0, Math.max(0, host.clientHeight - box.offsetHeight))}px`;
    },
    hide: () => { box.hidden = true; },
  };
}
