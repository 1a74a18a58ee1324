"""The card of a tuned model: a README.md with the front matter of Hugging Face, of facts that the run has kept.

Files are named without their folders, and no row of the data is in it. Texts may come from a stranger's file: none of
them is Markdown or HTML of the card.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load

from .. import __version__
from ..data.layouts import Example
from ..errors import FedKSeedError, without_controls
from ..evaluation.statistics import NOT_EVALUATED, Evaluation, estimate, named, title_of
from ..models.place import find
from ..run.privacy_plan import about as promise
from .formats import LIBRARIES
from .load import CARD, CARD_ENTRY, TunedModel

TUNED = "This model was tuned with fedkseed on data of several clients, which stayed with them."
UNKNOWN = "unknown"  # Hugging Face's word for a licence that is not known
RELATIONS = {"hf": "finetune", "peft": "adapter", "gguf": "quantized", "lora-gguf": "adapter", "fedkseed": "adapter"}

MARKUP = re.compile(r"[\\`*_{}\[\]<>#|&~]")  # of Markdown and HTML
LONGEST = 200  # characters of a text in a card


def card(tuned: TunedModel, tokenizer: Any, format_: str, command: str, dtype: str, notes: Sequence[str] = ()) -> str:
    """The card of an exported folder.

    Args:
        format_: the folder's, see `export`.
        command: the command that made the folder.
        dtype: the type of the weights.
        notes: sentences on what the folder holds, and how near it is to the tuned model.
    """
    unread = {}
    try:
        if tuned.store is not None:
            tuned.store.require_sound()
    except FedKSeedError:  # its model can be exported in any case
        unread = {"run": "not read: an earlier release made it, or it is damaged; see `fedkseed verify`"}
        tuned = replace(tuned, store=None)
    was_tuned = tuned.adapter is not None or tuned.store is not None  # else it is any folder
    base = shortened((tuned.base if was_tuned else tuned.base or tuned.weights) or UNKNOWN)
    if was_tuned:
        title, opening = "tuned by federated learning", TUNED
    else:
        title, opening = "in another format", f"It was made of {plain(shortened(str(tuned.path)))}, as it was found."
    relation = RELATIONS[format_] if was_tuned else "quantized" if format_ == "gguf" else None
    origin: Any = {"license": licence(tuned.base or tuned.weights), "base_model": base, "base_model_relation": relation}
    tags = ["fedkseed", *(["federated-learning"] if was_tuned else []), format_]
    data = ModelCardData(**origin, library_name=LIBRARIES[format_], pipeline_tag="text-generation", tags=tags)
    entry = {**(tuned.wording.facts if tuned.worded else {}), "dtype": dtype}
    if tuned.tokenizer_digest is not None and format_ == "peft":  # which asks its base model for the tokenizer
        entry["tokenizer_digest"] = tuned.tokenizer_digest
    data[CARD_ENTRY] = entry
    facts = {"base model": base, **_facts(tuned), **unread, "licence of the base model": data["license"]}
    prompt = tuned.words(tokenizer).text(Example("INSTRUCTION", ""), tokenizer)
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", prompt))])
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {plain(base.rpartition('/')[2])}, {title}",
        " ".join([opening, *notes]),
        _table(("", "as the adapter's file says" if was_tuned and tuned.store is None else ""), facts.items()),
        *_measured(tuned),
        f"## Prompt\n\nfedkseed asks it so:\n\n{fence}text\n{without_controls(prompt)}\n{fence}",
        f"## Made by\n\n    {one_line(command)}\n\nfedkseed {__version__}",
    ]
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """A text of a file or another party as words of Markdown: one line, not too long, its markup escaped."""
    return MARKUP.sub(r"\\\g<0>", one_line(text))


def one_line(text: str) -> str:
    """A text in one line, which is not too long."""
    text = re.sub(r"[\n\t]", " ", without_controls(text))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def shortened(name: str) -> str:
    """A model's or a file's name without the folders of one machine."""
    path = Path(name).expanduser()
    return path.name if path.is_absolute() or path.exists() or name.startswith(".") else name


def licence(base: str | None) -> str:
    """The licence that a base model's folder or file names; UNKNOWN if it names none."""
    if base is None:
        return UNKNOWN
    try:
        source = find(base)
        if (path := source.gguf_path) is not None:
            field = GGUFReader(path).fields.get("general.license")
            return UNKNOWN if field is None else str(field.contents())
        base_card = Path(source.name) / CARD
        name = (metadata_load(base_card) or {}).get("license") if base_card.is_file() else None
    except Exception:  # a base model that has moved, or a card of another's that can't be read, names no licence
        return UNKNOWN
    return name if isinstance(name, str) else UNKNOWN


def _facts(tuned: TunedModel) -> dict[str, str]:
    """The origin of the model, row by row, as far as it is known."""
    facts, adapter, store = dict[str, str](), tuned.adapter, tuned.store
    origin: Any = adapter.provenance if adapter is not None else {}
    rounds, privacy = origin.get("rounds"), origin.get("privacy")
    rounds = rounds if isinstance(rounds, int) else None
    if adapter is not None:
        facts["digest of the base model"] = adapter.base
        unknown = "not known: its server had no model, or the run is not finished"
        facts["digest of the tuned model"] = adapter.tuned or unknown
        facts["algorithm"] = str(origin.get("algorithm", "unknown"))
    if store is not None:
        recipe, identity = store.load_recipe(), store.recall("identity") or {}
        rounds = store.rounds if rounds is None else rounds
        facts.setdefault("digest of the base model", str(identity.get("a base model of digest", "unknown")))
        facts.setdefault("algorithm", recipe.training.algorithm)
        facts["data"] = shortened(recipe.data.source)
        holdings, reports = store.recall("clients") or {}, store.reports()[:rounds]
        count = len(holdings.get("examples", ())) or recipe.clients.count
        most = max((len(report["clients"]) for report in reports), default=0)
        facts["clients"] = f"{count or 'unknown'}, {most} a round at most"
        facts["traffic of all rounds"] = f"{sum(report['bytes_total'] for report in reports):,} bytes"
        facts["digest of the run"] = store.head(rounds).hex()
        privacy = privacy or promise(recipe, rounds).get("privacy")
    if rounds is not None:
        facts["rounds"] = tuned.remark or str(rounds)
    if privacy:
        simulated = "; simulated for a larger federation: no protection of these clients"
        try:
            privacy = (
                f"epsilon {privacy['epsilon']:.3g}, delta {privacy['delta']:g}, for one {privacy['unit']}"
                f"{simulated if privacy.get('simulated') else ''}"
            )
        except (AttributeError, KeyError, TypeError, ValueError):  # of a stranger's file
            privacy = UNKNOWN
    return facts | {"differential privacy": privacy or "none"} if facts else {}


def _measured(tuned: TunedModel) -> list[str]:
    """The table of metrics before and after, each with its standard error."""
    if tuned.store is None or tuned.ensemble > 1:  # the run has not measured a mean of its rounds
        return []
    evaluations = tuned.store.evaluations()
    rounds = tuned.adapter.provenance.get("rounds") if tuned.adapter is not None else tuned.store.rounds
    if 0 not in evaluations or rounds not in evaluations:
        return []
    before, after = (Evaluation.of(evaluations[done]).every for done in (0, rounds))
    rows = []
    for set_name, evaluation in after.items():
        base = before.get(set_name, NOT_EVALUATED)
        changes = evaluation.changes(base)
        for name, values in evaluation.measures.items():
            means = (str(estimate(each[name])) if name in each else "" for each in (base.measures, evaluation.measures))
            rows.append((f"{named(set_name, title_of(name))} ({len(values):,})", *means, str(changes.get(name, ""))))
    heads = "held-out metric (examples)", "base model", "tuned", "change, paired"
    whose = f"Each number is a mean and its standard error, of the model as the run had it, in {tuned.dtype}."
    return [f"## Measured\n\n{_table(heads, rows)}\n\n{whose}"]


def _table(heads: Sequence[str], rows: Any) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(plain, line)) + " |" for line in lines)
