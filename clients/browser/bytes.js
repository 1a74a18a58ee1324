/** Bytes: hexadecimal digits, joining, comparing, SHA-256, CRC-32. */

/** @typedef {Uint8Array<ArrayBuffer>} Bytes */

/** @param {Uint8Array} data */
export const hex = (data) => Array.from(data, (byte) => byte.toString(16).padStart(2, "0")).join("");

/** @param {string} digits @returns {Bytes} */
export const unhex = (digits) => Uint8Array.from(digits.match(/../g) ?? [], (pair) => parseInt(pair, 16));

/** @param {string} text @returns {Bytes} */
export const utf8 = (text) => new TextEncoder().encode(text);

/** @param {...Uint8Array} parts @returns {Bytes} */
export function join(...parts) {
  const whole = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** @param {Uint8Array} a @param {Uint8Array} b */
export const same = (a, b) => a.length === b.length && a.every((byte, at) => byte === b[at]);

/** @param {Uint8Array} data */
export const isZero = (data) => data.every((byte) => byte === 0);

/** @param {Uint8Array} data */
export const view = (data) => new DataView(data.buffer, data.byteOffset, data.byteLength);

/** @param {number} number @returns {Bytes} */
export function u32(number) {
  const data = new Uint8Array(4);
  view(data).setUint32(0, number, true);
  return data;
}

/** The SHA-256 of the parts, one after the other. @param {...Uint8Array} parts @returns {Promise<Bytes>} */
export async function sha256(...parts) {
  return new Uint8Array(await crypto.subtle.digest("SHA-256", join(...parts)));
}

const CRC = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? (byte >>> 1) ^ 0xedb88320 : byte >>> 1;
  return byte;
});

/** @param {Uint8Array} data */
export function crc32(data) {
  let sum = ~0;
  for (const byte of data) sum = CRC[(sum ^ byte) & 255] ^ (sum >>> 8);
  return ~sum >>> 0;
}
