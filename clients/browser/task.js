/** Tasks, stubs and replies (docs/wire.md, docs/session.md), and the log of a run. */

import { isZero, join, same, sha256, utf8, view } from "./bytes.js";

/** @typedef {import("./bytes.js").Bytes} Bytes */

export const DONE = 0;
export const UNPREPARED = 1;
export const REFUSED = 2;
export const FAILED = 3;

const LOG = utf8("fedkseed, version 2: the rounds of a run\n");
const MAGIC = utf8("FKSt");

/** The end of a task without an answer: its status, its code, and for people why. */
export class Refusal extends Error {
  /** @param {number} status @param {string} code @param {string} why */
  constructor(status, code = "", why = "") {
    super(why || code);
    this.status = status;
    this.code = code;
  }

  get reply() {
    return join(MAGIC, Uint8Array.of(3, this.status), utf8(this.code));
  }
}

/** A refusal of a broken task, or one that does not fit. @param {string} why */
export const broken = (why) => new Refusal(REFUSED, "task", why);

/** The reply with an answer. @param {Uint8Array} signature @param {Uint8Array} upload */
export const answer = (signature, upload) => join(MAGIC, Uint8Array.of(3, DONE), signature, upload);

/** @typedef {{
 *   keep: boolean, client: number, seconds: number, digest: Bytes, recipe: Bytes, certificate: Bytes, nonce: Bytes,
 *   issued: bigint, since: number, links: Bytes, head: Bytes, stem: Bytes, message: Bytes, signature: Bytes,
 *   done: number, whole: Bytes }} Task done: rounds in the state that the message is about */

/** The fields of a whole task. Throws a Refusal where it is broken. @param {Bytes} data @returns {Promise<Task>} */
export async function readTask(data) {
  if (data.length > 4 && same(data.subarray(0, 4), MAGIC) && data[4] !== 3) {
    throw new Refusal(REFUSED, "release", `the server speaks version ${data[4]} of the protocol, and this page 3`);
  }
  if (data.length < 194 || !same(data.subarray(0, 4), MAGIC) || (data[5] !== 0 && data[5] !== 128)) {
    throw broken("the server has sent something that is no task");
  }
  const at = view(data);
  const sizes = [at.getUint32(30, true), at.getUint16(34, true), 32 * at.getUint16(64, true)];
  const [recipe, certificate, links] = sizes;
  if (194 + recipe + certificate + links > data.length || recipe > 65536) throw broken("a task with parts missing");
  const ends = sizes.map((_, k) => 130 + sizes.slice(0, k + 1).reduce((a, b) => a + b));
  const since = at.getUint32(60, true);
  const task = {
    keep: data[5] === 128, client: at.getUint32(6, true), seconds: at.getFloat32(10, true),
    digest: data.slice(14, 30), recipe: data.slice(130, ends[0]), certificate: data.slice(ends[0], ends[1]),
    nonce: data.slice(36, 52), issued: at.getBigUint64(52, true), since, links: data.slice(ends[1], ends[2]),
    head: data.slice(66, 98), stem: data.slice(98, 130), message: data.slice(ends[2], -64),
    signature: data.slice(-64), done: since + links / 32 - 1, whole: data,
  };
  if (!(task.seconds > 0 && task.seconds < Infinity)) throw broken(`a task that ends after ${task.seconds} s`);
  if (recipe && !same((await sha256(task.recipe)).subarray(0, 16), task.digest)) {
    throw broken("a recipe with another digest than the task's");
  }
  return task;
}

/** A stub: its task's key, the names of three files, and how they become the whole task. @param {Bytes} data */
export function readStub(data) {
  if (data.length < 306) throw new Error(`a task without its files has 306 bytes or more, got ${data.length}`);
  const names = [16, 48, 80].map((at) => data.slice(at, at + 32));
  const rest = data.subarray(112);
  return {
    key: data.slice(0, 16),
    names,
    rest,
    /** @param {(name: Bytes) => Promise<Bytes>} file */
    async task(file) {
      const [recipe, certificate, message] = await Promise.all(
        names.map(async (name) => {
          if (isZero(name)) return new Uint8Array(0);
          const part = await file(name);
          if (!same(await sha256(part), name)) throw new Error("other bytes came under the name of a task's file");
          return part;
        }),
      );
      const links = rest.subarray(130, -64);
      return join(rest.subarray(0, 130), recipe, certificate, links, message, rest.subarray(-64));
    },
  };
}

/** What a client knows of a run.
 * @typedef {{ done: number, head: Bytes, link: Bytes, client: number, recipe: Bytes }} Log */

/** The log of a run after a task. Throws a Refusal where the task does not go on from the log that is known.
 * @param {Task} task @param {Log | undefined} known @returns {Promise<Log>} */
export async function follow(task, known) {
  const a = known ? known.done : -1;
  if (task.done < a) throw broken("the server has gone back to an earlier round of the run");
  if (task.since > a + 1) throw new Refusal(UNPREPARED, "", "links of the run's log are missing");
  let head = known?.head;
  for (let r = a + 1; r <= task.done; r++) {
    const at = 32 * (r - task.since);
    head = await sha256(head ?? LOG, task.links.subarray(at, at + 32));
  }
  if (!head || !same(head, task.head)) throw broken("the server's log of the run is another than the one known here");
  const link = task.done > a ? task.links.slice(-32) : (known?.link ?? new Uint8Array(32));
  return { done: task.done, head, link, client: task.client, recipe: task.digest };
}
