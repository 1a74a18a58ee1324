/** Sums of directions and products of matrices, in WebAssembly with vectors of four float32.
 *
 * Its additions and multiplications are those of IEEE-754, each rounded, with subnormal numbers: sums have the bits
 * that directions.js defines. Addresses and strides are in bytes. Everything is a multiple of four numbers.
 */

import {
  add, addOne, and, assemble, get, i32, lane, load, loop, mul, set, shl, shr, shuffled, store, storeOne, sub, vadd,
  vand, vector, vmul, vshl, vsub, vxor,
} from "./assembler.js";

/** @typedef {import("./assembler.js").Code} Code */

const TOP = 0x80000000; // the sign of a float32
const [TILE_ROWS, TILE_OUTS, UNROLLED] = [4, 2, 4]; // sums that a tile keeps in registers, of which x86-64 has 16

/** Numbers by which widths of matrices must divide. */
export const WIDTH = 4 * UNROLLED;
export const ROWS = TILE_ROWS;
export const OUTS = TILE_OUTS;

/** Four numbers with the signs of positions p … p + 3, see `signWords`.
 * @param {Code} numbers @param {number} words local @param {number} p local @returns {Code} */
function signed(numbers, words, p) {
  const at = add(get(words), shl(add(shl(shr(get(p), i32(10)), i32(5)), and(get(p), i32(31))), i32(2)));
  const bit = and(shr(get(p), i32(5)), i32(31));
  return vxor(numbers, vand(vshl(load(at), sub(i32(31), bit)), vector([TOP, TOP, TOP, TOP])));
}

/** flip(to, from, words, start, stop): each number with the sign of its position. */
function flip() {
  const [to, from, words, start, stop, p, at] = [0, 1, 2, 3, 4, 5, 6];
  const body = loop(p, get(start), get(stop), i32(4),
    set(at, shl(sub(get(p), get(start)), i32(2))),
    store(add(get(to), get(at)), signed(load(add(get(from), get(at))), words, p)));
  return { name: "flip", parameters: 5, locals: 2, vectors: 0, body: [body] };
}

/** addFlipped(to, from, words, start, stop, addend): addend + (+0 + each number with the sign of its position). */
function addFlipped() {
  const [to, from, words, start, stop, addend, p, at] = [0, 1, 2, 3, 4, 5, 6, 7];
  const sum = vadd(vector([0, 0, 0, 0]), signed(load(add(get(from), get(at))), words, p));
  const body = loop(p, get(start), get(stop), i32(4),
    set(at, shl(sub(get(p), get(start)), i32(2))),
    store(add(get(to), get(at)), vadd(load(add(get(addend), get(at))), sum)));
  return { name: "addFlipped", parameters: 6, locals: 2, vectors: 0, body: [body] };
}

/** transform(x, bytes): in place, in stages of which the first two are within a vector. */
function transform() {
  const [x, bytes, k, h, i, end, a, b] = [0, 1, 2, 3, 4, 5, 6, 7];
  const within = (/** @type {number[]} */ lanes, /** @type {number[]} */ signs) =>
    loop(k, get(x), add(get(x), get(bytes)), i32(16),
      set(a, load(get(k))),
      store(get(k), vadd(shuffled(get(a), lanes), vxor(get(a), vector(signs)))));
  const stages = loop(h, i32(16), get(bytes), get(h),
    loop(k, get(x), add(get(x), get(bytes)), shl(get(h), i32(1)),
      set(end, add(get(k), get(h))),
      loop(i, get(k), get(end), i32(16),
        set(a, load(get(i))),
        set(b, load(add(get(i), get(h)))),
        store(get(i), vadd(get(a), get(b))),
        store(add(get(i), get(h)), vsub(get(a), get(b))))));
  const small = [0x04, 0x40]; // if there is more than one vector
  const body = [
    within([1, 0, 3, 2], [0, TOP, 0, TOP]), within([2, 3, 0, 1], [0, 0, TOP, TOP]),
    [...i32(16), ...get(bytes), 0x49], small, stages, [0x0b],
  ];
  return { name: "transform", parameters: 2, locals: 4, vectors: 2, body };
}

/** multiply(y, x, w, rows, outs, inner, stride): y[t, o] = Σ_i x[t, i] w[o, i]; rows of y are `stride` bytes apart.
 *
 * A tile is `TILE_ROWS` rows of x by `TILE_OUTS` rows of w; rows and outs are multiples of these, inner of `WIDTH`. */
function multiply() {
  const [y, x, w, rows, outs, inner, stride] = [0, 1, 2, 3, 4, 5, 6];
  const [bytes, t, o, i, to, xs, ws] = [7, 8, 9, 10, 11, 12, 12 + TILE_ROWS];
  const sums = ws + TILE_OUTS; // the first of the vectors
  const many = (/** @type {number} */ n) => Array.from({ length: n }, (_, k) => k);
  const sum = (/** @type {number} */ r, /** @type {number} */ c) => sums + r * TILE_OUTS + c;
  const own = sums + TILE_ROWS * TILE_OUTS;
  const step = many(UNROLLED).flatMap((u) => [
    ...many(TILE_OUTS).flatMap((c) => set(own + c, load(add(get(ws + c), get(i)), 16 * u))),
    ...many(TILE_ROWS).flatMap((r) => [
      ...set(own + TILE_OUTS, load(add(get(xs + r), get(i)), 16 * u)),
      ...many(TILE_OUTS).flatMap((c) =>
        set(sum(r, c), vadd(get(sum(r, c)), vmul(get(own + TILE_OUTS), get(own + c))))),
    ]),
  ]);
  const whole = (/** @type {Code} */ v) => addOne(addOne(lane(v, 0), lane(v, 1)), addOne(lane(v, 2), lane(v, 3)));
  const tile = [
    ...many(TILE_OUTS).flatMap((c) => set(ws + c, add(get(w), mul(add(get(o), i32(c)), get(bytes))))),
    ...many(TILE_ROWS * TILE_OUTS).flatMap((k) => set(sums + k, vector([0, 0, 0, 0]))),
    ...loop(i, i32(0), get(bytes), i32(4 * WIDTH), step),
    ...many(TILE_ROWS).flatMap((r) => [
      ...set(to, add(add(get(y), mul(add(get(t), i32(r)), get(stride))), shl(get(o), i32(2)))),
      ...many(TILE_OUTS).flatMap((c) => storeOne(get(to), whole(get(sum(r, c))), 4 * c)),
    ]),
  ];
  const body = [
    set(bytes, shl(get(inner), i32(2))),
    loop(t, i32(0), get(rows), i32(TILE_ROWS),
      many(TILE_ROWS).flatMap((r) => set(xs + r, add(get(x), mul(add(get(t), i32(r)), get(bytes))))),
      loop(o, i32(0), get(outs), i32(TILE_OUTS), tile)),
  ];
  const locals = 5 + TILE_ROWS + TILE_OUTS;
  return { name: "multiply", parameters: 7, locals, vectors: TILE_ROWS * TILE_OUTS + TILE_OUTS + 1, body };
}

/** A memory for numbers, and the kernels that work on it. Memory that is taken is never given back one by one: `mark`
 * and `release` free all that was taken since. */
export class Kernels {
  constructor() {
    this.memory = new WebAssembly.Memory({ initial: 1 });
    this.end = 16;
    const code = assemble([flip(), addFlipped(), transform(), multiply()]);
    const { exports } = new WebAssembly.Instance(new WebAssembly.Module(code), { env: { memory: this.memory } });
    /** @typedef {(...numbers: number[]) => void} Kernel */
    const { flip: f, addFlipped: g, transform: h, multiply: m } = /** @type {Record<string, Kernel>} */ (exports);
    this.flip = f;
    this.addFlipped = g;
    this.transform = h;
    this.multiply = m;
  }

  /** Room for some numbers; its address. @param {number} count */
  take(count) {
    const at = this.end;
    this.end += 16 * Math.ceil(count / 4);
    const lacking = Math.ceil((this.end - this.memory.buffer.byteLength) / 65536);
    if (lacking > 0) this.memory.grow(Math.max(lacking, 64));
    return at;
  }

  /** Numbers at an address; good until memory is taken. @param {number} at @param {number} count */
  floats(at, count) {
    return new Float32Array(this.memory.buffer, at, count);
  }

  /** Do something with memory that is free again afterwards. @template T @param {() => T} work */
  freeing(work) {
    const mark = this.end;
    try {
      return work();
    } finally {
      this.end = mark;
    }
  }
}
