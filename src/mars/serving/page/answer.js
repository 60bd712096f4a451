// An answer: what the server wrote and when, and how it looks.

import { $, copyOf, make, plural } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { CUT_OFF, STOPPED, Trouble, events, inWords, modelName, request } from "./server.js";

const TINTS = 4;
const SHOWN_BINS = [4, 8]; // at least and at most so many in a histogram
const FOUR_DIGITS = 1e4;

const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);

/** One answer. Its public fields are what the history keeps. */
export class Answer {
  dial = null;
  turned = []; // [forward, dial]: the dial was turned before that forward
  tokens = 0;
  forwards = 0;
  agreement = null;
  seconds = 0; // from the first piece to the end
  finished = false;
  trouble = "";
  pieces = []; // [seconds since the request was sent, text, tokens] of each forward

  #sent = 0;

  constructor(dial) { this.dial = dial; }

  static from(kept) { return Object.assign(new Answer(kept.dial), kept); }

  get text() { return this.pieces.map(([, text]) => text).join(""); }

  get failed() { return Boolean(this.trouble) && this.trouble !== STOPPED; }

  get dials() { return [this.dial ?? "MARS", ...this.turned.map(([, dial]) => dial)].join(", then "); }

  /** When the first piece came. Times are compared from then on: before it the prompt is read, and the second side of a race
   * finds it in the server's prefix cache. */
  get start() { return this.pieces[0]?.[0] ?? 0; }

  /** Tokens that came after the first piece */
  timedTokens(count = this.pieces.length) {
    return sum(this.pieces.slice(0, count).filter(([at]) => at > this.start).map(([, , tokens]) => tokens));
  }

  /** Tokens per second from the first piece on; NaN where there is nothing to time. */
  get rate() {
    const timed = this.tokens - sum(this.pieces.filter(([at]) => at === this.start).map(([, , tokens]) => tokens));
    return timed > 0 && this.seconds > 0 ? timed / this.seconds : Number.NaN;
  }

  async stream(body, signal, changed) {
    try {
      const onSend = () => { this.#sent = performance.now(); };
      const post = (fields) => request("v1/chat/completions", { method: "POST", body: fields, signal, onSend });
      const full = { model: await modelName(signal), ...body };
      const response = await post(full).catch((error) => {
        if (error.param !== "max_tokens" || !$("max-tokens").validity.valid) throw error;
        $("max-tokens").value = ""; // the operator allows less: then as much as that
        return post({ ...full, max_tokens: undefined });
      });
      for await (const event of events(response)) {
        this.#take(event);
        changed();
      }
      if (!this.finished) throw new Trouble(CUT_OFF);
    } catch (error) {
      this.trouble = inWords(error);
    }
  }

  #take({ error, choices: [choice] = [], mars, usage }) {
    if (error) throw new Trouble(`The server has a problem: ${error.message}`);
    this.#noteDial(mars?.dial);
    this.agreement = mars?.agreement ?? this.agreement;
    if (choice) {
      const at = Math.round((performance.now() - this.#sent) / 1000 * FOUR_DIGITS) / FOUR_DIGITS;
      this.finished ||= Boolean(choice.finish_reason);
      for (const [tokens, text] of forwardsIn(choice.delta?.content, mars)) {
        this.pieces.push([at, text, tokens]);
        this.tokens += tokens;
        this.forwards += 1;
      }
      this.seconds = this.pieces.length ? Math.round((at - this.start) * FOUR_DIGITS) / FOUR_DIGITS : 0;
    } else if (mars) {
      this.tokens = usage?.completion_tokens ?? this.tokens;
      this.forwards = mars.forwards ?? this.forwards;
    }
  }

  #noteDial(dial) {
    const before = this.turned.at(-1)?.[1] ?? this.dial;
    if (!dial || dial === before) return;
    if (before) this.turned.push([this.forwards, dial]);
    else this.dial = dial;
  }
}

/** [tokens, text] of each forward in a chunk; the server may have put several into one. */
function forwardsIn(content, mars) {
  if (!content) return [];
  if (!mars?.forwards) return [[1, content]];
  const characters = [...content]; // code points, as the server counts them
  return mars.forwards.map(([tokens, length]) => [tokens, characters.splice(0, length).join("")]);
}

/** How an answer looks, or the beginning of it: the view of a turn without a race. */
export class AnswerView {
  #shown = 0; // pieces
  #text = "";
  #ends = []; // where the text of each piece ends
  #cursor = { end: 0, piece: 0, mark: 0 }; // how far the text has been coloured

  constructor({ answers: [answer] }, { onGrow = () => {}, onEnd = () => {} } = {}) {
    Object.assign(this, { answer, onGrow, onEnd });
    this.element = copyOf("answer-template");
    this.elements = [this.element];
    this.markdown = new MarkdownView(this.part(".text"), (start, end) => this.#coloured(start, end));
  }

  part(selector) { return this.element.querySelector(selector); }

  record(body, signal) {
    return this.answer.stream(body, signal, () => { this.draw(); this.onGrow(); });
  }

  end() { this.finish(); }

  finish() {
    this.busy = false;
    this.drawWhole();
    this.onEnd();
  }

  /** All of it anew: a line that had just begun may have looked like another block. */
  drawWhole() {
    this.#clear();
    this.draw();
  }

  set busy(busy) { this.element.ariaBusy = String(busy); }

  /** Show the first so many pieces; all of them with the answer's totals. */
  draw(count = this.answer.pieces.length) {
    if (count < this.#shown) this.#clear();
    if (count > this.#shown) this.#write(count);
    this.part(".dial-used").textContent = this.answer.dials;
    this.part(".trouble").textContent = this.answer.trouble;
    this.#drawFigures();
  }

  #clear() {
    this.markdown.clear();
    this.#shown = 0;
    this.#text = "";
    this.#ends = [];
  }

  #write(count) {
    for (const [, text] of this.answer.pieces.slice(this.#shown, count)) {
      this.#text += text;
      this.#ends.push(this.#text.length);
    }
    this.#shown = count;
    this.markdown.show(this.#text);
  }

  /** A stretch of the text, tinted by forward, with marks where the dial was turned. */
  #coloured(start, end) {
    if (start < this.#cursor.end) this.#cursor = this.#cursorAt(start); // the last block is made anew
    const { turned } = this.answer;
    const nodes = [];
    for (let at = start; at < end;) {
      while (this.#ends[this.#cursor.piece] <= at) this.#cursor.piece += 1;
      const { piece } = this.#cursor;
      while (turned[this.#cursor.mark]?.[0] <= piece) nodes.push(dialMark(turned[this.#cursor.mark++][1]));
      const next = Math.min(end, this.#ends[piece]);
      nodes.push(this.#tinted(this.#text.slice(at, next), piece));
      at = next;
    }
    this.#cursor.end = end;
    return nodes;
  }

  #cursorAt(start) {
    const piece = this.#ends.findIndex((end) => end > start);
    const mark = this.answer.turned.findIndex(([forward]) => (this.#ends[forward - 1] ?? 0) >= start);
    return { end: start, piece, mark: mark < 0 ? this.answer.turned.length : mark };
  }

  #tinted(text, piece) {
    const [, , tokens] = this.answer.pieces[piece];
    const span = make("span", "", text);
    span.dataset.tint = piece % TINTS;
    span.dataset.label = `Forward ${piece + 1}: ${plural(tokens, "token")}`;
    span.style.setProperty("--tokens", tokens);
    labelForward(span);
    return span;
  }

  #drawFigures() {
    const { answer } = this;
    const shown = answer.pieces.slice(0, this.#shown);
    const isWhole = shown.length === answer.pieces.length;
    if (!shown.length) return;
    const tokens = isWhole ? answer.tokens : sum(shown.map(([, , each]) => each));
    const forwards = isWhole ? answer.forwards : shown.length;
    const rate = isWhole ? answer.rate : answer.timedTokens(shown.length) / (shown.at(-1)[0] - answer.start);
    this.part("[data-figure=rate]").textContent = Number.isFinite(rate) ? rate.toFixed(rate < 100 ? 1 : 0) : "–";
    this.part("[data-figure=perForward]").textContent = (tokens / forwards).toFixed(2);
    this.part("[data-figure=agreement]").textContent = isWhole && answer.agreement !== null ? `${+(100 * answer.agreement).toFixed(1)}%` : "–";
    this.part("[data-figure=forwards]").textContent = forwards;
    this.#drawHistogram(shown.map(([, , each]) => each));
  }

  #drawHistogram(sizes) {
    const [least, most] = SHOWN_BINS;
    const counts = Array(Math.min(most, Math.max(least, ...sizes))).fill(0);
    for (const size of sizes) counts[Math.min(size, most) - 1] += 1;
    const bins = counts.map((count, index) => {
      const bin = make("li", "", make("i"), `${index + 1}${index + 1 === most ? "+" : ""}`);
      bin.style.setProperty("--share", count / Math.max(...counts));
      bin.dataset.count = count;
      bin.title = `${plural(count, "forward")} of ${plural(index + 1, "token")}`;
      return bin;
    });
    this.part(".histogram").replaceChildren(...bins);
    this.part(".histogram").ariaLabel = `Tokens per forward: ${bins.map(({ title }) => title).join(", ")}`;
  }
}

function dialMark(dial) {
  const mark = make("i", "turned");
  mark.dataset.dial = dial; // shown by the style sheet, so that it is not copied with the text
  mark.role = "img";
  mark.ariaLabel = `The dial was turned to ${dial} here.`;
  return mark;
}

function labelForward(span) {
  span.title = $("show-forwards").checked ? span.dataset.label : "";
}

export function showForwards() {
  document.body.classList.toggle("by-forward", $("show-forwards").checked);
  document.querySelectorAll(".text [data-tint]").forEach(labelForward);
}
