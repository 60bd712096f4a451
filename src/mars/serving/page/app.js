// The page: chats, the composer, settings, the welcome.

import { Answer, AnswerView, showForwards } from "./answer.js";
import { currentDial, keepFollowing, setUpDial } from "./dial.js";
import { $, copyOf, make, say } from "./dom.js";
import { chats, forgetAll, keep, read, write } from "./history.js";
import { RaceView } from "./race.js";
import { inWords, modelName } from "./server.js";

const OPEN_CHAT = "mars-open-chat";
const SETTINGS = "mars-settings";
const COPIED_MS = 1500;

let chat = newChat(); // { id, turns: [{ prompt, model, answers }] }
let stopper = null; // stops the answers that are being written
let atEnd = true; // whether the page follows the text; scrolling up ends that
let last = { scrollTop: 0, scrollHeight: 0 };

// ---- Asking ---------------------------------------------------------------------------------------------------------

function messagesFor(prompt) {
  const system = $("system").value.trim();
  const past = chat.turns.filter(({ answers }) => answers.at(-1).text).flatMap((turn) => [
    { role: "user", content: turn.prompt },
    { role: "assistant", content: turn.answers.at(-1).text },
  ]);
  return [...(system ? [{ role: "system", content: system }] : []), ...past, { role: "user", content: prompt }];
}

function settings() {
  const seed = $("seed").valueAsNumber;
  return {
    max_tokens: $("max-tokens").valueAsNumber || undefined,
    temperature: $("temperature").valueAsNumber || 0,
    seed: Number.isInteger(seed) ? seed : undefined,
    stream: true,
    stream_options: { include_usage: true, include_forwards: true },
  };
}

/** Without a dial of its own an answer obeys the server's, also when that is turned on the way. Racers keep theirs. */
async function ask(prompt, racing) {
  const dials = racing ? ["one-token", currentDial()] : [currentDial()];
  const body = { messages: messagesFor(prompt), ...settings() };
  const mine = chat;
  const turn = { prompt, model: "", answers: dials.map((dial) => new Answer(dial)) };
  mine.turns.push(turn);
  document.querySelectorAll(".skip:not([hidden])").forEach((skip) => skip.click()); // a replay would take time from what is timed
  const { element, view } = openTurn(turn);
  const { signal } = stopper = new AbortController();
  drawComposer();
  say("announcement", "Writing…");
  await view.record(body, signal);
  turn.model = $("model").textContent;
  keep(mine);
  listChats();
  if (stopper?.signal === signal) stopper = null;
  if (element.isConnected) view.end(); // first, or its new lines look like scrolling up
  drawComposer();
}

/** A turn's place on the page, with one answer or, in a race, two. The chat goes on from the last. */
function openTurn(turn) {
  const element = copyOf("turn-template");
  const part = (selector) => element.querySelector(selector);
  const isRace = turn.answers.length > 1;
  const answer = turn.answers.at(-1);
  const view = new (isRace ? RaceView : AnswerView)(turn, { onGrow: keepEndInView, onEnd: close });
  element.classList.toggle("race", isRace);
  part(".question").textContent = turn.prompt;
  part(".body").append(...view.elements);
  $("log").append(element);
  atEnd = true;
  keepEndInView();

  function close() {
    const failed = turn.answers.some((each) => each.failed);
    element.classList.toggle("failed", failed);
    part(".again").textContent = failed ? "Try again" : isRace ? "Race again" : "Regenerate";
    part(".again").onclick = () => askAgain(turn, element);
    part(".copy").onclick = () => copy(answer.text, part(".copy"));
    part(".copy").hidden = !answer.text;
    part(".actions").hidden = false;
    say("announcement", part(".verdict")?.textContent ?? `${answer.text} ${answer.trouble}`);
    keepEndInView();
  }

  return { element, view };
}

/** Ask a turn's question anew, at the end: only the last turn and those that failed have a button for it. */
function askAgain(turn, element) {
  if (stopper) return;
  element.remove();
  chat.turns = chat.turns.filter((each) => each !== turn);
  ask(turn.prompt, turn.answers.length > 1);
}

// ---- Chats ----------------------------------------------------------------------------------------------------------

function newChat() { return { id: Date.now(), turns: [] }; }

function openChat(opened) {
  stopper?.abort();
  document.querySelectorAll(".turn").forEach((turn) => turn.remove());
  chat = opened;
  sessionStorage.setItem(OPEN_CHAT, chat.id);
  for (const turn of chat.turns) {
    turn.answers = turn.answers.map(Answer.from);
    openTurn(turn).view.finish();
  }
  say("announcement", "");
  $("chats").hidePopover();
  listChats();
  $("question").focus();
}

function listChats() {
  const entries = chats().map((each) => {
    const open = make("button", "", each.turns[0].prompt);
    open.type = "button";
    open.ariaCurrent = String(each.id === chat.id);
    open.onclick = () => openChat(each);
    return make("li", "", open);
  });
  $("chat-list").replaceChildren(...entries);
  $("no-chats").hidden = entries.length > 0;
  $("forget").hidden = entries.length === 0;
}

function forget() {
  chat.turns = []; // an answer under way shall not bring it back
  forgetAll();
  openChat(newChat());
}

// ---- The welcome ----------------------------------------------------------------------------------------------------

/** A recorded race; without one the welcome is complete as well. */
async function showRecordedRace() {
  const response = await fetch("race.json", { cache: "no-store" }).catch(() => null);
  if (!response?.ok) return;
  const race = await response.json();
  const turn = { ...race, answers: race.answers.map(Answer.from) };
  const { machine, dtype, date } = race.provenance;
  const view = new RaceView(turn);
  const element = $("recorded");
  element.querySelector(".question").textContent = race.prompt;
  element.querySelector(".body").append(...view.elements);
  element.querySelector(".provenance").textContent = `Recorded with ${race.model} in ${dtype} on ${machine}, ${date.slice(0, 10)}. In int8, its default on a CPU, the gain is smaller.`;
  element.hidden = false;
  if (chat.turns.length) view.finish();
  else view.end();
}

// ---- The composer ---------------------------------------------------------------------------------------------------

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

function noteScroll() {
  const { scrollHeight, clientHeight, scrollTop } = document.documentElement;
  if (scrollTop < last.scrollTop && scrollHeight >= last.scrollHeight) atEnd = false; // where it shrinks, it scrolls by itself
  if (scrollHeight - clientHeight - scrollTop < 40) atEnd = true;
  last = { scrollTop, scrollHeight };
}

function keepEndInView() {
  requestAnimationFrame(() => atEnd && chat.turns.length && window.scrollTo(0, document.documentElement.scrollHeight));
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

async function copy(text, button) {
  const label = button.textContent;
  await (navigator.clipboard?.writeText(text) ?? Promise.reject()).catch(() => copyBySelection(text));
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, COPIED_MS);
}

/** Where the page was not loaded over HTTPS or from this machine, browsers have no clipboard for it. */
function copyBySelection(text) {
  const field = document.body.appendChild(make("textarea", "unseen"));
  field.value = text;
  field.select();
  document.execCommand("copy");
  field.remove();
}

// ---- Settings -------------------------------------------------------------------------------------------------------

const kept = () => [...document.querySelectorAll("[data-kept]")];

function keepSettings() {
  const values = kept().map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value]);
  write(SETTINGS, Object.fromEntries(values));
}

function restoreSettings() {
  const values = read(SETTINGS) ?? {};
  for (const field of kept().filter(({ id }) => id in values)) {
    field[field.type === "checkbox" ? "checked" : "value"] = values[field.id];
  }
}

setUpDial();
restoreSettings();
kept().forEach((field) => field.addEventListener("change", keepSettings));
$("show-forwards").addEventListener("change", () => { showForwards(); keepEndInView(); });
$("question").addEventListener("keydown", sendOnEnter);
$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(false); });
$("race").addEventListener("click", () => submit(true));
$("stop").addEventListener("click", () => stopper?.abort());
$("new-chat").addEventListener("click", () => openChat(newChat()));
$("forget").addEventListener("click", forget);
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("log").addEventListener("click", ({ target }) => {
  if (target.matches(".copy-code")) copy(target.closest(".code").querySelector("code").textContent, target);
});
document.querySelectorAll(".example").forEach((example) => example.addEventListener("click", useExample));
document.addEventListener("scroll", noteScroll, { passive: true });

showForwards();
openChat(chats().find(({ id }) => String(id) === sessionStorage.getItem(OPEN_CHAT)) ?? chat);
showRecordedRace();
await modelName().catch((error) => { $("model").textContent = inWords(error); });
keepFollowing();
