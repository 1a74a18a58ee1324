/** A model: its tensors, and w(c) of any range of them (docs/directions.md). */

import { hex, sha256, utf8 } from "./bytes.js";
import { BLOCK, ROW, signWords } from "./directions.js";
import { readGguf } from "./gguf.js";
import { Kernels } from "./kernels.js";
import { part, readSafetensors } from "./safetensors.js";

/** @typedef {{ name: string, shape: number[], count: number, base: number, rows: number, blocks: number }} Tensor
 *   base: address of its weights; rows, blocks: addresses of the words of D1 and D2 */
/** @typedef {(name: string) => Promise<Blob>} Folder gives a file by its name, or WEIGHTS */

const EMBEDDING = "model.embed_tokens.weight";
export const HEAD = "lm_head.weight";
/** The name of the file of the weights, which is model.safetensors or a GGUF file. */
export const WEIGHTS = "weights";

/** The weights of a model, and the coefficients of the directions by which they are moved. */
export class Weights {
  /** @param {Kernels} kernels @param {Map<string, Tensor>} tensors @param {number} size K */
  constructor(kernels, tensors, size) {
    this.kernels = kernels;
    this.tensors = tensors;
    this.size = size;
    this.c = kernels.take(size);
    this.block = kernels.take(size);
    this.count = [...tensors.values()].reduce((sum, { count }) => sum + count, 0);
  }

  /** Set the coefficients. @param {Float32Array} c */
  load(c) {
    this.kernels.floats(this.c, this.size).set(c);
  }

  /** @param {string} name */
  tensor(name) {
    const found = this.tensors.get(name);
    if (!found) throw new Error(`the model's file has no tensor ${name}`);
    return found;
  }

  /** Write w(c) at positions start … stop − 1 of a tensor to an address.
   * @param {string} name @param {number} start a multiple of 4 @param {number} stop
   * @param {number} to with room up to the next multiple of 4 */
  write(name, start, stop, to) {
    const { kernels, size, c, block } = this;
    const { base, rows, blocks } = this.tensor(name);
    const last = 4 * Math.ceil(stop / 4);
    for (let first = size * Math.floor(start / size); first < stop; first += size) {
      kernels.flip(block, c, blocks, first, first + size);
      kernels.transform(block, 4 * size);
      const from = Math.max(first, start);
      const end = Math.min(first + size, last);
      kernels.addFlipped(to + 4 * (from - start), block + 4 * (from - first), rows, from, end, base + 4 * from);
    }
  }

  /** The digest of w_0, or of w(c). @param {boolean} tuned */
  async digest(tuned) {
    const lines = [];
    for (const [name, { count, shape, base }] of this.tensors) {
      const data = this.kernels.freeing(() => {
        const at = tuned ? this.kernels.take(count) : base;
        if (tuned) this.write(name, 0, count, at);
        return new Uint8Array(this.kernels.floats(at, count).slice().buffer);
      });
      lines.push(`${name} float32 [${shape.join(", ")}] ${hex(await sha256(data))}\n`);
    }
    return hex(await sha256(utf8(lines.join(""))));
  }
}

/** The weights of a model, in float32. Throws an Error that says what is wrong with its file.
 * @param {Blob} file @param {Record<string, any>} config config.json
 * @param {bigint} key @param {number} size of the pool @param {(share: number) => void} progress */
export async function readWeights(file, config, key, size, progress) {
  /** @type {Map<string, import("./safetensors.js").Stored>} */
  const stored = new Map();
  const isGguf = new TextDecoder().decode(await part(file, 0, 4)) === "GGUF";
  for (const tensor of await (isGguf ? readGguf(file, config) : readSafetensors(file))) {
    const { name } = tensor;
    if (/rotary_emb\.inv_freq$|\.masked_bias$/.test(name)) continue; // no parameters
    const whole = name.startsWith("model.") || name === HEAD ? name : `model.${name}`;
    stored.set(whole, tensor);
  }
  const embedding = config.tie_word_embeddings === true ? stored.get(EMBEDDING) : undefined;
  if (embedding) {
    stored.delete(EMBEDDING);
    stored.set(HEAD, embedding);
  }
  const kernels = new Kernels();
  /** @type {Map<string, Tensor>} */
  const tensors = new Map();
  const names = [...stored.keys()].sort(byCodePoint);
  for (const [number, name] of names.entries()) {
    const { shape, read } = /** @type {import("./safetensors.js").Stored} */ (stored.get(name));
    const count = shape.reduce((a, b) => a * b, 1);
    const numbers = await read();
    if (numbers.length !== count) throw new Error(`the model's file is cut: ${name} has ${numbers.length} numbers`);
    const base = kernels.take(count);
    kernels.floats(base, count).set(numbers);
    const [rows, blocks] = [ROW, BLOCK].map((stream) => {
      const words = signWords(key, stream, number, size * Math.ceil(count / size));
      const at = kernels.take(words.length);
      new Uint32Array(kernels.memory.buffer, at, words.length).set(words);
      return at;
    });
    tensors.set(name, { name, shape, count, base, rows, blocks });
    progress((number + 1) / names.length);
  }
  return new Weights(kernels, tensors, size);
}

/** Names in the order of their code points, which is not that of JavaScript's strings. @param {string} a
 * @param {string} b */
export function byCodePoint(a, b) {
  const [x, y] = [a, b].map((text) => Array.from(text, (letter) => letter.codePointAt(0) ?? 0));
  const at = x.findIndex((point, k) => point !== y[k]);
  return at < 0 ? x.length - y.length : x[at] - (y[at] ?? -1);
}
