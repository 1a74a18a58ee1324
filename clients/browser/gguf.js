/** The tensors of a GGUF file of a Llama, by the names of the layout, their blocks as numbers (docs/session.md). */

import { view } from "./bytes.js";
import { half, MOST_HEADER, part, widened } from "./safetensors.js";

/** @typedef {import("./safetensors.js").Stored} Stored */
/** @typedef {[bits: number, first: number, run: number, worth?: number]} Field b, p and r of docs/session.md, and what
 *   each number of it is worth */
/** @typedef {{ fields: Field[], minus?: number, signed?: boolean, table?: number[] }} Codes */
/** @typedef {{ name: string, weights: number, bytes: number, d: number, m?: boolean, q: Codes,
 *   groups?: { count: number, codes?: Codes } }} Layout of a block; groups without codes are those of Q4_K */

const CURVE = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
const SIX = { count: 8 };

/** Layouts of blocks, by the numbers of their types. @type {Record<number, Layout>} */
const LAYOUTS = {
  2: { name: "Q4_0", weights: 32, bytes: 18, d: 0, q: { fields: [[4, 2, 16]], minus: 8 } },
  3: { name: "Q4_1", weights: 32, bytes: 20, d: 0, m: true, q: { fields: [[4, 4, 16]] } },
  6: { name: "Q5_0", weights: 32, bytes: 22, d: 0, q: { fields: [[4, 6, 16], [1, 2, 1, 16]], minus: 16 } },
  7: { name: "Q5_1", weights: 32, bytes: 24, d: 0, m: true, q: { fields: [[4, 8, 16], [1, 4, 1, 16]] } },
  8: { name: "Q8_0", weights: 32, bytes: 34, d: 0, q: { fields: [[8, 2, 32]], signed: true } },
  10: {
    name: "Q2_K", weights: 256, bytes: 84, d: 80, m: true, q: { fields: [[2, 16, 32]] },
    groups: { count: 16, codes: { fields: [[4, 0, 16]] } },
  },
  11: {
    name: "Q3_K", weights: 256, bytes: 110, d: 108, q: { fields: [[2, 32, 32], [1, 0, 32, 4]], minus: 4 },
    groups: { count: 16, codes: { fields: [[4, 96, 8], [2, 104, 4, 16]], minus: 32 } },
  },
  12: { name: "Q4_K", weights: 256, bytes: 144, d: 0, m: true, q: { fields: [[4, 16, 32]] }, groups: SIX },
  13: {
    name: "Q5_K", weights: 256, bytes: 176, d: 0, m: true, q: { fields: [[4, 48, 32], [1, 16, 32, 16]] }, groups: SIX,
  },
  14: {
    name: "Q6_K", weights: 256, bytes: 210, d: 208, q: { fields: [[4, 0, 64], [2, 128, 32, 16]], minus: 32 },
    groups: { count: 16, codes: { fields: [[8, 192, 16]], signed: true } },
  },
  20: { name: "IQ4_NL", weights: 32, bytes: 18, d: 0, q: { fields: [[4, 2, 16]], table: CURVE } },
  23: {
    name: "IQ4_XS", weights: 256, bytes: 136, d: 0, q: { fields: [[4, 8, 16]], table: CURVE },
    groups: { count: 8, codes: { fields: [[4, 4, 1], [2, 2, 1, 16]], minus: 32 } },
  },
};
/** Plain numbers, by the numbers of their types: name and bytes. @type {Record<number, [string, number]>} */
const PLAIN = { 0: ["F32", 4], 1: ["F16", 2], 30: ["BF16", 2] };
/** Numbers of the header, by their kinds: bytes, and how they are read. @type {Record<number, [number, string]>} */
const NUMBERS = {
  0: [1, "getUint8"], 1: [1, "getInt8"], 2: [2, "getUint16"], 3: [2, "getInt16"], 4: [4, "getUint32"],
  5: [4, "getInt32"], 6: [4, "getFloat32"], 7: [1, "getUint8"], 10: [8, "getBigUint64"], 11: [8, "getBigInt64"],
  12: [8, "getFloat64"],
};
const [STRING, ARRAY] = [8, 9];
const [MOST_TENSORS, MOST_PAIRS, MOST_DIMENSIONS] = [65_536, 16_384, 4]; // as in models/gguf_header.py
/** @type {Record<string, string>} */
const NAMES = {
  token_embd: "model.embed_tokens", output: "lm_head", output_norm: "model.norm", attn_q: "self_attn.q_proj",
  attn_k: "self_attn.k_proj", attn_v: "self_attn.v_proj", attn_output: "self_attn.o_proj", ffn_gate: "mlp.gate_proj",
  ffn_up: "mlp.up_proj", ffn_down: "mlp.down_proj", attn_norm: "input_layernorm", ffn_norm: "post_attention_layernorm",
};

/** The end of the part of a file that was read, before its header's end. */
class Short extends Error {}

/** The header of a file, whose values are read one after the other. */
class Header {
  /** @param {Uint8Array} data */
  constructor(data) {
    this.view = view(data);
    this.at = 0;
  }

  /** @param {number} size @returns {number} where these bytes begin */
  skip(size) {
    if (size > this.view.byteLength - this.at) throw new Short();
    this.at += size;
    return this.at - size;
  }

  u32 = () => this.number(4);
  u64 = () => this.number(10);

  /** @param {number} kind @returns {number} */
  number(kind) {
    const [size, read] = NUMBERS[kind];
    return Number(/** @type {any} */ (this.view)[read](this.skip(size), true));
  }

  text() {
    const size = this.u64();
    const begin = this.skip(size);
    return new TextDecoder().decode(new Uint8Array(this.view.buffer, this.view.byteOffset + begin, size));
  }

  /** A number or a text; the items of an array are passed over. @param {number} kind
   * @returns {number | string | undefined} */
  value(kind) {
    if (kind === STRING) return this.text();
    if (NUMBERS[kind]) return this.number(kind);
    const inner = kind === ARRAY ? this.u32() : kind;
    if (inner !== STRING && !NUMBERS[inner]) throw new Error(`the GGUF file's header has a value of kind ${inner}`);
    const items = this.u64();
    if (inner !== STRING) this.skip(items * NUMBERS[inner][0]);
    else for (let k = 0; k < items; k++) this.skip(this.u64());
    return undefined;
  }
}

/** The tensors of a file. Throws an Error that says what is wrong with it. @param {Blob} file
 * @param {Record<string, any>} config config.json, which must describe the same model @param {number} [first] bytes of
 * the first reading of the header @returns {Promise<Stored[]>} */
export async function readGguf(file, config, first = 1 << 22) {
  for (let size = first; ; size = Math.min(4 * size, MOST_HEADER)) {
    try {
      return described(new Header(await part(file, 0, size)), file, config);
    } catch (error) {
      if (!(error instanceof Short)) throw error;
      if (size >= Math.min(file.size, MOST_HEADER)) throw new Error("the GGUF file is cut, or its header is damaged");
    }
  }
}

/** @param {Header} header @param {Blob} file @param {Record<string, any>} config @returns {Stored[]} */
function described(header, file, config) {
  header.skip(4);
  const version = header.u32();
  if (version !== 2 && version !== 3) throw new Error(`the GGUF file has version ${version}; this page reads 2 and 3`);
  const [tensors, pairs] = [header.u64(), header.u64()];
  if (tensors > MOST_TENSORS || pairs > MOST_PAIRS) throw new Error(`the GGUF file announces ${tensors} tensors`);
  /** @type {Map<string, number | string | undefined>} */
  const about = new Map();
  for (let k = 0; k < pairs; k++) {
    const name = header.text();
    about.set(name, header.value(header.u32()));
  }
  const listed = [];
  for (let k = 0; k < tensors; k++) {
    const name = header.text();
    const dimensions = header.u32();
    if (!(dimensions > 0 && dimensions <= MOST_DIMENSIONS)) throw new Error(`${name} has ${dimensions} dimensions`);
    const shape = Array.from({ length: dimensions }, header.u64).reverse();
    listed.push({ name, shape, kind: header.u32(), offset: header.u64() });
  }
  const [heads, pairsOfHeads] = requireSame(about, config);
  const turned = { attn_q: heads, attn_k: pairsOfHeads };
  const alignment = Number(about.get("general.alignment") ?? 32);
  const data = alignment * Math.ceil(header.at / alignment);
  let rest = file.size; // tensors on the same bytes would each be a copy of them
  return listed.map(({ name, shape, kind, offset }) => {
    const columns = shape[shape.length - 1];
    const count = shape.reduce((a, b) => a * b, 1);
    const [layout, plain] = [LAYOUTS[kind], PLAIN[kind]];
    if (!layout && !plain) throw new Error(`${name} has blocks of type ${kind}, which this page can't read`);
    const size = plain ? plain[1] * count : (count / layout.weights) * layout.bytes;
    if (layout && columns % layout.weights) throw new Error(`${name} has rows of ${columns} weights, no whole blocks`);
    rest -= size;
    if (!(data + offset + size <= file.size)) throw new Error(`the GGUF file is cut: it lacks ${name}`);
    if (rest < 0) throw new Error("the GGUF file has tensors that share bytes");
    const [, before, own] = /^(blk\.\d+\.)?(\w+)\.weight$/.exec(name) ?? [];
    const known = own !== undefined && Object.hasOwn(NAMES, own) && NAMES[own];
    if (!known) throw new Error(`the GGUF file has the tensor ${name}, which this page can't use: use fedkseed join`);
    const read = async () => {
      const bytes = await part(file, data + offset, data + offset + size);
      const numbers = plain ? widened(name, plain[0], bytes) : unpacked(layout, bytes);
      return own === "attn_q" || own === "attn_k" ? halvesApart(numbers, turned[own], columns) : numbers;
    };
    return { name: `${before ? before.replace("blk", "model.layers") : ""}${known}.weight`, shape, read };
  });
}

/** The numbers of heads, of queries and of keys. Throws an Error where the header and config.json say different things.
 * @param {Map<string, number | string | undefined>} about @param {Record<string, any>} config */
function requireSame(about, config) {
  const kind = about.get("general.architecture");
  if (kind !== "llama") throw new Error(`the GGUF file has a ${kind}, and this page runs Llamas`);
  const of = (/** @type {string} */ key) => about.get(`llama.${key}`);
  const heads = config.num_attention_heads;
  const pairs = config.num_key_value_heads ?? heads;
  const theta = config.rope_parameters?.rope_theta ?? config.rope_theta ?? 10000;
  const factor = of("rope.scaling.type") === "none" ? 1 : (of("rope.scaling.factor") ?? 1);
  /** @type {[string, any, any][]} what it is, in the file, in config.json */
  const both = [
    ["heads", of("attention.head_count"), heads], ["pairs of keys", of("attention.head_count_kv") ?? heads, pairs],
    ["the base of positions", of("rope.freq_base") ?? 10000, theta], ["the factor of positions", factor || 1, 1],
    ["epsilon", of("attention.layer_norm_rms_epsilon"), config.rms_norm_eps],
  ];
  for (const [what, found, wanted] of both) {
    if (Math.fround(found) !== Math.fround(wanted)) {
      throw new Error(`the GGUF file says ${found} for ${what}, and config.json ${wanted}`);
    }
  }
  return [heads, pairs];
}

/** Rows of a head as the model has them, where the file has those of its two halves by turns.
 * @param {Float32Array} numbers @param {number} heads @param {number} columns */
function halvesApart(numbers, heads, columns) {
  const rows = numbers.length / columns;
  const width = rows / heads;
  if (!Number.isInteger(width / 2)) throw new Error(`${rows} rows of queries or keys are not those of ${heads} heads`);
  const found = new Float32Array(numbers.length);
  for (let row = 0; row < rows; row++) {
    const [head, place] = [Math.floor(row / width), row % width];
    const from = head * width + 2 * (place % (width / 2)) + Math.floor(place / (width / 2));
    found.set(numbers.subarray(from * columns, (from + 1) * columns), row * columns);
  }
  return found;
}

/** A reader of the integers of a block. @param {Codes} codes @param {number} count
 * @returns {(data: Uint8Array, at: number, to: Int32Array) => void} */
function integers({ fields, minus = 0, signed, table }, count) {
  const places = fields.map(([bits, first, run, worth = 1]) => {
    const levels = 8 / bits;
    const numbers = Array.from({ length: count }, (_, i) => i);
    return {
      byte: numbers.map((i) => first + Math.floor(i / (run * levels)) * run + (i % run)),
      shift: numbers.map((i) => bits * (Math.floor(i / run) % levels)), mask: 2 ** bits - 1, worth,
    };
  });
  return (data, at, to) => {
    for (let i = 0; i < count; i++) {
      let sum = -minus;
      for (const { byte, shift, mask, worth } of places) sum += ((data[at + byte[i]] >> shift[i]) & mask) * worth;
      to[i] = table ? table[sum] : signed ? (sum << 24) >> 24 : sum;
    }
  };
}

/** The numbers s, and behind them t, of the eight groups of Q4_K and Q5_K. @param {Uint8Array} data @param {number} at
 * @param {Int32Array} to */
function six(data, at, to) {
  for (let g = 0; g < 4; g++) {
    const [x, y, z] = [data[at + 4 + g], data[at + 8 + g], data[at + 12 + g]];
    to[g] = x & 63;
    to[g + 4] = (z & 15) + 16 * (x >> 6);
    to[g + 8] = y & 63;
    to[g + 12] = (z >> 4) + 16 * (y >> 6);
  }
}

/** The weights of blocks: each operation is rounded to float32. @param {Layout} layout @param {Uint8Array} data */
function unpacked({ weights, bytes, d, m, q, groups }, data) {
  const { fround } = Math;
  const count = groups?.count ?? 1;
  const [codes, factors] = [new Int32Array(weights), new Int32Array(2 * count).fill(1)];
  const factorCount = m ? 2 * count : count;
  const [readCodes, readFactors] = [integers(q, weights), groups?.codes ? integers(groups.codes, factorCount) : six];
  const found = new Float32Array((data.length / bytes) * weights);
  const at16 = (/** @type {number} */ at) => half(data[at] + 256 * data[at + 1]);
  for (let at = 0, to = 0; at < data.length; at += bytes) {
    readCodes(data, at, codes);
    if (groups) readFactors(data, at, factors);
    const [scale, plus] = [at16(at + d), m ? at16(at + d + 2) : 0];
    for (let g = 0, i = 0; g < count; g++) {
      const ofGroup = fround(scale * factors[g]);
      const added = groups ? fround(-plus * factors[count + g]) : plus;
      for (const end = i + weights / count; i < end; i++, to++) {
        const product = fround(codes[i] * ofGroup);
        found[to] = m ? product + added : product;
      }
    }
  }
  return found;
}
