// Markdown as nodes, while it grows. Text becomes text nodes and nothing else; links are the only attributes.
//
// Complete blocks are rendered once. Only the open one, the last, is rendered again as text arrives; an open block of
// code gets its new lines appended. So a long answer costs no more per token than a short one. Complete lines alone
// decide about blocks, so that an answer looks the same however it was cut on its way.

import { copyButton, el } from "./dom.js";

const FENCE = /^( {0,12})(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const FENCE_BEGUN = /^ {0,12}(?:`{1,2}|~{1,2})$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*))?$/s;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const LINK = /^(https?:\/\/|mailto:)[^\s<>"]+$/i;
const BARE_LINK = /https?:\/\/[^\s<>"')\]]{1,2000}/y;
const SPECIAL = /[\0*_~[!h\n]/g; // \0: here begins what stands as written
const AS_WRITTEN = /`+|(?<!\$)\$\$(?!\$)|\\[!-/:-@[-`{-~]/g;
const FORMULAS = new Map([["\\(", "\\)"], ["\\[", "\\]"], ["$$", "$$"]]);
const MOST_DEPTH = 6; // of quotes, lists and emphasis within each other
const MOST_LABEL = 1000;
const MOST_FORMULA = 5000; // characters

/** Grows an element by the text of an answer. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.line = ""; // the last one, which may be incomplete
    this.open = null; // a block of text {lines, element} or of code {code, rest, fence, indent}
  }

  push(text) {
    const lines = (this.line + text).split("\n");
    this.line = lines.pop();
    for (const line of lines) this.#take(line.replace(/\r$/, ""));
    this.isStale = true;
  }

  /** Shows what has been pushed, and of the incomplete line what cannot become a fence. */
  render() {
    if (!this.isStale) return;
    this.isStale = false;
    const line = this.line.replace(/\r$/, "");
    if (this.open?.code) this.open.rest.data = this.#mayEndCode(line) ? "" : this.#ofCode(line);
    else if (line.trim() && !FENCE_BEGUN.test(line) && !FENCE.test(line)) this.#show([...this.#text().lines, line]);
    else if (this.open) this.#show(this.open.lines);
  }

  end() {
    if (this.line) this.#take(this.line.replace(/\r$/, ""));
    this.line = "";
    this.#close();
  }

  #take(line) {
    const fence = FENCE.exec(line);
    if (this.open?.code) {
      if (this.#mayEndCode(line) && line.trim().length >= this.open.fence.length) this.#close();
      else this.open.code.appendData(`${this.#ofCode(line)}\n`);
    } else if (fence) {
      this.#close();
      this.#beginCode(fence);
    } else if (line.trim()) this.#text().lines.push(line);
    else this.#close();
  }

  /** The open block of text, or a new one. */
  #text() {
    if (!this.open) {
      this.open = { lines: [], element: el("div", { className: "block" }) };
      this.root.append(this.open.element);
    }
    return this.open;
  }

  #beginCode([, indent, fence, info]) {
    const text = document.createTextNode("");
    const rest = document.createTextNode("");
    const code = el("code", {}, text, rest);
    const language = /^\s*([\w+#.-]*)/.exec(info)[1];
    const bar = el("div", { className: "code-bar" }, el("span", {}, language || "text"), copyButton(() => code.textContent));
    this.root.append(el("div", { className: "code", dir: "ltr" }, bar, el("pre", { tabindex: "0" }, code)));
    this.open = { code: text, rest, fence, indent: indent.length };
  }

  #mayEndCode(line) {
    return line.trim() !== "" && !line.trim().replaceAll(this.open.fence[0], "");
  }

  /** A line without the indent of its block of code. */
  #ofCode(line) {
    const { indent } = this.open;
    return line.slice(0, indent).trim() ? line : line.slice(indent);
  }

  #show(lines) {
    this.open.element.replaceChildren(...blocks(withFormulas(lines), 0));
  }

  /** Ends the open block; what was shown of an incomplete line goes. */
  #close() {
    if (this.open?.code) this.open.rest.data = "";
    else if (this.open?.lines.length) this.#show(this.open.lines);
    else this.open?.element.remove();
    this.open = null;
  }
}

/** The nodes of lines without blank ones and without fences. A formula of several lines is one line. */
function blocks(lines, depth) {
  const nodes = [];
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) nodes.push(el("p", { dir: "auto" }, ...inline(paragraph.join("\n"), 0)));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at];
    const heading = HEADING.exec(line);
    if (heading) {
      flush();
      const level = Math.min(6, heading[1].length + 2); // below the page's own headings
      nodes.push(el(`h${level}`, { dir: "auto" }, ...inline(heading[2], 0)));
    } else if (RULE.test(line)) {
      flush();
      nodes.push(el("hr"));
    } else if (depth < MOST_DEPTH && QUOTE.test(line)) {
      flush();
      const end = firstWithout(lines, at, (each) => QUOTE.test(each));
      const inside = lines.slice(at, end).map((each) => QUOTE.exec(each)[1]);
      nodes.push(el("blockquote", {}, ...blocks(withFormulas(inside), depth + 1)));
      at = end - 1;
    } else if (depth < MOST_DEPTH && ITEM.test(line) && (!paragraph.length || !line.startsWith(" "))) {
      flush();
      const [element, end] = listOf(lines, at, depth);
      nodes.push(element);
      at = end - 1;
    } else if (line.includes("|") && at + 1 < lines.length && TABLE_RULE.test(lines[at + 1]) && lines[at + 1].includes("-")) {
      flush();
      const end = firstWithout(lines, at, (each) => each.includes("|"));
      nodes.push(table(lines.slice(at, end)));
      at = end - 1;
    } else paragraph.push(line);
  }
  flush();
  return nodes;
}

function firstWithout(lines, at, has) {
  let end = at + 1;
  while (end < lines.length && has(lines[end])) end += 1;
  return end;
}

/** A list from a line on, with what is indented below its items; and the line after it. */
function listOf(lines, first, depth) {
  const [, indent, marker] = ITEM.exec(lines[first]);
  const isOrdered = /\d/.test(marker);
  const element = isOrdered ? el("ol", { start: parseInt(marker, 10) }) : el("ul");
  let at = first;
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== isOrdered || item[1].length < indent.length) break;
    const inside = [item[3] ?? ""];
    at += 1;
    while (at < lines.length) {
      const below = ITEM.exec(lines[at]);
      if (below ? below[1].length <= indent.length + 1 : /^\S/.test(lines[at]) && (QUOTE.test(lines[at]) || HEADING.test(lines[at]))) break;
      inside.push(lines[at].replace(/^ {1,4}|^\t/, ""));
      at += 1;
    }
    const content = blocks(inside, depth + 1);
    const isTight = content.length && content[0].tagName === "P";
    element.append(el("li", { dir: "auto" }, ...(isTight ? [...content[0].childNodes, ...content.slice(1)] : content)));
  }
  return [element, Math.max(at, first + 1)];
}

function table(lines) {
  const cells = (line) => split(line.trim().replace(/^\||\|$/g, ""), "|", () => true).map((cell) => cell.trim());
  const row = (line, tag) => el("tr", {}, ...cells(line).map((cell) => el(tag, { dir: "auto" }, ...inline(cell, 0))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  return el("div", { className: "table", tabindex: "0" }, el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...body)));
}

/** Lines, those of a formula as one, so that nothing in it begins a list or a table. A quote's are joined within it. */
function withFormulas(lines) {
  const text = lines.join("\n");
  const isQuoted = (start) => QUOTE.test(text.slice(text.lastIndexOf("\n", start) + 1, start + 1));
  const hasLines = (start, end) => text.slice(start, end).includes("\n");
  return split(text, "\n", ({ kind, end }, start) => kind === "formula" && hasLines(start, end) && !isQuoted(start));
}

/** A text's parts between separators that lie outside of the chosen spans. */
function split(text, separator, isChosen) {
  const spans = [...asWritten(text)].filter(([start, span]) => isChosen(span, start));
  let at = 0;
  return masked(text, spans).split(separator).map((part) => text.slice(at, (at += part.length + 1) - 1));
}

function masked(text, spans) {
  let found = "";
  for (const [start, { end }] of spans) found += text.slice(found.length, start) + "\0".repeat(end - start);
  return found + text.slice(found.length);
}

/** What stands as written: where it begins → {kind: "code", "formula" or "character", open: its mark, end}. */
function asWritten(text) {
  const spans = new Map();
  const next = finder(text);
  let found;
  for (AS_WRITTEN.lastIndex = 0; (found = AS_WRITTEN.exec(text)); ) {
    const [open] = found;
    const start = found.index;
    const close = FORMULAS.get(open) ?? (open[0] === "`" ? open : "");
    const at = close ? next(close, start + open.length) : -1;
    const isWhole = at >= 0 && (open[0] === "`" || isFormula(text, start, at));
    if (isWhole) AS_WRITTEN.lastIndex = at + close.length;
    const kind = !isWhole ? "character" : open[0] === "`" ? "code" : "formula";
    if (isWhole || open[0] === "\\") spans.set(start, { kind, open, end: AS_WRITTEN.lastIndex });
  }
  return spans;
}

/** Whether a formula lies between two marks: no other one begins there, and $$ are no prices in two lines. */
function isFormula(text, start, end) {
  const open = text.slice(start, start + 2);
  if (end - start > MOST_FORMULA) return false;
  if (open === "$$") {
    const beginsLine = (at) => !text.slice(text.lastIndexOf("\n", at) + 1, at).trim();
    return text[end + 2] !== "$" && (!text.slice(start, end).includes("\n") || beginsLine(start) || beginsLine(end));
  }
  let last = text.lastIndexOf(open, end);
  while (last > start && text[last - 1] === "\\") last = text.lastIndexOf(open, last - 1); // \\[2pt] ends a line
  return last === start;
}

/** Finds the next place of a mark, from places that do not decrease. It reads the text once for each mark. */
function finder(text) {
  const places = new Map();
  return (mark, from) => {
    let place = places.get(mark);
    if (place === undefined || (place >= 0 && place < from)) places.set(mark, (place = text.indexOf(mark, from)));
    return place;
  };
}

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

/** The nodes of a text with emphasis, code, formulas and links. */
export function inline(text, depth) {
  const nodes = [];
  const spans = asWritten(text);
  const outside = masked(text, spans);
  const closed = finder(outside);
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(outside)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at >= text.length) break;
    const span = spans.get(at);
    const made = span ? { node: nodeOf(span, text.slice(at, span.end)), end: span.end } : one(text, at, depth, closed);
    if (made) {
      if (typeof made.node === "string") plain += made.node;
      else {
        flush();
        nodes.push(made.node);
      }
      at = made.end;
    } else {
      const mark = MARKS.find(([each]) => text.startsWith(each, at))?.[0] ?? text[at];
      plain += mark;
      at += mark.length;
    }
  }
  flush();
  return nodes;
}

/** The node of what stands as written; a text of a character. Brackets keep their backslash: they may be a formula's. */
function nodeOf({ kind, open }, text) {
  if (kind === "formula") return el("span", { className: "formula", dir: "ltr" }, text);
  if (kind === "code") return el("code", { dir: "ltr" }, text.slice(open.length, -open.length).replace(/^ (.+) $/, "$1"));
  return "()[]".includes(text[1]) ? text : text[1];
}

/** What begins at a place, and its end; null if it is text. */
function one(text, at, depth, closed) {
  const char = text[at];
  if (char === "\n") return { node: el("br"), end: at + 1 };
  if (char === "[" || (char === "!" && text[at + 1] === "[")) return link(text, char === "!" ? at + 1 : at, depth, closed);
  if (char === "h") {
    BARE_LINK.lastIndex = at;
    const url = BARE_LINK.exec(text)?.[0].replace(/[.,;:!?]+$/, "");
    return url ? { node: anchor(url, [document.createTextNode(url)]), end: at + url.length } : null;
  }
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const start = at + mark.length;
    if (depth >= MOST_DEPTH || !text[start]?.trim() || (mark[0] === "_" && /\w/.test(text[at - 1] ?? ""))) return null;
    const end = closed(mark, start + 1);
    if (end < 0 || !text[end - 1].trim() || (mark[0] === "_" && /\w/.test(text[end + mark.length] ?? ""))) return null;
    return { node: el(tag, {}, ...inline(text.slice(start, end), depth + 1)), end: end + mark.length };
  }
  return null;
}

function link(text, at, depth, closed) {
  const middle = closed("](", at);
  if (middle < 0 || middle - at > MOST_LABEL || depth >= MOST_DEPTH) return null;
  const end = text.indexOf(")", middle);
  const url = end < 0 ? "" : text.slice(middle + 2, end).trim().split(/\s/)[0];
  if (!LINK.test(url) || url.length > 2000) return null;
  return { node: anchor(url, inline(text.slice(at + 1, middle), depth + 1)), end: end + 1 };
}

function anchor(url, children) {
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url }, ...children);
}
