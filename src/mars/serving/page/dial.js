// The dial: what the slider shows, what the server was told, what it allows.

import { $, make, say } from "./dom.js";
import { fetchJson, inWords, request } from "./server.js";

const STOPS = [
  "one-token", "exact", "relaxed=0.7", "relaxed=0.5", "relaxed=0.3", "relaxed=0.1",
  "threshold=0.95", "threshold=0.9", "threshold=0.8", "threshold=0.7",
];
const LAST_LOSSLESS = STOPS.indexOf("exact");
const DEBOUNCE_MS = 200;
const FOLLOW_MS = 3000;

let server = null; // what GET /v1/dial said last
let wanted = null; // where the slider was put, until the server has heard of it
let refused = ""; // why the server did not take the last turn
let turns = 0; // tells an answer about the dial that was asked for before the last turn
let debounce;
let turning = Promise.resolve();

export const currentDial = () => wanted ?? server?.dial;
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
    exact: "Keeps a draft only if it is the model's own choice: the text of one-token, in fewer forward passes.",
    relaxed: `Checks every draft, and keeps it if the model finds it at least ${share} as likely as its own first choice.`,
    threshold: `Keeps every draft that is at least ${share} sure, without a check.`,
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
  for (const row of [$("stops"), $("stop-names")]) {
    STOPS.forEach((stop, index) => row.children[index].classList.toggle("closed", !isAllowed(stop)));
  }
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

export async function keepFollowing() {
  if (!document.hidden) await followServer();
  setTimeout(keepFollowing, FOLLOW_MS);
}

/** What is written at a stop: a name, or the number of the group named below. */
const stopName = (stop) => (stop.includes("=") ? String(valueOf(stop)).slice(1) : stop);

export function setUpDial() {
  $("stops").append(...STOPS.map(() => make("i")));
  $("stop-names").prepend(...STOPS.map((stop) => make("span", "", stopName(stop))));
  $("slider").addEventListener("input", turnDial);
  $("key-dialog").addEventListener("close", () => setTimeout(followServer)); // the dial may have waited for the key as well
  document.addEventListener("visibilitychange", () => { if (!document.hidden) followServer(); });
}
