// Chats that survive a reload, in this browser only. Keys are not among what is kept.

const CHATS = "mars-chats";
const MOST_CHATS = 30;
const MOST_CHARACTERS = 2e6; // browsers keep some five million for a page

/** The newest first: { id, turns: [{ prompt, model, answers }] }; `id` is when it began. A turn with two answers is a race. */
export const chats = () => read(CHATS) ?? [];

/** What is kept under a name; null if that is nothing or cannot be read. */
export function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

export function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // The browser keeps nothing, or not so much: it is lost with the tab.
  }
}

export function keep(chat) {
  const kept = [chat, ...chats().filter(({ id }) => id !== chat.id)].filter(({ turns }) => turns.length).slice(0, MOST_CHATS);
  while (kept.length > 1 && JSON.stringify(kept).length > MOST_CHARACTERS) kept.pop();
  write(CHATS, kept);
}

export function forgetAll() { localStorage.removeItem(CHATS); }
