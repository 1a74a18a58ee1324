/** TOML, as recipes have it: everything of version 1.0 but dates and times, which no recipe has. */

/** @typedef {{ [key: string]: any }} Table values are texts, numbers, BigInts, booleans, lists and tables */

const ESCAPES = { b: "\b", t: "\t", n: "\n", f: "\f", r: "\r", '"': '"', "\\": "\\" };
const NUMBER = /^[+-]?(?:0|[1-9](?:_?\d)*)(?:\.\d(?:_?\d)*)?(?:[eE][+-]?\d(?:_?\d)*)?$/;
const BASED = /^0(?:x[\da-fA-F](?:_?[\da-fA-F])*|o[0-7](?:_?[0-7])*|b[01](?:_?[01])*)$/;
const DEEPEST = 32; // arrays in arrays; a recipe has two

/** The tables of a text. Integers beyond 2^53 are BigInts. Throws an Error that names the line. @param {string} text */
export function parse(text) {
  return new Reader(text).document();
}

class Reader {
  /** @param {string} text */
  constructor(text) {
    this.text = text.replace(/\r\n/g, "\n");
    this.at = 0;
  }

  document() {
    const root = empty();
    let table = root;
    const defined = new Set();
    for (this.#blank(true); this.at < this.text.length; this.#blank(true)) {
      if (this.#takes("[")) {
        const many = this.#takes("[");
        const keys = this.#keys();
        if (!this.#takes(many ? "]]" : "]")) throw this.#error("a header that does not end");
        const name = JSON.stringify(keys);
        if (!many && defined.has(name)) throw this.#error("a table that is there already");
        defined.add(name);
        const last = /** @type {string} */ (keys.pop());
        const parent = this.#within(root, keys);
        if (many) {
          const list = (parent[last] ??= []);
          if (!Array.isArray(list)) throw this.#error("a key that is there already");
          list.push((table = empty()));
        } else table = this.#within(parent, [last]);
      } else this.#pair(table);
      this.#blank(false);
      if (this.at < this.text.length && !this.#takes("\n")) throw this.#error("something after the end of a value");
    }
    return root;
  }

  /** White space and comments, over lines or within one. @param {boolean} lines */
  #blank(lines) {
    const found = (lines ? /(?:[ \t\n]|#[^\n]*)*/y : /[ \t]*(?:#[^\n]*)?/y);
    found.lastIndex = this.at;
    this.at += found.exec(this.text)?.[0].length ?? 0;
  }

  /** @param {string} what */
  #takes(what) {
    const is = this.text.startsWith(what, this.at);
    if (is) this.at += what.length;
    return is;
  }

  /** The parts of a dotted key. */
  #keys() {
    const keys = [];
    do {
      this.#blank(false);
      const bare = /[\w-]+/y;
      bare.lastIndex = this.at;
      const found = bare.exec(this.text)?.[0];
      if (found) this.at += found.length;
      else if (!'"\''.includes(this.text[this.at] ?? "?")) throw this.#error("a key is missing");
      keys.push(found ?? this.#text());
      this.#blank(false);
    } while (this.#takes("."));
    return keys;
  }

  /** The table at some keys, made where it is missing; of a list of tables the last. @param {Table} table
   * @param {string[]} keys */
  #within(table, keys) {
    for (const key of keys) {
      const found = (table[key] ??= empty());
      const next = Array.isArray(found) ? found[found.length - 1] : found;
      if (typeof next !== "object" || Array.isArray(next)) throw this.#error("a key that is there already");
      table = next;
    }
    return table;
  }

  /** @param {Table} table */
  #pair(table) {
    const keys = this.#keys();
    const last = /** @type {string} */ (keys.pop());
    if (!this.#takes("=")) throw this.#error("a key without a value");
    const parent = this.#within(table, keys);
    if (last in parent) throw this.#error(`${last} is there twice`);
    parent[last] = this.#value(0);
  }

  /** @param {number} depth @returns {any} */
  #value(depth) {
    this.#blank(false);
    if (depth > DEEPEST) throw this.#error("values within values");
    if ('"\''.includes(this.text[this.at] ?? "?")) return this.#text();
    if (this.#takes("[")) {
      const list = [];
      for (this.#blank(true); !this.#takes("]"); this.#blank(true)) {
        list.push(this.#value(depth + 1));
        this.#blank(true);
        if (!this.#takes(",") && this.text[this.at] !== "]") throw this.#error("a list that does not end");
      }
      return list;
    }
    if (this.#takes("{")) {
      const table = empty();
      this.#blank(false);
      if (this.#takes("}")) return table;
      do this.#pair(table), this.#blank(false);
      while (this.#takes(","));
      if (!this.#takes("}")) throw this.#error("a table in a line that does not end");
      return table;
    }
    const word = /[\w.+-]+/y;
    word.lastIndex = this.at;
    const found = word.exec(this.text)?.[0] ?? "";
    this.at += found.length;
    if (found === "true" || found === "false") return found === "true";
    if (/^[+-]?(inf|nan)$/.test(found)) return found.endsWith("nan") ? NaN : found[0] === "-" ? -Infinity : Infinity;
    const digits = found.replaceAll("_", "");
    if (BASED.test(found) || (NUMBER.test(found) && !/[.eE]/.test(found))) {
      const whole = BigInt(digits.replace(/^[+-]/, "")) * (digits[0] === "-" ? -1n : 1n);
      return Number.isSafeInteger(Number(whole)) ? Number(whole) : whole;
    }
    if (NUMBER.test(found)) return Number(digits);
    throw this.#error(`a value that is none: ${found.slice(0, 40)}`);
  }

  #text() {
    const quote = this.text[this.at];
    const long = this.#takes(quote.repeat(3));
    if (!long) this.at++;
    else this.#takes("\n");
    let found = "";
    for (;;) {
      const here = this.text[this.at];
      if (here === undefined || (!long && here === "\n")) throw this.#error("a text that does not end");
      if (here === quote && (!long || this.text.startsWith(quote.repeat(3), this.at))) {
        this.at += long ? 3 : 1;
        for (let more = 0; long && more < 2 && this.#takes(quote); more++) found += quote; // of '"""a"""""'
        return found;
      }
      this.at++;
      found += here === "\\" && quote === '"' ? this.#escaped(long) : here;
    }
  }

  /** @param {boolean} long */
  #escaped(long) {
    const gap = /[ \t]*\n[ \t\n]*/y;
    gap.lastIndex = this.at;
    const line = long ? gap.exec(this.text)?.[0] : undefined;
    if (line) {
      this.at += line.length;
      return "";
    }
    const code = /u([\da-fA-F]{4})|U([\da-fA-F]{8})/y;
    code.lastIndex = this.at;
    const digits = code.exec(this.text);
    if (digits) {
      this.at += digits[0].length;
      const point = parseInt(digits[1] ?? digits[2], 16);
      if (point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) throw this.#error("a character that is none");
      return String.fromCodePoint(point);
    }
    const found = /** @type {Record<string, string>} */ (ESCAPES)[this.text[this.at++]];
    if (found === undefined) throw this.#error("a character that is none");
    return found;
  }

  /** @param {string} what */
  #error(what) {
    return new Error(`line ${this.text.slice(0, this.at).split("\n").length}: ${what}`);
  }
}

/** A table without inherited keys. @returns {Table} */
const empty = () => Object.create(null);
