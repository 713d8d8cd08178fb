// The page: which conversation is open, what a person does, and answers under way.

import * as api from "./api.js";
import { button, byId, download, el, isSending } from "./dom.js";
import { Insight } from "./insight.js";
import { MessageView } from "./message.js";
import * as store from "./store.js";

const SAMPLING = [
  ["temperature", "Temperature", 0, 5, 0.05],
  ["top_p", "Top p", 0, 1, 0.01],
  ["top_k", "Top k", 0, 10000, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["repetition_penalty", "Repetition penalty", 0.1, 5, 0.05],
  ["max_tokens", "Most tokens", 1, 1000000, 1],
  ["seed", "Seed", 0, 2 ** 31, 1],
];
const KEYS = [
  ["Enter", "send; Shift+Enter begins a new line"],
  ["Esc", "stop the answer"],
  ["/", "to the message field"],
  ["Alt+N", "new conversation"],
  ["Alt+↑ Alt+↓", "other conversation"],
  ["Alt+R", "regenerate the last answer"],
  ["Alt+E", "edit the last message"],
  ["Alt+I", "show passes"],
  ["Alt+C", "colour tokens by source"],
  ["Alt+S", "settings"],
  ["[ and ]", "earlier and later pass"],
  ["?", "these keys"],
];
const SAVE_MS = 1000; // between two saves of an answer that grows
const LOST_MS = 15 * SAVE_MS; // an answer of another tab that was not saved for so long is over
const HEALTH_MS = 3000;
const MOST_FILE_BYTES = 1 << 20;
const MOST_PASSES = 2000; // kept of an answer, for the panel
const MOST_TITLE = 60;
const MOST_SPARE = 4096; // tokens kept free for an answer, at most this share of the context (offspec/session.py)
const SPARE_SHARE = 1 / 4;
const NEAR_END = 60; // pixels: who is this near to the end follows the answer

const state = {
  conversation: null,
  nodes: new Map(),
  views: new Map(),
  runs: new Map(), // conversation id → {controller, node}
  passes: new Map(), // node id → the passes of this visit
  files: [],
  isOnline: true,
  defaults: new Map(), // model → its defaults of sampling
};
const insight = new Insight(byId("insight"));
const log = byId("log");

// ---------------------------------------------------------------- the tree of messages

const children = (parent) =>
  [...state.nodes.values()].filter((node) => node.parent === parent).sort((one, other) => one.created - other.created);

/** The messages from the first one down to the chosen leaf. */
function path(leaf = state.conversation.leaf) {
  const messages = [];
  for (let node = state.nodes.get(leaf); node; node = state.nodes.get(node.parent)) messages.unshift(node);
  return messages;
}

function newestLeaf(id) {
  for (;;) {
    const below = children(id);
    if (!below.length) return id;
    id = below.at(-1).id;
  }
}

const isUsers = (node) => node.role === "user";

/** The messages that the server is told: without the turns that were left out of an earlier answer. */
function told(messages) {
  const first = messages.findLast((node) => node.first)?.first;
  return messages.slice(Math.max(0, messages.findIndex((node) => node.id === first)));
}

const lastAnswer = () => path().findLast((node) => node.role === "assistant");

// ---------------------------------------------------------------- what is shown

/** The conversations, or those that have the searched text. */
async function showList() {
  const all = await store.conversations();
  const text = byId("search").value.trim();
  const having = text ? await store.withText(text) : null;
  if (text !== byId("search").value.trim()) return; // a later call shows it
  if (byId("conversations").querySelector("input")) return; // a name is being typed; its end shows the list
  const shown = all.filter(({ id }) => !having || having.has(id)).map(listed);
  byId("conversations").replaceChildren(...shown, ...(having?.size === 0 ? [el("li", { className: "hint" }, "Nothing found.")] : []));
}

function listed(each) {
  const isOpen = each.id === state.conversation?.id;
  const tool = (label, title, act) => button(label, act, { className: "quiet tool", title, "aria-label": `${title}: ${each.title}` });
  const item = el("li", { className: isOpen ? "open" : "" });
  item.append(
    button(each.title || "New conversation", () => open(each.id), { className: "quiet title", dir: "auto", "aria-current": isOpen && "true" }),
    tool("✎", "Rename", () => rename(each, item)),
    tool("✕", "Delete", () => remove(each)),
  );
  return item;
}

/** Puts a field in the place of a title. Enter and leaving keep what was typed, Escape does not. */
function rename({ id, title }, item) {
  const field = el("input", { dir: "auto", "aria-label": "Name of the conversation", value: title });
  let isDone = false;
  const done = async (isKept) => {
    if (isDone) return;
    isDone = true;
    const inUse = [state.conversation, state.runs.get(id)?.conversation];
    const conversation = [...inUse, ...(await store.conversations())].find((each) => each?.id === id);
    const name = field.value.trim();
    if (isKept && name && conversation) await store.saveConversation(Object.assign(conversation, { title: name }));
    field.remove();
    await showList();
  };
  field.addEventListener("blur", () => done(true));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape" || isSending(event)) done(event.key === "Enter");
  });
  item.replaceChildren(field);
  field.select();
}

async function open(id) {
  const all = await store.conversations();
  const conversation = all.find((each) => each.id === id) ?? store.newConversation();
  const run = state.runs.get(conversation.id);
  state.conversation = run?.conversation ?? conversation;
  state.nodes = new Map((await store.nodesOf(conversation.id)).map((node) => [node.id, node]));
  if (run) state.nodes.set(run.node.id, run.node);
  sessionStorage.setItem("offspec.open", conversation.id);
  document.body.classList.remove("shows-list");
  state.views.clear();
  showMessages();
  await showList();
  log.scrollTop = log.scrollHeight;
}

/** Ends the answers of tabs that have gone. */
function endLost() {
  clearTimeout(endLost.timer);
  const run = state.runs.get(state.conversation.id);
  const others = [...state.nodes.values()].filter((node) => node.state === "running" && node !== run?.node);
  const isLost = (node) => Date.now() - (node.saved ?? 0) > LOST_MS;
  for (const node of others.filter(isLost)) node.state = "stopped";
  if (others.length) endLost.timer = setTimeout(showMessages, LOST_MS);
}

function showMessages() {
  endLost();
  const shown = path();
  const actions = {
    siblings: (node) => children(node.parent).map((each) => each.id),
    choose: (id) => chooseLeaf(newestLeaf(id)),
    regenerate: (node) => answer(node.parent),
    canGoOn: (node) => !children(node.id).length,
    goOn,
    canLeaveOut: (node) => told(path(node.parent)).filter(isUsers).length > 1,
    leaveOut: (node) => {
      state.conversation.leavesOut = true;
      answer(node.parent);
    },
    edit: (node, text) => say(text, node.parent),
  };
  for (const node of shown) {
    if (state.views.get(node.id)?.node !== node) state.views.set(node.id, new MessageView(node, actions, byId("sources").checked));
    else state.views.get(node.id).update();
  }
  const elements = shown.map((node) => state.views.get(node.id).element);
  byId("messages").replaceChildren(...(elements.length ? elements : [greeting()]));
  showRunning();
  showInsight();
}

function greeting() {
  return el(
    "div",
    { className: "greeting" },
    el("p", {}, "Ask something. The answer is the model's own, token for token; a small draft only makes it come sooner."),
    el("p", { className: "hint" }, "Press ? for the keys."),
  );
}

function showRunning() {
  const isRunning = state.runs.has(state.conversation.id);
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
}

function showInsight() {
  const node = lastAnswer();
  insight.show(node ? passesOf(node) : [], node?.figures);
}

function passesOf(node) {
  if (!state.passes.has(node.id)) state.passes.set(node.id, []);
  return state.passes.get(node.id);
}

function notice(text) {
  const box = byId("notice");
  box.textContent = text;
  clearTimeout(notice.timer);
  notice.timer = setTimeout(() => (box.textContent = ""), 8000);
}

async function chooseLeaf(leaf) {
  state.conversation.leaf = leaf;
  await store.saveConversation(state.conversation);
  showMessages();
}

async function remove(conversation) {
  if (!confirm(`Delete “${conversation.title || "New conversation"}”?`)) return;
  state.runs.get(conversation.id)?.controller.abort();
  await store.removeConversation(conversation.id);
  if (conversation.id === state.conversation.id) await open((await store.conversations())[0]?.id);
  else await showList();
}

// ---------------------------------------------------------------- asking

async function send(event) {
  event?.preventDefault();
  const field = byId("prompt");
  const text = field.value.trim();
  if ((!text && !state.files.length) || state.runs.has(state.conversation.id)) return;
  const content = [...state.files.map(asText), text].filter(Boolean).join("\n\n");
  field.value = "";
  state.files = [];
  showFiles();
  fit(field);
  await say(content, state.conversation.leaf);
}

/** A file in the prompt: its name, and its text behind a fence that the text does not contain. */
function asText({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `File ${JSON.stringify(name)}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** Add a person's message below `parent`, and ask for its answer. */
async function say(content, parent) {
  if (state.runs.has(state.conversation.id)) return;
  const node = store.newNode(state.conversation.id, parent, "user", content);
  state.nodes.set(node.id, node);
  state.conversation.title ||= content.replace(/\s+/g, " ").slice(0, MOST_TITLE);
  await store.saveNode(node);
  await answer(node.id);
}

/** Ask for a new answer to the message `parent`. */
async function answer(parent) {
  const { conversation } = state;
  if (state.runs.has(conversation.id)) return;
  const node = { ...store.newNode(conversation.id, parent, "assistant", ""), state: "running" };
  state.nodes.set(node.id, node);
  await ask(node, told(path(parent)));
}

/** Let an answer that was cut go on, in the same message. */
async function goOn(node) {
  if (state.runs.has(state.conversation.id)) return;
  const begun = { earlier: node.figures, numBegun: node.content.length };
  Object.assign(node, { state: "running", waiting: null, finish: null, error: null, isFull: false, ...begun });
  state.views.delete(node.id); // it has ended its text
  await ask(node, told(path(node.id)));
}

/** Ask for the text of an answer, or for more of it if the messages end with it. */
async function ask(node, messages) {
  const { conversation } = state;
  const run = { controller: new AbortController(), node, conversation };
  state.runs.set(conversation.id, run);
  conversation.leaf = node.id;
  conversation.updated = Date.now();
  await Promise.all([store.saveConversation(conversation), save(node)]);
  showMessages();
  showList();
  log.scrollTop = log.scrollHeight;
  await receive(run, messages);
}

/** Keeps an answer in the browser; a full store ends no answer. */
async function save(node) {
  try {
    await store.saveNode({ ...node, saved: Date.now() });
  } catch (error) {
    notice(`The browser cannot keep this answer: ${error.message}`);
  }
}

/** A message as the server has it. An answer that goes on has its thinking, which templates may show. */
const messageOf = ({ role, content, thought }, goesOn) => ({ role, content, ...(goesOn && thought ? { reasoning_content: thought } : {}) });

function requestOf(conversation, messages) {
  const goesOn = !isUsers(messages.at(-1));
  const system = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  const thinking = conversation.thinking ? { chat_template_kwargs: { enable_thinking: conversation.thinking === "on" } } : {};
  return {
    model: state.model ?? "any",
    messages: [...system, ...messages.map((node) => messageOf(node, goesOn && node === messages.at(-1)))],
    stream: true,
    offspec: { passes: true },
    ...conversation.sampling,
    ...thinking,
    ...(goesOn ? { continue_final_message: true } : {}),
  };
}

/** The events of an answer. Once a person wished so, the oldest turns are left out of a new one's full context. */
async function* eventsOf({ conversation, node, controller: { signal } }, messages) {
  const within = conversation.leavesOut && isUsers(messages.at(-1)) ? await withinContext(conversation, messages, signal) : messages;
  if (within.length < messages.length) {
    node.first = within[0].id;
    node.numLeftOut = messages.filter(isUsers).length - within.filter(isUsers).length;
  }
  yield* api.chat(requestOf(conversation, within), signal);
}

/** The messages that leave room for an answer, without the oldest turns if need be: by the rule of `offspec chat`. */
async function withinContext(conversation, messages, signal) {
  const tokensFrom = (first) => api.countTokens(requestOf(conversation, messages.slice(first)), signal);
  const all = await tokensFrom(0);
  const context = await api.contextOf(state.model);
  const spare = Math.min(conversation.sampling.max_tokens ?? MOST_SPARE, context * SPARE_SHARE);
  if (all + spare <= context) return messages;
  const turns = [...messages.keys()].filter((index) => index && isUsers(messages[index])); // where later ones begin
  let [low, high] = [0, turns.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((await tokensFrom(turns[middle])) + spare <= context * (1 - SPARE_SHARE)) high = middle;
    else low = middle + 1;
  }
  return messages.slice(turns[low] ?? 0);
}

/** Whether an answer ended because it filled the context. */
async function filledContext({ finish, figures }) {
  if (finish !== "length" || !figures) return false;
  return figures.num_prompt_tokens + figures.num_tokens >= (await api.contextOf(state.model));
}

async function receive(run, messages) {
  const { node } = run;
  const drawing = drawEachFrame(run);
  let saved = Date.now();
  try {
    for await (const event of eventsOf(run, messages)) {
      if (event.comment) node.waiting = event.comment === "running" ? "the model reads the prompt" : "waiting for other answers";
      else take(node, event.data);
      if (Date.now() - saved > SAVE_MS) {
        saved = Date.now();
        save(node);
      }
    }
    node.isFull = await filledContext(node).catch(() => false);
    node.state = "done";
  } catch (error) {
    node.state = error.name === "AbortError" ? "stopped" : "failed";
    if (node.state === "failed") node.error = error.message;
    node.isFull = error.code === "context_length_exceeded";
    if (error.status === 401) askKey();
    if (error.status === 0) setOnline(false);
  }
  cancelAnimationFrame(drawing.frame);
  state.runs.delete(run.conversation.id);
  await save(node);
  const view = state.views.get(node.id);
  view?.draw(true);
  view?.update();
  if (run.conversation.id === state.conversation.id) {
    showRunning();
    showInsight();
    follow(drawing);
  }
}

/** The figures of an answer's last request, with the tokens and passes of those before it. */
function withEarlier(figures, earlier) {
  if (!earlier) return figures;
  const [num_tokens, num_passes] = [earlier.num_tokens + figures.num_tokens, earlier.num_passes + figures.num_passes];
  return { ...figures, num_tokens, num_passes, num_prompt_tokens: figures.num_prompt_tokens - earlier.num_tokens };
}

/** Take an event of an answer into its node. */
function take(node, data) {
  const report = data.offspec;
  if (report) {
    const { pass, ...figures } = report;
    node.figures = withEarlier(figures, node.earlier);
    if (pass) {
      const passes = passesOf(node);
      passes.push({ ...pass, number: node.figures.num_passes });
      if (passes.length > MOST_PASSES) passes.splice(0, passes.length - MOST_PASSES);
      for (const { text, source } of pass.tokens) node.tokens.push([text, source]);
    }
  }
  node.finish = data.choices[0]?.finish_reason ?? node.finish;
  const delta = data.choices[0]?.delta;
  node.content += delta?.content ?? "";
  node.thought += delta?.reasoning_content ?? "";
}

/** Draws the answer once a frame, while it is shown; the person who is at the end stays there. */
function drawEachFrame(run) {
  const drawing = { frame: 0, follows: true, seen: "" };
  const draw = () => {
    drawing.frame = requestAnimationFrame(draw);
    const view = state.views.get(run.node.id);
    if (!view?.element.isConnected) return;
    const seen = `${run.node.content.length} ${run.node.thought.length} ${run.node.tokens.length} ${run.node.waiting}`;
    if (seen === drawing.seen) return;
    drawing.seen = seen;
    drawing.follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    view.draw();
    if (view.state.textContent || !run.node.content) view.update();
    showInsight();
    follow(drawing);
  };
  drawing.frame = requestAnimationFrame(draw);
  return drawing;
}

function follow(drawing) {
  if (drawing.follows) log.scrollTop = log.scrollHeight;
}

const stop = () => state.runs.get(state.conversation.id)?.controller.abort();

// ---------------------------------------------------------------- files

async function addFiles(list) {
  for (const file of list) {
    if (file.size > MOST_FILE_BYTES) {
      notice(`${file.name} is larger than ${MOST_FILE_BYTES >> 20} MiB.`);
      continue;
    }
    const text = await file.text();
    if (text.includes("\0") || text.includes("\ufffd")) notice(`${file.name} is not a text in UTF-8.`);
    else state.files.push({ name: file.name, text });
  }
  showFiles();
}

function showFiles() {
  byId("files").replaceChildren(
    ...state.files.map((file, index) =>
      el(
        "li",
        {},
        el("span", { dir: "auto" }, file.name),
        button("✕", () => (state.files.splice(index, 1), showFiles()), { "aria-label": `Remove ${file.name}` }),
      ),
    ),
  );
}

// ---------------------------------------------------------------- the server

async function connect() {
  try {
    showModels(await api.models());
    setOnline(true);
  } catch (error) {
    if (error.status === 401) askKey();
    else if (error.status === 0) setOnline(false);
    else notice(error.message);
  }
}

/** The model's name; of several models a choice, which the browser keeps. */
function showModels(models) {
  const names = models.map((model) => model.id);
  const kept = localStorage.getItem("offspec.model");
  state.defaults = new Map(models.map((model) => [model.id, model.sampling ?? {}]));
  const choice = byId("models");
  choice.replaceChildren(...names.map((name) => el("option", {}, name)));
  choice.value = names.includes(kept) ? kept : names[0];
  choice.hidden = names.length < 2;
  byId("model").hidden = names.length > 1;
  useModel();
}

function useModel() {
  state.model = byId("models").value;
  localStorage.setItem("offspec.model", state.model);
  byId("model").textContent = state.model;
  document.title = `${state.model} · offspec`;
}

function setOnline(isOnline) {
  const wasOnline = state.isOnline;
  state.isOnline = isOnline;
  byId("server").textContent = isOnline ? "" : "server away";
  if (!isOnline && wasOnline) waitForServer();
}

async function waitForServer() {
  while (!state.isOnline) {
    await new Promise((resolve) => setTimeout(resolve, HEALTH_MS));
    if (await api.isHealthy()) {
      setOnline(true);
      connect();
    }
  }
}

function askKey() {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  dialog.showModal();
  dialog.onclose = () => {
    const key = byId("asked-key").value.trim();
    byId("asked-key").value = "";
    if (!key) return;
    api.setApiKey(key, byId("keep-asked-key").checked);
    connect();
  };
}

// ---------------------------------------------------------------- settings

function makeSampling() {
  byId("sampling").append(
    ...SAMPLING.map(([name, title, min, max, step]) =>
      el("label", {}, title, el("input", { id: `s-${name}`, type: "number", min, max, step, placeholder: "default" })),
    ),
  );
}

function openSettings() {
  const { conversation } = state;
  byId("system").value = conversation.system;
  byId("thinking").value = conversation.thinking;
  byId("theme").value = localStorage.getItem("offspec.theme") ?? "";
  byId("key").value = api.apiKey();
  byId("keep-key").checked = api.isKeyKept();
  for (const [name] of SAMPLING) byId(`s-${name}`).value = conversation.sampling[name] ?? "";
  byId("settings").showModal();
  showDefaults();
}

/** The defaults of the loaded model, in the empty fields. */
async function showDefaults() {
  await connect();
  const defaults = state.defaults.get(state.model) ?? {};
  for (const [name] of SAMPLING) byId(`s-${name}`).placeholder = defaults[name] ?? "default";
}

async function closeSettings() {
  const { conversation } = state;
  conversation.system = byId("system").value.trim();
  conversation.thinking = byId("thinking").value;
  conversation.sampling = {};
  for (const [name] of SAMPLING) {
    const { value, validity } = byId(`s-${name}`);
    if (value !== "" && validity.valid) conversation.sampling[name] = Number(value);
  }
  localStorage.setItem("offspec.theme", byId("theme").value);
  showTheme();
  if (byId("key").value.trim() !== api.apiKey() || byId("keep-key").checked !== api.isKeyKept()) {
    api.setApiKey(byId("key").value.trim(), byId("keep-key").checked);
    connect();
  }
  if (conversation.leaf) await store.saveConversation(conversation);
}

function showTheme() {
  document.documentElement.dataset.theme = localStorage.getItem("offspec.theme") ?? "";
}

function showPanel(isShown) {
  byId("insight").hidden = !isShown;
  byId("insight-button").setAttribute("aria-expanded", String(isShown));
  localStorage.setItem("offspec.passes", isShown ? "1" : "");
  insight.render();
}

function showSources() {
  localStorage.setItem("offspec.sources", byId("sources").checked ? "1" : "");
  for (const view of state.views.values()) view.setSources(byId("sources").checked);
}

// ---------------------------------------------------------------- keys

function fit(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, innerHeight / 3)}px`;
}

async function toNeighbour(by) {
  const all = await store.conversations();
  const at = all.findIndex((each) => each.id === state.conversation.id);
  const next = all[at < 0 ? 0 : at + by];
  if (next) await open(next.id);
}

function newOne() {
  open(null).then(() => byId("prompt").focus());
}

const ALT = {
  KeyN: newOne,
  KeyR: () => lastAnswer() && answer(lastAnswer().parent),
  KeyE: () => state.views.get(path().findLast((node) => node.role === "user")?.id)?.element.querySelectorAll(".foot button").forEach((each) => each.textContent === "Edit" && each.click()),
  KeyI: () => showPanel(byId("insight").hidden),
  KeyC: () => byId("sources").click(),
  KeyS: openSettings,
  ArrowUp: () => toNeighbour(-1),
  ArrowDown: () => toNeighbour(1),
};

function onKey(event) {
  if (event.altKey && !event.ctrlKey && !event.metaKey && ALT[event.code]) {
    event.preventDefault();
    ALT[event.code]();
    return;
  }
  if (event.key === "Escape" && !document.querySelector("dialog[open]") && !event.target.closest("#sidebar")) stop();
  if (event.target.matches("textarea, input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const plain = { "/": () => byId("prompt").focus(), "?": () => byId("keys").showModal(), "[": () => insight.step(-1), "]": () => insight.step(1) };
  if (plain[event.key]) {
    event.preventDefault();
    plain[event.key]();
  }
}

function listen() {
  const field = byId("prompt");
  field.addEventListener("input", () => fit(field));
  field.addEventListener("keydown", (event) => {
    if (isSending(event)) send(event);
  });
  const clicks = {
    new: newOne,
    stop,
    help: () => byId("keys").showModal(),
    "settings-button": openSettings,
    "insight-button": () => showPanel(byId("insight").hidden),
    "open-sidebar": () => document.body.classList.add("shows-list"),
    "close-sidebar": () => document.body.classList.remove("shows-list"),
    attach: () => byId("file").click(),
    import: () => byId("import-file").click(),
    export: async () => download("offspec-conversations.json", await store.exported()),
  };
  for (const [id, listener] of Object.entries(clicks)) byId(id).addEventListener("click", listener);
  byId("composer").addEventListener("submit", send);
  byId("settings").addEventListener("close", closeSettings);
  byId("sources").addEventListener("change", showSources);
  byId("models").addEventListener("change", useModel);
  byId("search").addEventListener("input", showList);
  byId("file").addEventListener("change", async (event) => {
    await addFiles(event.target.files);
    event.target.value = "";
  });
  byId("import-file").addEventListener("change", importFile);
  document.addEventListener("keydown", onKey);
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    addFiles(event.dataTransfer.files);
  });
  addEventListener("pagehide", () => state.runs.forEach(({ node }) => store.keepAtOnce({ ...node, state: "stopped" })));
  store.onOtherTab(onOtherTab);
}

async function importFile(event) {
  try {
    notice(`${await store.imported(await event.target.files[0].text())} conversations imported.`);
    await showList();
  } catch (error) {
    notice(error.message);
  }
  event.target.value = "";
}

/** Another tab wrote: show its messages, unless an answer of this tab runs in the same conversation. */
async function onOtherTab({ conversation }) {
  clearTimeout(onOtherTab.timer);
  onOtherTab.timer = setTimeout(async () => {
    await showList();
    if (conversation !== state.conversation.id || state.runs.has(conversation)) return;
    for (const node of await store.nodesOf(conversation)) {
      const earlier = state.nodes.get(node.id);
      if (!earlier || earlier.state === "running" || earlier.content !== node.content) state.nodes.set(node.id, node);
    }
    const stored = (await store.conversations()).find((each) => each.id === conversation);
    if (stored) state.conversation = stored;
    showMessages();
  }, 150);
}

async function begin() {
  showTheme();
  makeSampling();
  byId("key-list").append(...KEYS.flatMap(([keys, meaning]) => [el("dt", {}, keys), el("dd", {}, meaning)]));
  byId("sources").checked = localStorage.getItem("offspec.sources") === "1";
  if (!(await store.openStore())) notice("This browser keeps no data; conversations end with the tab.");
  listen();
  connect();
  await open(sessionStorage.getItem("offspec.open") ?? (await store.conversations())[0]?.id);
  showPanel(localStorage.getItem("offspec.passes") === "1");
  byId("prompt").focus();
}

begin();
