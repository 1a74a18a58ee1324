/** Rows of a file that a person picks, and the texts and tokens that the loss sees (docs/session.md). */

/** @typedef {{ role: string, text: string }} Turn */
/** @typedef {{ instruction: string, context: string, response: string, category: string, turns: Turn[],
 *   plain: boolean }} Row */
/** @typedef {{ prompt: string, response: string }} Piece an answer, and what stands before it */
/** @typedef {{ tokens: number[], counted: [number, number][] }} Example tokens, and spans that the loss counts */

const A = "Write a response that appropriately completes the request.";
const R = "Write a response for the task request.";
const W = "Below is an instruction that describes a task, paired with an input that provides further context. ";
const V = "Below is an instruction that describes a task. ";

/** @param {string} instruction @param {string} context */
const section = (instruction, context, always = false) =>
  `### Instruction:\n${instruction}\n\n${context || always ? `### Input:\n${context}\n\n` : ""}### Response:`;
/** @param {string} instruction @param {string} context */
const plain = (instruction, context) => instruction + (context && `\n\n${context}`);

/** @type {Record<string, (instruction: string, context: string) => string>} */
export const TEMPLATES = {
  paper: (instruction, context) => `${W}${A}\n\n${section(instruction, context)}`,
  alpaca: (instruction, context) => `${context ? W : V}${A}\n\n${section(instruction, context)}`,
  "official-dolly": (instruction, context) => `${context ? W : V}${R}\n\n${section(instruction, context)}`,
  "official-ni": (instruction, context) => `${W}${A}\n\n${section(instruction, context, true)}`,
  plain,
};

/** The answers in a row, each with its prompt. @param {string} template @param {string} separator @param {Row} row
 * @returns {Piece[]} */
export function pieces(template, separator, row) {
  const first = TEMPLATES[template];
  if (row.plain) return [{ prompt: "", response: row.response }];
  if (!row.turns.length) {
    return [{ prompt: first(row.instruction, row.context) + separator, response: row.response }];
  }
  const later = template === "plain" ? plain : section;
  /** @type {Piece[]} */
  const found = [];
  /** @type {string[]} */
  let asked = [];
  /** @type {string[]} */
  let system = [];
  for (const { role, text } of [...row.turns, { role: "assistant", text: row.response }]) {
    if (role === "system") system.push(text);
    else if (role !== "assistant") asked.push(text);
    else if (text.trim()) {
      const [request, context] = [asked.join("\n\n"), system.join("\n\n")];
      const worded = found.length ? `\n\n${later(request, context)}` : first(request, context);
      found.push({ prompt: worded + separator, response: text });
      [asked, system] = [[], []];
    }
  }
  return found;
}

/** A row as tokens. @param {Piece[]} of @param {(text: string, special: boolean) => number[]} encode
 * @param {number} end token for the end of text @returns {Example} */
export function example(of, encode, end) {
  /** @type {number[]} */
  const tokens = [];
  /** @type {[number, number][]} */
  const counted = [];
  of.forEach(({ prompt, response }, k) => {
    tokens.push(...encode(prompt, k === 0));
    const start = tokens.length;
    tokens.push(...encode(response, false), end);
    counted.push([start, tokens.length]);
  });
  return { tokens, counted };
}

/** The examples of rows: conversations and instructions one by one, plain texts joined and cut into blocks.
 * @param {Row[]} rows @param {import("./recipe.js").Recipe} recipe
 * @param {(text: string, special: boolean) => number[]} encode @param {number} end @returns {Example[]} */
export function examples(rows, recipe, encode, end) {
  const { maxTokens, cut, heldOut, template, separator } = recipe;
  const kept = rows.filter((row) => !heldOut.includes(row.category) && row.response.trim());
  const own = kept.filter((row) => !row.plain).map((row) => example(pieces(template, separator, row), encode, end));
  const short = cut
    ? own.map((one) => shortened(one, maxTokens)).filter((one) => one.counted.length)
    : own.filter((one) => one.tokens.length <= maxTokens);
  return [...short, ...packed(kept.filter((row) => row.plain), maxTokens, encode, end)];
}

/** The first tokens of an example; without a span where no response remains. @param {Example} of @param {number} limit
 * @returns {Example} */
export function shortened({ tokens, counted }, limit) {
  const last = counted[counted.length - 1];
  const left = last[0] < limit ? counted.map(([begin, stop]) => [begin, Math.min(stop, limit)]) : [];
  return { tokens: tokens.slice(0, limit), counted: /** @type {[number, number][]} */ (left) };
}

/** Blocks of plain texts, those of each category apart. @param {{ response: string, category: string }[]} rows
 * @param {number} limit @param {(text: string, special: boolean) => number[]} encode @param {number} end */
export function packed(rows, limit, encode, end) {
  /** @type {Map<string, number[]>} */
  const streams = new Map();
  for (const { response, category } of rows) {
    const stream = streams.get(category) ?? [];
    const [begin, tokens] = [encode("", true), encode(response, false)];
    // A text may have been written by a chat template, with the begin and the end of text.
    const begins = begin.every((token, k) => token === tokens[k]);
    const ends = encode(response.replace(/[ \t\r\n]+$/, ""), false).at(-1) === end;
    stream.push(...(begins ? [] : begin), ...tokens, ...(ends ? [] : [end]));
    streams.set(category, stream);
  }
  /** @type {Example[]} */
  const blocks = [];
  for (const stream of streams.values()) {
    for (let at = 0; at < stream.length; at += limit) {
      const tokens = stream.slice(at, at + limit);
      if (tokens.length > 1) blocks.push({ tokens, counted: [[1, tokens.length]] });
    }
  }
  return blocks;
}

/** The rows of a file: JSON lines, a JSON list, or CSV with a header.
 *
 * Columns: instruction (or prompt), response (or output, completion), and, where there are any, context (or input) and
 * category; or messages, each with role and content; or text. Throws an Error that says which line is no row.
 * @param {string} name of the file @param {string} text */
export function readRows(name, text) {
  /** @type {Record<string, any>[]} */
  let found;
  if (/\.csv$/i.test(name)) found = readCsv(text);
  else if (text.trimStart().startsWith("[")) found = JSON.parse(text);
  else found = text.split("\n").flatMap((line, k) => (line.trim() ? [readLine(line, k + 1)] : []));
  return found.map((given, k) => rowOf(given, k + 1));
}

/** @param {string} line @param {number} number */
function readLine(line, number) {
  try {
    return JSON.parse(line);
  } catch {
    throw new Error(`line ${number} is not JSON; a file has one JSON object on each line, or is .csv with a header`);
  }
}

/** @param {Record<string, any>} given @param {number} number @returns {Row} */
function rowOf(given, number) {
  const text = (/** @type {string[]} */ ...names) => {
    const value = names.map((name) => given?.[name]).find((one) => one !== undefined && one !== null);
    return value === undefined ? undefined : String(value);
  };
  const row = { instruction: "", context: "", response: "", category: text("category") ?? "", turns: [], plain: false };
  if (Array.isArray(given?.messages)) {
    const turns = given.messages.map((one) => ({ role: String(one.role), text: String(one.content ?? "") }));
    const last = turns.map(({ role, text }) => role === "assistant" && text.trim() !== "").lastIndexOf(true);
    return { ...row, turns: turns.slice(0, Math.max(last, 0)), response: turns[last]?.text ?? "" };
  }
  const instruction = text("instruction", "prompt");
  const response = text("response", "output", "completion");
  if (instruction !== undefined && response !== undefined) {
    return { ...row, instruction, response, context: text("context", "input") ?? "" };
  }
  const whole = text("text");
  if (whole === undefined) {
    const got = Object.keys(given ?? {}).slice(0, 8).join(", ");
    throw new Error(`row ${number} has ${got || "no columns"}; it needs instruction and response, messages, or text`);
  }
  return { ...row, response: whole, plain: true };
}

/** The rows of a CSV file, by the names in its header. @param {string} text */
function readCsv(text) {
  const cells = /(?:"((?:[^"]|"")*)"|([^",\r\n]*))(,|\r?\n|$)/y;
  /** @type {string[][]} */
  const lines = [[]];
  while (cells.lastIndex < text.length) {
    const at = cells.lastIndex;
    const found = cells.exec(text);
    if (!found) throw new Error(`line ${text.slice(0, at).split("\n").length} is not CSV: a quote is out of place`);
    lines[lines.length - 1].push(found[1]?.replaceAll('""', '"') ?? found[2]);
    if (found[3] !== "," && cells.lastIndex < text.length) lines.push([]);
    else if (found[3] === "," && cells.lastIndex === text.length) lines[lines.length - 1].push("");
  }
  const [names, ...rows] = lines.filter((line) => line.length > 1 || line[0]);
  return (rows ?? []).map((row) => Object.fromEntries((names ?? []).map((name, k) => [name, row[k] ?? ""])));
}
