// A pass's tree, drawn: from left to right the tokens guessed, the accepted path filled, siblings with probabilities.

import { svg, visible } from "./dom.js";

const ROW = 24;
const GAP = 20; // between columns, for the branches
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
  place(nodes);
  const widths = columnWidths(nodes);
  const lefts = widths.map((_, depth) => 10 + widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0));
  const width = lefts.at(-1) + widths.at(-1) + 12;
  const height = ROW * (1 + Math.max(...nodes.map((node) => node.row))) + 16;
  const title = `Tree of the pass: ${nodes.filter((node) => node.isAccepted).length} guesses accepted of ${pass.tree.num_nodes}`;
  const drawn = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const centre = (node) => 8 + ROW * node.row + ROW / 2;
  for (const node of nodes.slice(1)) {
    const from = lefts[node.parent.depth] + node.parent.width;
    const to = lefts[node.depth];
    const [y, end] = [centre(node.parent), centre(node)];
    const middle = to - GAP / 2;
    drawn.append(
      svg("path", {
        d: `M${from} ${y}H${middle - 6}C${middle} ${y} ${middle} ${end} ${middle + 8} ${end}H${to}`,
        className: `branch ${node.isAccepted ? `accepted from-${node.source}` : ""}`,
      }),
    );
  }
  for (const node of nodes) drawn.append(box(node, lefts[node.depth], centre(node)));
  return drawn;
}

/** The nodes with the text's end first, and the target's own token last, if the pass ended with one. */
function nodesOf(pass, before) {
  const { tree, tokens } = pass;
  const accepted = new Set(tree.accepted);
  const root = { text: before, depth: 0, children: [], source: "text", isAccepted: false, parent: null };
  const found = tree.texts.map((text, index) => ({
    text,
    probability: tree.probabilities[index],
    source: tree.sources[index],
    isAccepted: accepted.has(index),
    children: [],
  }));
  found.forEach((node, index) => {
    node.parent = tree.parents[index] < 0 ? root : found[tree.parents[index]];
    node.depth = node.parent.depth + 1;
    node.parent.children.push(node);
  });
  if (tokens.length > accepted.size) {
    const parent = tree.accepted.length ? found[tree.accepted.at(-1)] : root;
    const node = { text: tokens.at(-1).text, source: "target", isAccepted: true, children: [], parent, depth: parent.depth + 1 };
    parent.children.push(node);
    found.push(node);
  }
  return [root, ...found];
}

/** Gives each node its row: the accepted child's first, then by probability. */
function place(nodes) {
  let row = 0;
  const visit = (node) => {
    node.row = row;
    const order = (child) => (child.isAccepted ? 2 : (child.probability ?? 0));
    node.children.sort((one, other) => order(other) - order(one));
    node.children.forEach((child, index) => {
      if (index) row += 1;
      visit(child);
    });
  };
  visit(nodes[0]);
}

function columnWidths(nodes) {
  const widths = [];
  for (const node of nodes) {
    const share = node.probability === undefined ? 0 : 4.6;
    node.width = (label(node.text).length + share) * CHAR + 14;
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  return widths;
}

function box(node, left, middle) {
  const share = node.probability === undefined ? "" : `, guessed ${(100 * node.probability).toFixed(1)} %`;
  const told = `${visible(node.text)}: ${node.source === "text" ? "the text so far" : node.source}${share}`;
  return svg(
    "g",
    { className: `node from-${node.source} ${node.isAccepted ? "accepted" : ""}` },
    svg("title", {}, told),
    svg("rect", { x: left, y: middle - 9.5, width: node.width, height: 19, rx: 5 }),
    svg("text", { x: left + 7, y: middle + 4 }, label(node.text)),
    node.probability === undefined
      ? null
      : svg("text", { x: left + node.width - 7, y: middle + 4, className: "share" }, percent(node.probability)),
  );
}
