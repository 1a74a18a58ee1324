/** The generator of draws (docs/wire.md), and what is drawn with it: directions and batches. */

const WORD = 0xffffffffn;
const LONG = (1n << 64n) - 1n;
const LARGEST = (1n << 128n) - 1n;
const M = 0x2360ed051fc65da44385df649fccf645n;

/** The four words of 64 bits of the seed. @param {bigint[]} entropy */
export function seedOf(entropy) {
  const a = entropy.flatMap((n) => (n <= WORD ? [Number(n)] : [Number(n & WORD), Number(n >> 32n)]));
  let h = 0x43b0d7e5;
  const hashed = (/** @type {number} */ v) => {
    v ^= h;
    h = Math.imul(h, 0x931e8875);
    v = Math.imul(v, h);
    return (v ^ (v >>> 16)) >>> 0;
  };
  const mixed = (/** @type {number} */ x, /** @type {number} */ y) => {
    const r = (Math.imul(0xca01f9dd, x) - Math.imul(0x4973f715, y)) | 0;
    return (r ^ (r >>> 16)) >>> 0;
  };
  const p = [0, 1, 2, 3].map((i) => hashed(a[i] ?? 0));
  for (let s = 0; s < 4; s++) for (let d = 0; d < 4; d++) if (s !== d) p[d] = mixed(p[d], hashed(p[s]));
  for (let s = 4; s < a.length; s++) for (let d = 0; d < 4; d++) p[d] = mixed(p[d], hashed(a[s]));
  h = 0x8b51f9dd;
  const o = Array.from({ length: 8 }, (_, i) => {
    let v = p[i % 4] ^ h;
    h = Math.imul(h, 0x58f38ded);
    v = Math.imul(v, h);
    return BigInt((v ^ (v >>> 16)) >>> 0);
  });
  return [0, 1, 2, 3].map((k) => o[2 * k] + (o[2 * k + 1] << 32n));
}

/** The words, doubles and permutations of an entropy: numbers below 2^64. */
export class Generator {
  /** @param {...(bigint | number)} entropy */
  constructor(...entropy) {
    const s = seedOf(entropy.map(BigInt));
    this.increment = (2n * ((s[2] << 64n) + s[3]) + 1n) & LARGEST;
    this.t = this.#after(this.increment + (s[0] << 64n) + s[1]);
    /** @type {number | null} the upper half of a word whose lower half was a number */
    this.upper = null;
  }

  /** @param {bigint} t */
  #after(t) {
    return (t * M + this.increment) & LARGEST;
  }

  word() {
    this.t = this.#after(this.t);
    const x = ((this.t >> 64n) ^ this.t) & LONG;
    const turn = this.t >> 122n;
    return ((x >> turn) | (x << (64n - turn))) & LONG;
  }

  /** A double in [0, 1). */
  double() {
    return Number(this.word() >> 11n) * 2 ** -53;
  }

  /** A number of 32 bits. */
  number() {
    const kept = this.upper;
    if (kept !== null) {
      this.upper = null;
      return kept;
    }
    const word = this.word();
    this.upper = Number(word >> 32n);
    return Number(word & WORD);
  }

  /** @param {number} n */
  permutation(n) {
    const x = Array.from({ length: n }, (_, i) => i);
    for (let i = n - 1; i > 0; i--) {
      const mask = 2 ** (32 - Math.clz32(i)) - 1;
      let j;
      do j = (this.number() & mask) >>> 0;
      while (j > i);
      [x[i], x[j]] = [x[j], x[i]];
    }
    return x;
  }
}

/** Batches of a round: numbers of examples, without end.
 * @param {Generator} generator @param {number} examples @param {number} size
 * @returns {IterableIterator<number[], never>} */
export function* batchesOf(generator, examples, size) {
  const least = Math.min(size, examples);
  /** @type {number[]} */
  const queue = [];
  for (;;) {
    while (queue.length < least) queue.push(...generator.permutation(examples));
    yield queue.splice(0, least);
  }
}

/** The directions that a client draws in a round.
 * @param {bigint} key @param {number} round @param {number} drawer @param {number} count τ P
 * @param {number} size K @param {Float32Array | null} probabilities */
export function directionsOf(key, round, drawer, count, size, probabilities = null) {
  const generator = new Generator(key, 6, round, drawer);
  const sums = new Float64Array(probabilities?.length ?? 0);
  probabilities?.forEach((p, j) => (sums[j] = (j ? sums[j - 1] : 0) + p));
  return Uint32Array.from({ length: count }, () => {
    const u = generator.double();
    return Math.min(probabilities ? firstAbove(sums, u * sums[size - 1]) : Math.floor(u * size), size - 1);
  });
}

/** The first place of an ascending list with more than a number. @param {Float64Array} sums @param {number} bound */
function firstAbove(sums, bound) {
  let low = 0;
  let high = sums.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sums[middle] > bound) high = middle;
    else low = middle + 1;
  }
  return low;
}
