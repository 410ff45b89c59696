"""The words a verdict, a status and a caveat are said in, the same wherever they are read."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.records import DUMMY_CAVEAT, IMPOSED_CAVEAT, ResultRow
from harness.reporting import formatting as fmt
from harness.reporting.reading import (
    comparison_of,
    door_of,
    dummies_of,
    ran,
    results_of,
    summary_of,
    synthetic,
)
from harness.reporting.tables.comparison import comparison_sentences

if TYPE_CHECKING:
    from harness.storage import StoredRun

TITLES = {
    "sweep": "Sweep of {pair}: which K to serve, or none",
    "profile": "Profile of {pair}: what speculation could gain",
    "breakeven": "Break-even: the arithmetic of two latencies",
    "snapshot": "Snapshot of {pair}: does speculation leave the output unchanged?",
    "audition": "Audition for {pair}: who gets the part?",
    "report": "Runs compared: did anything change?",
}
_FAILURES_SHOWN = 8
NO_ADVICE = "Not a recommendation (dummy weights): "
AT_IMPOSED = " It holds at the imposed acceptance only."
DECIDING_DOORS = frozenset({"sweep", "audition"})
# What ran, by a model's `engine` in the manifest
ENGINES = {
    "cuda_graphs": "CUDA graphs",
    "lean": "eager forward of the harness",
    "transformers": "eager forward of transformers",
}
# Caveats that a banner has said already
TOLD_FIRST = (DUMMY_CAVEAT, IMPOSED_CAVEAT)


def title(run: "StoredRun") -> str:
    """What the run is, in one line."""
    names = [str((run.config.get(role) or {}).get("name") or "") for role in ("model", "draft")]
    pair = " with ".join(name for name in names if name) or "a pair"
    return TITLES.get(door_of(run), "Run of {pair}").format(pair=pair)


def banner(run: "StoredRun") -> str | None:
    """What must be read before any number; None where weights and acceptance are real."""
    names = " and ".join(dummies_of(run))
    if not names:
        return _sentence(IMPOSED_CAVEAT) if synthetic(run) else None
    told = f"{_sentence(DUMMY_CAVEAT).upper()} The weights of {names} are random:"
    if synthetic(run):
        return f"{told} acceptance was set (decode.acceptance), and speedups are as good as it."
    return f"{told} what they accept of each other is chance, so nothing here recommends a draft."


def status(run: "StoredRun") -> str | None:
    """Why this is not a whole run, in one line; None where it is whole."""
    stored = run.manifest.get("status")
    rows = ran(results_of(run))
    counted = [(name, sum(row.status == name for row in rows)) for name in ("failed", "partial")]
    cells = ", ".join(f"{number} {name}" for name, number in counted if number)
    unfinished = f" Cells: {cells} of {len(rows)}." if cells else ""
    if stored == "complete":
        return f"PARTIAL RUN: some cells did not complete.{unfinished}" if cells else None
    if stored == "failed":
        return f"FAILED RUN: what follows is what was stored.{unfinished}"
    if stored == "running":
        again = f"resume={run.folder} goes on with it"
        return f"UNFINISHED RUN: still running, or interrupted ({again}).{unfinished}"
    return f"UNKNOWN STATUS: the manifest does not say whether the run ended.{unfinished}"


def verdict(entry: Mapping[str, Any]) -> str:
    """A verdict as a sentence that starts with what to do.

    "Serve tiny_good at K=3: 1.42x [1.36, 1.48] on held-out prompts (whole workload, temperature
    1).", "Do not speculate: <reason> (...)." or "Undecided: <reason> (...)."
    """
    if entry.get("temperature") is None:
        return _given(entry)
    where = f"({_workload(entry.get('prompt_set'))}, temperature {_temperature(entry)})"
    reason = str(entry.get("reason") or "").strip().rstrip(".")
    if entry.get("decision") == "speculate":
        low, high = entry.get("speedup_lo"), entry.get("speedup_hi")
        gain = fmt.speedup(entry.get("speedup"), low, high)
        unsure = "" if low is not None else ", no interval"
        choice = f"{fmt.text(entry.get('draft'))} at K={entry.get('k')}"
        return f"Serve {choice}: {gain}{unsure} on held-out prompts {where}."
    said = "Undecided" if entry.get("decision") == "undecided" else "Do not speculate"
    return f"{said}: {reason} {where}." if reason else f"{said} {where}."


def _given(entry: Mapping[str, Any]) -> str:
    """A verdict from numbers of elsewhere, which know no prompts and no interval."""
    reason = str(entry.get("reason") or "").strip().rstrip(".")
    said = {
        "speculate": f"Serve the draft at K={entry.get('k')}",
        "undecided": "Undecided",
    }.get(str(entry.get("decision")), "Do not speculate")
    return f"{said}: {reason} (from the numbers given, no interval)."


def verdicts(run: "StoredRun") -> tuple[str, ...]:
    """What the run decides: the whole workload at each temperature, the main one first."""
    summary = summary_of(run)
    main = summary.get("verdict")
    if main is None:
        return _without_verdict(run, summary)
    others = [entry for entry in summary.get("per_temperature") or () if not _same(entry, main)]
    prefix = NO_ADVICE if dummies_of(run) and not synthetic(run) else ""
    suffix = AT_IMPOSED if synthetic(run) else ""
    return tuple(f"{prefix}{verdict(entry)}{suffix}" for entry in (main, *others))


def engine(run: "StoredRun") -> str | None:
    """What the steps ran on, model by model where that differs; None where no model ran.

    "engine: CUDA graphs (target); CUDA graphs, uncompiled (draft: no C compiler)"
    """
    models = run.manifest.get("models") or {}
    known = {role: entry for role, entry in models.items() if entry.get("engine")}
    ran_on: dict[tuple[str, str | None], list[str]] = {}
    for role, entry in known.items():
        name, reason = str(entry["engine"]), entry.get("engine_reason")
        uncompiled = name == "cuda_graphs" and (reason or entry.get("compiled") is False)
        label = f"{ENGINES.get(name, name)}{', uncompiled' if uncompiled else ''}"
        ran_on.setdefault((label, reason), []).append(role)
    if not ran_on:
        return None
    if len(ran_on) == 1 and not any(reason for _, reason in ran_on):
        return f"engine: {next(iter(ran_on))[0]}"
    parts = [
        f"{label} ({', '.join(roles)}{f': {reason}' if reason else ''})"
        for (label, reason), roles in ran_on.items()
    ]
    return f"engine: {'; '.join(parts)}"


def reasons(run: "StoredRun") -> tuple[str, ...]:
    """Why the verdict is what it is, and what would change it, as whole sentences."""
    return tuple(_sentence(text) for text in summary_of(run).get("advice") or ())


def snapshot(results: Sequence[str]) -> str:
    """The snapshot's outcome: FAIL if any fails, else OPEN, else TIE if any ties, else PASS."""
    worst = next((word for word in ("FAIL", "OPEN", "TIE") if word in results), "PASS")
    if set(results) == {"UNTESTED"}:
        worst = "UNTESTED"
    rare = (word for word in ("OPEN", "UNTESTED") if word in results)
    words = ("PASS", "TIE", "FAIL", *rare)
    counts = ", ".join(f"{results.count(word)} {word}" for word in words)
    meaning = {
        "PASS": "speculation left the output unchanged",
        "TIE": "the output differs only where two tokens tie within rounding noise",
        "FAIL": "speculation changed the output",
        "OPEN": "the output differs, and the run stopped before it was known whether that is a tie",
        "UNTESTED": "the target is nearly certain of every token, so no law could be tested",
    }[worst]
    return f"{worst}: {meaning} ({len(results)} checks: {counts})."


def acceptance_paragraph(results: Iterable[ResultRow]) -> str | None:
    """Why acceptance_rate and a break-even alpha do not compare, with this run's own numbers."""
    rows = [row for row in ran(results) if row.k > 1 and row.alpha is not None]
    known = [row for row in rows if row.acceptance_rate is not None]
    if not known:
        return None
    row = max(known, key=lambda row: row.k)
    draft = f" with {row.draft}" if len({row.draft for row in known}) > 1 else ""
    return (
        "Compare the break-even alpha with alpha, never with acceptance_rate. acceptance_rate is"
        " accepted / drafted: all K tokens of a round count as drafted, also those behind a"
        " rejection or beyond the end of the text, which had no chance, so it falls with K by"
        " construction. alpha is the"
        " probability that a draft token is accepted given that all before it in its round were,"
        f" and that is what break-even speaks of. Here,{draft} at K={row.k} on {row.prompt_set}"
        f" prompts at temperature {fmt.temperature(row.temperature)}, an acceptance_rate of"
        f" {fmt.percent(row.acceptance_rate)} goes with an alpha of {fmt.alpha(row.alpha)}."
    )


def failures(run: "StoredRun") -> tuple[str, ...]:
    """What did not complete, each with its error; the first few where there are many."""
    entries = summary_of(run).get("failures") or ()
    lines = [f"{entry.get('where')}: {entry.get('error')}" for entry in entries]
    if len(lines) <= _FAILURES_SHOWN:
        return tuple(lines)
    more = len(lines) - _FAILURES_SHOWN
    return (*lines[:_FAILURES_SHOWN], f"and {more} more, all listed in summary.json")


def caveats(run: "StoredRun") -> tuple[str, ...]:
    """What a reader must know before acting, as whole sentences; not what the banner says."""
    stored = summary_of(run).get("caveats") or ()
    return tuple(_sentence(text) for text in stored if text not in TOLD_FIRST or not banner(run))


def _without_verdict(run: "StoredRun", summary: Mapping[str, Any]) -> tuple[str, ...]:
    checks = [*(summary.get("prompts") or ()), *(summary.get("sampled") or ())]
    if door_of(run) == "snapshot" and checks:
        return (snapshot([str(entry.get("result")) for entry in checks]),)
    if door_of(run) == "report":
        comparison = comparison_of(run)
        return comparison_sentences(comparison) if comparison else ()
    if door_of(run) in DECIDING_DOORS:
        return ("No verdict: the run stopped before there was enough to decide on.",)
    return ()


def _workload(prompt_set: object) -> str:
    return "whole workload" if prompt_set in (None, "", "all") else f"{prompt_set} prompts"


def _temperature(entry: Mapping[str, Any]) -> str:
    return fmt.temperature(entry.get("temperature"))


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in ("temperature", "prompt_set"))


def _sentence(text: object) -> str:
    words = str(text).strip() if text else ""
    if not words:
        return ""
    ended = words if words.endswith((".", "!", "?", ")")) else f"{words}."
    return ended[0].upper() + ended[1:]
