// Small helpers for the document.

export const $ = (id) => document.getElementById(id);
export const copyOf = (template) => $(template).content.firstElementChild.cloneNode(true);
export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** Set a text that a screen reader speaks, and do not make it speak twice. */
export function say(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

/** An element with a class and children; texts become text nodes. */
export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}
