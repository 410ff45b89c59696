"""What a report says, gathered once; console, markdown and HTML only lay it out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.records import GREEDY_RESULTS
from harness.reporting import formatting as fmt
from harness.reporting import wording
from harness.reporting.reading import door_of, results_of, summary_of
from harness.reporting.serving import snippets_of
from harness.reporting.snippets import Snippet
from harness.reporting.tables import Table, tables_of

if TYPE_CHECKING:
    from harness.storage import StoredRun

# The lines of "How it was measured", each with the manifest's entry: the end of its dotted name.
MEASURED_WITH = (
    ("command line", "command"),
    ("when", "created_utc"),
    ("device", "device_name"),
    ("kind of device", "device"),
    ("driver", "driver"),
    ("CUDA", "cuda"),
    ("threads", "threads"),
    ("seed", "seed"),
    ("prompts, sha256", "prompts_sha256"),
    ("target dtype", "target.dtype"),
    ("target revision", "target.commit"),
    ("draft dtype", "draft.dtype"),
    ("draft revision", "draft.commit"),
    ("harness commit", "git.commit"),
    ("uncommitted changes", "git.dirty"),
    ("python", "python"),
    ("torch", "packages.torch"),
    ("transformers", "packages.transformers"),
)


@dataclass(frozen=True)
class Content:
    """One report, in the order it is read.

    Attributes:
        title: what the run is.
        banner: what must be read before any number; None where there is no such thing.
        status: why it is not a whole run; None where it is.
        verdicts: the decision, main one first; empty for a door that decides nothing.
        engine: what the steps ran on; None where no model ran.
        reasons: why, and what would change it; whole sentences.
        caveats, failures: whole lines.
        snippets: what to paste into a server; empty where nothing is to be served.
        tables: most important first.
        acceptance: the paragraph on acceptance_rate and break-even alpha; None where not needed.
        measured: (name, value) pairs on how it was measured.
        environment: every other entry of the manifest, dotted name and value.
    """

    title: str
    banner: str | None
    status: str | None
    verdicts: tuple[str, ...]
    engine: str | None
    reasons: tuple[str, ...]
    caveats: tuple[str, ...]
    failures: tuple[str, ...]
    snippets: tuple[Snippet, ...]
    tables: tuple[Table, ...]
    acceptance: str | None
    measured: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]


def content_of(run: "StoredRun") -> Content:
    """Gather a run's report from what is stored; whatever is missing is left out."""
    decides = door_of(run) in wording.DECIDING_DOORS
    measured, environment = measured_with(run)
    return Content(
        title=wording.title(run),
        banner=wording.banner(run),
        status=wording.status(run),
        verdicts=wording.verdicts(run),
        engine=wording.engine(run),
        reasons=wording.reasons(run),
        caveats=wording.caveats(run),
        failures=wording.failures(run),
        snippets=snippets_of(run),
        tables=tables_of(run),
        acceptance=wording.acceptance_paragraph(results_of(run)) if decides else None,
        measured=measured,
        environment=environment,
    )


Pairs = tuple[tuple[str, str], ...]


def measured_with(run: "StoredRun") -> tuple[Pairs, Pairs]:
    """What a reader asks first, and the rest of the manifest."""
    entries = dict(_flat(run.manifest))
    if "seed" in run.config:
        entries.setdefault("seed", run.config["seed"])
    shown: dict[str, str] = {}
    used: set[str] = set()
    for label, name in MEASURED_WITH:
        key = next((key for key in entries if f".{key}".endswith(f".{name}")), None)
        if key is not None and entries[key] not in (None, ""):
            shown[label] = (
                _command(run, entries[key]) if name == "command" else fmt.text(entries[key])
            )
            used.add(key)
    texts = summary_of(run).get("greedy_texts")
    if texts:
        shown_results = [key for key in GREEDY_RESULTS if key in texts]
        counts = ", ".join(f"{texts[key]} {GREEDY_RESULTS[key]}" for key in shown_results)
        shown["greedy texts against plain decoding"] = counts
    rest = ((key, fmt.text(value)) for key, value in entries.items() if key not in used)
    return tuple(shown.items()), tuple(rest)


def _command(run: "StoredRun", stored: Any) -> str:
    """The command line as it can be typed again."""
    if not isinstance(stored, list):
        return fmt.text(stored)
    words = [str(word) for word in stored]
    if words and words[0] == door_of(run):
        words = ["python", "-m", f"harness.{words[0]}", *words[1:]]
    return " ".join(word if "'" in word or " " not in word else f"'{word}'" for word in words)


def _flat(entries: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in entries.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
