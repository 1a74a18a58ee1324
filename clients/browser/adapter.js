/** The file of a tuned model (docs/wire.md): K numbers, and which model they belong to. */

import { join, sha256, utf8, view } from "./bytes.js";

/** Text as Python's json.dumps writes it: keys sorted, `, ` and `: ` between, only ASCII.
 * @param {unknown} value @returns {string} */
export function dumps(value) {
  if (typeof value === "bigint") return String(value);
  if (Array.isArray(value)) return `[${value.map(dumps).join(", ")}]`;
  if (value && typeof value === "object") {
    const parts = Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1));
    return `{${parts.map(([key, one]) => `${dumps(key)}: ${dumps(one)}`).join(", ")}}`;
  }
  const escaped = (/** @type {string} */ unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return JSON.stringify(value).replace(/[\x7f-\uffff]/g, escaped);
}

/** The adapter of coefficients.
 * @param {Float32Array} c @param {{ key: bigint, base: string, tuned: string | null, patterns: string[],
 *   provenance: Record<string, unknown> }} about */
export async function adapter(c, { key, base, tuned, patterns, provenance }) {
  const data = new Uint8Array(c.slice().buffer);
  const fields = { format: 1, pool: { key, size: c.length, family: "hadamard" }, base, tuned, patterns, provenance };
  const checksum = Array.from(await sha256(utf8(dumps(fields)), data), (b) => b.toString(16).padStart(2, "0")).join("");
  const head = utf8(JSON.stringify({
    __metadata__: { fedkseed: dumps({ ...fields, checksum }) },
    coefficients: { dtype: "F32", shape: [c.length], data_offsets: [0, data.length] },
  }));
  const padded = join(head, new Uint8Array((8 - (head.length % 8)) % 8).fill(32));
  const length = new Uint8Array(8);
  view(length).setBigUint64(0, BigInt(padded.length), true);
  return join(length, padded, data);
}
