// One message as it is shown: its text as Markdown or by sources, its thinking, its actions.

import { button, copyButton, el, isSending } from "./dom.js";
import { Markdown } from "./markdown.js";

const LONG = 1500; // characters of a message that may scroll
const FRAME_MS = 12; // more for rendering than this, and the next one waits
const STATES = { stopped: "stopped", failed: "ended early" };

/** The view of a node. actions: what a person can do with it. */
export class MessageView {
  constructor(node, actions, showsSources) {
    this.node = node;
    this.actions = actions;
    this.body = el("div", { className: "body" });
    this.state = el("p", { className: "state" });
    this.foot = el("div", { className: "foot" });
    const who = node.role === "user" ? "You" : "Answer";
    this.element = el("article", { className: `message ${node.role}`, "aria-label": who }, this.body, this.state, this.foot);
    this.waitsUntil = 0;
    this.setSources(showsSources);
    this.update();
  }

  setSources(isOn) {
    this.showsSources = isOn && this.node.role === "assistant" && this.node.tokens.length > 0;
    this.wantsSources = isOn;
    this.body.replaceChildren();
    this.shown = { content: 0, thought: 0, tokens: 0 };
    this.answer = this.thinking = null;
    this.isDrawn = false;
    this.draw(true);
  }

  /** Draws what is new. The caller calls it once a frame, and with `isLast` at the end. */
  draw(isLast = false) {
    const began = performance.now();
    if (!isLast && began < this.waitsUntil) return;
    if (this.wantsSources && !this.showsSources && this.node.tokens.length) return this.setSources(true);
    if (this.node.role === "user") this.#drawUser();
    else if (this.showsSources) this.#drawTokens();
    else this.#drawAnswer(isLast);
    const took = performance.now() - began;
    this.waitsUntil = took > FRAME_MS ? performance.now() + 4 * took : 0;
  }

  update() {
    const { node, actions } = this;
    this.element.setAttribute("aria-busy", String(node.state === "running"));
    const isOver = node.state !== "running";
    this.state.textContent = isOver ? stateOf(node) : this.#hasText() ? "" : (node.waiting ?? "waiting for the server");
    this.state.classList.toggle("error", node.state === "failed");
    const siblings = actions.siblings(node);
    const at = siblings.indexOf(node.id);
    const branches =
      siblings.length > 1
        ? el(
            "span",
            { className: "branches" },
            button("‹", () => actions.choose(siblings[at - 1]), { disabled: at === 0, "aria-label": "Earlier branch" }),
            el("span", {}, `${at + 1}/${siblings.length}`),
            button("›", () => actions.choose(siblings[at + 1]), { disabled: at === siblings.length - 1, "aria-label": "Later branch" }),
          )
        : null;
    this.foot.replaceChildren(
      ...[
        branches,
        isOver && node.role === "assistant" ? button(node.state === "failed" ? "Retry" : "Regenerate", () => actions.regenerate(node)) : null,
        isOver && isCut(node) && actions.canGoOn(node) ? button("Continue", () => actions.goOn(node)) : null,
        isOver && node.isFull && actions.canLeaveOut(node) ? button("Go on without the oldest turns", () => actions.leaveOut(node)) : null,
        isOver && node.role === "user" ? button("Edit", () => this.#edit()) : null,
        isOver ? copyButton(() => node.content) : null,
        el("span", { className: "figures-line" }, isOver ? figuresOf(node.figures) : ""),
      ].filter(Boolean),
    );
  }

  #hasText() {
    const { content, thought, numBegun } = this.node;
    return numBegun ? content.length > numBegun : Boolean(content || thought);
  }

  #drawUser() {
    if (this.isDrawn) return;
    this.isDrawn = true;
    const { content } = this.node;
    this.body.replaceChildren(el("div", { className: "plain", dir: "auto", tabindex: content.length > LONG ? "0" : null }, content));
  }

  #drawTokens() {
    if (!this.tokens) this.tokens = el("div", { className: "tokens", dir: "auto" });
    if (!this.tokens.isConnected) this.body.replaceChildren(this.tokens);
    const { tokens } = this.node;
    if (this.shown.tokens === 0) this.tokens.replaceChildren();
    const fresh = tokens.slice(this.shown.tokens).map(([text, source]) => el("span", { className: `from-${source}`, title: source }, text));
    this.tokens.append(...fresh);
    this.shown.tokens = tokens.length;
  }

  #drawAnswer(isLast) {
    const { node } = this;
    if (node.thought && !this.thinking) {
      const inside = el("div", { className: "prose" });
      this.summary = el("summary", {}, "Thinking");
      this.thinking = new Markdown(inside);
      this.body.prepend(el("details", { className: "thinking" }, this.summary, inside));
    }
    if (node.content && !this.answer) {
      const inside = el("div", { className: "prose" });
      this.body.append(inside);
      this.answer = new Markdown(inside);
    }
    const isOver = node.state !== "running";
    for (const [view, name] of [[this.thinking, "thought"], [this.answer, "content"]]) {
      if (!view) continue;
      view.push(node[name].slice(this.shown[name]));
      this.shown[name] = node[name].length;
      if (isLast && isOver) view.end();
      else view.render();
    }
    if (this.summary) this.summary.textContent = node.content || isOver ? "Thinking" : "Thinking …";
  }

  #edit() {
    const field = el("textarea", { rows: "4", dir: "auto", "aria-label": "Edited message" });
    field.value = this.node.content;
    const cancel = () => this.setSources(this.wantsSources);
    const send = () => {
      const text = field.value.trim();
      if (text) this.actions.edit(this.node, text);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (!isSending(event)) return;
      event.preventDefault();
      send();
    });
    const bar = el("div", { className: "actions" }, button("Cancel", cancel), button("Send", send, { className: "main" }));
    this.body.replaceChildren(el("div", { className: "editor" }, field, bar));
    field.focus();
  }
}

/** Whether an answer's text may go on: it has some, and was cut, but not by a full context. */
function isCut({ role, content, state, finish, isFull }) {
  return role === "assistant" && content && !isFull && (state !== "done" || finish === "length");
}

function stateOf({ state, error, finish, isFull, numLeftOut }) {
  const parts = [
    [STATES[state], error].filter(Boolean).join(": "),
    finish === "length" ? (isFull ? "the context is full" : "cut at its greatest length") : "",
    numLeftOut ? `the oldest ${numLeftOut === 1 ? "turn is" : `${numLeftOut} turns are`} left out from here on` : "",
  ];
  return parts.filter(Boolean).join(" · ");
}

function figuresOf(figures) {
  if (!figures) return "";
  const speed = figures.decode_tokens_per_s ? `${figures.decode_tokens_per_s.toFixed(1)} tokens/s · ` : "";
  return `${figures.num_tokens} tokens · ${speed}${figures.tokens_per_pass.toFixed(2)} per pass`;
}
