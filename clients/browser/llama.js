/** The forward pass of a Llama and the loss of a batch, with weights that are made where they are needed.
 *
 * All rows of a batch go through the model together, one after the other and without padding. A matrix is made in slabs
 * of rows, multiplied, and forgotten: beside the base weights there is never more than one slab.
 */

import { OUTS, ROWS, WIDTH } from "./kernels.js";
import { HEAD } from "./model.js";

/** @typedef {import("./texts.js").Example} Example */
/** @typedef {Record<string, any>} Any */

const SLAB = 1 << 17; // weights of a slab: half a megabyte, which stays in a processor's cache

export class Llama {
  /** @param {import("./model.js").Weights} weights @param {Any} config config.json; throws where it is another model */
  constructor(weights, config) {
    this.weights = weights;
    this.heads = config.num_attention_heads;
    this.pairs = config.num_key_value_heads ?? this.heads;
    this.hidden = config.hidden_size;
    this.inner = config.intermediate_size;
    this.layers = config.num_hidden_layers;
    this.width = config.head_dim ?? this.hidden / this.heads;
    this.words = config.vocab_size;
    this.epsilon = config.rms_norm_eps;
    this.theta = config.rope_parameters?.rope_theta ?? config.rope_theta ?? 10000;
    this.embedding = config.tie_word_embeddings ? HEAD : "model.embed_tokens.weight";
    const rope = config.rope_parameters?.rope_type ?? config.rope_scaling?.rope_type ?? "default";
    const others = [
      config.model_type !== "llama" && `a model of the type ${config.model_type}`,
      config.hidden_act !== "silu" && `the activation ${config.hidden_act}`,
      rope !== "default" && `positions of the type ${rope}`,
      (config.attention_bias || config.mlp_bias) && "layers with a bias",
      [this.hidden, this.inner, this.heads * this.width].some((n) => n % WIDTH) && `widths no multiple of ${WIDTH}`,
      this.words % OUTS && `an odd number of words, ${this.words}`,
    ].filter(Boolean);
    if (others.length) throw new Error(`config.json has ${others[0]}, which this page can't run: use fedkseed join`);
  }

  /** The loss of a batch at w(c), in nats a token. @param {Float32Array} c @param {Example[]} rows */
  loss(c, rows) {
    const { weights } = this;
    weights.load(c);
    return weights.kernels.freeing(() => this.#loss(rows));
  }

  /** @param {Example[]} rows */
  #loss(rows) {
    const { kernels } = this.weights;
    const spans = rows.map((_, k) => rows.slice(0, k).reduce((at, { tokens }) => at + tokens.length, 0));
    const tokens = rows.flatMap((row) => row.tokens);
    const room = ROWS * Math.ceil(tokens.length / ROWS);
    const wide = Math.max(this.hidden, this.heads * this.width);
    const slab = kernels.take(SLAB + 2 * Math.max(this.inner, wide));
    const [x, n, q, k, v] = [this.hidden, wide, wide, wide, wide].map((width) => kernels.take(room * width));
    const [gate, up] = [this.inner, this.inner].map((width) => kernels.take(room * width));
    tokens.forEach((token, t) => {
      this.weights.write(this.embedding, token * this.hidden, (token + 1) * this.hidden, x + 4 * t * this.hidden);
    });
    const turns = this.#turns(Math.max(...rows.map((row) => row.tokens.length)));
    const own = [room, slab];
    for (let layer = 0; layer < this.layers; layer++) {
      const name = (/** @type {string} */ part) => `model.layers.${layer}.${part}.weight`;
      this.#norm(n, x, tokens.length, name("input_layernorm"));
      this.#linear(q, n, name("self_attn.q_proj"), this.hidden, own);
      this.#linear(k, n, name("self_attn.k_proj"), this.hidden, own);
      this.#linear(v, n, name("self_attn.v_proj"), this.hidden, own);
      rows.forEach((row, r) => this.#attend(n, q, k, v, spans[r], row.tokens.length, turns));
      this.#linear(q, n, name("self_attn.o_proj"), this.heads * this.width, own);
      this.#grow(x, q, tokens.length * this.hidden);
      this.#norm(n, x, tokens.length, name("post_attention_layernorm"));
      this.#linear(gate, n, name("mlp.gate_proj"), this.hidden, own);
      this.#linear(up, n, name("mlp.up_proj"), this.hidden, own);
      this.#gated(gate, up, tokens.length * this.inner);
      this.#linear(q, gate, name("mlp.down_proj"), this.inner, own);
      this.#grow(x, q, tokens.length * this.hidden);
    }
    this.#norm(n, x, tokens.length, "model.norm.weight");
    const counted = rows.flatMap(({ counted, tokens }, r) =>
      counted.flatMap(([begin, end]) =>
        Array.from({ length: Math.max(0, end - Math.max(begin, 1)) }, (_, t) => {
          const at = Math.max(begin, 1) + t;
          return { row: spans[r] + at - 1, token: tokens[at] };
        })));
    return this.#surprise(n, q, counted, slab) / counted.length;
  }

  /** y = x Wᵀ for all rows. @param {number} y @param {number} x @param {string} name @param {number} inner
   * @param {number[]} own rows, and the address of a slab */
  #linear(y, x, name, inner, [rows, slab]) {
    const outs = this.weights.tensor(name).shape[0];
    this.#slabs(name, inner, slab, (first, count) => {
      this.weights.kernels.multiply(y + 4 * first, x, slab, rows, count, inner, 4 * outs);
    });
  }

  /** Make a matrix in slabs of rows. @param {string} name @param {number} inner @param {number} slab
   * @param {(first: number, count: number) => void} use */
  #slabs(name, inner, slab, use) {
    const [outs] = this.weights.tensor(name).shape;
    const step = OUTS * Math.max(1, Math.floor(SLAB / inner / OUTS));
    for (let first = 0; first < outs; first += step) {
      const count = Math.min(step, outs - first);
      this.weights.write(name, first * inner, (first + count) * inner, slab);
      use(first, count);
    }
  }

  /** y = x / √(mean x² + ε) · w for each row. @param {number} y @param {number} x @param {number} rows
   * @param {string} name */
  #norm(y, x, rows, name) {
    const { kernels } = this.weights;
    const size = this.hidden;
    kernels.freeing(() => {
      const at = kernels.take(size);
      this.weights.write(name, 0, size, at);
      const [from, to, w] = [kernels.floats(x, rows * size), kernels.floats(y, rows * size), kernels.floats(at, size)];
      for (let row = 0; row < rows * size; row += size) {
        let square = 0;
        for (let i = 0; i < size; i++) square += from[row + i] * from[row + i];
        const scale = 1 / Math.sqrt(square / size + this.epsilon);
        for (let i = 0; i < size; i++) to[row + i] = from[row + i] * scale * w[i];
      }
    });
  }

  /** Cosines and sines of positions: (T, width / 2) each. @param {number} most positions */
  #turns(most) {
    const half = this.width / 2;
    const angle = (/** @type {number} */ at) => Math.floor(at / half) * this.theta ** (-(at % half) / half);
    const made = (/** @type {(x: number) => number} */ of) =>
      Float32Array.from({ length: most * half }, (_, at) => of(angle(at)));
    return { cos: made(Math.cos), sin: made(Math.sin) };
  }

  /** Attention of one row of the batch to itself: tokens from `first` on. Every head is two products of matrices, whose
   * widths are filled up with zeros.
   * @param {number} to @param {number} q @param {number} k @param {number} v @param {number} first
   * @param {number} length @param {{ cos: Float32Array, sin: Float32Array }} turns */
  #attend(to, q, k, v, first, length, turns) {
    const { kernels } = this.weights;
    const { width, heads, pairs } = this;
    const [wide, long] = [width, length].map((n) => WIDTH * Math.ceil(n / WIDTH));
    kernels.freeing(() => {
      const [mine, theirs, values, scores] = [long * wide, long * wide, width * long, long * long]
        .map((count) => kernels.take(count));
      const part = (/** @type {number} */ at, /** @type {number} */ count) =>
        kernels.floats(at + 4 * first * count * width, length * count * width);
      kernels.floats(mine, 2 * long * wide + width * long).fill(0);
      const [shares, turned] = [kernels.floats(scores, long * long), kernels.floats(values, width * long)];
      for (let h = 0; h < heads; h++) {
        const pair = Math.floor((h * pairs) / heads);
        this.#turn(kernels.floats(mine, long * wide), part(q, heads), h, heads, wide, turns);
        this.#turn(kernels.floats(theirs, long * wide), part(k, pairs), pair, pairs, wide, turns);
        const own = part(v, pairs);
        for (let s = 0; s < length; s++) {
          for (let i = 0; i < width; i++) turned[i * long + s] = own[(s * pairs + pair) * width + i];
        }
        kernels.multiply(scores, mine, theirs, long, long, wide, 4 * long);
        for (let t = 0; t < length; t++) {
          softmax(shares.subarray(t * long, (t + 1) * long), t + 1, 1 / Math.sqrt(width));
        }
        const rows = ROWS * Math.ceil(length / ROWS); // those beyond are of the batch's next row, which comes later
        const out = to + 4 * (first * heads + h) * width;
        kernels.multiply(out, scores, values, rows, width, long, 4 * heads * width);
      }
    });
  }

  /** Copy a head, each position turned by its angle. @param {Float32Array} to @param {Float32Array} from
   * @param {number} h @param {number} heads @param {number} wide
   * @param {{ cos: Float32Array, sin: Float32Array }} turns */
  #turn(to, from, h, heads, wide, { cos, sin }) {
    const half = this.width / 2;
    for (let t = 0; (t * heads + h) * this.width < from.length; t++) {
      const begin = (t * heads + h) * this.width;
      for (let i = 0; i < half; i++) {
        const a = from[begin + i];
        const b = from[begin + i + half];
        to[t * wide + i] = a * cos[t * half + i] - b * sin[t * half + i];
        to[t * wide + i + half] = b * cos[t * half + i] + a * sin[t * half + i];
      }
    }
  }

  /** x ← x + y. @param {number} x @param {number} y @param {number} count */
  #grow(x, y, count) {
    const [a, b] = [x, y].map((at) => this.weights.kernels.floats(at, count));
    for (let i = 0; i < count; i++) a[i] += b[i];
  }

  /** x ← silu(x) · y. @param {number} x @param {number} y @param {number} count */
  #gated(x, y, count) {
    const [a, b] = [x, y].map((at) => this.weights.kernels.floats(at, count));
    for (let i = 0; i < count; i++) a[i] = (a[i] / (1 + Math.exp(-a[i]))) * b[i];
  }

  /** The sum of −log p over counted tokens, each predicted from the state of a row.
   *
   * @param {number} states @param {number} some room for the states of these rows
   * @param {{ row: number, token: number }[]} counted @param {number} slab */
  #surprise(states, some, counted, slab) {
    const { kernels } = this.weights;
    const { hidden } = this;
    const room = ROWS * Math.ceil(counted.length / ROWS);
    counted.forEach(({ row }, t) => {
      kernels.floats(some + 4 * t * hidden, hidden).set(kernels.floats(states + 4 * row * hidden, hidden));
    });
    const top = new Float64Array(counted.length).fill(-Infinity);
    const sum = new Float64Array(counted.length);
    const own = new Float64Array(counted.length);
    const logits = kernels.take(room * (SLAB / hidden + OUTS));
    this.#slabs(HEAD, hidden, slab, (first, count) => {
      kernels.multiply(logits, some, slab, room, count, hidden, 4 * count);
      const found = kernels.floats(logits, room * count);
      counted.forEach(({ token }, t) => {
        const begin = t * count;
        let most = top[t];
        for (let o = begin; o < begin + count; o++) most = Math.max(most, found[o]);
        let total = sum[t] * Math.exp(top[t] - most);
        for (let o = begin; o < begin + count; o++) total += Math.exp(found[o] - most);
        [top[t], sum[t]] = [most, total];
        if (token >= first && token < first + count) own[t] = found[begin + token - first];
      });
    });
    return counted.reduce((total, _, t) => total + top[t] + Math.log(sum[t]) - own[t], 0);
  }
}

/** The first numbers of x, times a scale, become shares of 1; the others 0. @param {Float32Array} x
 * @param {number} count @param {number} scale */
function softmax(x, count, scale) {
  let top = -Infinity;
  for (let s = 0; s < count; s++) top = Math.max(top, x[s] * scale);
  let all = 0;
  for (let s = 0; s < count; s++) {
    x[s] = Math.exp(x[s] * scale - top);
    all += x[s];
  }
  for (let s = 0; s < count; s++) x[s] /= all;
  x.fill(0, count);
}
