// The chat: streams responses, marks drafted text, and compares generation with and without speculation.

const byId = (id) => document.getElementById(id);

function message(log, kind, text) {
  const node = document.createElement("div");
  node.className = `message ${kind}`;
  node.textContent = text;
  log.append(node);
  node.scrollIntoView({ block: "nearest" });
  return node;
}

// Yields the JSON objects of a server-sent event stream.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// One streamed response: its text on the page, and its speed.
class Answer {
  constructor(column) {
    this.stats = column.querySelector(".stats");
    this.log = column.querySelector(".log");
    this.node = message(this.log, "assistant", "");
    this.text = "";
    this.held = []; // text whose pieces have not arrived
    this.written = ""; // text of pieces that is not shown yet
    this.marks = []; // for each character of `written`: whether it was drafted
    this.pieces = 0;
    this.tokens = null;
    this.acceptance = null;
    this.sent = performance.now();
    this.first = this.last = null;
  }

  add(text, kind, drafted) {
    const style = `${kind}${drafted ? " drafted" : ""}`;
    const tail = this.node.lastChild;
    if (tail && tail.className === style) tail.append(text);
    else {
      const piece = document.createElement(drafted ? "mark" : "span");
      piece.className = style;
      piece.append(text);
      this.node.append(piece);
    }
  }

  // Pieces have the raw output; the shown text is the output of the parsers. Align the two.
  paint({ text, kind }) {
    const at = this.written.indexOf(text);
    if (at < 0) { this.add(text, kind, false); return; }
    const marks = this.marks.slice(at, at + text.length);
    this.written = this.written.slice(at + text.length);
    this.marks = this.marks.slice(at + text.length);
    for (let start = 0, end = 1; start < text.length; start = end++) {
      while (end < text.length && marks[end] === marks[start]) end += 1;
      this.add(text.slice(start, end), kind, marks[start]);
    }
  }

  flush() {
    const near = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    this.held.splice(0).forEach((part) => this.paint(part));
    if (near) this.log.scrollTop = this.log.scrollHeight;
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message || "the server reported an error");
    if (chunk.usage) {
      this.tokens = chunk.usage.completion_tokens ?? this.tokens;
      const acceptance = chunk.usage.speculation?.acceptance_length ?? chunk.metrics?.speculative_decoding?.mean_acceptance_length; // ours, vLLM's
      this.acceptance = acceptance ?? this.acceptance;
    }
    for (const choice of chunk.choices || []) {
      const delta = choice.delta || {}, pieces = choice.fledge?.pieces || [];
      const text = delta.content || "", thought = delta.reasoning_content || "";
      if (thought) this.held.push({ text: thought, kind: "thought" });
      if (text) this.held.push({ text, kind: "own" });
      this.text += text;
      for (const piece of pieces) {
        this.written += piece.text;
        this.marks.push(...Array(piece.text.length).fill(piece.drafted));
      }
      if (text || thought || pieces.length) {
        this.last = performance.now();
        this.first ??= this.last;
        this.pieces += pieces.length || 1;
      }
      // The pieces of a round arrive with the last of its deltas. Other servers send none.
      if (pieces.length || this.held.length > 4) this.flush();
    }
    this.show();
  }

  // Decoding speed: tokens after the first, divided by the time after the first.
  get speed() {
    const tokens = this.tokens ?? this.pieces;
    return tokens > 1 && this.last > this.first ? ((tokens - 1) * 1000) / (this.last - this.first) : null;
  }

  show() {
    const parts = [];
    if (this.speed) parts.push(`${this.speed.toFixed(1)} tokens/s`);
    if (this.tokens !== null) parts.push(`${this.tokens} tokens`);
    if (this.acceptance) parts.push(`${this.acceptance.toFixed(2)} tokens per round`);
    if (this.first) parts.push(`first after ${((this.first - this.sent) / 1000).toFixed(2)} s`);
    this.stats.textContent = parts.join(" · ");
  }
}

export class Playground {
  constructor({ request, model }) {
    Object.assign(this, { request, model, abort: null, history: [], switchable: true }); // one conversation for both columns
    this.columns = Object.fromEntries([...document.querySelectorAll(".column")].map((column) => [column.dataset.mode, column]));
    this.status = byId("chat-status");
    byId("chat").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("chat").addEventListener("change", () => this.showColumns());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("clear").addEventListener("click", () => this.clear());
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.abort?.abort(); });
    this.showColumns();
  }

  get mode() {
    return document.querySelector("input[name=mode]:checked").value;
  }

  // Some engines (vLLM) cannot turn speculation off for single requests.
  set switches(switchable) {
    this.switchable = switchable;
    for (const other of document.querySelectorAll("input[name=mode]:not([value=on])")) other.disabled = !switchable;
  }

  showColumns() {
    if (this.abort) return;
    for (const [name, column] of Object.entries(this.columns)) column.hidden = this.mode !== "both" && this.mode !== name;
    byId("together").hidden = this.mode !== "both";
  }

  clear() {
    this.abort?.abort();
    this.history = [];
    this.status.textContent = "";
    for (const column of Object.values(this.columns)) {
      column.querySelector(".log").replaceChildren();
      column.querySelector(".stats").textContent = "";
    }
    byId("prompt").focus();
  }

  busy(abort) {
    this.abort = abort;
    byId("send").disabled = Boolean(abort);
    byId("stop").disabled = !abort;
    if (!abort) this.showColumns();
  }

  async send() {
    const prompt = byId("prompt"), text = prompt.value.trim();
    if (!text || this.abort) return;
    const modes = this.mode === "both" ? ["on", "off"] : [this.mode];
    const abort = new AbortController();
    this.busy(abort);
    this.status.textContent = "Writing…";
    prompt.value = "";
    this.history.push({ role: "user", content: text });
    for (const column of Object.values(this.columns)) message(column.querySelector(".log"), "user", text);
    for (const mode of modes) this.columns[mode].querySelector(".stats").textContent = mode === modes[0] ? "" : "waiting for its turn";
    const seed = Math.floor(Math.random() * 2 ** 31);
    const answers = [];
    let said = "", outcome = "Done.";
    for (const mode of modes) {
      const answer = new Answer(this.columns[mode]);
      try {
        await this.stream(mode, answer, seed, abort.signal);
        answers.push(answer);
      } catch (error) {
        outcome = abort.signal.aborted ? "Stopped." : "Failed.";
        if (!abort.signal.aborted) message(answer.log, "error", `${answer.text ? "The answer broke off: " : ""}${error.message}`);
        if (!answer.text) answer.node.remove();
      }
      said ||= answer.text; // if the two differ, both continue from the first
      if (outcome !== "Done.") break;
    }
    if (said) this.history.push({ role: "assistant", content: said });
    else this.history.pop();
    for (const [mode, column] of Object.entries(this.columns)) {
      if (!modes.includes(mode) && said) message(column.querySelector(".log"), "assistant", said);
    }
    for (const mode of modes) {
      const stats = this.columns[mode].querySelector(".stats");
      if (stats.textContent.startsWith("waiting")) stats.textContent = "not run";
    }
    this.status.textContent = answers.length === 2 ? compare(...answers) : outcome;
    this.busy(null);
    prompt.focus({ preventScroll: true });
  }

  async stream(mode, answer, seed, signal) {
    const response = await this.request("v1/chat/completions", {
      method: "POST",
      signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model: this.model(),
        messages: this.history,
        temperature: Number(byId("temperature").value),
        max_tokens: Number(byId("max-tokens").value),
        seed,
        stream: true,
        stream_options: { include_usage: true },
        ...(this.switchable && { speculation: { enabled: mode === "on", report: true } }),
      }),
    });
    if (!response.ok) {
      const said = await response.json().catch(() => ({}));
      throw new Error(said.error?.message || `the server answered ${response.status}`);
    }
    try {
      for await (const chunk of events(response.body)) answer.take(chunk);
    } finally {
      answer.flush();
    }
    if (!answer.first) throw new Error("the answer is empty");
  }
}

// Both requests have the same seed, so only rounding can make the responses differ.
function sameness(on, off) {
  if (on.text === off.text) return "The same text.";
  let at = 0;
  while (on.text[at] === off.text[at]) at += 1;
  return `The texts part at character ${at + 1}: rounding in low precision can tip the choice between two tokens about equally likely. Both go on from the first.`;
}

function compare(on, off) {
  const same = sameness(on, off);
  if (!on.speed || !off.speed) return same;
  return `${(on.speed / off.speed).toFixed(2)}x as fast with speculation: ${on.speed.toFixed(1)} against ${off.speed.toFixed(1)} tokens/s. ${same}`;
}
