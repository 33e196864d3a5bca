// Two plots of the drafter: growth of its state with depth, and acceptance against confidence.

import { compact, html, niceCeiling, percent, svg } from "./charts.js";

const HEIGHT = 220, LEFT = 50, RIGHT = 14, TOP = 10, BOTTOM = 34;
const LARGEST = 9, SMALLEST = 2.5; // radius of a point, by its share of the drafts

// A plot of curves: [{name, style, points: [{x, y, size}]}]; axes begin at 0, or at `low`.
class Curves {
  constructor(host, { title, unit, across, empty }) {
    Object.assign(this, { title, across, empty, curves: [], axes: null });
    this.figure = html("figure", "", "", host);
    html("span", "unit", ` ${unit}`, html("figcaption", "", title, this.figure));
    this.keys = html("ul", "keys", "", this.figure);
    this.plot = svg("svg", { class: "plot tall", role: "img", height: HEIGHT }, this.figure);
    new ResizeObserver(() => this.render()).observe(this.figure);
  }

  draw(curves, axes) {
    Object.assign(this, { curves, axes });
    this.render();
  }

  render() {
    if (!this.axes) return;
    const { low, high, top, ticks, format, formatY } = this.axes;
    const width = Math.max(200, this.figure.clientWidth);
    const x = (value) => LEFT + ((value - low) / (high - low)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
    const text = (at, up, anchor, words) => { svg("text", { x: at, y: up, "text-anchor": anchor }, this.plot).textContent = words; };
    this.plot.replaceChildren();
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    for (const share of [0, 0.5, 1]) {
      svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(top * share), y2: y(top * share) }, this.plot);
      text(LEFT - 6, y(top * share) + 4, "end", formatY(top * share));
    }
    for (const tick of ticks) text(x(tick), HEIGHT - 18, tick === high ? "end" : "middle", format(tick));
    text((LEFT + width - RIGHT) / 2, HEIGHT - 3, "middle", this.across);
    if (!this.curves.some((curve) => curve.points.length)) text((LEFT + width) / 2, HEIGHT / 2 - 10, "middle", this.empty);
    this.keys.replaceChildren();
    const spoken = [];
    for (const { name, style, points } of this.curves) {
      const at = points.map((point) => `${x(point.x).toFixed(1)},${y(point.y).toFixed(1)}`);
      svg("path", { class: `line ${style}`, d: at.length ? `M${at.join("L")}` : "" }, this.plot);
      for (const point of points.filter((one) => one.size)) svg("circle", { class: `point ${style}`, cx: x(point.x), cy: y(point.y), r: point.size }, this.plot);
      const item = html("li", "", "", this.keys);
      svg("path", { class: `line ${style}`, d: "M0,4H18" }, svg("svg", { viewBox: "0 0 18 8", "aria-hidden": "true" }, item));
      item.append(name);
      if (points.length) spoken.push(`${name}: ${points.map((point) => `${format(point.x)} ${formatY(point.y)}`).join(", ")}`);
    }
    this.plot.setAttribute("aria-label", `${this.title}. ${spoken.join(". ") || this.empty}.`);
  }
}

export class DrafterPanel {
  constructor(host) {
    this.growth = new Curves(host, { title: "State growth", unit: "size of the hidden state, over that at depth 1", across: "depth", empty: "No round was sampled yet" });
    this.reliability = new Curves(host, { title: "Reliability", unit: "share of drafts accepted; larger points: more drafts", across: "the drafter's confidence", empty: "No drafts were counted yet" });
  }

  draw({ growth, reliability }) {
    const live = growth.map(({ value }, i) => ({ x: i + 1, y: value, size: 3.5 }));
    const then = growth.flatMap(({ baseline }, i) => (baseline === null ? [] : [{ x: i + 1, y: baseline }]));
    const curves = [{ name: "live", style: "s1", points: live }];
    if (then.length) curves.push({ name: "baseline", style: "s3 dashed", points: then });
    const high = Math.max(2, growth.length);
    const top = niceCeiling(Math.max(1.2, ...curves.flatMap(({ points }) => points.map((point) => point.y))));
    this.growth.draw(curves, { low: 1, high, top, ticks: Array.from({ length: high }, (_, i) => i + 1), format: String, formatY: compact });
    const even = { name: "perfect calibration", style: "even", points: [{ x: 0, y: 0 }, { x: 1, y: 1 }] };
    const several = Object.entries(reliability).flatMap(([kind, found], i) => this.kind(kind, found, ["s1", "s2"][i]));
    const ends = { low: 0, high: 1, top: 1, ticks: [0, 0.25, 0.5, 0.75, 1], format: percent, formatY: percent };
    this.reliability.draw(several.length ? [even, ...several] : [], ends);
  }

  kind(name, { drafts, bins }, style) {
    const radius = (count) => SMALLEST + (LARGEST - SMALLEST) * Math.sqrt(count / drafts);
    const live = bins.filter((bin) => bin.drafts).map((bin) => ({ x: bin.confidence, y: bin.accepted, size: radius(bin.drafts) }));
    const then = bins.filter((bin) => bin.baseline).map(({ baseline }) => ({ x: baseline[0], y: baseline[1] }));
    const curves = [{ name: `${name} requests`, style, points: live }];
    return then.length ? [...curves, { name: `${name}, baseline`, style: `${style} dashed`, points: then }] : curves;
  }
}
