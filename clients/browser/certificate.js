/** X.509 certificates: as much of them as a client needs to trust a server's key (docs/session.md). */

import { hex, same } from "./bytes.js";
import { publicKey, verify } from "./keys.js";

/** @typedef {import("./bytes.js").Bytes} Bytes */
/** @typedef {{ tag: number, whole: Bytes, data: Bytes }} Value a value of DER, with and without its tag and length */

const EKU = "551d25"; // 2.5.29.37
const SERVER = "2b06010505070301"; // 1.3.6.1.5.5.7.3.1
const ECDSA_SHA256 = "2a8648ce3d040302"; // 1.2.840.10045.4.3.2
const [BOOLEAN, INTEGER, BITS, OCTETS, OID, UTC, SEQUENCE, EXTENSIONS] = [1, 2, 3, 4, 6, 23, 0x30, 0xa3];

/** The values that stand one after the other. @param {Bytes} data @returns {Value[]} */
function values(data) {
  const found = [];
  for (let at = 0; at < data.length; ) {
    let size = data[at + 1];
    let begin = at + 2;
    if (size > 0x84 || size === 0x80) throw new Error("a length that DER has not");
    if (size > 0x80) {
      const digits = data.subarray(begin, begin + size - 0x80);
      begin += digits.length;
      size = parseInt(hex(digits), 16);
    }
    if (!(begin + size <= data.length)) throw new Error("a value beyond its end");
    found.push({ tag: data[at], whole: data.subarray(at, begin + size), data: data.subarray(begin, begin + size) });
    at = begin + size;
  }
  return found;
}

/** The values of a sequence. @param {Value | undefined} of @param {number} tag */
function inside(of, tag = SEQUENCE) {
  if (of?.tag !== tag) throw new Error(`a value of type ${tag} is missing`);
  return values(of.data);
}

/** Milliseconds since 1970 of a time. @param {Value} of */
function time(of) {
  const text = String.fromCharCode(...of.data);
  const year = of.tag === UTC ? (text < "50" ? "20" : "19") + text : text;
  const parts = /^(\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)Z$/.exec(year)?.slice(1);
  if (!parts) throw new Error(`a time that is none: ${text}`);
  return Date.parse(`${parts.slice(0, 3).join("-")}T${parts.slice(3).join(":")}Z`);
}

/** r and s, 32 bytes each, of a signature in DER. @param {Bytes} data */
function rs(data) {
  const [sequence] = values(data);
  const signature = new Uint8Array(64);
  inside(sequence).forEach((number, half) => {
    const digits = number.data[0] === 0 ? number.data.subarray(1) : number.data;
    if (number.tag !== INTEGER || digits.length > 32 || half > 1) throw new Error("a signature of another curve");
    signature.set(digits, 32 * (half + 1) - digits.length);
  });
  return signature;
}

/** The fields of a certificate. @param {Bytes} der
 *
 * Throws where it can't be read or its key is not on P-256. */
export async function certificate(der) {
  const [outer, more] = values(der);
  if (more) throw new Error("bytes after a certificate");
  const [body, algorithm, signature] = inside(outer);
  const fields = inside(body);
  if (fields[0].tag === 0xa0) fields.shift(); // the version
  const [, , issuer, validity, subject, spki] = fields;
  const [begin, end] = inside(validity).map(time);
  /** @type {string[]} */
  let usages = [];
  const extensions = fields.find((field) => field.tag === EXTENSIONS);
  for (const extension of extensions ? inside(inside(extensions, EXTENSIONS)[0]) : []) {
    const [name, ...rest] = inside(extension);
    if (name.tag !== OID || hex(name.data) !== EKU) continue;
    const value = rest[0].tag === BOOLEAN ? rest[1] : rest[0];
    usages = inside(inside(value, OCTETS)[0]).map((one) => hex(one.data));
  }
  const [kind] = inside(algorithm);
  const known = kind.tag === OID && hex(kind.data) === ECDSA_SHA256
    && signature?.tag === BITS && signature.data[0] === 0;
  if (!known) throw new Error("a signature of another kind");
  const { key, fingerprint } = await publicKey(spki.whole);
  return {
    key, fingerprint, issuer: issuer.whole, subject: subject.whole, begin, end,
    server: usages.includes(SERVER), body: body.whole, signature: rs(signature.data.subarray(1)),
  };
}

/** @typedef {Awaited<ReturnType<typeof certificate>>} Certificate */

/** Whether an authority vouches for a server's certificate at a moment.
 * @param {Certificate} of @param {Certificate} authority @param {number} now milliseconds since 1970 */
export async function isTrusted(of, authority, now) {
  const valid = [of, authority].every((one) => one.begin <= now && now <= one.end);
  if (!valid || !of.server || !same(of.issuer, authority.subject)) return false;
  return verify(authority.key, of.body, of.signature);
}

/** The DER of the first certificate in a PEM file, which `ca.pem` is. @param {string} text */
export function fromPem(text) {
  const found = /-----BEGIN CERTIFICATE-----([\sA-Za-z0-9+/=]+)-----END CERTIFICATE-----/.exec(text);
  if (!found) throw new Error("the file holds no certificate; choose the ca.pem that the federation's owner gave you");
  return Uint8Array.from(atob(found[1].replace(/\s/g, "")), (letter) => letter.charCodeAt(0));
}
