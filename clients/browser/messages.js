/** Messages: broadcasts and differences that come, uploads and lacks that go (docs/wire.md). */

import { crc32, join, same, sha256, u32, utf8, view } from "./bytes.js";
import { broken } from "./task.js";

/** @typedef {import("./bytes.js").Bytes} Bytes */
/** @typedef {"exact" | "compact" | "sign"} Wire */
/** @typedef {{ family: number, round: number, key: bigint, size: number, base: Bytes, lr: number, eps: number,
 *   clip: number, steps: number, probes: number, wire: Wire, c: Float32Array, probabilities: Float32Array | null
 * }} Broadcast */

const MAGIC = utf8("FKSd");
const FLAGS = { exact: 0, compact: 2, sign: 4 };
const [BROADCAST, UPLOAD, DELTA, LACK] = [1, 2, 6, 7];
const PROBES = 2 ** 24; // the most that a round may have
const HADAMARD = 2; // a family without a basis; those with one, 5 and 6, have 32 bytes more in the header
const NONE = 0x7fc00000; // the one NaN: no ρ, no loss

const numbers = new Float32Array(1);
const bits = new Uint32Array(numbers.buffer);

/** The bits of a float32, as a word. @param {number} number */
export function bitsOf(number) {
  numbers[0] = number;
  return Number.isNaN(number) ? NONE : bits[0];
}

/** The float32 with some bits. @param {number} word */
export function floatOf(word) {
  bits[0] = word;
  return numbers[0];
}

/** n compact numbers. @param {Uint8Array} data @param {number} n @returns {Float32Array} */
export function compactNumbers(data, n) {
  const blocks = Math.ceil(n / 128);
  const at = view(data);
  const codes = new Int8Array(data.buffer, data.byteOffset + 4 * blocks, n);
  const found = new Float32Array(n);
  for (let block = 0; block < blocks; block++) {
    const word = at.getUint32(4 * block, true);
    const scale = floatOf(word);
    let largest = 0;
    for (let i = 128 * block; i < Math.min(n, 128 * block + 128); i++) {
      found[i] = codes[i] * scale;
      largest = Math.max(largest, Math.abs(codes[i]));
    }
    const right = word === 0 ? largest === 0 : word >= 0x0a238a00 && word <= 0x7c010200 && largest === 127;
    if (!right || word & 255) throw broken("compact numbers in an encoding that they have not");
  }
  return found;
}

/** The fields of a whole broadcast. Throws a Refusal where it is broken. @param {Bytes} data @returns {Broadcast} */
export function readBroadcast(data) {
  const at = view(data);
  if (data.length < 88 || !same(data.subarray(0, 4), MAGIC) || data[4] !== 2 || data[5] !== BROADCAST) {
    throw broken("a message that is no broadcast");
  }
  if (crc32(data.subarray(0, -4)) !== at.getUint32(data.length - 4, true)) throw broken("a damaged broadcast");
  if (data[6] > 4) throw broken(`a broadcast of the family ${data[6]}, whose form is another`);
  const size = at.getUint32(20, true) + 1;
  const flags = data[7];
  const wire = /** @type {Wire | undefined} */ (Object.entries(FLAGS).find(([, flag]) => flag === (flags & 6))?.[0]);
  const width = wire === "exact" ? 4 * size : size + 4 * Math.ceil(size / 128);
  const count = 1 + (flags & 1);
  if (!wire || flags > 7 || size > 2 ** 20 || data.length !== 88 + count * width) {
    throw broken("a broadcast whose length and flags do not fit");
  }
  const parts = Array.from({ length: count }, (_, k) => {
    const part = data.slice(84 + k * width, 84 + (k + 1) * width);
    return wire === "exact" ? new Float32Array(part.buffer) : compactNumbers(part, size);
  });
  const found = {
    family: data[6], round: at.getUint32(8, true), key: at.getBigUint64(12, true), size, base: data.slice(24, 56),
    lr: at.getFloat64(56, true), eps: at.getFloat64(64, true), clip: at.getFloat32(72, true),
    steps: at.getUint32(76, true), probes: at.getUint32(80, true), wire, c: parts[0], probabilities: parts[1] ?? null,
  };
  const work = found.steps * found.probes;
  const sound = [found.lr, found.eps].every((x) => x > 0 && x < Infinity) && found.clip > 0 && work > 0;
  const weights = found.probabilities;
  const drawn = !weights || (weights.every((p) => p >= 0 && p < Infinity) && weights.some((p) => p > 0));
  if (!sound || !drawn || work > PROBES || !found.c.every(Number.isFinite)) {
    throw broken("a broadcast with values that are not allowed");
  }
  if (found.family >= HADAMARD && found.family < 4 && size & (size - 1)) throw broken(`a pool of ${size} directions`);
  return found;
}

/** The whole message of what came; null: it is the difference to a message that was not kept.
 * @param {Bytes} data @param {Bytes | null} kept @returns {Promise<Bytes | null>} */
export async function restored(data, kept) {
  if (data[5] !== DELTA) return data;
  if (data.length < 68 || crc32(data.subarray(0, -4)) !== view(data).getUint32(data.length - 4, true)) {
    throw broken("a damaged difference");
  }
  const about = (/** @type {Uint8Array} */ of) => join(of.subarray(6, 7), of.subarray(12, 56));
  if (!kept || !same(kept.subarray(-4), data.subarray(56, 60))) return null;
  if (!same(about(kept), about(data))) throw broken("a difference of another pool or base than what it refers to");
  const difference = await inflated(data.subarray(64, -4), kept.length - 60);
  const body = kept.slice(56, -4);
  body.forEach((byte, at) => (body[at] = byte + difference[at]));
  const whole = join(kept.subarray(0, 8), data.subarray(8, 12), kept.subarray(12, 56), body);
  const sum = u32(crc32(whole));
  if (!same(sum, data.subarray(60, 64))) throw broken("a difference that restores another message than announced");
  return join(whole, sum);
}

/** The bytes of raw DEFLATE, which must be of a size; no more than one beyond it is looked at.
 * @param {Bytes} data @param {number} size */
async function inflated(data, size) {
  const reader = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const parts = [];
  let found = 0;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      parts.push(value);
      found += value.length;
      if (found > size) await reader.cancel().then(() => Promise.reject(new Error("too long")));
    }
  } catch {
    throw broken("a difference that does not inflate to the length of the message kept");
  }
  if (found !== size) throw broken("a difference that does not inflate to the length of the message kept");
  return join(...parts);
}

/** A client's message about a server's. @param {Uint8Array} like @param {number} kind @param {number} flags
 * @param {...Uint8Array} body */
function message(like, kind, flags, ...body) {
  const data = join(like.subarray(0, 5), Uint8Array.of(kind, like[6], flags), like.subarray(8, 56), ...body);
  return join(data, u32(crc32(data)));
}

/** The answer of a client that has not kept what a difference needs. @param {Uint8Array} asked
 * @param {number} client */
export const lack = (asked, client) => message(asked, LACK, 0, u32(client));

/** An upload.
 * @param {Uint8Array} asked the broadcast @param {number} client @param {number} examples
 * @param {number} loss NaN: none @param {number[]} scalars NaN: none @param {Wire} wire */
export function upload(asked, client, examples, loss, scalars, wire) {
  const fixed = join(u32(client), u32(examples), u32(bitsOf(loss)), u32(scalars.length));
  if (wire === "sign") {
    const skipped = scalars.some(Number.isNaN);
    const rows = [(/** @type {number} */ rho) => rho < 0, ...(skipped ? [Number.isNaN] : [])];
    const packed = rows.map((is) => {
      const row = new Uint8Array(Math.ceil(scalars.length / 8));
      scalars.forEach((rho, k) => (row[k >> 3] |= Number(is(rho)) << (k & 7)));
      return row;
    });
    return message(asked, UPLOAD, FLAGS.sign + (skipped ? 8 : 0), fixed, ...packed);
  }
  const words = Uint32Array.from(scalars, bitsOf);
  const data = wire === "exact" ? words : Uint16Array.from(words, (word) => word >>> 16);
  return message(asked, UPLOAD, FLAGS[wire], fixed, new Uint8Array(data.buffer));
}

/** Whether a broadcast belongs to the last link of a log. @param {Uint8Array} stem @param {Uint8Array} whole
 * @param {Uint8Array} link */
export const isBound = async (stem, whole, link) => same(await sha256(stem, await sha256(whole)), link);
