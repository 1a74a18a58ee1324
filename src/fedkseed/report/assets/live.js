
// The page of `fedkseed watch --serve`: it asks for news every few seconds, and for the report again after a round.

const EVERY = 2000; // milliseconds

const now = html("section", { id: "now", "aria-live": "polite" });
const live = html("div", { id: "live" }, now);
document.getElementById("page").before(live);
let seen = null; // the version of the report on the page

function tell({ name, state, text, done, planned, sent, left, moment, notes }) {
  const line = (...parts) => html("p", {}, ...parts);
  const named = (title, text) => line(html("strong", {}, `${title}: `), text);
  const people = Object.entries(moment?.clients ?? {}).map(([kind, clients]) =>
    named(kind, clients.length > 20 ? plural(clients.length, "client") : clients.join(" ")),
  );
  const activity = moment?.activity && `${moment.activity}, ${whole(moment.done)} of ${whole(moment.total)}`;
  now.dataset.state = state;
  now.replaceChildren(
    ...[
      line(html("strong", {}, text)),
      planned && line(`${whole(done)} of ${plural(planned, "round")}`),
      planned && line(`${bytes(sent)} sent`),
      left != null && line(`about ${duration(left)} left`),
      planned && html("progress", { max: planned, value: done, "aria-label": "rounds" }),
      ...people,
      activity && named("now", activity),
      notes.length && html("ol", {}, ...notes.toReversed().map((note) => html("li", {}, note))),
    ].filter(Boolean),
  );
  document.title = `${planned ? `${done}/${planned} ` : ""}${name} – fedkseed`;
}

async function asked(what) {
  const answer = await fetch(what, { cache: "no-store" });
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.json();
}

async function renew() {
  try {
    const view = await asked("now.json");
    tell(view);
    if (view.version && view.version !== seen) {
      show(await asked("report.json"));
      seen = view.version;
    }
  } catch (error) {
    now.dataset.state = "unknown";
    now.replaceChildren(html("p", {}, `no news (${error.message}): does fedkseed watch still run?`));
  }
  setTimeout(renew, EVERY);
}

renew();
