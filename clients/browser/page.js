/** The page: what a person chooses, and what happens. All else is in worker.js. */

import { adapter } from "./adapter.js";
import { hex } from "./bytes.js";
import { certificate, fromPem } from "./certificate.js";
import { makePair, publicLine } from "./keys.js";
import { LIMITS } from "./recipe.js";
import { WEIGHTS } from "./model.js";
import { keep, kept } from "./store.js";
import { readRows } from "./texts.js";

/** @typedef {Record<string, any>} Any */

const MODEL = ["config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS];
const WORDS = {
  heldOut: "Categories that may be left out, one a line", separators: "Texts between prompt and response, as JSON",
  leastExamples: "Fewest rows", leastBatch: "Fewest rows of a batch", mostBatch: "Most rows of a batch",
  leastSteps: "Fewest steps of a round", mostSteps: "Most steps of a round", mostProbes: "Most directions of a step",
  mostNumbers: "Most numbers of an answer", mostRounds: "Most rounds of a run", mostTokens: "Most tokens of a row",
  weightsPerDirection: "Fewest weights for each direction", mostSeconds: "Most seconds of a round",
  mostViews: "Most different questions", secretBatches: "Choose batches by a secret of this browser",
};

/** @template {HTMLElement} [T=HTMLInputElement] @param {string} id */
const at = (id) => /** @type {T} */ (document.getElementById(id));
const bytes = (/** @type {number} */ count) => `${count.toLocaleString("en")} ${count === 1 ? "byte" : "bytes"}`;

/** What the person has chosen. */
const chosen = {
  /** @type {import("./keys.js").Pair | undefined} */ pair: undefined,
  /** @type {import("./bytes.js").Bytes | undefined} */ authority: undefined,
  /** @type {File | undefined} */ rows: undefined,
  /** @type {Record<string, string | File>} */ model: {},
};
/** @type {Worker | undefined} */
let worker;
/** @type {WakeLockSentinel | undefined} */
let awake;
/** @type {import("./recipe.js").Recipe | undefined} */
let recipe;
const limits = structuredClone(LIMITS);

function showMissing() {
  const missing = [
    !chosen.pair && "a key", !chosen.authority && "the certificate", !chosen.rows && "your rows",
    MODEL.some((name) => !chosen.model[name]) && "the model",
  ].filter(Boolean);
  at("missing").textContent = missing.length && !worker ? `Missing: ${missing.join(", ")}.` : "";
  at("start").disabled = missing.length > 0 || worker !== undefined;
  at("stop").disabled = worker === undefined;
}

async function showKey() {
  const { pair } = chosen;
  if (!pair) return;
  const line = publicLine(pair.public);
  at("no-key").hidden = true;
  at("key").hidden = false;
  at("public-line").textContent = line;
  at("fingerprint").textContent = hex(pair.public.fingerprint).match(/.{8}/g)?.join(":") ?? "";
  at("save-key").setAttribute("href", URL.createObjectURL(new Blob([`${line}\n`])));
}

/** Show what became of a chosen file, in words. @param {string} id @param {() => Promise<string>} take */
async function shown(id, take) {
  const state = at(`${id}-state`);
  try {
    state.textContent = await take();
    delete state.dataset.kind;
  } catch (error) {
    state.textContent = error instanceof Error ? error.message : String(error);
    state.dataset.kind = "failed";
  }
  showMissing();
}

/** @param {import("./bytes.js").Bytes} der */
async function takeAuthority(der) {
  chosen.authority = undefined;
  const { end } = await certificate(der).catch(() => {
    throw new Error("the certificate can't be read; choose the ca.pem that the federation's owner gave you");
  });
  chosen.authority = der;
  await keep("authority", der);
  return `Good until ${new Date(end).toLocaleDateString()}.`;
}

/** @param {File} file */
async function takeRows(file) {
  chosen.rows = undefined;
  const rows = readRows(file.name, await file.text());
  chosen.rows = file;
  return `${rows.length.toLocaleString("en")} rows.`;
}

async function takeModel() {
  const offered = await fetch("model/files.json").then((answer) => (answer.ok ? answer.json() : null), () => null);
  if (!offered) {
    at("model-files").hidden = false;
    return "The server does not give its files: choose them here.";
  }
  chosen.model = Object.fromEntries(
    MODEL.map((name) => [name, new URL(`model/${name}?${offered[name].version}`, location.href).href]),
  );
  const size = Object.values(offered).reduce((sum, of) => sum + of.size, 0);
  return `It comes from the server: ${bytes(size)}, once. A wrong one is noticed by its digest.`;
}

function showLimits() {
  for (const [name, value] of Object.entries(limits)) {
    const label = document.createElement("label");
    const list = name === "heldOut";
    const input = document.createElement(list ? "textarea" : "input");
    input.id = `limit-${name}`;
    input.setAttribute("type", typeof value === "boolean" ? "checkbox" : typeof value === "number" ? "number" : "text");
    if (typeof value === "boolean") /** @type {HTMLInputElement} */ (input).checked = value;
    else input.value = list ? /** @type {string[]} */ (value).join("\n") : JSON.stringify(value);
    label.append(WORDS[/** @type {keyof WORDS} */ (name)], input);
    at("limits").append(label);
  }
}

/** The limits as they stand on the page. */
function readLimits() {
  for (const [name, value] of Object.entries(limits)) {
    const input = at(`limit-${name}`);
    const given = typeof value === "boolean" ? input.checked
      : name === "heldOut" ? input.value.split("\n").filter(Boolean) : JSON.parse(input.value);
    if (typeof given !== typeof value) throw new Error(`${WORDS[/** @type {keyof WORDS} */ (name)]}: ${input.value}`);
    Object.assign(limits, { [name]: given });
  }
}

/** @param {string} text */
function say(text, kind = "note") {
  const line = document.createElement("li");
  line.dataset.kind = kind;
  line.textContent = `${new Date().toLocaleTimeString()}  ${text}`;
  at("log").append(line);
  at("state").textContent = text;
}

/** A text that is shown at a click. @param {string} title @param {string} kind of the element @param {string} text */
function folded(title, kind, text) {
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = title;
  const shown = document.createElement(kind);
  shown.textContent = text;
  details.append(summary, shown);
  return details;
}

/** What servers have asked of the rows, with this browser, since it has a key. */
async function showAsked() {
  /** @type {{ time: number, text: string }[]} */
  const asked = (await kept("asked")) ?? [];
  at("asked").replaceChildren(...asked.map(({ time, text }) => {
    const item = document.createElement("li");
    item.append(folded(new Date(time).toLocaleString(), "pre", text));
    return item;
  }));
}

/** @param {number} share */
function progress(share) {
  /** @type {HTMLProgressElement} */ (document.getElementById("progress")).value = share;
}

/** A row of the table of rounds. @param {Any} of */
function showRound({ round, loss, scalars, upload }) {
  const row = document.createElement("tr");
  row.dataset.round = round;
  const details = folded("show", "code", hex(upload));
  const count = scalars.length.toLocaleString("en");
  const cells = [String(round + 1), loss.toFixed(4), count, bytes(upload.length), details];
  row.append(...cells.map((content) => {
    const cell = document.createElement("td");
    cell.append(content);
    return cell;
  }));
  at("rounds").append(row);
}

/** @param {Any} of */
async function showTuned({ round, digest, c, base, key }) {
  at("tuned").hidden = false;
  at("digest").textContent = digest;
  at("size").textContent = c.length.toLocaleString("en");
  const about = { model: recipe?.model ?? "", dtype: "float32", template: recipe?.template ?? "",
    separator: recipe?.separator ?? "", algorithm: "fedkseed", rounds: round, seed: recipe?.seed ?? 0 };
  const file = await adapter(c, { key, base, tuned: digest, patterns: ["*"], provenance: about });
  at("adapter").setAttribute("href", URL.createObjectURL(new Blob([file])));
  say(`The tuned model of ${round} rounds has come.`);
}

/** @type {Record<string, (what: any) => void>} */
const events = {
  connected: ({ number }) => say(`Connected as client ${number}. Waiting for a round.`),
  waiting: ({ why }) => say(`${why}; trying again.`),
  loading: ({ what, share }) => {
    at("state").textContent = `Loading ${what}`;
    progress(share);
  },
  ready: ({ examples, weights, recipe: read }) => {
    recipe = read;
    at("examples").textContent = examples.toLocaleString("en");
    showAsked();
    say(`${weights.toLocaleString("en")} weights are loaded, and ${examples} rows will be used.`);
  },
  step: ({ round, rounds, step, steps }) => {
    at("state").textContent = `Round ${round + 1} of ${rounds}: step ${step + 1} of ${steps}`;
    progress(step / steps);
  },
  trained: (what) => {
    progress(1);
    showRound(what);
  },
  sent: ({ taken, reply }) => say(taken ? `Sent ${bytes(reply.length)}.` : "The answer came too late for its round."),
  refused: ({ code, why }) => {
    say(`Not answered (${code}): ${why}`, "refused");
    showAsked();
  },
  traffic: ({ sent, received }) => {
    at("sent").textContent = bytes(sent);
    at("received").textContent = bytes(received);
  },
  tuned: showTuned,
  ended: () => stop("The run has ended."),
  failed: ({ why }) => stop(`This page has failed: ${why}`),
};

function start() {
  try {
    readLimits();
  } catch (error) {
    at("missing").textContent = `Your limits can't be read: ${error instanceof Error ? error.message : error}`;
    return;
  }
  at("work").hidden = false;
  worker = new Worker("worker.js", { type: "module" });
  worker.addEventListener("message", ({ data: { kind, what } }) => events[kind](what));
  worker.addEventListener("error", ({ message }) => stop(`This page has failed: ${message || "its worker ended"}`));
  worker.postMessage({ ...chosen, limits, url: location.origin });
  say("Connecting.");
  showMissing();
  // A telephone that sleeps computes nothing.
  navigator.wakeLock?.request("screen").then((lock) => (awake = lock), () => 0);
}

/** End the work at once: what is half done is not sent. */
function stop(text = "Stopped.") {
  worker?.terminate();
  worker = undefined;
  awake?.release();
  say(text);
  showMissing();
}

at("make-key").addEventListener("click", async () => {
  chosen.pair = await makePair();
  await keep("pair", chosen.pair);
  await navigator.storage?.persist?.(); // else a browser that needs room may forget the key
  await showKey();
  showMissing();
});
at("copy-key").addEventListener("click", () => navigator.clipboard.writeText(at("public-line").textContent ?? ""));
at("authority").addEventListener("change", () => shown("authority", async () => {
  const [file] = at("authority").files ?? [];
  return file ? takeAuthority(fromPem(await file.text())) : "";
}));
at("rows").addEventListener("change", () => shown("rows", async () => {
  const [file] = at("rows").files ?? [];
  return file ? takeRows(file) : "";
}));
at("model").addEventListener("change", () => shown("model", async () => {
  const files = [...(at("model").files ?? [])];
  const weights = files.filter(({ name }) => name === "model.safetensors" || name.endsWith(".gguf"));
  chosen.model = Object.fromEntries(files.map((file) => [weights.includes(file) ? WEIGHTS : file.name, file]));
  if (weights.length > 1) throw new Error(`${weights.map(({ name }) => name).join(" or ")}: choose one of them`);
  const missing = MODEL.filter((name) => !chosen.model[name])
    .map((name) => (name === WEIGHTS ? "model.safetensors or a GGUF file" : name));
  if (missing.length) throw new Error(`${missing.join(", ")} ${missing.length > 1 ? "are" : "is"} missing`);
  return "All four files are here.";
}));
at("start").addEventListener("click", start);
at("stop").addEventListener("click", () => stop());

showLimits();
chosen.pair = await kept("pair");
await showKey();
const authority = await kept("authority");
if (authority) await shown("authority", () => takeAuthority(authority));
await shown("model", takeModel);
document.body.dataset.ready = "yes";
