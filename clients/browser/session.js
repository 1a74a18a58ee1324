/** The connection to a server: a session, its task, the task's files, the reply (docs/session.md). */

import { hex, join, utf8 } from "./bytes.js";
import { GivenUp } from "./client.js";
import { connectionStatement, sign } from "./keys.js";
import { readStub, readTask, DONE, UNPREPARED } from "./task.js";

/** @typedef {import("./bytes.js").Bytes} Bytes */
/** @typedef {{ key: Bytes, question: string, keep: boolean, stop: AbortController, reply: Bytes | null | undefined,
 *   over: Promise<void> }} Work question: what a task must ask to have the same answer; reply: null where given up */

const BEAT = 15_000; // milliseconds between two signs of life while a client computes
const TIMEOUT = 60_000; // for a request that does not wait
const [FIRST, LONGEST] = [1000, 60_000]; // between two attempts
const KEPT = 16; // files

/** The end of a session: another is begun. */
class SessionError extends Error {}

/** The end of the run, without a tuned model for its clients. */
class RunOver extends Error {}

const sleep = (/** @type {number} */ milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

export class Session {
  /** @param {import("./client.js").Client} client @param {string} url of the server */
  constructor(client, url) {
    this.client = client;
    this.url = url;
    this.tell = client.owner.tell;
    this.token = "";
    this.wait = 0;
    this.traffic = { sent: 0, received: 0 };
    /** @type {Map<string, Bytes>} */
    this.files = new Map();
  }

  /** Take part until the tuned model has come, or the run is over without one. A server that does not answer is tried again and again. */
  async run() {
    for (let pause = FIRST; ; pause = Math.min(2 * pause, LONGEST)) {
      try {
        const number = await this.#begin();
        this.tell("connected", { number });
        pause = FIRST;
        return await this.#attend();
      } catch (error) {
        if (error instanceof RunOver) return;
        const why = error instanceof Error ? error.message : String(error);
        this.tell("waiting", { why });
      }
      const [random] = crypto.getRandomValues(new Uint32Array(1));
      await sleep(pause * (0.5 + random / 2 ** 32)); // spread: a server that is back is not asked by all at once
    }
  }

  /** Begin a session; the number by which the server knows this client. @returns {Promise<number>} */
  async #begin() {
    const { audience, dialled, pair } = this.client.owner;
    this.token = "";
    const challenge = await this.#bytes("/v1/challenge");
    const { fingerprint } = pair.public;
    const signature = await sign(pair.private, connectionStatement(audience, challenge, fingerprint));
    const proof = join(challenge, fingerprint, signature, utf8(dialled));
    const found = await this.#asked("/v1/session", TIMEOUT, proof);
    if (found.status !== 200) throw new SessionError(`the server refuses your key: ${found.text}`);
    const { client, token, wait } = JSON.parse(new TextDecoder().decode(found.data));
    [this.token, this.wait] = [token, wait];
    return client;
  }

  /** Answer tasks until the model was kept. */
  async #attend() {
    /** @type {Work | null} */
    let work = null;
    try {
      for (;;) {
        if (work) await Promise.race([work.over, sleep(BEAT)]);
        if (work?.reply !== undefined) {
          if (work.reply && (await this.#sent(work.key, work.reply)) && work.keep && work.reply[5] === DONE) return;
          work = null;
        }
        const wait = work ? 0 : this.wait;
        /** @type {string} */
        const after = work ? hex(work.key) : "";
        const data = await this.#bytes(`/v1/task?wait=${wait}&after=${after}`, TIMEOUT + 1000 * wait);
        if (data.length) work = await this.#taken(data, work);
      }
    } finally {
      work?.stop.abort();
    }
  }

  /** The work of a task; that in hand, where it is the same. @param {Bytes} data @param {Work | null} work
   * @returns {Promise<Work>} */
  async #taken(data, work) {
    const stub = readStub(data);
    const whole = await stub.task((name) => this.#file(hex(name)));
    const task = await readTask(whole).catch(() => null); // the client says in its reply what is wrong with it
    const question = task
      ? [task.nonce, task.head, task.digest, stub.names[2]].map(hex).join(" ") + ` ${task.client} ${task.keep}`
      : hex(stub.key);
    if (work?.question === question) {
      work.key = stub.key;
      return work;
    }
    if (work) {
      work.stop.abort();
      await work.over; // two tasks at once would share one model
    }
    const stop = new AbortController();
    const keep = task?.keep ?? false;
    /** @type {Work} */
    const next = { key: stub.key, question, keep, stop, reply: undefined, over: Promise.resolve() };
    next.over = this.client.reply(whole, stop.signal).then(
      (reply) => void (next.reply = reply),
      (error) => {
        next.reply = null;
        if (!(error instanceof GivenUp)) throw error;
        this.tell("waiting", { why: "the round went on without this answer" });
      },
    );
    return next;
  }

  /** Send a reply; whether the server took it. @param {Bytes} key @param {Bytes} reply */
  async #sent(key, reply) {
    const found = await this.#asked(`/v1/task/${hex(key)}`, TIMEOUT, reply);
    if (![204, 410].includes(found.status)) throw new SessionError(`the server refuses a reply: ${found.text}`);
    const taken = found.status === 204;
    if (reply[5] !== UNPREPARED) this.tell("sent", { taken, reply });
    return taken;
  }

  /** A file by its SHA-256, which the stub checks. @param {string} name */
  async #file(name) {
    const found = this.files.get(name) ?? (await this.#bytes(`/v1/file/${name}`));
    this.files.set(name, found);
    for (const old of [...this.files.keys()].slice(0, -KEPT)) this.files.delete(old);
    return found;
  }

  /** The body of an answer; empty for one without. @param {string} path @param {number} timeout */
  async #bytes(path, timeout = TIMEOUT) {
    const found = await this.#asked(path, timeout);
    if (found.status === 200 || found.status === 204) return found.data;
    if (found.status === 410) throw new RunOver();
    if (found.status === 401) throw new SessionError("the session has ended");
    throw new SessionError(`the server refuses a request: ${found.status} ${found.text}`);
  }

  /** @param {string} path @param {number} timeout @param {Bytes} [body] */
  async #asked(path, timeout, body) {
    /** @type {HeadersInit} */
    const headers = this.token ? { authorization: `Bearer ${this.token}` } : {};
    const signal = AbortSignal.timeout(timeout);
    const method = body ? "POST" : "GET";
    /** @type {RequestInit} */
    const request = { method, headers, signal, credentials: "omit", redirect: "error", ...(body && { body }) };
    const answer = await fetch(this.url + path, request).catch(() => {
      throw new SessionError(`no answer from ${this.url}: is the server running?`);
    });
    const data = new Uint8Array(await answer.arrayBuffer());
    this.traffic.sent += body?.length ?? 0;
    this.traffic.received += data.length;
    this.tell("traffic", { ...this.traffic });
    return { status: answer.status, data, text: new TextDecoder().decode(data.subarray(0, 200)).trim() };
  }
}
