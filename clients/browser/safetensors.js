/** The tensors of a safetensors file. */

import { view } from "./bytes.js";

/** @typedef {{ name: string, shape: number[], read: () => Promise<Float32Array<ArrayBuffer>> }} Stored
 *   a tensor of a file: its name in the layout, and its numbers, row after row */

export const MOST_HEADER = 100e6; // bytes

/** @param {Blob} file @param {number} begin @param {number} end */
export const part = async (file, begin, end) => new Uint8Array(await file.slice(begin, end).arrayBuffer());

/** The tensors of a file. Throws an Error that says what is wrong with it. @param {Blob} file
 * @returns {Promise<Stored[]>} */
export async function readSafetensors(file) {
  const start = await part(file, 0, 8);
  const length = start.length < 8 ? 0 : Number(view(start).getBigUint64(0, true));
  if (!(length > 0 && 8 + length <= Math.min(file.size, MOST_HEADER))) {
    throw new Error("the file of the weights is no .safetensors and no .gguf file");
  }
  const head = JSON.parse(new TextDecoder().decode(await part(file, 8, 8 + length)));
  delete head.__metadata__;
  return Object.entries(head).map(([name, { dtype, shape, data_offsets: [begin, end] }]) => ({
    name, shape, read: async () => widened(name, dtype, await part(file, 8 + length + begin, 8 + length + end)),
  }));
}

/** Numbers as float32, which is exact. @param {string} name @param {string} dtype
 * @param {Uint8Array<ArrayBuffer>} data */
export function widened(name, dtype, data) {
  if (dtype === "F32") return new Float32Array(data.buffer);
  if (dtype === "BF16") {
    const words = Uint32Array.from(new Uint16Array(data.buffer), (word) => word << 16);
    return new Float32Array(words.buffer);
  }
  if (dtype === "F16") return Float32Array.from(new Uint16Array(data.buffer), half);
  throw new Error(`${name} is of type ${dtype}; this page reads F32, F16 and BF16`);
}

/** The number of 16 bits of float16. @param {number} word */
export function half(word) {
  const exponent = (word >> 10) & 31;
  const fraction = word & 1023;
  const size = exponent ? (exponent === 31 ? (fraction ? NaN : Infinity) : 2 ** (exponent - 25) * (1024 + fraction))
    : 2 ** -24 * fraction;
  return word >> 15 ? -size : size;
}
