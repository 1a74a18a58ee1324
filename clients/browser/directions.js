/** Directions of the family hadamard (docs/directions.md): their definition, slow and right.
 *
 * kernels.js makes the same sums fast; tests compare the two, and this one with the published vectors.
 */

export const ROW = 2; // stream of D1
export const BLOCK = 3; // stream of D2

/** The high half of a product of two words. @param {number} a @param {number} b */
function high(a, b) {
  const a0 = a & 0xffff;
  const a1 = a >>> 16;
  const b0 = b & 0xffff;
  const b1 = b >>> 16;
  const middle = a1 * b0 + ((a0 * b0) / 65536 >>> 0);
  const other = a0 * b1 + (middle % 65536);
  return (a1 * b1 + Math.floor(middle / 65536) + Math.floor(other / 65536)) >>> 0;
}

/** Philox-4x32-10: four words.
 * @param {ArrayLike<number>} counter four words @param {ArrayLike<number>} key two words
 * @param {Uint32Array} out is written at `at` */
export function philox(counter, key, out = new Uint32Array(4), at = 0) {
  let x0 = counter[0];
  let x1 = counter[1];
  let x2 = counter[2];
  let x3 = counter[3];
  let k0 = key[0];
  let k1 = key[1];
  for (let i = 0; i < 10; i++) {
    const high0 = high(0xd2511f53, x0);
    const high2 = high(0xcd9e8d57, x2);
    const low0 = Math.imul(0xd2511f53, x0);
    const low2 = Math.imul(0xcd9e8d57, x2);
    x0 = (high2 ^ x1 ^ k0) >>> 0;
    x1 = low2 >>> 0;
    x2 = (high0 ^ x3 ^ k1) >>> 0;
    x3 = low0 >>> 0;
    k0 = (k0 + 0x9e3779b9) >>> 0;
    k1 = (k1 + 0xbb67ae85) >>> 0;
  }
  out[at] = x0;
  out[at + 1] = x1;
  out[at + 2] = x2;
  out[at + 3] = x3;
  return out;
}

/** The two words of a pool's key. @param {bigint} key */
export const keyWords = (key) => [Number(key & 0xffffffffn), Number(key >> 32n)];

/** The random words that hold the signs of positions 0 … count − 1, 128 for each group of 4096.
 *
 * Of p = 4096 g + 1024 w + 32 t + l it is bit t of word 128 g + 32 w + l: words stand in the order of w and l, so that
 * neighbours in memory have the signs of neighbours.
 * @param {bigint} key @param {number} stream @param {number} tensor @param {number} count
 * @param {number} first group of the words; those of groups before it are left out */
export function signWords(key, stream, tensor, count, first = 0) {
  const pair = keyWords(key);
  const groups = Math.ceil(count / 4096) - first;
  const words = new Uint32Array(128 * groups);
  const four = new Uint32Array(4);
  for (let call = 0; call < 32 * groups; call++) {
    philox([call + 32 * first, tensor, 0, stream], pair, four);
    for (let w = 0; w < 4; w++) words[128 * (call >>> 5) + 32 * w + (call & 31)] = four[w];
  }
  return words;
}

/** The sign of a position. @param {Uint32Array} words @param {number} p */
export function sign(words, p) {
  const word = words[128 * Math.floor(p / 4096) + 32 * ((p >>> 10) & 3) + (p & 31)];
  return (word >>> ((p >>> 5) & 31)) & 1 ? -1 : 1;
}

/** Transform in place, in stages h = 1, 2, 4, … @param {Float32Array} x */
export function transform(x) {
  for (let h = 1; h < x.length; h *= 2) {
    for (let k = 0; k < x.length; k += 2 * h) {
      for (let i = k; i < k + h; i++) {
        const a = x[i];
        const b = x[i + h];
        x[i] = a + b;
        x[i + h] = a - b;
      }
    }
  }
}

/** The sum of all directions at positions start … stop − 1 of a tensor: Σ_j c_j z_j, float32.
 * @param {bigint} key @param {number} tensor @param {number} start @param {number} stop @param {Float32Array} c
 * @param {Float32Array | null} addend a number for each position, to which the sum is added */
export function sum(key, tensor, start, stop, c, addend = null) {
  const size = c.length;
  const begin = Math.floor(start / size);
  const group = Math.floor((begin * size) / 4096);
  const end = size * Math.ceil(stop / size);
  const words = [ROW, BLOCK].map((stream) => signWords(key, stream, tensor, end, group));
  const [rows, blocks] = words.map((of) => (/** @type {number} */ p) => sign(of, p - 4096 * group));
  const out = new Float32Array(stop - start);
  for (let b = begin; b * size < stop; b++) {
    const y = c.map((number, j) => number * blocks(b * size + j));
    transform(y);
    for (let p = Math.max(start, b * size); p < Math.min(stop, (b + 1) * size); p++) {
      out[p - start] = (addend ? addend[p - start] : 0) + rows(p) * y[p - b * size];
    }
  }
  return out;
}
