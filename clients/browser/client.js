/** A client: what it answers to a task (docs/session.md). It knows nothing of connections. */

import { hex, same, sha256 } from "./bytes.js";
import { certificate as readCertificate, isTrusted } from "./certificate.js";
import { directionsOf, batchesOf, Generator } from "./draws.js";
import { answerStatement, sign, taskStatement, verify } from "./keys.js";
import { Llama } from "./llama.js";
import { isBound, lack, readBroadcast, restored, upload } from "./messages.js";
import { readWeights, WEIGHTS } from "./model.js";
import { choices, rateOf, readRecipe, requireAllowed } from "./recipe.js";
import { train } from "./steps.js";
import { answer, broken, FAILED, follow, readTask, Refusal, REFUSED, UNPREPARED } from "./task.js";
import { examples, readRows } from "./texts.js";
import { Tokenizer } from "./tokenizer.js";

/** @typedef {import("./bytes.js").Bytes} Bytes */
/** @typedef {import("./task.js").Task} Task */
/** @typedef {import("./task.js").Log} Log */
/** @typedef {{ kept: (name: string) => Promise<any>, keep: (name: string, value: unknown) => Promise<unknown>
 * }} Store */
/** @typedef {(kind: string, what: any) => void} Tell */
/** @typedef {{
 *   pair: import("./keys.js").Pair, authority: import("./certificate.js").Certificate, store: Store,
 *   audience: Bytes, dialled: string,
 *   folder: import("./model.js").Folder, rows: File, limits: import("./recipe.js").Limits, tell: Tell }} Owner */
/** @typedef {{ recipe: import("./recipe.js").Recipe, key: bigint, base: string, model: Llama,
 *   examples: import("./texts.js").Example[] }} Prepared what a recipe asks for, loaded */

const MOST_RUNS = 256;
const FAMILY = 2; // hadamard
const EVERYBODY = 0xffffffff; // in place of a client's number, where directions are shared

/** A task whose end was not waited for: there is no reply. */
export class GivenUp extends Error {}

export class Client {
  /** @param {Owner} owner */
  constructor(owner) {
    this.owner = owner;
    /** @type {Map<string, bigint>} nonce -> issued */
    this.issued = new Map();
    /** @type {import("./certificate.js").Certificate | null} */
    this.certificate = null;
    /** @type {Prepared | null} */
    this.prepared = null;
    this.digest = new Uint8Array(0);
    /** @type {Bytes | null} the broadcast to which a difference refers */
    this.kept = null;
    /** @type {{ asked: string, reply: Bytes } | null} */
    this.last = null;
  }

  /** The reply to a whole task. @param {Bytes} data @param {AbortSignal} stop
   *
   * Throws GivenUp where nobody waits for it any more. */
  async reply(data, stop) {
    try {
      return await this.#answered(data, stop);
    } catch (error) {
      if (error instanceof GivenUp) throw error;
      const refusal = error instanceof Refusal ? error : new Refusal(FAILED, "error", String(error));
      if (refusal.status !== UNPREPARED) this.owner.tell("refused", { code: refusal.code, why: refusal.message });
      return refusal.reply;
    }
  }

  /** @param {Bytes} data @param {AbortSignal} stop */
  async #answered(data, stop) {
    const begun = performance.now();
    const task = await readTask(data);
    await this.#requireSigned(task);
    const log = await this.#followed(task);
    if (task.recipe.length && !same(task.digest, this.digest)) await this.#prepare(task);
    const { prepared } = this;
    if (!prepared || !same(task.digest, this.digest)) throw new Refusal(UNPREPARED, "", "there is no recipe yet");
    const parts = [task.nonce, task.head, task.message].map(hex);
    const asked = [...parts, task.client, task.keep].join(" ");
    if (this.last?.asked === asked) return this.last.reply;
    const seconds = Math.min(task.seconds, this.owner.limits.mostSeconds);
    const late = () => {
      if (stop.aborted || performance.now() > begun + 1000 * seconds) throw new GivenUp("nobody waits for the answer");
    };
    const whole = task.keep ? task.message : await restored(task.message, this.kept);
    let sent = new Uint8Array(0);
    if (task.keep) await this.#keep(task, log, prepared);
    else if (whole) sent = await this.#trained(task, log, prepared, whole, late);
    else sent = lack(task.message, task.client);
    const statement = await answerStatement(this.owner.audience, task, whole ?? task.message, sent);
    const reply = answer(await sign(this.owner.pair.private, statement), sent);
    this.last = { asked, reply };
    return reply;
  }

  /** @param {Task} task */
  async #requireSigned(task) {
    const { audience, pair, authority } = this.owner;
    if (task.signature.every((byte) => byte === 0)) throw broken("a task without a signature");
    let certificate = this.certificate;
    if (task.certificate.length) {
      certificate = await readCertificate(task.certificate).catch(() => {
        throw broken("the server's certificate can't be read");
      });
      if (!(await isTrusted(certificate, authority, Date.now()))) {
        throw broken("the server's certificate is not one of the authority in your ca.pem, or not valid now");
      }
    }
    if (!certificate) throw new Refusal(UNPREPARED, "", "there is no certificate of the server yet");
    const statement = await taskStatement(audience, task.whole, pair.public.fingerprint);
    if (!(await verify(certificate.key, statement, task.signature))) {
      throw broken("a task that the server has not signed for this client");
    }
    if (task.issued <= (this.issued.get(hex(task.nonce)) ?? 0n)) throw new Refusal(FAILED, "task", "an old task");
    this.certificate = certificate;
    this.issued.set(hex(task.nonce), task.issued);
  }

  /** The log of the task's run, which is on disk before anything else is done. @param {Task} task */
  async #followed(task) {
    const { store } = this.owner;
    /** @type {Map<string, Log>} */
    const logs = (await store.kept("logs")) ?? new Map();
    const name = hex(task.nonce);
    const known = logs.get(name);
    if (!known && logs.size >= MOST_RUNS) throw broken(`a run beyond the ${MOST_RUNS} that are known here`);
    if (known && (known.client !== task.client || !same(known.recipe, task.digest))) {
      throw broken("another number or recipe than in this run before");
    }
    const log = await follow(task, known);
    if (log.done > (known?.done ?? -1)) await store.keep("logs", logs.set(name, log));
    return log;
  }

  /** Take over a recipe: read it, ask the owner's limits, load the model and the rows. @param {Task} task */
  async #prepare(task) {
    const { owner } = this;
    [this.prepared, this.digest, this.kept, this.last] = [null, new Uint8Array(0), null, null];
    const text = new TextDecoder().decode(task.recipe);
    const { tell, limits, folder } = owner;
    await this.#note(text);
    const recipe = readRecipe(text);
    requireAllowed(recipe, limits);
    await this.#look(recipe);
    const refused = (/** @type {string} */ code) => (/** @type {unknown} */ error) => {
      throw error instanceof Refusal ? error : new Refusal(REFUSED, code, error instanceof Error ? error.message : "");
    };
    const key = new Generator(recipe.seed, 1).word();
    const json = async (/** @type {string} */ name) => JSON.parse(await (await folder(name)).text());
    const { model, base } = await (async () => {
      const config = await json("config.json");
      const shown = (/** @type {number} */ share) => tell("loading", { what: "the model", share });
      const weights = await readWeights(await folder(WEIGHTS), config, key, recipe.size, shown);
      const digest = await weights.digest(false);
      if (recipe.modelDigest && recipe.modelDigest !== digest) {
        throw new Error(`these files are another model than the federation's: ${digest}, not ${recipe.modelDigest}`);
      }
      return { model: new Llama(weights, config), base: digest };
    })().catch(refused("model"));
    if (model.weights.count < limits.weightsPerDirection * recipe.size) {
      throw new Refusal(REFUSED, "policy", `${model.weights.count} weights for ${recipe.size} directions are too few`);
    }
    const tokenizer = await Promise.all(["tokenizer.json", "tokenizer_config.json"].map(json))
      .then(([file, config]) => new Tokenizer(file, config)).catch(refused("model"));
    const own = await (async () => {
      tell("loading", { what: "your rows", share: 0 });
      const rows = readRows(owner.rows.name, await owner.rows.text());
      const found = examples(rows, recipe, tokenizer.encode, tokenizer.end);
      const needed = Math.max(limits.leastExamples, limits.leastBatch);
      if (found.length < needed) throw new Error(`${found.length} rows are left to train on, and ${needed} are needed`);
      if (found.some(({ tokens }) => tokens.some((token) => token >= model.words))) {
        throw new Error("the tokenizer has tokens that the model has not");
      }
      return found;
    })().catch(refused("data"));
    this.prepared = { recipe, key, base, model, examples: own };
    this.digest = task.digest;
    tell("ready", { examples: own.length, weights: model.weights.count, recipe });
  }

  /** Keep a recipe that was asked for, for the owner. @param {string} text */
  async #note(text) {
    const { store } = this.owner;
    const asked = (await store.kept("asked")) ?? [];
    if (!asked.some((/** @type {{ text: string }} */ one) => one.text === text)) {
      await store.keep("asked", [...asked, { time: Date.now(), text }]);
    }
  }

  /** Count the different questions that were asked of the rows. @param {import("./recipe.js").Recipe} recipe */
  async #look(recipe) {
    const { store, limits } = this.owner;
    const view = choices(recipe);
    const views = (await store.kept("views")) ?? [];
    if (views.includes(view)) return;
    if (views.length >= limits.mostViews) {
      throw new Refusal(REFUSED, "policy", `${views.length} other choices were answered; your limits allow no more`);
    }
    await store.keep("views", [...views, view]);
  }

  /** @param {Task} task @param {Log} log @param {Prepared} prepared @param {Bytes} whole @param {() => void} late */
  async #trained(task, log, prepared, whole, late) {
    const asked = readBroadcast(whole);
    const { recipe, model } = prepared;
    if (!(await isBound(task.stem, whole, log.link))) throw broken("a broadcast that is not the one in the log");
    if (task.client >= recipe.count) throw broken("a number beyond the recipe's clients");
    this.#requirePool(asked, prepared);
    const rate = rateOf(recipe, asked.round);
    const right = asked.steps === recipe.steps && asked.probes === recipe.probes && asked.eps === recipe.eps
      && asked.wire === recipe.wire && asked.clip === Math.fround(recipe.clip)
      && Math.abs(asked.lr - rate) <= 1e-12 * rate && asked.round === task.done && asked.round < recipe.rounds;
    if (!right) throw broken("a message that asks for something else than its recipe");
    this.kept = whole;
    const drawer = recipe.shared ? EVERYBODY : task.client;
    const count = asked.steps * asked.probes;
    const directions = directionsOf(asked.key, asked.round, drawer, count, asked.size, asked.probabilities);
    const batches = batchesOf(await this.#generator(task, recipe, asked.round), prepared.examples.length, recipe.batch);
    /** @type {import("./texts.js").Example[][]} */
    const drawn = [];
    const { tell } = this.owner;
    const { scalars, loss } = await train(asked, directions, async (c, step) => {
      while (drawn.length <= step) drawn.push(batches.next().value.map((row) => prepared.examples[row]));
      tell("step", { round: asked.round, rounds: recipe.rounds, step, steps: asked.steps });
      await new Promise((done) => setTimeout(done)); // lets requests and a stop through
      late();
      return model.loss(c, drawn[step]);
    });
    const sent = upload(whole, task.client, prepared.examples.length, loss, scalars, asked.wire);
    tell("trained", { round: asked.round, loss, scalars, upload: sent, message: task.message.length });
    return sent;
  }

  /** Of a round's batches: by a secret of this browser, or by the recipe's seed. @param {Task} task
   * @param {import("./recipe.js").Recipe} recipe @param {number} round */
  async #generator(task, recipe, round) {
    if (!this.owner.limits.secretBatches) return new Generator(recipe.seed, 5, round, task.client);
    const { store } = this.owner;
    const secret = (await store.kept("secret")) ?? crypto.getRandomValues(new Uint8Array(32));
    await store.keep("secret", secret);
    const own = new DataView((await sha256(secret, task.nonce)).buffer);
    return new Generator(own.getBigUint64(0), own.getBigUint64(8), round);
  }

  /** Keep the tuned model: its coefficients and its digest. @param {Task} task @param {Log} log
   * @param {Prepared} prepared */
  async #keep(task, log, prepared) {
    const found = readBroadcast(task.message);
    if (found.round === task.done && !(await isBound(task.stem, task.message, log.link))) {
      throw broken("a tuned model that is not the one in the log");
    }
    this.#requirePool(found, prepared);
    const { weights } = prepared.model;
    weights.load(found.c);
    const digest = await weights.digest(true);
    this.owner.tell("tuned", { round: found.round, digest, c: found.c, base: prepared.base, key: found.key });
  }

  /** @param {import("./messages.js").Broadcast} asked @param {Prepared} prepared */
  #requirePool(asked, { recipe, key, base }) {
    const right = asked.family === FAMILY && asked.key === key && asked.size === recipe.size
      && hex(asked.base) === base;
    if (!right) throw new Refusal(REFUSED, "model", "the server's model or directions are others than those here");
  }
}
