// Conversations in this browser (IndexedDB): their settings, and their messages as a tree, each on its own.
// Two tabs may write at once: they add messages, and tell each other. Without IndexedDB, all is kept until the tab ends.

import { randomId } from "./dom.js";

const NAME = "offspec";
const VERSION = 1;
const FORMAT = "offspec-conversations-1";
const ROLES = ["user", "assistant"];

const KEPT = "offspec.kept."; // in localStorage

const channel = "BroadcastChannel" in window ? new BroadcastChannel(NAME) : null;
let database = null;
const memory = { conversations: new Map(), nodes: new Map() };

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Opens the store; returns whether it outlives the tab. */
export async function openStore() {
  try {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("nodes", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    database = await promised(request);
  } catch {
    return false;
  }
  await takeKept().catch(() => {}); // full: kept until there is room
  return true;
}

/** Keeps a message while the page ends, when the database would be too late. */
export function keepAtOnce(node) {
  try {
    localStorage.setItem(KEPT + node.id, JSON.stringify({ ...node, saved: Date.now() }));
  } catch {} // full: what was saved last remains
}

async function takeKept() {
  for (const key of Object.keys(localStorage).filter((each) => each.startsWith(KEPT))) {
    const node = JSON.parse(localStorage.getItem(key));
    if (!node) continue; // another tab took it
    const earlier = await promised(store("nodes").get(node.id));
    if (!(earlier?.saved > node.saved)) await save("nodes", node);
    localStorage.removeItem(key);
  }
}

export function onOtherTab(listener) {
  if (channel) channel.onmessage = (event) => listener(event.data);
}

const store = (name, mode = "readonly") => database.transaction(name, mode).objectStore(name);

async function save(name, value) {
  if (database) await promised(store(name, "readwrite").put(value));
  else memory[name].set(value.id, structuredClone(value));
  channel?.postMessage({ conversation: value.conversation ?? value.id });
}

export const saveConversation = (conversation) => save("conversations", conversation);
export const saveNode = (node) => save("nodes", node);

/** All conversations, the last used first. */
export async function conversations() {
  const all = database ? await promised(store("conversations").getAll()) : [...memory.conversations.values()];
  return all.sort((one, other) => other.updated - one.updated);
}

/** The ids of conversations with a text in their title or messages, in any case. */
export async function withText(text) {
  const nodes = database ? await promised(store("nodes").getAll()) : [...memory.nodes.values()];
  const has = (each) => each.toLowerCase().includes(text.toLowerCase());
  const titled = (await conversations()).filter(({ title }) => has(title));
  return new Set([...titled.map(({ id }) => id), ...nodes.filter(({ content }) => has(content)).map((node) => node.conversation)]);
}

export async function nodesOf(conversation) {
  if (database) return promised(store("nodes").index("conversation").getAll(conversation));
  return [...memory.nodes.values()].filter((node) => node.conversation === conversation);
}

export async function removeConversation(id) {
  const nodes = await nodesOf(id);
  if (database) {
    const transaction = database.transaction(["conversations", "nodes"], "readwrite");
    transaction.objectStore("conversations").delete(id);
    for (const node of nodes) transaction.objectStore("nodes").delete(node.id);
    await new Promise((resolve) => (transaction.oncomplete = resolve));
  } else {
    memory.conversations.delete(id);
    for (const node of nodes) memory.nodes.delete(node.id);
  }
  channel?.postMessage({ conversation: id });
}

export function newConversation() {
  return { id: randomId(), title: "", updated: Date.now(), system: "", sampling: {}, thinking: "", leaf: null };
}

export function newNode(conversation, parent, role, content) {
  return { id: randomId(), conversation, parent, role, content, thought: "", tokens: [], created: Date.now(), state: "done" };
}

export async function exported() {
  const all = [];
  for (const conversation of await conversations()) {
    all.push({ ...conversation, nodes: await nodesOf(conversation.id) });
  }
  return JSON.stringify({ format: FORMAT, conversations: all });
}

const text = (value) => (typeof value === "string" ? value : "");
const number = (value, otherwise) => (Number.isFinite(value) ? value : otherwise);
const object = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : {});
const list = (value) => (Array.isArray(value) ? value : []);

/** Adds the conversations of an exported file, with new ids; returns how many. Raises Error for another file. */
export async function imported(content) {
  let parsed;
  try {
    parsed = JSON.parse(content);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (object(parsed).format !== FORMAT) throw new Error("The file has no conversations of this page.");
  let count = 0;
  for (const each of list(parsed.conversations).map(object)) {
    const ids = new Map(list(each.nodes).map((node) => [object(node).id, randomId()]));
    const conversation = {
      ...newConversation(),
      title: text(each.title),
      updated: number(each.updated, Date.now()),
      system: text(each.system),
      sampling: Object.fromEntries(Object.entries(object(each.sampling)).filter(([, value]) => Number.isFinite(value))),
      thinking: ["on", "off"].includes(each.thinking) ? each.thinking : "",
      leaf: ids.get(each.leaf) ?? null,
      leavesOut: each.leavesOut === true,
    };
    for (const node of list(each.nodes).map(object)) {
      if (!ROLES.includes(node.role)) continue;
      await saveNode({
        ...newNode(conversation.id, ids.get(node.parent) ?? null, node.role, text(node.content)),
        id: ids.get(node.id),
        thought: text(node.thought),
        created: number(node.created, 0),
        first: ids.get(node.first),
        tokens: list(node.tokens).filter((pair) => list(pair).length === 2 && pair.every((part) => typeof part === "string")),
      });
    }
    await saveConversation(conversation);
    count += 1;
  }
  return count;
}
