// The page: one section a question. Its data is `account` of page.py, one a run.

let page, runs, several;
let FAR; // Do some runs send so much more than others that one scale can't show both?

function take(data) {
  page = data;
  runs = page.runs.map((run, k) => ({
    ...run,
    look: { name: run.name, colour: `c${k % 8}`, dash: `dash${Math.floor(k / 8) % 3}` },
    shape: SHAPES[k % SHAPES.length],
    last: run.evaluations.find((e) => e.done === run.best) ?? run.evaluations.at(-1), // of the tuned model
    base: run.evaluations.find((e) => e.done === 0),
    time: run.rounds.at(-1)?.seconds_total ?? 0,
    bytes: run.rounds.at(-1)?.bytes ?? 0,
  }));
  several = runs.length > 1;
  FAR = most(runs.map((run) => run.bytes)) > 50 * extent(runs.map((run) => run.bytes).filter(Boolean))[0];
}

const PAIRED =
  "Changes are paired, on the same held-out examples, ± one standard error over these examples; " +
  "what another seed would change is not in it. Unclear: within two standard errors.";
const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
const modelAfter = (rounds) => (rounds ? `after ${plural(rounds, "round")}` : "the base model");
const loss = (v) => fixed(v, 4); // and other scores
const heading = (title) => (title.includes(":") ? title : title[0].toUpperCase() + title.slice(1));
const most = (values) => extent(values)[1];

const AXES = {
  rounds: { of: (e) => e.done, label: "rounds", show: (v) => modelAfter(v), integers: true },
  bytes: { of: (e) => e.bytes, label: "sent by all clients together", show: bytes, units: BYTES },
  seconds: { of: (e) => e.seconds_total, label: "of training", show: duration, units: SECONDS },
  clock: { of: (e) => e.clock, label: "virtual time, in local steps", show: (v) => `at ${whole(v)}`, integers: true },
};

/** An axis for the values it has to hold: its label names the unit. */
function axis(kind, values) {
  const { units, label, ...rest } = AXES[kind];
  if (kind === "bytes" && FAR) return { ...rest, label: `${label}, on a log scale`, log: true, format: volume };
  return { ...rest, units, label: units ? `${unit(units, most([0, ...values]))[0]} ${label}` : label };
}

// ----------------------------------------------------------------------------------------------- headline

function headline() {
  const notices = runs.flatMap((run) => [run.verdict.kind !== "diverged" && run.stopped, ...run.verdict.warnings]);
  const verdicts = runs.map((run) =>
    html(
      "p",
      { class: `verdict ${run.verdict.kind}` },
      several && [sample(run.look), html("strong", {}, `${run.name}: `)],
      run.verdict.text.replaceAll(/-(?=\d)/g, MINUS),
    ),
  );
  return html(
    "header",
    {},
    html("p", { class: "brand" }, "fedkseed report"),
    html("h1", {}, several ? `${runs.length} runs` : runs[0].name),
    several ? null : html("p", { class: "lead" }, what(runs[0])),
    verdicts,
    [...new Set(notices)].filter(Boolean).map((line) => html("p", { class: "notice" }, line)),
    several ? comparison() : [tiles(runs[0]), runs[0].last?.loss_change && html("p", { class: "note" }, PAIRED)],
    several && Object.keys(page.differences).length ? recipesDiffer() : null,
  );
}

const leaf = (path) => path.split("/").filter(Boolean).at(-1) ?? path;
const what = (run) => `${run.algorithm} tunes ${leaf(run.model)} on ${leaf(run.data)}`;

function tiles(run) {
  const { base, last, rounds } = run;
  const final = rounds.at(-1);
  const since = base && last !== base ? `from ${loss(base.loss.mean)}, ` : "";
  const best = run.evaluations.reduce((a, b) => ((b.loss.mean ?? Infinity) < (a?.loss.mean ?? Infinity) ? b : a), null);
  const sum = (name) => rounds.reduce((total, r) => total + (r[name] ?? 0), 0);
  const shown = html(
    "div",
    { class: "tiles" },
    last &&
      tile("Held-out loss", loss(last.loss.mean), changed(last.loss_change, -1), [
        `${since}${plural(last.examples, "example")}, nats a token`,
        last.done < rounds.length && AXES.rounds.show(last.done),
        best && best !== last && `lowest ${loss(best.loss.mean)}, ${AXES.rounds.show(best.done)}`,
      ]),
    last?.rouge &&
      tile("Rouge-L", fixed(last.rouge.mean, 4), changed(last.rouge_change, 1), [
        base?.rouge && last !== base && `from ${fixed(base.rouge.mean, 4)}, ${plural(last.answers, "answer")}`,
        `${last.empty} of ${last.answers} empty`,
      ]),
    page.scores.map(({ name, title, good }) => {
      const [now, before] = [last, base].map((e) => e?.others[name]);
      if (!now) return null;
      const from = before && last !== base ? `from ${fixed(before.mean.mean, 4)}, ` : "";
      const more = now.choices ? chosen(now.choices, before?.choices) : [];
      return tile(heading(title), fixed(now.mean.mean, 4), changed(now.change, good), [`${from}${now.count}`, ...more]);
    }),
    final &&
      tile("Traffic", bytes(run.bytes), null, [
        `${bytes(most(rounds.map((r) => r.bytes_down)))} down, ${bytes(most(rounds.map((r) => r.bytes_up)))} up`,
        "a client and round, at most",
      ]),
    final &&
      tile("Time", duration(run.time), null, [`${duration(run.time / rounds.length)} a round`, "without evaluations"]),
    final &&
      tile("Rounds", `${rounds.length} of ${run.planned}`, null, [
        `${plural(final.clients.length, "client")} in the last`,
        run.best != null && `the tuned model: ${AXES.rounds.show(run.best)}`,
        sum("skipped") ? `${plural(sum("skipped"), "probe")} skipped: loss not finite` : null,
      ]),
  );
  const { length } = shown.children;
  shown.style.setProperty("--columns", Math.ceil(length / Math.ceil(length / 5))); // rows of about equal length
  return shown;
}

/** Lines about choices that their accuracy does not show. */
const chosen = ({ balanced, frequent, share, test }, before) => [
  `balanced ${fixed(balanced, 4)}${test && before ? ` (from ${fixed(before.balanced, 4)})` : ""}`,
  `most frequent: ${frequent}, ${Math.round(100 * share)} %`,
  test && `${test.gained} gained, ${test.lost} lost, McNemar's p = ${trimmed(test.p, 2)}`,
];

const tile = (name, value, delta, lines) =>
  html(
    "section",
    { class: "tile" },
    html("h2", {}, name),
    html("p", { class: "value" }, value),
    delta,
    lines.filter(Boolean).map((line) => html("p", {}, line)),
  );

/** A paired change in figures and words; `good` is the sign of an improvement. */
function changed(estimate, good, from = "") {
  if (estimate?.mean == null || estimate.error == null) return null;
  const sure = Math.abs(estimate.mean) > 2 * estimate.error;
  const kind = !sure ? "unsure" : Math.sign(estimate.mean) === good ? "better" : "worse";
  const words = { better: "better", worse: "worse", unsure: "unclear" }[kind];
  const text = [from, words].filter(Boolean).join(": ");
  return html(
    "p",
    { class: `change ${kind}` },
    `${change(estimate.mean, 4)} ± ${fixed(estimate.error, 4)} `,
    html("small", {}, text),
  );
}

function spread(estimate, digits) {
  if (!estimate) return "–";
  return fixed(estimate.mean, digits) + (estimate.error == null ? "" : ` ± ${fixed(estimate.error, digits)}`);
}

function comparison() {
  const scored = (estimate, delta, good) =>
    estimate ? html("div", {}, html("p", {}, spread(estimate, 4)), changed(delta, good, "from base")) : "–";
  const written = runs.some((run) => run.last?.rouge);
  const head = [
    "run",
    "algorithm",
    "rounds",
    "held-out loss",
    `loss against ${runs[0].name}`,
    ...(written ? ["Rouge-L"] : []),
    ...page.scores.map(({ title }) => title),
    "a client and round",
    "sent in all",
    "time",
  ];
  const rows = runs.map((run) => [
    [sample({ ...run.look, shape: run.shape }), run.name],
    run.algorithm,
    `${run.rounds.length} of ${run.planned}`,
    scored(run.last?.loss, run.last?.loss_change, -1),
    changed(run.against_first, -1) ?? "–",
    ...(written ? [scored(run.last?.rouge, run.last?.rouge_change, 1)] : []),
    ...page.scores.map(({ name, good }) =>
      scored(run.last?.others[name]?.mean, run.last?.others[name]?.change, good),
    ),
    run.rounds.length ? bytes(most(run.rounds.map((r) => r.bytes_down + r.bytes_up))) : "–",
    bytes(run.bytes),
    duration(run.time),
  ]);
  return [table(head, rows), html("p", { class: "note" }, PAIRED)];
}

function recipesDiffer() {
  const small = (value) => typeof value === "number" && value && Math.abs(value) < 1e-3;
  const text = (value) => {
    if (value == null) return "–";
    if (small(value)) return value.toExponential();
    return typeof value === "string" ? value : JSON.stringify(value);
  };
  const rows = Object.entries(page.differences).map(([key, values]) => [html("code", {}, key), ...values.map(text)]);
  return table(["what the recipes differ in", ...runs.map((run) => run.name)], rows);
}

/** A table, which becomes a list where the window is narrow, each cell beside its column's name. */
function table(head, rows, caption = null) {
  const names = head.map((cell) => html("th", { scope: "col" }, cell));
  const line = ([first, ...others]) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, first),
      others.map((cell, k) => html("td", { "data-column": names[k + 1].firstChild.textContent, class: cell === "–" ? "none" : null }, cell)),
    );
  const parts = [html("thead", {}, html("tr", {}, names)), html("tbody", {}, rows.map(line))];
  return html(
    "div",
    { class: "scroll", tabindex: 0 },
    html("table", {}, caption && html("caption", {}, caption), parts),
  );
}

// ----------------------------------------------------------------------------------------------- learning

function learning() {
  const charts = html("div", { class: "charts" });
  const draw = (kind) => charts.replaceChildren(...curves(kind).filter(Boolean));
  const timed = runs.some((run) => run.time > 0);
  const every = runs.flatMap((run) => run.rounds);
  const late = every.every((r) => r.clock != null) && every.some((r) => r.staleness.some(Boolean));
  const kinds = Object.keys(AXES).filter((kind) => ({ seconds: timed, clock: late })[kind] ?? true);
  const choice = html(
    "fieldset",
    { class: "choice" },
    html("legend", {}, "against"),
    kinds.map((kind, k) => {
      const input = html("input", { type: "radio", name: "axis", value: kind, checked: k ? null : "" });
      input.addEventListener("change", () => draw(kind));
      return html("label", {}, input, html("span", {}, kind));
    }),
  );
  draw("rounds");
  return section("Learning", null, charts, choice);
}

function curves(kind) {
  const at = AXES[kind].of;
  const score = (name) => (run) =>
    run.evaluations.filter((e) => e[name]).map((e) => ({ x: at(e), y: e[name].mean, error: e[name].error }));
  const shift = (run) =>
    run.evaluations.map((e) => ({
      x: at(e),
      ...(e.done ? { y: e.loss_change?.mean, error: e.loss_change?.error } : { y: 0, error: 0 }),
    }));
  const others = (name) => (run) =>
    run.evaluations
      .filter((e) => e.others[name])
      .map((e) => ({ x: at(e), y: e.others[name].mean.mean, error: e.others[name].mean.error }));
  const scored = (title, note, points, show) => curve({ title, note, points, y: { show }, kind, marked: true });
  const delta = (v) => change(v, 4);
  return [
    scored("Held-out loss", "nats a token of unseen examples, ± one standard error", score("loss"), loss),
    scored(
      "Change of held-out loss",
      "from the base model on the same examples, ± one standard error: below zero is better",
      shift,
      delta,
    ),
    curve({
      title: "Local loss",
      note: "nats a token of the clients' own examples while they train",
      points: (run) => run.rounds.map((r) => ({ x: at(r), y: r.loss })),
      y: { show: loss },
      kind,
    }),
    scored("Rouge-L", "of written answers to unseen instructions, ± one standard error", score("rouge"), loss),
    ...page.scores.map(({ name, title }) =>
      scored(heading(title), "mean over unseen examples, ± one standard error", others(name), loss),
    ),
  ];
}

/** One chart with a curve a run, or null if there is nothing to show. */
function curve({ title, note, points, y, kind, marked }) {
  const series = runs.map((run) => ({ ...run.look, shape: marked ? run.shape : null, points: points(run) }));
  const shown = series.flatMap((s) => s.points).filter((p) => p.y != null);
  if (!shown.length) return null;
  const x = axis(
    kind,
    shown.map((p) => p.x),
  );
  return lines({ title, note, series, x, y, text: story(series, y) });
}

const story = (series, { show }) =>
  series
    .map(({ name, points }) => [name, points.filter((p) => p.y != null)])
    .map(([name, p]) => (p.length ? `${name}: from ${show(p[0].y)} to ${show(p.at(-1).y)}` : `${name}: nothing`))
    .join("; ");

// ------------------------------------------------------------------------------------------------ choices

/** A confusion matrix a run and set, of the latest evaluation. */
function choices() {
  const found = runs.flatMap(({ name, last }) =>
    Object.entries(last?.others ?? {})
      .filter(([, { choices }]) => choices?.confusion)
      .map(([metric, { choices }]) => {
        const { labels, counts } = choices.confusion;
        const rows = labels.map((label, k) => [label, ...counts[k].map(whole)]);
        const set = metric.split(": ").at(-2); // undefined for the set that is always there
        const of = [several && name, set, "true response (rows) by choice (columns)", AXES.rounds.show(last.done)];
        const caption = `${of.filter(Boolean).join(", ")}: ${chosen(choices, null).slice(0, 2).join("; ")}`;
        return table(["true response", ...labels], rows, caption);
      }),
  );
  if (!found.length) return null;
  return section("Choices", null, ...found);
}

// -------------------------------------------------------------------------------------------- each client

/** A change without an error, as of a single row, has no judgement. */
const moved = (estimate, good) => changed(estimate, good) ?? (estimate ? change(estimate.mean, 4) : "–");

/** What tuning changed for each client, on rows of its own that it did not train on. */
function gains() {
  const tables = runs
    .filter((run) => run.gains.length)
    .map((run) => {
      const scored = "loss" in run.gains[0].before;
      const measured = new Set(run.gains.flatMap((one) => Object.keys(one.change)));
      const others = [...measured].filter((name) => name !== "loss");
      const losses = scored ? ["loss before", "loss after"] : [];
      const head = ["client", "rows", ...losses, "change of the loss", ...others.map((name) => page.titles[name])];
      const rows = run.gains.map((one) => [
        one.client,
        whole(one.rows),
        ...(scored ? [loss(one.before.loss), loss(one.after.loss)] : []),
        moved(one.change.loss, -1),
        ...others.map((name) => moved(one.change[name], 1)),
      ]);
      return table(head, rows, several ? run.name : "Of rows that the client did not train on, ± one standard error");
    });
  return tables.length ? section("Each client", null, ...tables) : null;
}

// ------------------------------------------------------------------------------------------------ answers

/** The first written answers of each run: those of the base model beside those of the latest evaluation. */
function answers() {
  const found = runs
    .filter(({ last }) => last?.written.length)
    .map(({ name, evaluations, last }) => {
      const before = evaluations[0].done === 0 && last.done ? evaluations[0].written : [];
      const rows = last.written.map(([request, right, now], k) => [
        request,
        right,
        ...(before.length ? [before[k][2] || "(nothing)"] : []),
        now || "(nothing)",
      ]);
      const columns = ["request", "right answer", ...(before.length ? ["base model"] : []), AXES.rounds.show(last.done)];
      return table(columns, rows, several ? name : "The first held-out requests");
    });
  return found.length ? section("Answers", null, ...found) : null;
}

// ------------------------------------------------------------------------------------------------ traffic

function traffic() {
  if (!runs.some((run) => run.rounds.length)) return null;
  const x = { ...AXES.rounds, show: (v) => `round ${v}` };
  const per = (name, dash) =>
    runs.map((run) => ({
      ...run.look,
      name: [...(several ? [run.name] : []), name.split("_")[1]].join(", "),
      dash,
      points: run.rounds.map((r) => ({ x: r.done, y: r[name] })),
    }));
  const both = [...per("bytes_down"), ...per("bytes_up", "dash1")];
  const exact = (v) => `${whole(v)} bytes`;
  const amount = { show: bytes, ...(FAR ? { log: true, format: volume } : { units: BYTES, zero: true }) };
  const time = { show: duration, units: SECONDS, zero: true };
  const total = (name) =>
    runs.map((run) => ({ ...run.look, points: run.rounds.map((r) => ({ x: r.done, y: r[name] ?? 0 })) }));
  const named = (series, units) => unit(units, most(series.flatMap((s) => s.points.map((p) => p.y))))[0];
  const sent = total("bytes");
  const took = total("seconds");
  return section(
    "Traffic and time",
    "Sizes of encoded messages, as they are sent.",
    html(
      "div",
      { class: "charts three" },
      lines({
        title: "A client's messages",
        note: "one message, the largest of the round, on a log scale",
        series: both,
        x,
        y: { show: exact, format: volume, log: true },
        text: story(both, { show: exact }),
      }),
      lines({
        title: "Sent in all",
        note: `${FAR ? "on a log scale" : named(sent, BYTES)}, down and up, all clients, since the start`,
        series: sent,
        x,
        y: amount,
        text: story(sent, amount),
      }),
      runs.some((run) => run.time > 0) &&
        lines({
          title: "Time of a round",
          note: `${named(took, SECONDS)}, from the broadcast to the next state`,
          series: took,
          x,
          y: time,
          text: story(took, time),
        }),
    ),
  );
}

// --------------------------------------------------------------------------------------------- directions

function directions() {
  const with_ = runs.filter((run) => run.directions);
  const slopes = curve({
    title: "Size of a scalar gradient",
    note: "mean |ρ| of a round",
    points: (run) => run.rounds.map((r) => ({ x: r.done, y: r.scalar || null })),
    y: { show: (v) => trimmed(v, 4), zero: true },
    kind: "rounds",
  });
  if (!with_.length) return slopes && section("Directions", null, html("div", { class: "charts" }, slopes));
  const of = (points, extra) => with_.map((run) => ({ ...run.look, ...extra, points: points(run.directions) }));
  const times = (v) => `${trimmed(v)} times`;
  const sorted = of((d) =>
    d.probabilities
      .toSorted((a, b) => b - a)
      .map((p, k) => ({ x: k + 1, y: p * d.probabilities.length, note: `p = ${trimmed(p)}` })),
  );
  const drawn = histograms(
    with_.map((run) => run.directions.counts),
    true,
  );
  const sizes = histograms(
    with_.map((run) => run.directions.coefficients.map(Math.abs).filter(Boolean)),
    false,
  );
  const count = { show: (v) => plural(v, "direction"), integers: true, zero: true };
  const zero = (run) => {
    const all = run.directions.coefficients;
    return `${whole(all.filter((c) => !c).length)} of ${whole(all.length)}${several ? ` (${run.name})` : ""}`;
  };
  const zeros = `Zero: ${with_.map(zero).join(", ")}`;
  const bars = (bins) => with_.map((run, k) => ({ ...run.look, steps: true, points: bins[k] }));
  return section(
    "Directions",
    "The server's state: one number a direction. Probabilities are those that FedKSeed-Pro draws with next, " +
      "a softmax of the mean |ρ|; FedKSeed draws evenly whatever they are.",
    html(
      "div",
      { class: "charts" },
      lines({
        title: "Probabilities",
        note: "of the directions, most likely first, as multiples of an even draw",
        series: sorted,
        x: { label: "rank", show: (v) => `rank ${whole(v)}`, integers: true, least: 1 },
        y: { show: times },
        reference: { name: "even", y: 1 },
        text: story(sorted, { show: times }),
      }),
      lines({
        title: "Draws",
        note: "how many directions were drawn so often",
        series: bars(drawn),
        x: { label: "times drawn", show: (v) => binAt(drawn, v, whole), integers: true },
        y: count,
        text: `At most ${whole(most(with_.map((run) => most(run.directions.counts))))} times`,
      }),
      slopes,
      lines({
        title: "Coefficients",
        note: `how many have that size |c|, on a log scale. ${zeros}`,
        series: bars(sizes),
        x: { label: "|c|", show: (v) => binAt(sizes, v, trimmed), format: (v) => v.toExponential(0), log: true },
        y: count,
        text: zeros,
      }),
    ),
  );
}

/** Histograms of several lists over the same bins: of whole numbers, or of positive ones by factors. */
function histograms(lists, integers) {
  const range = extent(lists.flat());
  if (!(range[0] <= range[1])) return lists.map(() => []);
  const edges = integers ? wholeEdges(range) : factorEdges(range, 32);
  return lists.map((list) => {
    const bins = edges
      .slice(1)
      .map((to, k) => ({ from: edges[k], to, x: integers ? (edges[k] + to) / 2 : Math.sqrt(edges[k] * to), y: 0 }));
    const within = (k) => Math.max(0, Math.min(bins.length - 1, k)); // the last edge belongs to the last bin
    for (const value of list) bins[within(edges.findLastIndex((edge) => edge <= value))].y++;
    return bins;
  });
}

function wholeEdges([a, b]) {
  const step = Math.ceil((b - a + 1) / 40);
  return Array.from({ length: Math.ceil((b - a + 1) / step) + 1 }, (_, k) => a - 0.5 + k * step);
}

const factorEdges = ([a, b], count) =>
  Array.from({ length: count + 1 }, (_, k) => a * (b === a ? 2 : b / a) ** (k / count));

function binAt(histograms, x, show) {
  const bin = histograms.flat().find((b) => b.x === x);
  const [from, to] = show === whole ? [Math.ceil(bin.from), Math.floor(bin.to)] : [bin.from, bin.to];
  return show(from) === show(to) ? `${show(from)}` : `${show(from)} to ${show(to)}`;
}

// ------------------------------------------------------------------------------------------------ clients

function clients() {
  const groups = new Map(); // runs of equal clients are shown once
  for (const run of runs.filter((run) => run.clients)) {
    const key = JSON.stringify(run.clients);
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  if (!groups.size) return null;
  const warned = new Set(runs.flatMap((run) => run.verdict.warnings)); // which stand on top
  const lines = new Set(runs.flatMap((run) => run.notes).filter((line) => !warned.has(line.replace("warning: ", ""))));
  return section(
    "Clients",
    null,
    ...[...lines].map((line) => html("p", { class: "note" }, line)),
    ...[...groups.values()].map((group) =>
      people(group[0].clients, several ? group.map((run) => run.name).join(", ") : null),
    ),
  );
}

/** What the clients of one run, or of several equal ones, hold and did. */
function people({ examples, categories, taken, too_long, held_out, names: own }, names) {
  const client = (k) => own[k] ?? `client ${k}`;
  const active = taken.filter(Boolean).length;
  const took = (order) => ({
    title: "Participation",
    note: "rounds in which each client took part",
    bars: order.map((k) => ({ label: client(k), parts: [taken[k]] })),
    parts: [{ name: "rounds", colour: "c0" }],
    text: `${active} of ${plural(taken.length, "client")} took part at least once`,
  });
  if (!examples) return html("div", { class: "charts" }, columns(took([...taken.keys()]))); // the clients' rows are elsewhere
  const order = [...examples.keys()].sort((a, b) => examples[b] - examples[a] || a - b);
  const parts = kinds(categories);
  const holds = order.map((k) => ({
    label: client(k),
    parts: parts.map((part) => part.count(categories[k])),
  }));
  const sum = examples.reduce((a, b) => a + b, 0);
  const [least, middle, largest] = [order.at(-1), order[order.length >> 1], order[0]];
  const text = [
    `${plural(examples.length, "client")} hold ${plural(sum, "example")}: ${client(least)} has ${examples[least]},`,
    `${client(largest)} ${examples[largest]}, the median is ${examples[middle]}; ${active} took part at least once.`,
    `${plural(too_long, "example")} too long and left out, ${held_out} held out.`,
  ].join(" ");
  return [
    html("p", { class: "note" }, names && html("strong", {}, `${names}: `), text),
    html(
      "div",
      { class: "charts" },
      columns({ title: "Examples", note: "of each client by category", bars: holds, parts, text }),
      columns(took(order)),
    ),
  ];
}

/** The categories, most frequent first; what is beyond eight colours is one part, and says so. */
function kinds(categories) {
  const totals = new Map();
  for (const counts of categories)
    for (const [name, n] of Object.entries(counts)) totals.set(name, (totals.get(name) ?? 0) + n);
  const names = [...totals].sort((a, b) => b[1] - a[1]).map(([name]) => name);
  const own = names.length > 9 ? names.slice(0, 8) : names;
  const others = names.slice(own.length);
  const of = (counts, name) => (Object.hasOwn(counts, name) ? counts[name] : 0);
  const parts = own.map((name, k) => ({
    name: name || "(none)",
    colour: `k${k}`,
    count: (counts) => of(counts, name),
  }));
  if (others.length)
    parts.push({
      name: `${others.length} other categories`,
      colour: "k8",
      count: (counts) => others.reduce((sum, name) => sum + of(counts, name), 0),
    });
  return parts;
}

// -------------------------------------------------------------------------------------- rounds and recipes

/** The numbers as a table; its columns are the metrics that say something of some round, or are always shown. */
function rounds() {
  const every = runs.flatMap((run) => run.rounds);
  const metrics = page.metrics.filter(({ name, always }) => always || every.some((r) => r.metrics[name]));
  const titles = metrics.map(({ title, unit }) => [title, !title.includes(unit) && html("small", {}, unit)]);
  const measured = page.scores.map(({ title }) => title);
  const written = runs.some((run) => run.evaluations.some((e) => e.rouge));
  const head = ["", "held-out loss", ...(written ? ["Rouge-L"] : []), ...measured, ...titles, "who took part"];
  const tables = runs.map((run) => {
    const scores = new Map(run.evaluations.map((e) => [e.done, e]));
    const scored = (done) => {
      const at = scores.get(done);
      const others = page.scores.map(({ name }) => spread(at?.others[name]?.mean, 4));
      return [spread(at?.loss, 4), ...(written ? [spread(at?.rouge, 4)] : []), ...others];
    };
    const base = scores.has(0) ? [["base model", ...scored(0), ...Array(metrics.length + 1).fill("–")]] : [];
    const rows = run.rounds.map((r) => [
      `round ${r.done}`,
      ...scored(r.done),
      ...metrics.map(({ name }) => signed(r.texts[name])),
      r.clients.map((k) => run.clients?.names[k] ?? k).join(run.clients?.names.length ? ", " : " "),
    ]);
    return fold(
      run,
      `${plural(run.rounds.length, "round")}`,
      !several && run.rounds.length <= 12,
      table(head, [...base, ...rows]),
    );
  });
  return section("Rounds", null, ...tables);
}

const recipes = () =>
  section(
    "Recipe",
    null,
    ...runs.map((run) =>
      fold(run, "keys that differ from their defaults", !several, [
        html("pre", { tabindex: 0 }, run.recipe),
        html("details", {}, html("summary", {}, "all keys"), html("pre", { tabindex: 0 }, run.defaults)),
      ]),
    ),
  );

const fold = (run, text, open, content) =>
  html(
    "details",
    { open: open ? "" : null },
    html("summary", {}, several && [sample(run.look), " ", html("strong", {}, run.name), " · "], text),
    content,
  );

// --------------------------------------------------------------------------------------------- put together

const section = (title, note, ...content) => {
  const choice = content.find((node) => node?.classList?.contains("choice"));
  return html(
    "section",
    { id: title.toLowerCase().replaceAll(" ", "-") },
    html("div", { class: "head" }, html("h2", {}, title), choice),
    note && html("p", { class: "note" }, note),
    content.filter((node) => node !== choice),
  );
};

/** Show other data. What a reader has opened, chosen and scrolled to stays so. */
function show(data) {
  const all = (what) => [...document.querySelectorAll(what)];
  const opened = all("details").map((node) => node.open);
  const across = all(".scroll").map((node) => node.scrollLeft);
  const chosen = document.querySelector("input[name=axis]:checked")?.value;
  take(data);
  const sections = [learning, gains, choices, answers, traffic, directions, clients, rounds, recipes]
    .map((made) => made())
    .filter(Boolean);
  const links = html(
    "nav",
    { "aria-label": "Sections" },
    sections.map((node) => html("a", { href: `#${node.id}` }, node.querySelector("h2").textContent)),
  );
  document
    .getElementById("page")
    .replaceChildren(headline(), links, ...sections, html("footer", {}, `made by fedkseed ${page.version}`));
  bubble.hidden = true;
  all("figure").forEach((node) => node.redraw?.());
  all("details").forEach((node, k) => (node.open = opened[k] ?? node.open));
  all(".scroll").forEach((node, k) => (node.scrollLeft = across[k] ?? 0));
  const choice = chosen && document.querySelector(`input[name=axis][value=${chosen}]`);
  if (choice && !choice.checked) choice.click();
}

document.body.append(bubble);
const given = JSON.parse(document.getElementById("data").textContent);
if (given) show(given);
addEventListener("scroll", () => (bubble.hidden = true), { passive: true });
