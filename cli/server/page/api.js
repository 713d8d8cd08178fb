// The server's API: requests, streams of events, errors in one line.

export class ApiError extends Error {
  /** status: 0 if the server could not be reached. code: the server's name of the error, if it has one. */
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const KEY = "offspec.key";
export const GONE = "The server cannot be reached.";

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
}

export function setApiKey(key, isKept) {
  sessionStorage.setItem(KEY, key);
  if (isKept && key) localStorage.setItem(KEY, key);
  else localStorage.removeItem(KEY);
}

export const isKeyKept = () => localStorage.getItem(KEY) !== null;

async function request(path, options = {}) {
  const key = apiKey();
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, GONE);
  }
  if (response.ok) return response;
  let error = { message: `The server answered with status ${response.status}.` };
  try {
    error = (await response.json()).error ?? error;
  } catch {} // not JSON: a proxy's page
  throw new ApiError(response.status, error.message, error.code);
}

export async function models() {
  return (await (await request("/v1/models")).json()).data;
}

/** Tokens that the context of a model has. */
export const contextOf = async (name) => (await models()).find(({ id }) => id === name)?.context_length;

/** Tokens of a chat; Infinity for one that is far too long to count. */
export async function countTokens(body, signal) {
  try {
    const response = await request("/v1/messages/count_tokens", { method: "POST", body: JSON.stringify(body), signal });
    return (await response.json()).input_tokens;
  } catch (error) {
    if (error.status === 400) return Infinity;
    throw error;
  }
}

export async function isHealthy() {
  try {
    return (await fetch("/health", { cache: "no-store" })).ok;
  } catch {
    return false;
  }
}

/** The events of a chat's answer: {comment} or {data}. Raises ApiError; AbortError after `signal`. */
export async function* chat(body, signal) {
  const response = await request("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The connection to the server ended before the answer did.");
    }
    if (part.done) throw new ApiError(0, "The server ended before the answer did.");
    held += part.value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (event.startsWith(":")) {
        yield { comment: event.slice(1).trim() };
        continue;
      }
      const text = event.replace(/^(event: error\n)?data: /, "");
      if (text === "[DONE]") return;
      const data = JSON.parse(text);
      if (data.error) throw new ApiError(500, data.error.message, data.error.code);
      yield { data };
    }
  }
}
