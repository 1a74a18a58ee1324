/** WebAssembly written as expressions: each function here returns the bytes of an instruction and of its operands.
 *
 * So kernels.js needs no compiler and no binary file beside it.
 */

/** @typedef {number[]} Code */

/** A whole number in LEB128, as WebAssembly writes it. @param {number} n @returns {Code} */
function leb(n) {
  const bytes = [];
  for (;;) {
    const byte = n & 127;
    n >>= 7;
    if ((n === 0 && !(byte & 64)) || (n === -1 && byte & 64)) return [...bytes, byte];
    bytes.push(byte | 128);
  }
}

/** The same without a sign. @param {number} n @returns {Code} */
const unsigned = (n) => (n < 128 ? [n] : [(n & 127) | 128, ...unsigned(n >>> 7)]);

/** @param {number} code @returns {(...operands: Code[]) => Code} */
const op = (code) => (...operands) => [...operands.flat(), code];
/** @param {number} code @returns {(...operands: Code[]) => Code} */
const simd = (code) => (...operands) => [...operands.flat(), 0xfd, ...unsigned(code)];

/** @param {number} local @returns {Code} */
export const get = (local) => [0x20, ...unsigned(local)];
/** @param {number} local @param {Code} value @returns {Code} */
export const set = (local, value) => [...value, 0x21, ...unsigned(local)];
/** @param {number} n @returns {Code} */
export const i32 = (n) => [0x41, ...leb(n | 0)];
export const [add, sub, mul, and, shl, shr] = [0x6a, 0x6b, 0x6c, 0x71, 0x74, 0x76].map(op);
const below = op(0x49);

/** @param {Code} address @param {number} offset bytes @returns {Code} */
export const load = (address, offset = 0) => [...address, 0xfd, 0, 2, ...unsigned(offset)];
/** @param {Code} address @param {Code} value @returns {Code} */
export const store = (address, value) => [...address, ...value, 0xfd, 0x0b, 2, 0];
/** @param {Code} address @param {Code} value @param {number} offset bytes @returns {Code} */
export const storeOne = (address, value, offset = 0) => [...address, ...value, 0x38, 2, ...unsigned(offset)];
/** @param {Code} vector @param {number} at @returns {Code} */
export const lane = (vector, at) => [...vector, 0xfd, 0x1f, at];
export const addOne = op(0x92);
export const [vadd, vsub, vmul, vand, vxor, vshl] = [0xe4, 0xe5, 0xe6, 0x4e, 0x51, 0xab].map(simd);
/** @param {number[]} words four @returns {Code} */
export const vector = (words) =>
  [0xfd, 0x0c, ...words.flatMap((word) => [0, 8, 16, 24].map((by) => (word >>> by) & 255))];
/** A vector with its lanes in another order. @param {Code} of @param {number[]} lanes @returns {Code} */
export const shuffled = (of, lanes) =>
  [...of, ...of, 0xfd, 0x0d, ...lanes.flatMap((from) => [0, 1, 2, 3].map((byte) => 4 * from + byte))];

/** Repeat as long as a local is below a bound; a step is added to it after each time. The first time is always done.
 * @param {number} local @param {Code} from @param {Code} bound @param {Code} step @param {...Code} body
 * @returns {Code} */
export const loop = (local, from, bound, step, ...body) => [
  ...set(local, from), 0x03, 0x40, ...body.flat(), ...set(local, add(get(local), step)),
  ...below(get(local), bound), 0x0d, 0, 0x0b,
];

/** A module of functions on an imported memory.
 * @param {{ name: string, parameters: number, locals: number, vectors: number, body: Code[] }[]} functions each has
 *   parameters and locals of 32 bits, and then vectors */
export function assemble(functions) {
  const section = (/** @type {number} */ id, /** @type {Code[]} */ parts) => {
    const body = [...unsigned(parts.length), ...parts.flat()];
    return [id, ...unsigned(body.length), ...body];
  };
  const text = (/** @type {string} */ name) => [name.length, ...Array.from(name, (letter) => letter.charCodeAt(0))];
  const types = functions.map(({ parameters }) => [0x60, ...unsigned(parameters), ...Array(parameters).fill(0x7f), 0]);
  const bodies = functions.map(({ locals, vectors, body }) => {
    const code = [2, ...unsigned(locals), 0x7f, ...unsigned(vectors), 0x7b, ...body.flat(), 0x0b];
    return [...unsigned(code.length), ...code];
  });
  return Uint8Array.from([
    0, 0x61, 0x73, 0x6d, 1, 0, 0, 0,
    ...section(1, types),
    ...section(2, [[...text("env"), ...text("memory"), 2, 0, 0]]),
    ...section(3, functions.map((_, k) => unsigned(k))),
    ...section(7, functions.map(({ name }, k) => [...text(name), 0, ...unsigned(k)])),
    ...section(10, bodies),
  ]);
}
