// SVG charts over time, lines or stacked shares, with a pointer that follows the mouse or the arrow keys.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 150, LEFT = 50, RIGHT = 8, TOP = 8, BOTTOM = 20;
const SHORTEST = 30; // intervals on the time axis

export function svg(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (parent) parent.append(node);
  return node;
}

export function html(name, className, text, parent) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

// Round up to 1, 2, 5, 10, ...
export function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export function compact(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(value >= 100000 ? 0 : 1)}k`;
  if (value >= 100) return value.toFixed(0);
  if (value >= 10) return value.toFixed(1);
  return value.toFixed(value === 0 ? 0 : 2);
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  return `${(value * 100).toFixed(value > 0 && value < 0.0995 ? 1 : 0)}%`;
}

export const count = (value) => (value === null || value === undefined ? "–" : `${+value.toFixed(1)}`);

export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${+seconds.toFixed(1)} s`;
}

// series(points) gives [{name, style, values: [number or null]}]; the style is a class of page.css.
export class Chart {
  constructor(host, { title, unit, series, format = compact, top = null, stacked = false, empty = "No data yet" }) {
    Object.assign(this, { title, series, format, top, stacked, empty, cursor: null, points: [] });
    this.figure = html("figure", "", "", host);
    const caption = html("figcaption", "", title, this.figure);
    html("span", "unit", ` ${unit}`, caption);
    this.keys = html("ul", "keys", "", this.figure);
    this.plot = svg("svg", { class: "plot", role: "img", tabindex: "0", height: HEIGHT }, this.figure);
    this.plot.addEventListener("pointermove", (event) => this.pointAt(event));
    this.plot.addEventListener("pointerleave", () => this.moveTo(null));
    this.plot.addEventListener("blur", () => this.moveTo(null));
    this.plot.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.render()).observe(this.figure);
  }

  draw(points, { kept, interval }) {
    // A short history, after a start, fills the width too.
    Object.assign(this, { points, interval, kept: Math.max(SHORTEST, Math.min(kept, points.length)) });
    this.render();
  }

  moveTo(number) {
    this.cursor = number;
    this.render();
  }

  pointAt(event) {
    if (!this.points.length) return;
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    const last = this.points[this.points.length - 1].n;
    this.moveTo(this.near(Math.round(last - (1 - share) * (this.kept - 1))));
  }

  onKey(event) {
    if (!this.points.length) return;
    const first = this.points[0].n, last = this.points[this.points.length - 1].n;
    const here = this.cursor ?? last;
    const moves = { ArrowLeft: here - 1, ArrowRight: here + 1, PageUp: here - 15, PageDown: here + 15, Home: first, End: last };
    if (event.key === "Escape") this.moveTo(null);
    else if (event.key in moves) this.moveTo(this.near(moves[event.key]));
    else return;
    event.preventDefault();
  }

  near(number) {
    return Math.max(this.points[0].n, Math.min(this.points[this.points.length - 1].n, number));
  }

  render() {
    const width = Math.max(200, this.figure.clientWidth);
    this.plot.replaceChildren();
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    if (!this.points.length) return;
    const series = this.series(this.points);
    const last = this.points[this.points.length - 1].n;
    const x = (n) => LEFT + (1 - (last - n) / (this.kept - 1)) * (width - LEFT - RIGHT);
    const values = series.flatMap((one) => one.values).filter((value) => value !== null);
    const top = this.top ?? niceCeiling(Math.max(0, ...values));
    const y = (value) => TOP + (1 - Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
    this.axes(width, top, y);
    if (values.length === 0) {
      const note = svg("text", { x: (width + LEFT) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, this.plot);
      note.textContent = this.empty;
    }
    if (this.stacked) this.areas(series, x, y);
    else for (const one of series) svg("path", { class: `line ${one.style}`, d: this.path(one.values, x, y) }, this.plot);
    let index = this.points.length - 1;
    if (this.cursor !== null) {
      index = Math.max(0, this.points.findIndex((point) => point.n >= this.cursor));
      const at = x(this.points[index].n);
      svg("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }, this.plot);
    }
    this.legend(series, index, last);
  }

  axes(width, top, y) {
    for (const share of [0, 0.5, 1]) {
      const at = y(top * share);
      svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }, this.plot);
      svg("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, this.plot).textContent = this.format(top * share);
    }
    const minutes = (this.kept * this.interval) / 60;
    const labels = [["start", LEFT, `${compactMinutes(minutes)} ago`], ["middle", (LEFT + width - RIGHT) / 2, `${compactMinutes(minutes / 2)} ago`], ["end", width - RIGHT, "now"]];
    for (const [anchor, at, text] of labels) svg("text", { x: at, y: HEIGHT - 5, "text-anchor": anchor }, this.plot).textContent = text;
  }

  path(values, x, y) {
    let d = "", pen = false;
    values.forEach((value, i) => {
      if (value === null) { pen = false; return; }
      const at = `${x(this.points[i].n).toFixed(1)},${y(value).toFixed(1)}`;
      // A single value between two gaps is drawn as a point.
      const alone = !pen && (values[i + 1] === null || values[i + 1] === undefined);
      d += pen ? `L${at}` : `M${at}${alone ? "h2" : ""}`;
      pen = true;
    });
    return d;
  }

  areas(series, x, y) {
    const step = x(1) - x(0);
    const sums = this.points.map(() => 0);
    for (const one of series) {
      let d = "";
      one.values.forEach((value, i) => {
        if (value === null) return;
        const low = y(sums[i]), high = y(sums[i] + value);
        const left = Math.max(LEFT, x(this.points[i].n) - step);
        d += `M${left.toFixed(1)},${low.toFixed(1)}h${step.toFixed(2)}V${high.toFixed(1)}h${(-step).toFixed(2)}z`;
        sums[i] += value;
      });
      svg("path", { class: `area ${one.style}`, d }, this.plot);
    }
  }

  legend(series, index, last) {
    this.keys.replaceChildren();
    const spoken = [];
    for (const one of series) {
      const item = html("li", "", "", this.keys);
      const sample = svg("svg", { viewBox: "0 0 18 8", "aria-hidden": "true" }, item);
      if (this.stacked) svg("rect", { class: `area ${one.style}`, width: 18, height: 8 }, sample);
      else svg("path", { class: `line ${one.style}`, d: "M0,4H18" }, sample);
      const text = `${one.name} ${this.format(one.values[index])}`;
      item.append(text);
      spoken.push(text);
    }
    let when = "now";
    if (this.cursor !== null) {
      when = `${Math.round((last - this.points[index].n) * this.interval)} s ago`;
      html("li", "when", when, this.keys);
    }
    this.plot.setAttribute("aria-label", `${this.title}, ${when}: ${spoken.join(", ")}. Arrow keys move through time.`);
  }
}

function compactMinutes(minutes) {
  return minutes >= 1 ? `${+minutes.toFixed(1)} min` : `${Math.round(minutes * 60)} s`;
}
