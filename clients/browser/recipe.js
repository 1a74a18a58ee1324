/** A recipe, as a client reads it (docs/session.md), and the limits of its owner. */

import { REFUSED, Refusal } from "./task.js";
import { TEMPLATES } from "./texts.js";
import { parse } from "./toml.js";

/** All keys of a recipe: another one is refused. tests/clients compares them with fedkseed init --keys. */
export const KEYS = {
  "": "seed save model data clients directions training derivatives asynchronous peft evaluation network trust secure "
    + "privacy report",
  model: "name dtype storage device digest tokenizer_digest losses tuned last_layers head mode",
  data: "source format protocol layout columns strict leave_out_faulty template separator date max_tokens held_out seed",
  clients: "split count cohort active draw alpha min_examples backpropagating slow_share slow_factor at_once threads",
  directions: "family size shared basis basis_digest",
  training: "algorithm rounds steps epochs probes batch_size lr eps schedule clip server_lr server wire objective",
  derivatives: "optimizer lr steps schedule checkpointing",
  asynchronous: "buffer concurrency staleness_power max_staleness",
  peft: "rank alpha vector targets virtual_tokens",
  evaluation: "every examples validation best patience clients stop_when_diverged max_tokens metrics generated rouge "
    + "max_new_tokens batch_size sets",
  network: "minimum deadline grace attempts patience required shards",
  trust: "rule hostile agreement most_examples warmup guard receipts",
  secure: "norm bits neighbours",
  privacy: "unit epsilon delta norm colluding noise times simulated",
  report: "to project",
};

/** What an owner allows, with the defaults of docs/operations.md. @typedef {typeof LIMITS} Limits */
export const LIMITS = {
  heldOut: ["summarization"],
  separators: ["\n", ""],
  leastExamples: 10,
  leastBatch: 4,
  mostBatch: 64,
  leastSteps: 4,
  mostSteps: 10_000,
  mostProbes: 256,
  mostNumbers: 16_384,
  mostRounds: 1000,
  mostTokens: 2048,
  weightsPerDirection: 100,
  mostSeconds: 3600,
  mostViews: 3,
  /** Whether batches are drawn by a secret of this browser; else by the recipe's seed, as in a run of one process. */
  secretBatches: true,
};

/** What a client needs of a recipe.
 * @typedef {{
 *   seed: bigint, model: string, modelDigest: string | null, heldOut: string[], template: string, separator: string,
 *   maxTokens: number, cut: boolean, count: number, size: number, shared: boolean, rounds: number, steps: number,
 *   probes: number, batch: number, lr: number, eps: number, schedule: string, clip: number,
 *   wire: import("./messages.js").Wire }} Recipe */

/** @param {string} why */
const unable = (why) => new Refusal(REFUSED, "recipe", why);

/** @typedef {Record<string, any>} Any */

/** The recipe in a text. Throws a Refusal where it can't be read, or this client can't follow it. @param {string} text
 * @returns {Recipe} */
export function readRecipe(text) {
  /** @type {Any} */
  let found;
  try {
    found = parse(text);
  } catch (error) {
    throw unable(`the recipe can't be read: ${error instanceof Error ? error.message : error}`);
  }
  for (const [name, keys] of Object.entries(KEYS)) {
    const table = name ? (found[name] ?? {}) : found;
    const strange = Object.keys(table).find((key) => !keys.split(" ").includes(key));
    if (typeof table !== "object" || strange) throw unable(`[${name}] ${strange ?? ""}: this page knows no such key`);
  }
  const { model = {}, clients = {}, evaluation = {} } = found;
  const data = { template: "paper", separator: "\n", max_tokens: 1024, held_out: "summarization", ...found.data };
  const directions = { family: "hadamard", size: 4096, ...found.directions };
  const training = {
    algorithm: "fedkseed", rounds: 40, steps: 200, probes: 1, batch_size: 1, lr: 3e-7, eps: 5e-4, schedule: "constant",
    clip: Infinity, wire: "compact", objective: "loss", ...found.training,
  };
  const only = (/** @type {string} */ key, /** @type {unknown} */ got, /** @type {unknown[]} */ most) => {
    if (!most.includes(got)) {
      const known = most.map((one) => JSON.stringify(one)).join(", ");
      throw unable(`${key} = ${JSON.stringify(got)}: a client in a browser can do ${known}`);
    }
  };
  const asked = ["secure", "privacy", "asynchronous"].find((table) => table in found);
  if (asked) throw unable(`[${asked}]: a client in a browser can't do that`);
  only("[training] algorithm", training.algorithm, ["fedkseed", "fedkseed-pro"]);
  only("[training] objective", training.objective, ["loss"]);
  only("[training] schedule", training.schedule, ["constant", "linear", "cosine"]);
  only("[training] wire", training.wire, ["exact", "compact", "sign"]);
  only("[directions] family", directions.family, ["hadamard"]);
  only("[model] dtype", model.dtype ?? "float32", ["float32"]);
  only("[model] storage", model.storage ?? "dense", ["dense", "as stored"]);
  only("[model] tuned", model.tuned ?? null, [null]);
  only("[clients] split", clients.split, ["files"]);
  only("[data] template", data.template, Object.keys(TEMPLATES));
  only("[data] protocol", data.protocol ?? "paper", ["paper", "official-code"]);
  only("[data] held_out", typeof data.held_out, ["string"]);
  only("[data] separator", typeof data.separator, ["string"]);
  const sets = Array.isArray(evaluation.sets) ? evaluation.sets : [];
  if (sets.some((/** @type {Any} */ set) => "clients" in set)) {
    throw unable("[evaluation.sets] clients: rows that are kept back are the clients' own matter");
  }
  const whole = (/** @type {string} */ key, /** @type {unknown} */ got) => {
    if (!Number.isSafeInteger(got) || Number(got) < 1) throw unable(`${key} = ${got}: a whole number from 1 on`);
    return Number(got);
  };
  const above = (/** @type {string} */ key, /** @type {unknown} */ got) => {
    if (typeof got !== "number" || !(got > 0)) throw unable(`${key} = ${got}: a number above 0`);
    return got;
  };
  const size = whole("[directions] size", directions.size);
  if (size & (size - 1) || size < 4 || size > 2 ** 20) throw unable(`[directions] size = ${size}: a power of two`);
  return {
    seed: BigInt(found.seed ?? 0), model: String(model.name), modelDigest: model.digest ?? null,
    heldOut: [data.held_out, ...sets.flatMap((/** @type {Any} */ set) => set.held_out ?? [])],
    template: data.template, separator: data.separator, maxTokens: whole("[data] max_tokens", data.max_tokens),
    cut: data.protocol === "official-code", count: whole("[clients] count", clients.count),
    size, shared: directions.shared === true,
    rounds: whole("[training] rounds", training.rounds), steps: whole("[training] steps", training.steps),
    probes: whole("[training] probes", training.probes), batch: whole("[training] batch_size", training.batch_size),
    lr: above("[training] lr", training.lr), eps: above("[training] eps", training.eps),
    schedule: training.schedule, clip: above("[training] clip", training.clip),
    wire: training.wire,
  };
}

/** Refuse a recipe that asks for more than its owner allows. @param {Recipe} recipe @param {Limits} limits */
export function requireAllowed(recipe, limits) {
  /** @type {[string, boolean][]} */
  const checks = [
    [`rows of ${recipe.heldOut} are held out`, recipe.heldOut.every((one) => limits.heldOut.includes(one))],
    ["that text stands between prompt and response", limits.separators.includes(recipe.separator)],
    [`examples have up to ${recipe.maxTokens} tokens`, recipe.maxTokens <= limits.mostTokens],
    [`a batch has ${recipe.batch} examples`, limits.leastBatch <= recipe.batch && recipe.batch <= limits.mostBatch],
    [`a round has ${recipe.steps} steps`, limits.leastSteps <= recipe.steps && recipe.steps <= limits.mostSteps],
    [`a step has ${recipe.probes} directions`, recipe.probes <= limits.mostProbes],
    [`an answer has ${recipe.steps * recipe.probes} numbers`, recipe.steps * recipe.probes <= limits.mostNumbers],
    [`a run has ${recipe.rounds} rounds`, recipe.rounds <= limits.mostRounds],
  ];
  const beyond = checks.find(([, allowed]) => !allowed);
  if (beyond) throw new Refusal(REFUSED, "policy", `your limits do not allow that ${beyond[0]}`);
}

/** What decides which questions are asked of the rows: two choices that differ by one row show what it adds.
 * @param {Recipe} recipe */
export function choices(recipe) {
  const { heldOut, template, separator, maxTokens, cut, seed, size, shared } = recipe;
  return JSON.stringify([heldOut, template, separator, maxTokens, cut, String(seed), size, shared]);
}

/** The learning rate of a round. @param {Recipe} recipe @param {number} round */
export function rateOf({ schedule, lr, rounds }, round) {
  const x = round / rounds;
  const factors = { constant: 1, linear: 1 - x, cosine: (1 + Math.cos(Math.PI * x)) / 2 };
  return lr * Math.max(factors[/** @type {keyof typeof factors} */ (schedule)], 1e-6);
}
