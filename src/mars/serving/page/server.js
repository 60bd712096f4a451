// Talking to the server: requests, keys, event streams.

import { $, plural } from "./dom.js";

const KEY = "mars-key";
export const STOPPED = "Stopped.";
export const CUT_OFF = "The connection broke off before the answer was finished.";

/** Something went wrong, in words that can be shown. */
export class Trouble extends Error {}

export function inWords(error) {
  if (error.name === "AbortError") return STOPPED;
  return error instanceof Trouble ? error.message : `Something unexpected happened: ${error.message}`;
}

function orTrouble(message) {
  return (error) => { throw error.name === "AbortError" ? error : new Trouble(message); };
}

/** Fetch, and ask for a key when the server wants one; a quiet request does not ask. */
export async function request(path, { body, quiet = false, onSend = () => {}, ...options } = {}) {
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

export const fetchJson = async (path, options) => (await request(path, options)).json();

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
    }, { once: true });
  });
  return keyAsked;
}

/** The JSON of every server-sent event up to `[DONE]`. */
export async function* events(response) {
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

export async function modelName(signal) {
  const { data: [{ id }] } = await fetchJson("v1/models", { signal });
  $("model").textContent = id;
  return id;
}

