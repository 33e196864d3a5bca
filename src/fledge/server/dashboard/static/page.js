// Polls the data every two seconds and shows it. Handles restarts of the server, and servers with API keys.

import { Chart, compact, count, milliseconds, percent } from "./charts.js";
import { Playground } from "./chat.js";
import { DrafterPanel } from "./drafter.js";

const byId = (id) => document.getElementById(id);
const KEY = "fledge-api-key";
const PERIOD = 2000, LONGEST_WAIT = 8000, PATIENCE = 10000;

let state = { started: null, points: [], data: null };
let failures = 0;
let asking = null;
let declined = false; // after the dialog was closed, it opens again only when a message is sent

// Asks for the key when the server first refuses a request.
function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key-wrong").hidden = !wrong;
    byId("key").value = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      const key = byId("key").value.trim();
      if (key) sessionStorage.setItem(KEY, key);
      asking = null;
      declined = !key;
      resolve(Boolean(key));
    }, { once: true });
  });
  return asking;
}

async function request(path, options = {}, inBackground = false) {
  while (true) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401 || (inBackground && declined)) return response;
    if (sessionStorage.getItem(KEY) === key && !(await askForKey(Boolean(key)))) return response;
  }
}

function connection(kind, text) {
  byId("connection").className = kind;
  if (byId("connection-text").textContent !== text) byId("connection-text").textContent = text;
}

async function refresh() {
  const after = state.points.length ? state.points[state.points.length - 1].n : -1;
  const slow = new AbortController();
  // Requests time out, except while the key dialog is open.
  const timer = setTimeout(() => { if (!asking) slow.abort(); }, PATIENCE);
  try {
    const response = await request(`dashboard/data?after=${after}`, { signal: slow.signal, cache: "no-store" }, true);
    if (!response.ok) throw new Error(response.status === 401 ? "The server wants an API key" : `The server answered ${response.status}`);
    const data = await response.json();
    if (state.started !== null && state.started !== data.server.started) {
      // The server was restarted: its history is new.
      state = { started: data.server.started, points: [], data: null };
      return await refresh();
    }
    state.started = data.server.started;
    state.points = [...state.points, ...data.points].slice(-data.kept_intervals);
    state.data = data;
    failures = 0;
    byId("banner").hidden = true;
    connection("live", "Live");
    show(data);
  } catch (error) {
    failures += 1;
    connection("lost", "Not connected");
    const reason = error.message.startsWith("The server") ? error.message : "The server cannot be reached";
    byId("banner").textContent = `${reason}. The numbers below are the last that came; trying again.`;
    if (failures > 1) byId("banner").hidden = false;
  } finally {
    clearTimeout(timer);
  }
}

async function keepAsking() {
  while (true) {
    if (!document.hidden) await refresh();
    const wait = failures ? Math.min(LONGEST_WAIT, 500 * 2 ** failures) : PERIOD;
    await new Promise((resolve) => {
      const done = () => {
        clearTimeout(timer);
        document.removeEventListener("visibilitychange", done);
        resolve();
      };
      const timer = setTimeout(done, wait);
      document.addEventListener("visibilitychange", done);
    });
  }
}

function make(name, className, ...content) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...content);
  return node;
}

function tile(title, value, note, alarm = false) {
  return make("div", alarm ? "alarm" : "", make("dt", "", title), make("dd", "", make("span", "value", value), make("span", "note", note)));
}

function tiles(t, hasDrafter) {
  const known = t.speed_up !== null;
  return [
    tile("Estimated speed-up", known ? `${t.speed_up.toFixed(2)}x` : "unknown", known ? "against no speculation" : hasDrafter ? "no plain step measured" : "no drafter", known && t.speed_up < 1),
    tile("Tokens per round", compact(t.acceptance_length), t.break_even === null ? (t.depth ? `${t.depth} drafted` : "") : `pays from ${t.break_even.toFixed(2)}`),
    tile("Generated", `${compact(t.output_tokens_per_s)}`, "tokens/s, all users"),
    tile("Per user", `${compact(t.user_tokens_per_s)}`, "tokens/s while decoding"),
    tile("First token", milliseconds(t.ttft_s), "mean from arrival"),
    tile("Requests", `${t.running}`, t.waiting ? `running, ${t.waiting} waiting` : "running, none waiting"),
    tile("KV cache", percent(t.kv_use), t.preemptions ? `in use, ${t.preemptions} preemptions` : "in use"),
    tile("Prefix cache", percent(t.prefix_hit_rate), "of prompt tokens found"),
    tile("Without drafts", percent(t.fallback_ratio), t.fallback ? "the drafter is switched off" : "of turns", t.fallback),
    tile("Rejected", `${t.rejected}`, `of ${t.rejected + t.finished} requests`),
  ];
}

function row(...cells) {
  const line = document.createElement("tr");
  for (const [text, className, header] of cells) {
    const cell = make(header ? "th" : "td", className || "", text);
    if (header) cell.scope = "row";
    line.append(cell);
  }
  return line;
}

const depths = (rates) => rates.map((rate) => `${Math.round(rate * 100)}%`).join("  ") || "–";
const pays = (value) => (value === null ? ["unknown", "muted"] : value ? ["yes", "yes"] : ["no", "no"]);

function table(id, lines, columns, none = "No finished requests yet.") {
  const body = byId(id);
  if (lines.length) body.replaceChildren(...lines);
  else {
    const cell = make("td", "muted", none);
    cell.colSpan = columns;
    body.replaceChildren(make("tr", "", cell));
  }
}

// Text between backticks is code.
const withCode = (text) => text.split("`").map((part, i) => (i % 2 ? make("code", "", part) : part));

function showFindings(findings) {
  const words = { good: "", info: "", warning: "Note: ", bad: "" };
  const lines = findings.map(({ level, text }) => make("li", level, words[level], ...withCode(text)));
  const list = byId("findings");
  const changed = list.textContent !== lines.map((line) => line.textContent).join("");
  if (changed) list.replaceChildren(...lines);
}

function show(data) {
  const { server, tiles: now } = data;
  document.title = `${server.model} · Fledge`;
  byId("server").textContent = `${server.model}${server.has_drafter ? ` with ${server.drafter ?? "a drafter"}` : ", no drafter"} · ${server.version} · up ${duration(server.uptime_s)}`;
  playground.switches = server.switchable;
  showFindings(data.findings);
  byId("window").textContent = `Speed-up and tokens per round are over the last ${duration(data.window_s)}; rates over the last ${duration(data.now_s)}.`;
  byId("tiles").replaceChildren(...tiles(now, server.has_drafter));
  table("templates", data.templates.map((t) => row([t.name, "", true], [t.hash.slice(0, 8) || "–"], [`${t.requests}`], [`${t.rounds}`], [compact(t.acceptance_length)], [depths(t.rate_by_depth), "rates"], pays(t.pays))), 7);
  table("contexts", data.contexts.map((c) => row([c.name, "", true], [`${c.rounds}`], [compact(c.acceptance_length)], [depths(c.rate_by_depth), "rates"], pays(c.pays))), 5);
  table("baseline", data.baseline.map((d) => row([`${d.depth}`, "", true], [percent(d.rate)], [`${percent(Math.max(0, d.low))} to ${percent(Math.min(1, d.high))}`], [percent(d.expected)])), 4, "Nothing to compare yet.");
  showDrafter(data.drafter);
  const scale = { kept: data.kept_intervals, interval: data.interval_s };
  for (const chart of charts) chart.draw(state.points, scale);
}

const share = (value) => [percent(value), "number"];

function showDrafter(drafter) {
  panel.draw(drafter);
  const words = drafter.words.join(" ") || "Nothing was drafted lately.";
  if (byId("drafter-words").textContent !== words) byId("drafter-words").textContent = words;
  table("growth", drafter.growth.map((d, i) => row([`${i + 1}`, "", true], [compact(d.value), "number"], [compact(d.baseline), "number"], [`${d.rounds}`, "number"])), 4, "No round was sampled yet.");
  const kinds = ["greedy", "sampled"].map((kind) => drafter.reliability[kind]);
  const tenths = kinds.some(Boolean) ? Array.from({ length: 10 }, (_, i) => i) : [];
  const cells = (found, i) => (found ? [[`${found.bins[i].drafts}`, "number"], share(found.bins[i].accepted), share(found.bins[i].baseline?.[1])] : [["–", "number"], ["–", "number"], ["–", "number"]]);
  const error = (found) => (found ? [[`${found.drafts}`, "number"], [found.error.toFixed(3), "number"], [found.baseline_error?.toFixed(3) ?? "–", "number"]] : cells(found));
  const lines = tenths.map((i) => row([`${i * 10} to ${i * 10 + 10}%`, "", true], ...kinds.flatMap((found) => cells(found, i))));
  if (lines.length) lines.push(row(["Calibration error", "", true], ...kinds.flatMap(error)));
  table("reliability", lines, 7, "No drafts were counted yet.");
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

const one = (name, style, value) => (points) => [{ name, style, values: points.map(value) }];
const STYLES = ["s1", "s2", "s3", "s4", "s1 dashed", "s2 dashed", "s3 dashed", "s4 dashed"];

const byDepth = (name) => (points) => {
  const deepest = Math.max(0, ...points.map((point) => point[name].length));
  return Array.from({ length: Math.min(deepest, STYLES.length) }, (_, depth) => ({
    name: `${depth + 1}`,
    style: STYLES[depth],
    values: points.map((point) => point[name][depth] ?? null),
  }));
};

function tokensPerRound(points) {
  const series = [{ name: "given", style: "s1", values: points.map((point) => point.length) }];
  const even = state.data?.tiles.break_even ?? null;
  if (even !== null) series.push({ name: "break-even now", style: "s3 dashed", values: points.map(() => even) });
  return series;
}

function timeSplit(points) {
  return ["verify", "accept", "draft"].map((name, i) => ({
    name,
    style: ["s2", "s3", "s1"][i],
    values: points.map(({ phases }) => { const all = phases[0] + phases[1] + phases[2]; return all > 0 ? phases[i] / all : null; }),
  }));
}

const queue = (points) => [
  { name: "running", style: "s1", values: points.map((point) => point.running) },
  { name: "waiting", style: "s3 dashed", values: points.map((point) => point.waiting) },
];

const charts = [
  { title: "Throughput", unit: "generated tokens/s", series: one("all users", "s1", (point) => point.output) },
  { title: "Per user", unit: "tokens/s while decoding", series: one("mean", "s2", (point) => point.user) },
  { title: "First token", unit: "mean time from arrival", series: one("mean", "s3", (point) => point.ttft), format: milliseconds },
  { title: "Tokens per round", unit: "the target's own included", series: tokensPerRound },
  { title: "Acceptance by depth", unit: "share of drafts accepted", series: byDepth("depths"), format: percent, top: 1 },
  { title: "State growth by depth", unit: "times its size at depth 1", series: byDepth("growth") },
  { title: "Where a round's time goes", unit: "share", series: timeSplit, format: percent, top: 1, stacked: true },
  { title: "KV cache", unit: "share of blocks in use", series: one("in use", "s4", (point) => point.kv), format: percent, top: 1 },
  { title: "Requests", unit: "at the end of each interval", series: queue, format: count },
  { title: "Prompts", unit: "tokens read per second", series: one("all users", "s2", (point) => point.prompt) },
].map((spec) => new Chart(byId("charts"), spec));

const panel = new DrafterPanel(byId("drafter-curves"));
const playground = new Playground({ request: (path, options) => request(path, options), model: () => state.data?.server.model ?? "" });
keepAsking();
