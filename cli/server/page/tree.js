// A pass's tree, drawn downwards: the tokens guessed, the accepted path filled, siblings with their probabilities.

import { svg, visible } from "./dom.js";

const LEVEL = 34; // from one depth to the next
const HEIGHT = 20; // of a node
const GAP = 7; // between neighbours
const EDGE = 10;
const STEM = 14; // where branches leave a node, from its left
const CHAR = 7.3; // width of a character of the labels
const MOST_CHARS = 16;

const label = (text) => {
  const shown = visible(text);
  return shown.length > MOST_CHARS ? `${shown.slice(0, MOST_CHARS - 1)}…` : shown;
};
const percent = (share) => (share >= 0.995 ? "1" : share < 0.01 ? "<.01" : share.toFixed(2).slice(1));

/** The SVG of a pass. pass: as the server reports it. before: the text's last token. */
export function drawTree(pass, before) {
  const nodes = nodesOf(pass, before);
  place(nodes[0], []);
  const width = Math.max(...nodes.map((node) => node.x + node.width)) + EDGE;
  const height = Math.max(...nodes.map((node) => node.y)) + HEIGHT + EDGE;
  const title = `Tree of the pass: ${pass.tree.accepted.length} guesses accepted of ${pass.tree.num_nodes}`;
  const drawn = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const byAcceptance = [...nodes.slice(1)].sort((one, other) => one.isAccepted - other.isAccepted);
  drawn.append(...byAcceptance.map(branch), ...nodes.map(box));
  return drawn;
}

/** From a node's parent down to it. */
function branch(node) {
  const [x, y] = [node.parent.x + STEM, node.parent.y + HEIGHT];
  const [toX, toY] = [node.x + STEM, node.y];
  const middle = y + (toY - y) / 2;
  const line = x === toX ? `V${toY}` : `C${x} ${middle + 4} ${toX} ${middle - 4} ${toX} ${toY}`;
  return svg("path", { d: `M${x} ${y}${line}`, className: `branch ${node.isAccepted ? `accepted from-${node.source}` : ""}` });
}

/** The nodes with the text's end first, and the target's own token last, if the pass ended with one. */
function nodesOf(pass, before) {
  const { tree, tokens } = pass;
  const accepted = new Set(tree.accepted);
  const root = { text: before, depth: 0, children: [], source: "text", isAccepted: false, parent: null };
  const guesses = tree.texts.map((text, index) => ({
    text,
    probability: tree.probabilities[index],
    source: tree.sources[index],
    isAccepted: accepted.has(index),
    children: [],
  }));
  guesses.forEach((node, index) => {
    node.parent = tree.parents[index] < 0 ? root : guesses[tree.parents[index]];
    node.depth = node.parent.depth + 1;
    node.parent.children.push(node);
  });
  if (tokens.length > accepted.size) {
    const parent = tree.accepted.length ? guesses[tree.accepted.at(-1)] : root;
    const node = { text: tokens.at(-1).text, source: "target", isAccepted: true, children: [], parent, depth: parent.depth + 1 };
    parent.children.push(node);
    guesses.push(node);
  }
  return [root, ...guesses];
}

/** Gives each node its place: a level a depth, each as far left as its parent and its neighbours allow.
 *
 * So branches do not cross. The accepted child comes first, then by probability: the accepted path is the left edge.
 */
function place(node, free) {
  const share = node.probability === undefined ? 0 : 4.6;
  node.width = (label(node.text).length + share) * CHAR + 14;
  node.x = Math.max(free[node.depth] ?? EDGE, node.parent?.x ?? EDGE);
  node.y = EDGE + node.depth * LEVEL;
  free[node.depth] = node.x + node.width + GAP;
  const order = (child) => (child.isAccepted ? 2 : (child.probability ?? 0));
  node.children.sort((one, other) => order(other) - order(one));
  for (const child of node.children) place(child, free);
}

function box(node) {
  const [left, middle] = [node.x, node.y + HEIGHT / 2];
  const share = node.probability === undefined ? "" : `, guessed ${(100 * node.probability).toFixed(1)} %`;
  const title = `${visible(node.text)}: ${node.source === "text" ? "the text so far" : node.source}${share}`;
  return svg(
    "g",
    { className: `node from-${node.source} ${node.isAccepted ? "accepted" : ""}` },
    svg("title", {}, title),
    svg("rect", { x: left, y: node.y, width: node.width, height: HEIGHT, rx: 5 }),
    svg("text", { x: left + 7, y: middle + 4 }, label(node.text)),
    node.probability === undefined
      ? null
      : svg("text", { x: left + node.width - 7, y: middle + 4, className: "share" }, percent(node.probability)),
  );
}
