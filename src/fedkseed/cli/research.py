"""Commands of research: a basis of directions, a check of the directions' bits, the paper's experiments."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ..errors import FedKSeedError
from ..files import require_absent
from ..report.bars import Bars
from ..report.terminal import console, print_json, print_rows, say
from .options import Json, RecipeFile


def basis(
    recipe: RecipeFile,
    data: Annotated[str, Option(help="Public instruction data, no client's: a file or an archive of tasks.")],
    output: Annotated[Path, Option("--output", "-o", help="New file for the basis.")],
    examples: Annotated[int, Option(help="Examples of the data to use.", min=1)] = 64,
    rank: Annotated[int | None, Option(help="One rank for every tensor, not ranks by energy.", min=1)] = None,
    scaled: Annotated[bool, Option(help="Make directions shorter, the steeper the loss is along them.")] = True,
) -> None:
    """Make a basis from public text, for directions that know where gradients point.

    The file has the leading singular vectors of the model's mean gradient on the examples, as int8, for as many
    coefficients as [directions] size says, each shorter the steeper the loss is along it. Every party needs the same
    file; it takes a minute or two, once for a model.
    In a recipe: [directions] family = "informed" (or "mixed", for clients that only run forward) and basis = "FILE".

    The data may be of any kind that is public, the closer to the clients' the better. `fedkseed docs directions` has
    the definition, and what such directions can and can't learn.

    fedkseed basis recipe.toml --data public.jsonl --output basis.safetensors
    """
    from ..data.sources import Reader
    from ..recipe.reading import load_recipe
    from ..run.prerequisites import require_ready
    from ..weights.basis_file import save_basis

    require_absent(output, "file")
    parsed = load_recipe(recipe)
    require_ready(parsed, has_data=False)
    if ".tar" not in Path(data).name:
        Reader().file(data)
    from ..planning.make_basis import basis_of

    with Bars(0) as bars:
        learned = basis_of(parsed, data, examples, rank, bars, scaled)
    save_basis(learned, output)
    ranks, used = sorted(max(factor.ranks) for _, factor in learned), int(str(learned.about["examples"]))
    say(
        f"wrote {output}: {learned.size} directions in {len(ranks)} tensors, ranks {ranks[0]} to {ranks[-1]}, of "
        f"{used} examples, {output.stat().st_size:,} bytes, digest {learned.digest().hex()}"
    )
    if used < examples:
        say(f"{examples} examples were asked for: no more of those drawn are within [data] max_tokens")


def directions(
    device: Annotated[str, Option(help="Device that computes the directions: cpu, cuda, cuda:1, mps, …")] = "cpu",
    as_json: Json = False,
) -> None:
    """Check that this machine computes the random directions as specified, bit for bit.

    Every backend of the device is compared with the published test vectors of every family of directions. Parties
    that differ in one bit would end with different models.

    fedkseed directions --device cpu
    """
    from ..directions.vectors import check

    checks = [(backend, vectors, list(failed)) for backend, vectors, failed in check(device)]
    print_rows(("backend", "vectors", "wrong"), checks, as_json)
    if wrong := sum(len(failed) for *_, failed in checks):
        raise FedKSeedError(f"{wrong} test vectors are wrong: models made here differ from other parties'; report it")
    if not as_json:
        say("all bits agree with the specification: fedkseed docs directions")


def reproduce(
    name: Annotated[str, Argument(help="Name of an experiment, or all; --list shows the names.")] = "",
    scale: Annotated[str, Option(help="Size: tiny (minutes), stories, small (hours) or full (the paper's).")] = "tiny",
    output: Annotated[Path, Option("--output", "-o", help="Directory for runs, tables and figures.")] = Path("results"),
    model: Annotated[str | None, Option(help="Folder of the model, needed by --scale stories.")] = None,
    dolly: Annotated[Path | None, Option(help="File with the whole data set Dolly-15K, for --scale full.")] = None,
    natural_instructions: Annotated[Path | None, Option(help="Folder of Super-NaturalInstructions.")] = None,
    basis: Annotated[Path | None, Option(help="Basis of informed directions; for `unlike` a folder of them.")] = None,
    public: Annotated[str | None, Option(help="Public data, of which such bases are made in place of --basis.")] = None,
    seeds: Annotated[int | None, Option(help="Number of seeds, instead of the experiment's own number.", min=1)] = None,
    only: Annotated[str, Option(help="Limit the experiment to runs whose label contains this text.")] = "",
    part: Annotated[str, Option(help="I/N: every N-th run from the I-th; N processes share the work.")] = "1/1",
    records: Annotated[Path | None, Option(help="Folder of results, whose runs are not done again.")] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print sizes, bytes, passes and a rough time; load no weights.")
    ] = False,
    seconds_per_step: Annotated[float | None, Option(help="Seconds of a local step, for --dry-run.")] = None,
    redraw: Annotated[
        bool, Option("--redraw", help="Make table and figure from OUTPUT/NAME/SCALE; run nothing.")
    ] = False,
    show_list: Annotated[bool, Option("--list", help="List the experiments.")] = False,
    as_json: Json = False,
) -> None:
    """Run an experiment of the paper and write its table and figure.

    It may be stopped at any moment: the same command continues it, and finished runs are not repeated.

    fedkseed reproduce --list
    fedkseed reproduce table-3 --scale tiny
    fedkseed reproduce table-3 --scale full --dry-run
    """
    from ..paper import experiments
    from ..paper.experiment_bases import all_places, tiny_place

    if show_list or not name:
        titles = ("name", "paper", "what")
        listed = [experiments.load(each, scale) for each in experiments.names()]
        print_rows(titles, [(experiment.name, experiment.item, experiment.title) for experiment in listed], as_json)
        return
    places = {"model": model, "dolly": dolly, "natural-instructions": natural_instructions, "basis": basis}
    paths = {place: str(Path(path).expanduser()) for place, path in places.items() if path is not None}
    for place, path in (paths | {"records": records, "public": public}).items():
        if path is not None and (place != "model" or str(path)[:1] in "/.") and not Path(path).exists():
            raise FedKSeedError(f"--{place} {path}: no such file or folder")
    chosen = [experiments.load(each, scale) for each in (experiments.names() if name == "all" else [name])]
    texts = {each.name: public if each.bases or name != "all" else None for each in chosen}
    places = {each.name: all_places(each, output, paths, texts[each.name]) for each in chosen}
    for each in [] if dry_run or redraw else chosen:
        each.recipes(places[each.name], only)

    from ..paper import reproduce as runs  # which loads PyTorch, after what needs none is refused
    from ..paper import tiny_model
    from ..paper.dry_run import estimate

    documents = {}  # by experiment, for JSON
    for experiment in chosen:
        each, text = experiment.name, texts[experiment.name]
        if seeds is not None:
            experiment = replace(experiment, seeds=seeds)
        if dry_run:
            if scale == "tiny" and model is None:
                tiny_model.make(tiny_place(output))
            costs = estimate(experiment, places[each], only, seconds_per_step)
            documents[each] = {"rows": costs.rows, "notes": costs.notes}
            if not as_json:
                print(costs.markdown(f"{each}, {scale}"))
            continue
        if redraw:
            folder = runs.redraw(experiment, output)
        else:
            command = ["fedkseed", *sys.argv[1:]]
            wanted = runs.Reproduction(experiment, output, paths, only, runs.parts(part), records, text, command)
            folder = runs.reproduce(wanted)
        documents[each] = {"folder": folder}
        if folder is None:
            console.print("this part is finished; once all parts are, the command without --part writes the table")
        else:
            say((folder / "table.md").read_text(encoding="utf-8"))
            say(f"written to {folder}")
    if as_json:
        print_json(documents)
