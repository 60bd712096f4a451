// A race: the same question one token at a time and with the dial, recorded one after the other, replayed side by side.
//
// Both sides run alone, the dial first: whatever is warmer by then favours one-token. Both are timed from their first piece
// on, since only the second finds the prompt in the server's prefix cache. The server sends the first and the last tokens at
// once and those between at most 25 times a second: totals are exact, the pace between is as coarse as that.

import { AnswerView } from "./answer.js";
import { copyOf, make, plural } from "./dom.js";
import { savePicture } from "./picture.js";

const EQUAL = 0.05; // ratios nearer to 1 than this are called equal
const RATIO_FROM = 0.1; // seconds of a replay before which there is no ratio to speak of

const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** What a race has shown, from measured times and texts only. */
function verdict([plain, dialled]) {
  if (!plain.finished || !dialled.finished) return "No verdict: the race was not finished.";
  return `${compareSpeed(dialled.rate / plain.rate, dialled)}, ${compareTexts(plain.text, dialled.text)}`;
}

/** A forward with drafts costs no less than one without: a side that saves no forwards is faster by chance alone. */
const savesForwards = ({ tokens, forwards }) => tokens > (1 + EQUAL) * forwards;

function compareSpeed(ratio, dialled) {
  if (Number.isNaN(ratio)) return "Too short to be timed";
  if (Math.abs(ratio - 1) < EQUAL) return "Equally fast within 5%";
  if (ratio > 1 && !savesForwards(dialled)) return `No faster: ${(dialled.tokens / dialled.forwards).toFixed(2)} tokens per forward`;
  return `${ratio < 1 ? "Slower: " : ""}${ratio.toFixed(2)} times as fast`;
}

function compareTexts(one, other) {
  if (one === other) return "the same text";
  const words = one.split(/\s+/);
  const others = other.split(/\s+/);
  const longer = words.length > others.length ? words : others;
  const at = longer.findIndex((_, index) => words[index] !== others[index]);
  return at < 0 ? "the same words with other spaces" : `but the texts differ from the ${ordinal(at + 1)} word on`;
}

function ordinal(number) {
  const suffix = { one: "st", two: "nd", few: "rd", other: "th" };
  return number + suffix[new Intl.PluralRules("en-GB", { type: "ordinal" }).select(number)];
}

/** How far a side had got so many seconds after its first piece: pieces and tokens. */
function stateAt(answer, seconds) {
  if (seconds >= answer.seconds) return { pieces: answer.pieces.length, tokens: answer.tokens };
  const found = answer.pieces.findIndex(([at]) => at - answer.start > seconds);
  const pieces = found < 0 ? answer.pieces.length : found;
  return { pieces, tokens: answer.tokens - answer.timedTokens() + answer.timedTokens(pieces) };
}

/** The share of a side's text that was there when the faster side had finished */
function shareAtFinish(answer, answers) {
  const finish = Math.min(...answers.map(({ seconds }) => seconds));
  return stateAt(answer, finish).tokens / Math.max(1, answer.tokens);
}

/** The tokens per second of both sides so far, one over the other. */
function ratioAt([plain, dialled], seconds) {
  const rate = (answer) => answer.timedTokens(stateAt(answer, seconds).pieces) / Math.min(seconds, answer.seconds);
  return rate(dialled) / rate(plain);
}

export class RaceView {
  #replay = 0; // tells a replay that another one has begun

  /** `turn`: { prompt, model, answers: [one-token's, the dial's] } */
  constructor(turn, { onGrow = () => {}, onEnd = () => {} } = {}) {
    Object.assign(this, { turn, onGrow, onEnd });
    this.views = turn.answers.map((answer) => new AnswerView({ answers: [answer] }));
    this.views.forEach((view, index) => {
      const name = `Text of ${turn.answers[index].dial}`;
      Object.assign(view.part(".window"), { tabIndex: 0, role: "group", ariaLabel: name }); // it scrolls
    });
    this.board = copyOf("board-template");
    this.elements = [this.board, make("div", "answers", ...this.views.map(({ element }) => element))];
    this.lanes = [...this.board.querySelectorAll(".lane")];
    this.part(".skip").onclick = () => this.finish();
    this.part(".replay").onclick = () => this.replay();
    this.part(".picture").onclick = () => this.#savePicture();
    turn.answers.forEach((answer, index) => {
      this.lanes[index].querySelector(".lane-dial").textContent = answer.dial;
      this.lanes[index].querySelector("progress").ariaLabel = `Tokens of ${answer.dial}`;
    });
  }

  part(selector) { return this.board.querySelector(selector); }

  #stage(name) {
    this.board.dataset.stage = name;
    this.part(".skip").hidden = name !== "replaying";
    this.part(".replay").hidden = this.part(".picture").hidden = name !== "finished" || !this.isWhole;
    this.views.forEach((view) => { view.busy = name !== "finished"; });
  }

  get isWhole() { return this.turn.answers.every(({ finished }) => finished); }

  get note() {
    const { answers: [, dialled], ratios } = this.turn; // a recorded race has the ratio of each of its turns
    const timed = ratios ? `The faster of ${ratios.length} turns on each side, timed` : "Timed once,";
    const hardlyDrafts = dialled.dial === "exact" && !savesForwards(dialled);
    return `One after the other, ${dialled.dial} first. ${timed} from the first token to the last.`
      + (hardlyDrafts ? " With exact, tokens are drafted only where that saves time, and here it seldom did." : "");
  }

  /** Have the server write both sides, one after the other. */
  async record(body, signal) {
    this.#stage("recording");
    this.views.forEach((view) => view.draw());
    const [plain, dialled] = this.turn.answers;
    for (const answer of [dialled, plain]) {
      const lane = this.turn.answers.indexOf(answer);
      this.part(".verdict").textContent = `Recording ${answer.dial}…`;
      this.part(".note").textContent = "The sides run in turn, so that they do not share the machine. Then both are replayed together.";
      await answer.stream({ ...body, temperature: 0, dial: answer.dial }, signal, () => {
        const expected = answer === plain ? dialled.tokens : body.max_tokens;
        this.#drawLane(lane, answer.tokens, Math.max(expected || 0, answer.tokens), "recording");
      });
      if (!answer.finished) break;
    }
  }

  end() { this.replay(); }

  /** Show both sides at the pace they had, from their first pieces on. */
  replay() {
    if (!this.isWhole || isCalm()) return this.finish();
    const mine = this.#replay += 1;
    const started = performance.now();
    const { answers } = this.turn;
    const end = Math.max(...answers.map(({ seconds }) => seconds));
    this.#stage("replaying");
    this.part(".note").textContent = this.note;
    const frame = () => {
      const seconds = (performance.now() - started) / 1000;
      if (mine !== this.#replay || !this.board.isConnected) return;
      if (seconds >= end) this.finish();
      else { this.#drawAt(seconds); requestAnimationFrame(frame); }
    };
    frame();
  }

  #drawAt(seconds) {
    const { answers } = this.turn;
    const most = Math.max(...answers.map(({ tokens }) => tokens));
    answers.forEach((answer, index) => {
      const { pieces, tokens } = stateAt(answer, seconds);
      this.views[index].draw(pieces);
      this.#follow(this.views[index]);
      this.#drawLane(index, tokens, most, `${Math.min(seconds, answer.seconds).toFixed(1)} s`);
    });
    const ratio = ratioAt(answers, seconds);
    const isKnown = seconds > RATIO_FROM && ratio > 0 && ratio < Infinity && savesForwards(answers[1]);
    this.part(".verdict").textContent = isKnown ? `${ratio.toFixed(1)} times as fast` : "Go…";
    this.onGrow();
  }

  /** Keep the end of a text in its window. */
  #follow(view) {
    const window = view.part(".window");
    window.scrollTop = window.scrollHeight;
  }

  #drawLane(index, tokens, most, when) {
    const bar = this.lanes[index].querySelector("progress");
    bar.max = Math.max(1, most);
    bar.value = tokens;
    this.lanes[index].querySelector(".lane-state").textContent = `${plural(tokens, "token")}, ${when}`;
  }

  #savePicture() {
    const { prompt, model, answers } = this.turn;
    const sides = answers.map((answer) => {
      const { dial, rate, seconds } = answer;
      return { dial, rate, seconds, share: shareAtFinish(answer, answers) };
    });
    savePicture({ prompt, model, verdict: verdict(answers), sides });
  }

  /** Show how it ended. */
  finish() {
    this.#replay += 1;
    const { answers } = this.turn;
    const most = Math.max(...answers.map(({ tokens }) => tokens));
    const isReplayed = this.board.dataset.stage === "replaying";
    answers.forEach((answer, index) => {
      this.views[index].drawWhole();
      if (isReplayed) this.#follow(this.views[index]);
      this.#drawLane(index, answer.tokens, most, `${answer.seconds.toFixed(2)} s`);
      this.lanes[index].style.setProperty("--late", this.isWhole ? 1 - shareAtFinish(answer, answers) : 0);
    });
    this.part(".verdict").textContent = verdict(answers);
    this.part(".note").textContent = this.isWhole ? this.note : "";
    this.#stage("finished");
    this.onEnd();
  }
}
