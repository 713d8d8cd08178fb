// Elements, made without HTML: every text becomes a text node.

const SVG = "http://www.w3.org/2000/svg";

/** An element. props: properties and attributes; `on…` are listeners. children: nodes and texts. */
export function el(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name === "className" ? "class" : name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function button(label, onclick, props = {}) {
  return el("button", { type: "button", className: "quiet", onclick, ...props }, label);
}

/** Whether a key sends the text of a field; Shift+Enter begins a line, and input methods take Enter themselves. */
export const isSending = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

export const byId = (id) => document.getElementById(id);

export function randomId() {
  // crypto.randomUUID is missing where the page comes over plain HTTP from another machine.
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Copies a text; also where the page comes over plain HTTP, which has no clipboard. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = el("textarea", { "aria-hidden": "true", className: "offscreen" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

export function copyButton(text, label = "Copy") {
  const made = button(label, async () => {
    await copyText(text());
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = label), 1500);
  });
  return made;
}

/** A text with white space made visible, for labels of tokens. */
export function visible(text) {
  return text.replace(/ /g, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
