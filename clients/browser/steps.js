/** What two losses say of a direction, and how a step follows from it (docs/session.md). */

import { bitsOf, floatOf } from "./messages.js";

/** @typedef {import("./messages.js").Wire} Wire */

const GRID = 2 ** 16; // a ρ is a multiple of 1 / GRID
const MOST = 2 ** 20;

/** The nearest whole number, of two the even one. @param {number} x below 2^52 in size */
function rint(x) {
  const low = Math.floor(x);
  const over = x - low;
  return low + Number(over > 0.5 || (over === 0.5 && low % 2 !== 0));
}

/** The ρ that is made of a finding x; NaN: none. @param {number} x @param {number} clip @param {Wire} wire */
export function scalarOf(x, clip, wire) {
  if (!Number.isFinite(x)) return NaN;
  const m = Math.min(clip, MOST);
  let steps = rint(Math.min(Math.max(x, -m), m) * GRID);
  if (Math.abs(steps) > m * GRID) steps -= Math.sign(steps);
  const rho = Math.fround(steps / GRID) + 0; // no −0
  if (wire === "sign") return Math.sign(rho) || NaN;
  if (wire === "exact") return rho;
  const word = bitsOf(rho);
  const upper = (word >>> 16) + Number((word & 0xffff) + ((word >>> 16) & 1) > 0x8000);
  const value = floatOf(upper * 65536);
  return Math.abs(value) > m ? floatOf((upper - 1) * 65536) : value;
}

/** How a step moves c_j. @param {number} lr @param {number} probes @param {number} rho */
export const moveOf = (lr, probes, rho) => Math.fround((-lr / probes) * rho);

/** The steps of a round.
 *
 * @param {import("./messages.js").Broadcast} asked
 * @param {ArrayLike<number>} directions τ P
 * @param {(c: Float32Array, step: number) => Promise<number> | number} loss of a step's batch at w(c)
 * @returns {Promise<{ scalars: number[], loss: number, c: Float32Array }>} c as it is after the last step */
export async function train(asked, directions, loss) {
  const { eps, lr, probes, clip, wire } = asked;
  const c = asked.c.slice();
  const there = Math.fround(eps);
  /** @type {number[]} */
  const scalars = [];
  let total = 0;
  let counted = 0;
  for (let step = 0; step < asked.steps; step++) {
    for (let k = step * probes; k < (step + 1) * probes; k++) {
      const j = directions[k];
      const near = c[j];
      c[j] = near + there;
      const a = await loss(c, step);
      c[j] = near - there;
      const b = await loss(c, step);
      c[j] = near; // all probes of a step begin at the same w
      const rho = scalarOf((a - b) / (2 * eps), clip, wire);
      scalars.push(rho);
      if (Number.isNaN(rho)) continue;
      total += (a + b) / 2;
      counted++;
    }
    for (let k = step * probes; k < (step + 1) * probes; k++) {
      if (!Number.isNaN(scalars[k])) c[directions[k]] += moveOf(lr, probes, scalars[k]);
    }
  }
  return { scalars, loss: counted ? total / counted : NaN, c };
}
