"use strict";
// Charts as SVG, drawn again when their width changes. All texts go in as text nodes: nothing here parses HTML.

const make =
  (namespace) =>
  (tag, attributes = {}, ...children) => {
    const node = document.createElementNS(namespace, tag);
    for (const [name, value] of Object.entries(attributes)) if (value != null) node.setAttribute(name, value);
    node.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
    return node;
  };
const html = make("http://www.w3.org/1999/xhtml");
const svg = make("http://www.w3.org/2000/svg");

// ---------------------------------------------------------------------------------------------- numbers

const MINUS = "\u2212";
const signed = (text) => text.replace("-", MINUS);
const trimmed = (value, digits = 3) => signed(String(Number(value.toPrecision(digits))));
const whole = (value) => Math.round(value).toLocaleString("en");
const fixed = (value, digits) => (value == null ? "not finite" : signed(value.toFixed(digits)));
const change = (value, digits) => (value > 0 ? "+" : "") + fixed(value, digits);

const BYTES = [
  ["TB", 1e12],
  ["GB", 1e9],
  ["MB", 1e6],
  ["kB", 1e3],
  ["bytes", 1],
];
const SECONDS = [
  ["hours", 3600],
  ["minutes", 60],
  ["seconds", 1],
];
/** The [name, size] that suits an axis up to `most`. */
const unit = (units, most) => units.find(([, size]) => most >= 2 * size) ?? units.at(-1);

function volume(value) {
  const [name, size] = unit(BYTES, 2 * value);
  return `${trimmed(value / size)} ${name === "bytes" ? "B" : name}`;
}

const bytes = (value) => (value < 1e4 ? `${whole(value)} bytes` : volume(value));

function duration(value) {
  if (value < 100) return `${trimmed(value, 2)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// ------------------------------------------------------------------------------------- scales and ticks

const extent = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
const linear =
  ([a, b], [from, to]) =>
  (v) =>
    from + ((to - from) * (v - a)) / (b - a || 1);
const logarithmic = (domain, range) => {
  const scale = linear(domain.map(Math.log10), range);
  return (v) => scale(Math.log10(v));
};

/** About `count` round numbers between a and b, and how many decimals they need. */
function ticks([a, b], count, integers = false) {
  const rough = (b - a || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(integers ? 1 : 0, power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999));
  const values = [];
  for (let k = Math.ceil(a / step - 1e-9); k * step <= b + step * 1e-9; k++) values.push(k * step + 0); // never -0
  return { values, decimals: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function decades([a, b]) {
  const marks = b / a > 300 ? [1] : [1, 2, 5];
  const values = [];
  for (let e = Math.floor(Math.log10(a)); 10 ** e <= b; e++) values.push(...marks.map((m) => m * 10 ** e));
  return values.filter((v) => v >= a * 0.999 && v <= b * 1.001);
}

// ----------------------------------------------------------------------------------------------- figures

const PAD = { left: 58, right: 14, top: 10, bottom: 40 };
const HEIGHT = 230; // the style sheet's .plot has the same: a plot never changes its own size
const SHAPES = ["M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-4,-4h8v8h-8z", "M0,-5L5,4H-5z", "M0,-5L5,0L0,5L-5,0z"];

/** A titled figure whose plot is drawn for the width it has. */
function figure({ title, note, legend = [], wide = false, text, draw }) {
  const plot = html("div", { class: "plot" });
  const node = html(
    "figure",
    { class: wide ? "wide" : null },
    html("figcaption", {}, html("h3", {}, title), note && html("p", {}, note), keys(legend)),
    plot,
  );
  const redraw = () => {
    const width = Math.round(plot.clientWidth) || 560;
    if (width !== node.drawn) plot.replaceChildren(draw(canvas(title, text, (node.drawn = width))));
  };
  node.redraw = redraw;
  new ResizeObserver(redraw).observe(plot);
  return node;
}

const canvas = (title, text, width) =>
  svg(
    "svg",
    { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": `${title}. ${text}` },
    svg("title", {}, title),
    svg("desc", {}, text),
  );

const keys = (legend) =>
  legend.length > 1 &&
  html(
    "ul",
    { class: "keys" },
    legend.map((entry) => html("li", {}, sample(entry), entry.name)),
  );

/** What stands for a series in a legend. */
const sample = ({ colour, dash, shape, block }) =>
  svg(
    "svg",
    { viewBox: "-12 -6 24 12", class: `sample ${colour}`, "aria-hidden": "true" },
    block
      ? svg("path", { d: "M-6,-6h12v12h-12z", class: "block" })
      : svg("path", { d: "M-12,0H12", class: `line ${dash ?? ""}` }),
    shape && svg("path", { d: shape, class: "mark" }),
  );

function axes(node, width, { x, y, X, Y }) {
  const right = width - PAD.right;
  const bottom = HEIGHT - PAD.bottom;
  for (const [value, text] of y.ticks)
    node.append(
      svg("line", { class: "grid", x1: PAD.left, x2: right, y1: Y(value), y2: Y(value) }),
      svg("text", { class: "tick", x: PAD.left - 8, y: Y(value), dy: "0.32em", "text-anchor": "end" }, text),
    );
  for (const [value, text] of x.ticks)
    node.append(svg("text", { class: "tick", x: X(value), y: bottom + 16, "text-anchor": "middle" }, text));
  node.append(
    svg("line", { class: "axis", x1: PAD.left, x2: right, y1: bottom, y2: bottom }),
    svg("text", { class: "label", x: right, y: HEIGHT - 6, "text-anchor": "end" }, x.label),
  );
}

/** Ticks of an axis: pairs of a value and its text. `units` divides them, `log` spaces them by factors. */
function marks(domain, count, { units, log, integers, format }) {
  if (log) {
    const all = decades(domain);
    const every = Math.ceil(all.length / count);
    return all.filter((_, k) => k % every === 0).map((v) => [v, format(v)]);
  }
  const size = units ? unit(units, domain[1])[1] : 1;
  const { values, decimals } = ticks(
    domain.map((v) => v / size),
    count,
    integers,
  );
  return values.map((v) => [v * size, integers ? whole(v) : fixed(v, decimals)]);
}

// ------------------------------------------------------------------------------------------ lines and steps

/**
 * Curves. A series has points {x, y, error} (y null: a gap) or, as steps of a histogram, {from, to, x, y}.
 * x and y say how values read: {label, show, units, log, integers, zero}; what a log axis can't hold is left out.
 */
function lines({ series: given, x, y, reference, ...rest }) {
  const series = x.log ? given.map((s) => ({ ...s, points: s.points.filter((p) => p.x > 0) })) : given;
  const legend = [...series, ...(reference ? [{ ...reference, colour: "plain", dash: "dash1" }] : [])];
  return figure({ ...rest, legend, draw: (node) => drawLines(node, { series, x, y, reference }) });
}

function drawLines(node, { series, x, y, reference }) {
  const width = node.viewBox.baseVal.width;
  const bottom = HEIGHT - PAD.bottom;
  const shown = series.map((s) => s.points.filter((p) => p.y != null && !(y.log && p.y <= 0)));
  const least = x.log || series.some((s) => s.steps) ? [] : [x.least ?? 0];
  const all = shown.flat();
  const xs = extent([...least, ...all.flatMap((p) => [p.from ?? p.x, p.to ?? p.x])]);
  const reach = all.flatMap((p) => [p.y - (p.error ?? 0), p.y + (p.error ?? 0)]);
  const ys = padded(reach, y, reference);
  const X = (x.log ? logarithmic : linear)(xs, [PAD.left, width - PAD.right]);
  const Y = (y.log ? logarithmic : linear)(ys, [bottom, PAD.top]);
  const across = Math.max(2, Math.floor((width - PAD.left) / 80));
  axes(node, width, { X, Y, x: { label: x.label, ticks: marks(xs, across, x) }, y: { ticks: marks(ys, 6, y) } });
  if (reference)
    node.append(svg("path", { class: "plain line dash1", d: `M${PAD.left},${Y(reference.y)}H${width - PAD.right}` }));
  series.forEach((s, i) => node.append(...drawn(s, shown[i], X, Y, bottom)));
  const stops = [...new Set(all.map((p) => p.x))].sort((a, b) => a - b);
  const values = (at) => series.flatMap((s, i) => told(s, shown[i], at, X, y));
  listen(node, stops.map(X), (k) => tip(x.show(stops[k]), values(stops[k])));
  return node;
}

/** The range of y: a little more than the values, and what has to be in it. */
function padded(values, { log, zero }, reference) {
  const [a, b] = extent([...values, ...(zero ? [0] : []), ...(reference ? [reference.y] : [])]);
  if (!(a <= b)) return [0, 1];
  if (log) return [a / 1.6, b * 1.6];
  const more = (b - a || Math.abs(b) || 1) * 0.06;
  return [zero && a === 0 ? 0 : a - more, b + more];
}

function drawn({ points, colour, dash, shape, steps }, shown, X, Y, bottom) {
  const line = (d, kind) => svg("path", { class: `${colour} ${kind} ${dash ?? ""}`, d });
  if (steps) {
    const d = shown.map((p, k) => `${k ? "L" : `M${X(p.from)},${bottom}L`}${X(p.from)},${Y(p.y)}H${X(p.to)}`).join("");
    return d ? [line(`${d}V${bottom}`, "area"), line(`${d}V${bottom}`, "line")] : [];
  }
  const parts = points.map((p, k) =>
    p.y == null ? "" : `${k && points[k - 1].y != null ? "L" : "M"}${X(p.x)},${Y(p.y)}`,
  );
  const edge = (side, list) => list.map((p) => `${X(p.x)},${Y(p.y + side * p.error)}`);
  const sure = shown.filter((p) => p.error != null);
  const band =
    sure.length > 2 &&
    svg("path", { class: `${colour} band`, d: `M${[...edge(1, sure), ...edge(-1, sure.toReversed())].join("L")}Z` });
  const bars = (band ? [] : sure).map((p) => `M${X(p.x)},${Y(p.y - p.error)}V${Y(p.y + p.error)}`).join("");
  const alone = points.filter((p, k) => p.y != null && points[k - 1]?.y == null && points[k + 1]?.y == null);
  const dots = (shape ? shown : alone).map((p) =>
    svg("path", { class: `${colour} mark`, d: shape ?? SHAPES[0], transform: `translate(${X(p.x)},${Y(p.y)})` }),
  );
  return [band, bars && line(bars, "whisker"), line(parts.join(""), "line"), ...dots].filter(Boolean);
}

/** What a series has to tell near x: nothing if its nearest point is elsewhere. */
function told(series, shown, at, X, y) {
  const near = shown.reduce((best, p) => (Math.abs(p.x - at) < Math.abs((best?.x ?? Infinity) - at) ? p : best), null);
  if (!near || Math.abs(X(near.x) - X(at)) > 6) return [];
  return [
    [
      series,
      `${y.show(near.y)}${near.error == null ? "" : ` ± ${y.show(near.error)}`}${near.note ? `, ${near.note}` : ""}`,
    ],
  ];
}

// ------------------------------------------------------------------------------------------------ columns

const NAMED = 24; // bars that are lists with a name each; more are columns, which a pointer names

/** Stacked columns {label, parts: [number]}, one path a part however many columns there are; or a list of a few. */
function columns({ bars, parts, ...rest }) {
  const legend = parts.map((part) => ({ ...part, block: true }));
  if (bars.length <= NAMED) return named({ bars, parts: legend, ...rest });
  return figure({ ...rest, wide: true, legend, draw: (node) => drawColumns(node, { bars, parts: legend, x: "clients" }) });
}

/** A list of stacked bars, each between its name and its sum. */
function named({ title, note, bars, parts, text }) {
  const sums = bars.map((bar) => bar.parts.reduce((a, b) => a + b, 0));
  const viewBox = `0 0 ${Math.max(1, ...sums)} 1`;
  const bar = ({ parts: sizes }) => {
    let sum = 0;
    return sizes.flatMap((size, k) => {
      const block = { class: `${parts[k].colour} block`, d: `M${sum},0h${size}v1h${-size}z` };
      sum += size;
      return size ? svg("path", block, svg("title", {}, `${parts[k].name}: ${whole(size)}`)) : [];
    });
  };
  const row = (one, k) =>
    html(
      "li",
      {},
      html("span", {}, one.label),
      svg("svg", { viewBox, preserveAspectRatio: "none", "aria-hidden": "true" }, bar(one)),
      html("strong", {}, whole(sums[k])),
    );
  return html(
    "figure",
    { "aria-label": `${title}. ${text}` },
    html("figcaption", {}, html("h3", {}, title), note && html("p", {}, note), keys(parts)),
    html("ol", { class: "plot bars" }, bars.map(row)),
  );
}

function drawColumns(node, { bars, parts, x }) {
  const width = node.viewBox.baseVal.width;
  const bottom = HEIGHT - PAD.bottom;
  const most = Math.max(1, extent(bars.map((bar) => bar.parts.reduce((a, b) => a + b, 0)))[1]);
  const X = linear([0, bars.length], [PAD.left, width - PAD.right]);
  const Y = linear([0, most], [bottom, PAD.top]);
  axes(node, width, { X, Y, x: { label: x, ticks: [] }, y: { ticks: marks([0, most], 5, { integers: true }) } });
  const gap = Math.min(2, (X(1) - X(0)) * 0.15);
  const paths = parts.map(() => "");
  bars.forEach((bar, k) => {
    let sum = 0;
    bar.parts.forEach((value, i) => {
      if (value) paths[i] += `M${X(k)},${Y(sum)}V${Y((sum += value))}H${X(k + 1) - gap}V${Y(sum - value)}Z`;
    });
  });
  parts.forEach((part, i) => paths[i] && node.append(svg("path", { class: `${part.colour} block`, d: paths[i] })));
  const told = (bar) => parts.flatMap((part, i) => (bar.parts[i] ? [[part, whole(bar.parts[i])]] : []));
  listen(
    node,
    bars.map((_, k) => X(k + 0.5)),
    (k) => tip(bars[k].label, told(bars[k])),
  );
  return node;
}

// --------------------------------------------------------------------------------------- what a pointer sees

const bubble = html("div", { class: "tip", role: "status", hidden: "" });

const tip = (head, rows) =>
  bubble.replaceChildren(
    html("strong", {}, head),
    ...rows.map(([series, text]) =>
      html("div", {}, sample(series), html("span", {}, series.name), html("b", {}, text)),
    ),
  );

/** Follow pointer and arrow keys over `places` (x in pixels, ascending): a guide there, and its values. */
function listen(node, places, show) {
  if (!places.length) return;
  const guide = svg("line", { class: "guide", y1: PAD.top, y2: HEIGHT - PAD.bottom, visibility: "hidden" });
  node.append(guide);
  let at = -1;
  const go = (k) => {
    at = Math.max(0, Math.min(places.length - 1, k));
    for (const end of ["x1", "x2"]) guide.setAttribute(end, places[at]);
    guide.setAttribute("visibility", "visible");
    show(at);
    place(node, places[at]);
  };
  const leave = () => {
    guide.setAttribute("visibility", "hidden");
    bubble.hidden = true;
  };
  node.addEventListener("pointermove", (event) => {
    const box = node.getBoundingClientRect();
    const x = ((event.clientX - box.left) * node.viewBox.baseVal.width) / box.width;
    go(nearest(places, x));
  });
  node.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) (go(at + step), event.preventDefault());
    if (event.key === "Escape") leave();
  });
  node.addEventListener("pointerleave", leave);
  node.addEventListener("blur", leave);
}

function nearest(sorted, value) {
  let low = 0,
    high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle;
    else high = middle;
  }
  return value - sorted[low] < sorted[high] - value ? low : high;
}

function place(node, x) {
  bubble.hidden = false;
  const box = node.getBoundingClientRect();
  const own = bubble.getBoundingClientRect();
  const left = box.left + (x * box.width) / node.viewBox.baseVal.width;
  const beside = left + 14 + own.width < innerWidth ? left + 14 : left - 14 - own.width;
  bubble.style.left = `${Math.max(4, beside)}px`;
  bubble.style.top = `${Math.max(4, box.top + 8)}px`;
}
