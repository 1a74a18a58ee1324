/** Keys on P-256: pairs, public lines, fingerprints, signatures, and the signed statements (docs/session.md). */

import { join, sha256, u32, utf8, view } from "./bytes.js";

/** @typedef {import("./bytes.js").Bytes} Bytes */
/** @typedef {{ key: CryptoKey, spki: Bytes, fingerprint: Bytes }} Public a public key, as SubjectPublicKeyInfo too */
/** @typedef {{ private: CryptoKey, public: Public }} Pair */

const P256 = { name: "ECDSA", namedCurve: "P-256" };
const SIGNED = { name: "ECDSA", hash: "SHA-256" };
const LINE = "ecdsa-sha2-nistp256";

const AUDIENCE = utf8("fedkseed, version 3: whom a signature is for\n");
const CONNECTION = utf8("fedkseed, version 3: a client proves its key to a server over HTTPS\n");
const TASK = utf8("fedkseed, version 3: a server asks one client for its answer\n");
const ANSWER = utf8("fedkseed, version 3: a client answers a broadcast of the server\n");

/** A new pair whose private half this browser uses and never shows. @returns {Promise<Pair>} */
export async function makePair() {
  const made = await crypto.subtle.generateKey(P256, false, ["sign", "verify"]);
  const spki = new Uint8Array(await crypto.subtle.exportKey("spki", made.publicKey));
  return { private: made.privateKey, public: await publicKey(spki) };
}

/** @param {Bytes} spki @returns {Promise<Public>} */
export async function publicKey(spki) {
  const key = await crypto.subtle.importKey("spki", spki, P256, true, ["verify"]);
  return { key, spki, fingerprint: await sha256(spki) };
}

/** The line of a public key in OpenSSH's format, as a server's owner takes it in. @param {Public} of */
export function publicLine(of) {
  const text = (/** @type {Uint8Array} */ data) => {
    const length = new Uint8Array(4);
    view(length).setUint32(0, data.length);
    return join(length, data);
  };
  const point = of.spki.subarray(-65); // uncompressed: 4, x, y
  const blob = join(text(utf8(LINE)), text(utf8("nistp256")), text(point));
  return `${LINE} ${btoa(String.fromCharCode(...blob))}`;
}

/** @param {CryptoKey} key @param {Bytes} statement @returns {Promise<Bytes>} r and s */
export async function sign(key, statement) {
  return new Uint8Array(await crypto.subtle.sign(SIGNED, key, statement));
}

/** @param {CryptoKey} key @param {Bytes} statement @param {Bytes} signature r and s */
export const verify = (key, statement, signature) => crypto.subtle.verify(SIGNED, key, signature, statement);

/** Whom signatures are for: the federation of an authority, and its server by the name that is dialled.
 * @param {Uint8Array} authority fingerprint of its key @param {string} name */
export const audienceOf = (authority, name) => sha256(AUDIENCE, authority, utf8(name));

/** The statement of a connection. @param {Uint8Array} audience @param {Uint8Array} challenge
 * @param {Uint8Array} fingerprint */
export const connectionStatement = (audience, challenge, fingerprint) =>
  join(CONNECTION, audience, challenge, fingerprint);

/** The statement of a task to the client with a fingerprint. @param {Uint8Array} audience
 * @param {Bytes} data the whole task @param {Uint8Array} fingerprint */
export async function taskStatement(audience, data, fingerprint) {
  return join(TASK, audience, data.subarray(36, 60), fingerprint, await sha256(data.subarray(0, -64)));
}

/** The statement of an answer. @param {Uint8Array} audience @param {{ nonce: Uint8Array, client: number, head: Uint8Array }} task
 * @param {Uint8Array} broadcast @param {Uint8Array} upload */
export async function answerStatement(audience, task, broadcast, upload) {
  const both = [await sha256(broadcast), await sha256(upload)];
  return join(ANSWER, audience, task.nonce, u32(task.client), task.head, ...both);
}
