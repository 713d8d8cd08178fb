// Beside the answer: its rates, a bar for each pass, and the tree of a chosen pass.

import { button, el, svg } from "./dom.js";
import { drawTree } from "./tree.js";

const SOURCES = [
  ["draft", "the draft model guessed it"],
  ["lookup", "found in an earlier text"],
  ["recycling", "the target's earlier prediction"],
  ["constraint", "the grammar allows nothing else"],
  ["target", "the target's own token"],
];
const MOST_BARS = 240;
const BAR = 5;

const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(bytes < 1e8 ? 3 : 2)} GB`;
const rate = (value, digits = 1) => (value === null || value === undefined ? "–" : value.toFixed(digits));

export function legend() {
  return el(
    "ul",
    { className: "legend" },
    ...SOURCES.map(([name, title]) => el("li", { title }, el("span", { className: `swatch from-${name}` }), name)),
  );
}

/** The panel. Follows the last pass until a person chooses one. */
export class Insight {
  constructor(root) {
    this.root = root;
    this.passes = [];
    this.chosen = null; // an index; null follows the last one
    this.figures = el("dl", { className: "figures" });
    this.bars = svg("svg", { height: 64, className: "bars", "aria-hidden": "true" });
    this.bars.addEventListener("click", (event) => this.#clicked(event));
    this.place = el("span", { className: "place" });
    this.tree = el("div", { className: "tree", tabindex: "0", role: "region", "aria-label": "Tree of the pass" });
    const earlier = button("‹", () => this.step(-1), { "aria-label": "Earlier pass", title: "Earlier pass ([)" });
    const later = button("›", () => this.step(1), { "aria-label": "Later pass", title: "Later pass (])" });
    const last = button("latest", () => this.choose(null));
    root.append(
      el("h2", {}, "Passes"),
      this.figures,
      el("div", { className: "bar-box" }, this.bars),
      el("div", { className: "bar" }, earlier, this.place, later, el("span", { className: "space" }), last),
      this.tree,
      legend(),
      el("p", { className: "hint" }, "One pass of the target verifies a whole tree of guesses. Filled nodes came true; the number beside a guess is its probability."),
    );
  }

  /** Show the passes of an answer. passes: grows while the answer does. */
  show(passes, figures) {
    if (passes !== this.passes) this.chosen = null;
    this.passes = passes;
    this.last = figures;
    this.render();
  }

  step(by) {
    if (!this.passes.length) return;
    const at = this.chosen ?? this.passes.length - 1;
    this.choose(Math.max(0, Math.min(this.passes.length - 1, at + by)));
  }

  choose(index) {
    this.chosen = index;
    this.render();
  }

  render() {
    if (this.root.hidden) return;
    const figures = this.last;
    const streamed = figures?.stream_bytes_per_pass
      ? `${gigabytes(figures.stream_bytes_per_pass)} at ${rate(figures.stream_gb_per_s)} of ${rate(figures.link_gb_per_s)} GB/s`
      : "nothing, the weights are resident";
    const rows = figures
      ? [
          ["tokens/s", rate(figures.decode_tokens_per_s)],
          ["tokens per pass", rate(figures.tokens_per_pass, 2)],
          ["passes", String(figures.num_passes)],
          ["first token", `${rate(figures.ttft_s, 2)} s`],
          ["streamed per pass", streamed],
        ]
      : [];
    this.figures.replaceChildren(...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
    const at = this.chosen ?? this.passes.length - 1;
    this.#drawBars(at);
    const pass = this.passes[at];
    this.place.textContent = pass ? `pass ${pass.number} of ${this.passes.at(-1).number}` : "no pass of this visit";
    if (pass !== this.drawn) this.tree.replaceChildren(...(pass ? [drawTree(pass, this.#before(at))] : []));
    this.drawn = pass;
  }

  #before(at) {
    return this.passes[at - 1]?.tokens.at(-1)?.text ?? "…";
  }

  #drawBars(at) {
    this.firstBar = Math.max(0, Math.min(at - MOST_BARS / 2, this.passes.length - MOST_BARS));
    const shown = this.passes.slice(this.firstBar, this.firstBar + MOST_BARS);
    const most = Math.max(4, ...shown.map((pass) => pass.tokens.length));
    const bars = shown.map((pass, index) => {
      const height = (60 * pass.tokens.length) / most;
      const isChosen = this.firstBar + index === at;
      return svg("rect", { x: BAR * index, y: 62 - height, width: BAR - 1, height, className: isChosen ? "chosen" : "" });
    });
    this.bars.setAttribute("width", String(Math.max(1, BAR * shown.length)));
    this.bars.replaceChildren(...bars);
    if (this.chosen === null) this.bars.parentElement.scrollLeft = this.bars.parentElement.scrollWidth;
  }

  #clicked(event) {
    const left = this.bars.getBoundingClientRect().left;
    const index = this.firstBar + Math.floor((event.clientX - left) / BAR);
    if (index >= 0 && index < this.passes.length) this.choose(index);
  }
}
