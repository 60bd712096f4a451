// Markdown becomes DOM nodes, made one by one: HTML in the text stays text.
//
// Text of the source reaches the page through `leaf(start, end)`, which returns the nodes of that stretch, so that the
// caller can colour it. Emphasis does not go over the end of a line.

import { make } from "./dom.js";

const FENCE = /^ *(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(?=\S)/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DIVIDER = /^\s*\|?(\s*:?-+:?\s*\|)+(\s*:?-+:?\s*)?$/;
const BAR = /(?<!\\)\|/;
const DEEPEST = 30; // blocks and emphasis within each other: what is deeper is shown as it was written
const SAFE_LINK = /^https?:\/\//i;
const INLINE = new RegExp([
  /\\(?<escaped>[!-/:-@[-`{-~])/,
  /(?<ticks>`+)(?<code>[^`]|[^`].*?[^`])\k<ticks>(?!`)/,
  /(?<strongMark>\*\*|(?<!\w)__)(?=\S)(?<strong>.*?\S)\k<strongMark>/,
  /(?<emMark>\*|(?<!\w)_)(?=[^\s*_])(?<em>.*?[^\s*_])\k<emMark>(?![\w*])/,
  /~~(?=\S)(?<del>.*?\S)~~/,
  /\[(?<a>[^\]]+)\]\((?<href>[^\s()]+)\)/,
].map((each) => each.source).join("|"), "dg");

/** Shows a text that grows. Only its last block is made anew; a line that has just begun may look like another one. */
export class MarkdownView {
  #last = 0; // where the last block starts

  constructor(element, leaf) {
    this.element = element;
    this.leaf = leaf;
  }

  show(source) {
    this.element.lastChild?.remove();
    const text = new Markdown(source, this.leaf);
    for (const { start, build } of text.blocks(text.lines(this.#last))) {
      this.#last = start;
      this.element.append(build());
    }
  }

  clear() {
    this.element.replaceChildren();
    this.#last = 0;
  }
}

class Markdown {
  #depth = 0;

  constructor(source, leaf) {
    this.source = source;
    this.leaf = leaf;
  }

  /** Lines are { start, end } in the source; `end` is before the line break. */
  lines(from) {
    const lines = [];
    for (let start = from; start < this.source.length;) {
      const found = this.source.indexOf("\n", start);
      const end = found < 0 ? this.source.length : found;
      lines.push({ start, end });
      start = end + 1;
    }
    return lines;
  }

  text({ start, end }) { return this.source.slice(start, end); }

  /** Where each block starts, and a function that builds it. */
  * blocks(lines) {
    for (let at = 0; at < lines.length;) {
      if (this.isBlank(lines[at])) { at += 1; continue; }
      const [count, build] = this.block(lines.slice(at));
      yield { start: lines[at].start, build };
      at += count;
    }
  }

  isBlank(line) { return !this.text(line).trim(); }

  /** The first block of these lines: how many of them it has, and a function that builds it. */
  block(lines) {
    if (this.#depth > DEEPEST) return this.paragraph(lines);
    const [first] = lines;
    const text = this.text(first);
    const [, fence, language] = FENCE.exec(text) ?? [];
    if (fence) return this.code(lines, fence, language);
    const heading = HEADING.exec(text);
    if (heading) return [1, () => this.heading(first, heading)];
    if (RULE.test(text)) return [1, () => make("hr")];
    if (QUOTE.test(text)) return this.quote(lines);
    if (ITEM.test(text)) return this.list(lines);
    if (text.includes("|") && lines[1] && DIVIDER.test(this.text(lines[1]))) return this.table(lines);
    return this.paragraph(lines);
  }

  code(lines, fence, language) {
    const closes = (line) => this.text(line).trim().startsWith(fence) && !this.text(line).trim().replaceAll(fence[0], "");
    const close = lines.findIndex((line, index) => index > 0 && closes(line));
    const body = lines.slice(1, close < 0 ? lines.length : close);
    const copy = make("button", "copy-code", "Copy");
    copy.type = "button";
    copy.ariaLabel = "Copy this code";
    const build = () => {
      const code = make("code", "", ...this.joined(body, ({ start, end }) => this.leaf(start, end)));
      return make("div", "code", make("header", "", make("span", "", language), copy), make("pre", "", code));
    };
    return [close < 0 ? lines.length : close + 1, build];
  }

  /** What `show` makes of each line, with the line breaks between them. */
  joined(lines, show) {
    return lines.flatMap((line, index) => [...show(line), ...(index < lines.length - 1 ? this.leaf(line.end, line.end + 1) : [])]);
  }

  /** Below the page's own headings, which have three levels */
  heading({ start, end }, [prefix, marks]) {
    const level = Math.min(6, marks.length + 3);
    return make(`h${level}`, "", ...this.inline(start + prefix.length, end));
  }

  quote(lines) {
    const count = countWhile(lines, (line) => QUOTE.test(this.text(line)));
    const inner = lines.slice(0, count).map((line) => ({ start: line.start + QUOTE.exec(this.text(line))[0].length, end: line.end }));
    return [count, () => make("blockquote", "", ...this.built(inner))];
  }

  built(lines) { return this.#deeper(() => [...this.blocks(lines)].map(({ build }) => build())); }

  #deeper(work) {
    this.#depth += 1;
    const made = work();
    this.#depth -= 1;
    return made;
  }

  /** Items of one kind; what is indented below an item belongs to it. */
  list(lines) {
    const [, indent, mark] = ITEM.exec(this.text(lines[0]));
    const isOrdered = /\d/.test(mark);
    const items = [];
    let at = 0;
    for (; at < lines.length; at += 1) {
      const line = lines[at];
      const text = this.text(line);
      const item = ITEM.exec(text);
      const depth = text.search(/\S|$/);
      if (item && item[1].length <= indent.length + 1 && depth >= indent.length) {
        if (/\d/.test(item[2]) !== isOrdered || RULE.test(text)) break;
        items.push([{ start: line.start + item[0].length, end: line.end }]);
      } else if (!text.trim() || depth > indent.length + 1) {
        items.at(-1).push({ start: line.start + Math.min(depth, indent.length + mark.length + 1), end: line.end });
      } else if (this.isBlank(lines[at - 1]) || this.interrupts(text)) {
        break;
      } else {
        items.at(-1).push(line);
      }
    }
    const build = () => {
      const list = make(isOrdered ? "ol" : "ul", "", ...items.map((item) => make("li", "", ...this.built(item))));
      if (isOrdered) list.start = Number.parseInt(mark, 10);
      return list;
    };
    return [at, build];
  }

  interrupts(text) {
    return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(text));
  }

  table(lines) {
    const count = countWhile(lines, (line) => this.text(line).includes("|"));
    const [head, , ...rows] = lines.slice(0, count);
    const row = (line, tag) => make("tr", "", ...this.cells(line).map((cell) => make(tag, "", ...this.inline(cell.start, cell.end))));
    const build = () => make("div", "table", make("table", "",
      make("thead", "", row(head, "th")), make("tbody", "", ...rows.map((line) => row(line, "td")))));
    return [count, build];
  }

  /** Of a line of a table, without the spaces around them */
  cells({ start, end }) {
    let at = start + /^\s*\|?/.exec(this.source.slice(start, end))[0].length;
    return this.source.slice(at, end).replace(/\|?\s*$/, "").split(BAR).map((cell) => {
      const begin = at + cell.search(/\S|$/);
      at += cell.length + 1;
      return { start: begin, end: begin + cell.trim().length };
    });
  }

  paragraph(lines) {
    const count = 1 + countWhile(lines.slice(1), (line) => !this.isBlank(line) && !this.interrupts(this.text(line)));
    return [count, () => make("p", "", ...this.joined(lines.slice(0, count), ({ start, end }) => this.inline(start, end)))];
  }

  inline(start, end) {
    const nodes = [];
    const text = this.#depth > DEEPEST ? "" : this.source.slice(start, end);
    let done = 0;
    for (const match of text.matchAll(INLINE)) {
      const node = this.span(match, start);
      if (!node) continue;
      nodes.push(...this.leaf(start + done, start + match.index), ...node);
      done = match.index + match[0].length;
    }
    return [...nodes, ...this.leaf(start + done, end)];
  }

  /** The nodes of a match of `INLINE`; none for a link that is not shown as one. */
  span({ groups, indices }, offset) {
    const [name] = ["escaped", "code", "strong", "em", "del", "a"].filter((each) => groups[each] !== undefined);
    const [start, end] = indices.groups[name].map((each) => each + offset);
    if (name === "escaped") return this.leaf(start, end);
    if (name === "code") return [make("code", "", ...this.leaf(start, end))];
    if (name === "a" && !SAFE_LINK.test(groups.href)) return null;
    const element = make(name, "", ...this.#deeper(() => this.inline(start, end)));
    if (name === "a") Object.assign(element, { href: groups.href, rel: "noopener noreferrer", target: "_blank" });
    return [element];
  }
}

function countWhile(lines, holds) {
  const end = lines.findIndex((line) => !holds(line));
  return end < 0 ? lines.length : end;
}
