/** The tokenizer of a Hugging Face folder: byte-pair encoding as `tokenizer.json` says it.
 *
 * Known are the parts that models of the Llama type have, of bytes or of SentencePiece; any other part is refused by
 * name, since a text cut otherwise would be another example.
 */

/** @typedef {Record<string, any>} Any */
/** @typedef {(text: string) => string} Normalizer */
/** @typedef {(text: string) => string[]} Splitter */

// White space of Unicode, which JavaScript's \s is not.
const SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

const PAIR = 2 ** 24; // more than there are tokens

/** @param {string} what @returns {never} */
function unknown(what) {
  throw new Error(`tokenizer.json has ${what}, which this page does not know; use fedkseed join with this model`);
}

/** The visible character that stands for each byte in a vocabulary of bytes. */
const LETTERS = (() => {
  const shown = (/** @type {number} */ b) => (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, b) => String.fromCharCode(shown(b) ? b : next++));
})();

/** A regular expression of Rust's or Oniguruma's, with their white space. @param {string} source */
function pattern(source) {
  let inside = false;
  const text = source.replace(/\\[\s\S]|[[\]]/g, (found) => {
    if (found === "[") inside = true;
    if (found === "]") inside = false;
    if (found === "\\s") return inside ? SPACE : `[${SPACE}]`;
    if (found === "\\S") return inside ? unknown("\\S in a set") : `[^${SPACE}]`;
    return found;
  });
  return new RegExp(text, "gu");
}

/** The pattern that matches a text and nothing else. @param {string} text */
const literally = (text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");

/** The parts that a pattern matches, and those between them. @param {string} text @param {RegExp} by */
function isolated(text, by) {
  const found = [];
  let at = 0;
  for (const match of text.matchAll(by)) {
    if (match.index > at) found.push(text.slice(at, match.index));
    if (match[0]) found.push(match[0]);
    at = match.index + match[0].length;
  }
  if (at < text.length) found.push(text.slice(at));
  return found;
}

/** @param {Any | null} of @returns {Normalizer} */
function normalizer(of) {
  switch (of?.type) {
    case undefined: return (text) => text;
    case "Sequence": return of.normalizers.map(normalizer).reduce(
      (/** @type {Normalizer} */ a, /** @type {Normalizer} */ b) => (/** @type {string} */ text) => b(a(text)),
      (/** @type {string} */ text) => text,
    );
    case "Prepend": return (text) => (text ? of.prepend + text : text);
    case "Replace": {
      const by = of.pattern.String ?? pattern(of.pattern.Regex);
      return (text) => text.replaceAll(by, () => of.content);
    }
    case "NFC": case "NFD": case "NFKC": case "NFKD": return (text) => text.normalize(of.type);
    case "Lowercase": return (text) => text.toLowerCase();
    default: return unknown(`the normalizer ${of?.type}`);
  }
}

/** @param {Any | null} of @returns {Splitter} */
function splitter(of) {
  switch (of?.type) {
    case undefined: return (text) => [text];
    case "Sequence": return of.pretokenizers.map(splitter).reduce(
      (/** @type {Splitter} */ a, /** @type {Splitter} */ b) => (/** @type {string} */ text) => a(text).flatMap(b),
      (/** @type {string} */ text) => [text],
    );
    case "ByteLevel": {
      const by = of.use_regex === false ? null : pattern(GPT2);
      const encoder = new TextEncoder();
      const letters = (/** @type {string} */ text) => Array.from(encoder.encode(text), (b) => LETTERS[b]).join("");
      return (text) => {
        const whole = of.add_prefix_space && !text.startsWith(" ") ? ` ${text}` : text;
        return (by ? isolated(whole, by) : [whole]).map(letters);
      };
    }
    case "Split": {
      if (of.behavior !== "Isolated" || of.invert) unknown(`a split that is ${of.behavior}`);
      const by = pattern(of.pattern.Regex ?? literally(of.pattern.String));
      return (text) => isolated(text, by);
    }
    case "Digits": return (text) => isolated(text, of.individual_digits ? /\p{N}/gu : /\p{N}+/gu);
    default: return unknown(`the pre-tokenizer ${of?.type}`);
  }
}

/** The tokens before and after a text. @param {Any | null} of @returns {[number[], number[]]} */
function frame(of) {
  if (!of || of.type === "ByteLevel") return [[], []];
  if (of.type === "Sequence") {
    return of.processors.map(frame).reduce(
      (/** @type {number[][]} */ [a, b], /** @type {number[][]} */ [c, d]) => [[...c, ...a], [...b, ...d]], [[], []]);
  }
  if (of.type !== "TemplateProcessing") unknown(`the post-processor ${of.type}`);
  /** @type {[number[], number[]]} */
  const sides = [[], []];
  let side = 0;
  for (const part of of.single) {
    if (part.Sequence) side = 1;
    else sides[side].push(...of.special_tokens[part.SpecialToken.id].ids);
  }
  return sides;
}

export class Tokenizer {
  /** @param {Any} file tokenizer.json @param {Any} config tokenizer_config.json */
  constructor(file, config) {
    const { model } = file;
    if (model.type !== "BPE") unknown(`the model ${model.type}`);
    if (model.continuing_subword_prefix || model.end_of_word_suffix || model.dropout) unknown("affixes or a dropout");
    /** @type {Map<string, number>} */
    this.vocabulary = new Map(Object.entries(model.vocab));
    /** @type {Map<number, [number, number]>} pair of tokens -> rank and the token it becomes */
    this.merges = new Map();
    model.merges.forEach((/** @type {string | [string, string]} */ merge, /** @type {number} */ rank) => {
      const [a, b] = typeof merge === "string" ? merge.split(" ") : merge;
      const [left, right, both] = [a, b, a + b].map((text) => this.vocabulary.get(text) ?? NaN);
      this.merges.set(left * PAIR + right, [rank, both]);
    });
    this.model = model;
    this.normalize = normalizer(file.normalizer);
    this.split = splitter(file.pre_tokenizer);
    this.frame = frame(file.post_processor);
    /** @type {Map<string, number>} */
    this.added = new Map();
    for (const one of file.added_tokens) {
      if (one.lstrip || one.rstrip || one.single_word) unknown(`the token ${one.content}, which takes white space`);
      this.added.set(one.normalized ? this.normalize(one.content) : one.content, one.id);
    }
    const texts = (/** @type {boolean} */ normalized) =>
      file.added_tokens.filter((/** @type {Any} */ one) => Boolean(one.normalized) === normalized)
        .map((/** @type {Any} */ one) => (normalized ? this.normalize(one.content) : one.content))
        .sort((/** @type {string} */ a, /** @type {string} */ b) => b.length - a.length)
        .map(literally).join("|");
    this.raw = texts(false) ? new RegExp(texts(false), "gu") : null;
    this.normalized = texts(true) ? new RegExp(texts(true), "gu") : null;
    const end = config.eos_token?.content ?? config.eos_token;
    const found = this.added.get(end) ?? this.vocabulary.get(end);
    if (found === undefined) throw new Error(`tokenizer_config.json names no end of text that is a token: ${end}`);
    this.end = found;
    /** @type {Map<string, number[]>} */
    this.known = new Map();
  }

  /** The tokens of a text. @param {string} text @param {boolean} special whether those before and after it are put */
  encode = (text, special) => {
    /** @type {number[]} */
    const tokens = [];
    const taken = (/** @type {RegExp | null} */ by, /** @type {string} */ whole, /** @type {Splitter} */ rest) => {
      for (const part of by ? isolated(whole, by) : whole ? [whole] : []) {
        const id = by ? this.added.get(part) : undefined;
        if (id === undefined) rest(part);
        else tokens.push(id);
      }
      return [];
    };
    taken(this.raw, text, (part) =>
      taken(this.normalized, this.normalize(part), (clean) => {
        for (const word of this.split(clean)) tokens.push(...this.#word(word));
        return [];
      }));
    return special ? [...this.frame[0], ...tokens, ...this.frame[1]] : tokens;
  };

  /** @param {string} word */
  #word(word) {
    const whole = this.model.ignore_merges ? this.vocabulary.get(word) : undefined;
    if (whole !== undefined) return [whole];
    let found = this.known.get(word);
    if (!found) {
      found = this.#merged(this.#symbols(word));
      if (word.length < 24 && this.known.size < 100_000) this.known.set(word, found); // words of a language come again
    }
    return found;
  }

  /** The token of each character; of one that has none those of its bytes, or the unknown one. @param {string} word */
  #symbols(word) {
    /** @type {number[]} */
    const found = [];
    let fused = false;
    for (const character of word) {
      const id = this.vocabulary.get(character);
      const bytes = this.model.byte_fallback
        ? Array.from(new TextEncoder().encode(character), (b) =>
            this.vocabulary.get(`<0x${b.toString(16).toUpperCase().padStart(2, "0")}>`))
        : [undefined];
      const none = id === undefined && bytes.includes(undefined);
      if (id !== undefined) found.push(id);
      else if (!none) found.push(.../** @type {number[]} */ (bytes));
      else {
        const unk = this.vocabulary.get(this.model.unk_token);
        if (unk !== undefined && !(fused && this.model.fuse_unk)) found.push(unk);
      }
      fused = none;
    }
    return found;
  }

  /** Symbols after all merges: the one of the lowest rank first, of several the leftmost. @param {number[]} symbols */
  #merged(symbols) {
    const merge = (/** @type {number} */ i) => this.merges.get(symbols[i] * PAIR + symbols[i + 1]);
    const ranks = symbols.map((_, i) => merge(i)?.[0] ?? Infinity);
    for (;;) {
      let best = 0;
      for (let i = 1; i < ranks.length; i++) if (ranks[i] < ranks[best]) best = i;
      const found = ranks.length && ranks[best] < Infinity ? merge(best) : undefined;
      if (!found) return symbols;
      symbols.splice(best, 2, found[1]);
      ranks.splice(best, 1);
      ranks[best] = merge(best)?.[0] ?? Infinity;
      if (best > 0) ranks[best - 1] = merge(best - 1)?.[0] ?? Infinity;
    }
  }
}
