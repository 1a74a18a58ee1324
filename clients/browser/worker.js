/** The thread that connects and computes, so that the page stays alive. The page, or its stop button, ends it. */

import { certificate } from "./certificate.js";
import { Client } from "./client.js";
import { audienceOf } from "./keys.js";
import { Session } from "./session.js";
import { keep, kept } from "./store.js";

/** @typedef {{ authority: import("./bytes.js").Bytes, pair: import("./keys.js").Pair, rows: File,
 *   model: Record<string, string | File>, limits: import("./recipe.js").Limits, url: string }} Start
 *   model: where each file of the model is: an address of the server, or what the person has picked */

/** @type {import("./client.js").Tell} */
const tell = (kind, what) => postMessage({ kind, what });

/** A file of the model. @param {Record<string, string | File>} model @param {string} name */
async function file(model, name) {
  const found = model[name];
  if (found === undefined) throw new Error(`the model's ${name} is missing: choose it, too`);
  if (typeof found !== "string") return found;
  const answer = await fetch(found);
  if (!answer.ok || !answer.body) throw new Error(`the server does not give ${name}: ${answer.status}`);
  const size = Number(answer.headers.get("content-length"));
  const parts = [];
  let got = 0;
  for await (const part of answer.body) {
    parts.push(part);
    got += part.length;
    tell("loading", { what: name, share: size ? got / size : 0 });
  }
  return new Blob(parts);
}

addEventListener("message", async ({ data }) => {
  const { authority, pair, rows, model, limits, url } = /** @type {Start} */ (data);
  const folder = (/** @type {string} */ name) => file(model, name);
  const trusted = await certificate(authority);
  const dialled = new URL(url).hostname.replace(/^\[|\]$/g, ""); // an IPv6 address stands in brackets
  const owner = {
    pair, authority: trusted, audience: await audienceOf(trusted.fingerprint, dialled), dialled,
    store: { kept, keep }, folder, rows, limits, tell,
  };
  await navigator.locks.request("fedkseed", { ifAvailable: true }, async (lock) => {
    if (!lock) throw new Error("another tab of this browser takes part already");
    await new Session(new Client(owner), url).run();
  });
  tell("ended", {});
});

addEventListener("unhandledrejection", ({ reason }) => tell("failed", { why: String(reason?.message ?? reason) }));
