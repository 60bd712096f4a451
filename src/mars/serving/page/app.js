const STOPS = [
  "one-token", "exact", "relaxed=0.7", "relaxed=0.5", "relaxed=0.3", "relaxed=0.1",
  "threshold=0.95", "threshold=0.9", "threshold=0.8", "threshold=0.7",
];
const LAST_LOSSLESS = STOPS.indexOf("exact");
const DEBOUNCE_MS = 200;
const FOLLOW_MS = 3000;
const KEY = "mars-key";
const CUT_OFF = "The connection broke off before the answer was finished.";
const TINTS = 4;

const $ = (id) => document.getElementById(id);
const copyOf = (template) => $(template).content.firstElementChild.cloneNode(true);
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** Set a text that a screen reader speaks, and do not make it speak twice. */
function say(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

// ---- Talking to the server ------------------------------------------------------------------------------------------

/** Something went wrong, in words that can be shown. */
class Trouble extends Error {}

function inWords(error) {
  if (error.name === "AbortError") return "Stopped.";
  return error instanceof Trouble ? error.message : `Something unexpected happened: ${error.message}`;
}

function orTrouble(message) {
  return (error) => { throw error.name === "AbortError" ? error : new Trouble(message); };
}

/** Fetch, and ask for a key when the server wants one; a quiet request does not ask. */
async function request(path, { body, quiet = false, onSend = () => {}, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
    onSend();
    const response = await fetch(path, { cache: "no-store", ...options, headers, body: body && JSON.stringify(body) })
      .catch(orTrouble("The server cannot be reached."));
    if (response.ok) return response;
    // Another request may have got a new key while this one was under way.
    const retry = response.status === 401 && !quiet && (sessionStorage.getItem(KEY) !== key || await askForKey(key));
    if (!retry) throw await refusal(response);
  }
}

async function refusal(response) {
  const { message: said, param } = (await response.json().catch(() => null))?.error ?? {};
  const wait = Number.parseInt(response.headers.get("Retry-After"), 10);
  if (response.status === 401) return new Trouble("A key is needed for this.");
  if (response.status === 429) {
    return new Trouble(`The server is busy. Please try again in ${wait ? plural(wait, "second") : "a moment"}.`);
  }
  if (response.status >= 500) return new Trouble(`The server has a problem: ${said ?? `status ${response.status}`}`);
  return Object.assign(new Trouble(`The server refused: ${said ?? `status ${response.status}`}`), { param });
}

const fetchJson = async (path, options) => (await request(path, options)).json();

let keyAsked = null;

function askForKey(refused) {
  keyAsked ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-hint").textContent = `${refused ? "Your key was not accepted for this. " : ""}It is forgotten when you close this tab.`;
    $("key").value = dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "use";
      if (given) sessionStorage.setItem(KEY, $("key").value.trim());
      keyAsked = null;
      resolve(given);
      followServer(); // the dial may have waited for the key as well
    }, { once: true });
  });
  return keyAsked;
}

/** The JSON of every server-sent event up to `[DONE]`. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let pending = ""; ;) {
    const { value, done } = await reader.read().catch(orTrouble(CUT_OFF));
    if (done) return;
    const lines = (pending + value).split(/\r?\n/);
    pending = lines.pop();
    for (const line of lines.filter((each) => each.startsWith("data:"))) {
      const data = line.slice("data:".length).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function model(signal) {
  const { data: [{ id }] } = await fetchJson("v1/models", { signal });
  $("model").textContent = id;
  return id;
}

// ---- The dial -------------------------------------------------------------------------------------------------------

let server = null; // what GET /v1/dial said last
let wanted = null; // where the slider was put, until the server has heard of it
let refused = ""; // why the server did not take the last turn
let turns = 0; // tells an answer about the dial that was asked for before the last turn
let debounce;
let turning = Promise.resolve();

const currentDial = () => wanted ?? server?.dial;
const nameOf = (dial) => dial.split("=")[0];
const kindOf = (dial) => nameOf(dial).split(":")[0];
const valueOf = (dial) => Number(dial.split("=")[1]);

/** Orders all dials as the slider does, also those that are not on it. */
function looseness(dial) {
  const value = valueOf(dial);
  return { "one-token": 0, exact: 1, relaxed: 3 - value, threshold: 5 - value }[kindOf(dial)];
}

function nearestStop(dial) {
  const distance = (stop) => Math.abs(looseness(stop) - looseness(dial));
  return STOPS.indexOf(STOPS.reduce((best, stop) => (distance(stop) < distance(best) ? stop : best)));
}

/** The server's rule: a loose dial must be of the floor's kind, since kinds cannot be compared, and no looser. */
function isAllowed(dial) {
  if (!server.floor || STOPS.indexOf(dial) <= LAST_LOSSLESS) return true;
  return nameOf(dial) === nameOf(server.floor) && valueOf(dial) >= valueOf(server.floor);
}

/** Past stops that are not allowed, go on in the direction of travel; where there are no more, come back. */
function landing(target, start) {
  const ahead = target < start ? STOPS.slice(0, target + 1).reverse() : STOPS.slice(target);
  return ahead.find(isAllowed) ?? STOPS.findLast(isAllowed);
}

function explain(dial) {
  const share = `${+(100 * valueOf(dial)).toPrecision(3)}%`;
  return {
    "one-token": "Writes one token per forward pass: the plain model, for comparison.",
    exact: "Writes exactly what the model would have written one token at a time; only faster.",
    relaxed: `Checks every guess, and keeps it if the model finds it at least ${share} as likely as its own first choice.`,
    threshold: `Believes every guess that is at least ${share} sure, and checks none.`,
  }[kindOf(dial)] ?? "";
}

function drawDial() {
  const dial = currentDial();
  const at = nearestStop(dial);
  const stretch = at <= LAST_LOSSLESS ? "lossless" : "loose";
  const atLimit = server.floor && dial === STOPS.findLast(isAllowed);
  $("slider").disabled = false;
  $("slider").value = at;
  $("slider").setAttribute("aria-valuetext", `${dial}, ${stretch}${atLimit ? ", the loosest allowed" : ""}`);
  $("dial").dataset.stretch = stretch;
  $("dial-name").textContent = dial;
  $("dial-meaning").textContent = explain(dial) + (server.auto ? " The server is turning the dial by itself." : "");
  $("dial-limit").hidden = !server.floor;
  $("dial-limit").textContent = `The operator allows nothing looser than ${server.floor}.`;
  [...$("stops").children].forEach((stop, index) => stop.classList.toggle("closed", !isAllowed(STOPS[index])));
}

function turnDial() {
  wanted = landing(Number($("slider").value), nearestStop(currentDial()));
  refused = "";
  turns += 1;
  drawDial();
  clearTimeout(debounce);
  debounce = setTimeout(() => { turning = turning.then(tellServer); }, DEBOUNCE_MS);
}

async function tellServer() {
  const telling = wanted;
  if (telling === null) return;
  try {
    await request("v1/dial", { method: "PUT", body: { dial: telling } });
    server.dial = telling;
  } catch (error) {
    refused = inWords(error);
  }
  if (wanted !== telling) return; // turned again meanwhile
  wanted = null;
  turns += 1;
  await followServer();
}

/** Show the server's dial, which somebody else may have turned. */
async function followServer() {
  const before = turns;
  try {
    const said = await fetchJson("v1/dial", { quiet: true });
    if (turns !== before) return;
    server = said;
    drawDial();
    say("dial-trouble", refused);
  } catch (error) {
    say("dial-trouble", inWords(error));
  }
}

async function keepFollowing() {
  if (!document.hidden) await followServer();
  setTimeout(keepFollowing, FOLLOW_MS);
}

// ---- Answers --------------------------------------------------------------------------------------------------------

/** One answer on the page, and what is counted while it streams. */
class Answer {
  text = "";
  tokens = 0;
  forwards = 0;
  agreement = null;
  seconds = 0;
  finished = false;
  failed = false;

  constructor(dial) {
    this.dial = dial;
    this.element = copyOf("answer-template");
    this.part(".dial-used").textContent = dial ?? "MARS";
  }

  part(selector) { return this.element.querySelector(selector); }

  get rate() { return this.tokens / this.seconds; }

  get perForward() { return this.tokens / this.forwards; }

  async stream(body, signal) {
    try {
      const onSend = () => { this.started = performance.now(); };
      const full = { model: await model(signal), ...body };
      const post = (fields) => request("v1/chat/completions", { method: "POST", body: fields, signal, onSend });
      const response = await post(full).catch((error) => {
        if (error.param !== "max_tokens" || !$("max-tokens").validity.valid) throw error;
        $("max-tokens").value = ""; // the operator allows less: then as much as that
        return post({ ...full, max_tokens: undefined });
      });
      for await (const event of events(response)) this.take(event);
      if (!this.finished) throw new Trouble(CUT_OFF);
    } catch (error) {
      this.failed = error.name !== "AbortError";
      this.part(".trouble").textContent = inWords(error);
    }
    this.element.setAttribute("aria-busy", "false");
  }

  take({ error, choices: [choice] = [], mars, usage }) {
    if (error) throw new Trouble(`The server has a problem: ${error.message}`);
    if (choice) {
      this.seconds = (performance.now() - this.started) / 1000;
      this.finished ||= Boolean(choice.finish_reason);
      for (const [tokens, text] of forwardsIn(choice.delta?.content, mars)) this.addForward(text, tokens);
    } else if (mars) {
      this.addTotals(mars, usage);
    }
    this.drawFigures();
    keepEndInView();
  }

  addForward(text, tokens) {
    const span = document.createElement("span");
    span.textContent = text;
    span.dataset.tint = this.forwards % TINTS;
    span.style.setProperty("--tokens", tokens);
    this.text += text;
    this.tokens += tokens;
    this.forwards += 1;
    span.dataset.label = `Forward ${this.forwards}: ${plural(tokens, "token")}`;
    labelForward(span);
    this.part(".text").append(span);
  }

  addTotals(mars, usage) {
    this.tokens = usage?.completion_tokens ?? this.tokens;
    this.forwards = mars.forwards ?? this.forwards;
    this.agreement = mars.agreement;
    if (mars.dial && mars.dial !== this.dial) {
      this.part(".dial-used").textContent = this.dial ? `${this.dial}, then ${mars.dial}` : mars.dial;
    }
  }

  drawFigures() {
    if (!this.forwards) return;
    const figures = {
      rate: this.rate.toFixed(1),
      perForward: this.perForward.toFixed(2),
      agreement: this.agreement === null ? "–" : `${+(100 * this.agreement).toFixed(1)}%`,
      forwards: this.forwards,
    };
    for (const [name, value] of Object.entries(figures)) this.part(`[data-figure=${name}]`).textContent = value;
  }
}

/** [tokens, text] of each forward in a chunk; the server may have put several into one. */
function forwardsIn(content, mars) {
  if (!content) return [];
  if (!mars?.forwards) return [[1, content]];
  const characters = [...content]; // code points, as the server counts them
  return mars.forwards.map(([tokens, length]) => [tokens, characters.splice(0, length).join("")]);
}

function labelForward(span) {
  span.title = $("show-forwards").checked ? span.dataset.label : "";
}

function showForwards() {
  document.body.classList.toggle("by-forward", $("show-forwards").checked);
  document.querySelectorAll(".text span").forEach(labelForward);
  if (chat.length) keepEndInView(); // the lines have moved apart
}

// ---- The race -------------------------------------------------------------------------------------------------------

function verdict(plain, dialled) {
  if (!plain.finished || !dialled.finished) return "No verdict: the race was not finished.";
  return `${compareSpeed(dialled.rate / plain.rate)}, ${compareTexts(plain.text, dialled.text)}`;
}

function compareSpeed(ratio) {
  if (ratio >= 1.05) return `${ratio.toFixed(1)}× faster`;
  if (ratio <= 0.95) return `${(1 / ratio).toFixed(1)}× slower`;
  return "Equally fast";
}

function compareTexts(one, other) {
  if (one === other) return "same text";
  const words = one.split(/\s+/);
  const others = other.split(/\s+/);
  const longer = words.length > others.length ? words : others;
  const at = longer.findIndex((_, index) => words[index] !== others[index]);
  return at < 0 ? "same words, spaced differently" : `but the texts differ from the ${ordinal(at + 1)} word on`;
}

function ordinal(number) {
  const suffix = { one: "st", two: "nd", few: "rd", other: "th" };
  return number + suffix[new Intl.PluralRules("en-GB", { type: "ordinal" }).select(number)];
}

// ---- The chat -------------------------------------------------------------------------------------------------------

let chat = []; // the turns on the page: { element, question, answer }
let stopper = null; // stops the answers that are being written
let atEnd = true; // whether the page follows the text; scrolling up ends that
let lastTop = 0;

function messagesFor(question) {
  const past = chat.filter(({ answer }) => answer.text).flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.answer.text },
  ]);
  return [...past, { role: "user", content: question }];
}

function settings() {
  return {
    max_tokens: $("max-tokens").valueAsNumber || undefined,
    temperature: $("temperature").valueAsNumber || 0,
    stream: true,
    stream_options: { include_usage: true, include_forwards: true },
  };
}

/** Without a dial of its own an answer obeys the server's, also when that is turned on the way. Racers keep theirs. */
async function ask(question, racing) {
  const dials = racing ? ["one-token", currentDial()] : [currentDial()];
  const replies = dials.map((dial) => new Answer(dial));
  const body = { messages: messagesFor(question), ...settings() };
  const turn = openTurn(question, replies);
  const mine = stopper = new AbortController();
  drawComposer();
  say("announcement", "Writing…");
  await Promise.all(replies.map((reply) => {
    return reply.stream(racing ? { ...body, temperature: 0, dial: reply.dial } : body, mine.signal);
  }));
  if (stopper === mine) stopper = null;
  if (turn.element.isConnected) closeTurn(turn, replies, racing); // first, or its new lines look like scrolling up
  drawComposer();
}

/** A question's place on the page, with one answer or, in a race, two. The chat goes on from the last. */
function openTurn(question, replies) {
  const turn = { element: copyOf("turn-template"), question, answer: replies.at(-1) };
  turn.element.classList.toggle("race", replies.length > 1);
  turn.element.querySelector(".question").textContent = question;
  turn.element.querySelector(".answers").append(...replies.map((reply) => reply.element));
  $("log").append(turn.element);
  chat.push(turn);
  atEnd = true;
  keepEndInView();
  return turn;
}

function closeTurn(turn, replies, racing) {
  const outcome = turn.element.querySelector(".verdict");
  const again = turn.element.querySelector(".again");
  if (racing) outcome.textContent = verdict(...replies);
  again.hidden = !replies.some(({ failed }) => failed);
  again.onclick = () => askAgain(turn, racing);
  say("announcement", outcome.textContent || `${turn.answer.text} ${turn.answer.part(".trouble").textContent}`);
  keepEndInView();
}

function askAgain(turn, racing) {
  if (stopper) return;
  turn.element.remove();
  chat = chat.filter((each) => each !== turn);
  ask(turn.question, racing);
}

function drawComposer() {
  const writing = stopper !== null;
  const hadFocus = $("composer").contains(document.activeElement) && document.activeElement.tagName === "BUTTON";
  $("send").hidden = writing;
  $("stop").hidden = !writing;
  $("race").disabled = writing;
  if (hadFocus) $(writing ? "stop" : "send").focus({ preventScroll: true });
}

/** Take the question out of the composer, if it may be asked now. */
function submit(racing) {
  const question = $("question").value.trim();
  const hindrance = racing ? raceHindrance() : "";
  say("composer-note", hindrance);
  if (!question || stopper || hindrance) return;
  $("question").value = "";
  ask(question, racing);
}

function raceHindrance() {
  if (!currentDial()) return "The dial is not known yet.";
  if (currentDial() === "one-token") return "Turn the dial to exact or beyond first: one-token would race against itself.";
  return "";
}

function startAnew() {
  stopper?.abort();
  chat = [];
  document.querySelectorAll(".turn").forEach((turn) => turn.remove());
  $("question").focus();
}

function noteScroll() {
  const { scrollHeight, clientHeight, scrollTop } = document.documentElement;
  if (scrollTop < lastTop) atEnd = false;
  if (scrollHeight - clientHeight - scrollTop < 40) atEnd = true;
  lastTop = scrollTop;
}

function keepEndInView() {
  requestAnimationFrame(() => atEnd && window.scrollTo(0, document.documentElement.scrollHeight));
}

function useExample({ target }) {
  $("question").value = target.textContent;
  $("question").focus();
}

function sendOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit(false);
}

$("stops").append(...STOPS.map(() => document.createElement("i")));
$("slider").addEventListener("input", turnDial);
$("show-forwards").addEventListener("change", showForwards);
$("question").addEventListener("keydown", sendOnEnter);
$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(false); });
$("race").addEventListener("click", () => submit(true));
$("stop").addEventListener("click", () => stopper?.abort());
$("new-chat").addEventListener("click", startAnew);
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
document.querySelectorAll(".example").forEach((example) => example.addEventListener("click", useExample));
document.addEventListener("visibilitychange", () => { if (!document.hidden) followServer(); });
document.addEventListener("scroll", noteScroll, { passive: true });

showForwards(); // a reload may have kept the tick
await model().catch((error) => { $("model").textContent = inWords(error); });
keepFollowing();
