"""Stored auditions put together: one target on several cards, or its drafts in several parts.

Each run was made by the audition door, on the same prompts and settings. Those of one card become
one bench, which is ranked like any audition; the cards are then ranked by what a token costs there
with the draft that the evidence says to serve, or without. The result is an ordinary audition run
of the best card, with every card's row beside its verdict. No model and no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from harness.analysis.fleet import CardRow, card_draft_rows, card_row, draft_order, placed
from harness.analysis.judge import judge
from harness.analysis.latency import latency_rows
from harness.analysis.views import LeaderboardRow
from harness.commands.audition import caveats_of
from harness.commands.cards import Card, open_cards
from harness.commands.outcome import Outcome
from harness.commands.running import running, shown
from harness.config import AuditionConfig
from harness.records import Failure, ResultRow, Summary, UserError
from harness.storage import RunFolder, StoredRun, timings_from
from harness.theory.cost import money


@dataclass(frozen=True)
class Judged:
    """A card with its ranking: rows of results.csv, the summary, and the views beside it."""

    card: Card
    rows: list[ResultRow]
    summary: Summary
    extra: dict[str, Any]


def run(config: AuditionConfig, failures: Sequence[Failure] = ()) -> Outcome:
    """Combine the runs that `combine` names and store, render and show the ranking of their cards.

    Args:
        config: only `combine` and `results_root` matter; all else is the runs' own.
        failures: of runs that brought nothing back.

    Returns:
        The combined run; status 1 where a run, or a draft in one, failed.

    Raises:
        UserError: a folder that is no finished audition, or runs that are not parts of one.
    """
    if not config.combine:
        raise UserError("combine=[]: name at least one audition's folder")
    judged = [_judged(card) for card in open_cards(config.combine)]
    runs = [stored for entry in judged for stored in entry.card.runs]
    best, extra = _ranked(judged)
    summary = replace(
        best.summary,
        caveats=(*_whose(extra["cards"]), *_caveats(judged)),
        failures=(*_failures(runs), *failures),
    )
    extra = {**best.extra, **extra, "not_eligible": _not_eligible(runs)}
    return _stored(config, best, summary, extra)


def _judged(card: Card) -> Judged:
    caveats = caveats_of(card.folder, card.config, card.taken)
    rows, summary, extra = judge(card.bench, (), caveats)
    return Judged(card, rows, summary, extra)


def _ranked(judged: Sequence[Judged]) -> tuple[Judged, dict[str, Any]]:
    """The best card at the first temperature, and what summary.json says of all of them."""
    by_temperature = [
        placed(
            card_row(
                entry.card.name,
                entry.card.device,
                entry.summary.per_temperature[index],
                entry.card.target_step_s,
                entry.card.bench.price_per_hour,
            )
            for entry in judged
        )
        for index in range(len(judged[0].summary.per_temperature))
    ]
    best = next(entry for entry in judged if entry.card.name == by_temperature[0][0].card)
    drafts = [row for entry in judged for row in _draft_rows(entry)]
    cards = [_with_spending(row, judged) for rows in by_temperature for row in rows]
    return best, {"cards": cards, "card_drafts": [asdict(row) for row in draft_order(drafts)]}


def _draft_rows(entry: Judged) -> list[Any]:
    bench = entry.card.bench
    known = {field.name for field in fields(LeaderboardRow)}
    rows = [
        LeaderboardRow(**{key: value for key, value in row.items() if key in known})
        for board in entry.extra["leaderboards"]
        if board["rule"] == bench.rule
        for row in board["rows"]
    ]
    return card_draft_rows(entry.card.name, rows, entry.card.target_step_s, bench.price_per_hour)


def _with_spending(row: CardRow, judged: Sequence[Judged]) -> dict[str, Any]:
    """A card's row with what its runs took of rented time, where they were rented."""
    card = next(entry.card for entry in judged if entry.card.name == row.card)
    rented = [entry for stored in card.runs if (entry := stored.manifest.get("cloud"))]
    prices = [entry for entry in rented if entry.get("price_per_hour_usd") is not None]
    spent = [money(entry["seconds"], entry["price_per_hour_usd"]) for entry in prices]
    return {
        **asdict(row),
        "asked_gpu": rented[0]["asked_gpu"] if rented else None,
        "rented_s": sum(entry["seconds"] for entry in rented) if rented else None,
        "spent_usd": sum(spent) if spent else None,
    }


def _failures(runs: Sequence[StoredRun]) -> list[Failure]:
    return [
        Failure(f"{stored.folder.name}: {entry['where']}", entry["error"])
        for stored in runs
        for entry in (stored.summary or {}).get("failures") or ()
    ]


def _whose(cards: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of which card the verdict is; nothing where there is one only."""
    first = cards[0]
    count = len({entry["card"] for entry in cards})
    if count == 1:
        return []
    priced = all(entry["usd_per_million_tokens"] is not None for entry in cards)
    least = "cheapest" if priced else "fastest"
    return [f"the verdict is for {first['card']}, where a token is {least} of {count} cards"]


def _caveats(judged: Sequence[Judged]) -> list[str]:
    return list(dict.fromkeys(note for entry in judged for note in entry.summary.caveats))


def _not_eligible(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """The drafts that no run could let play; every card says the same."""
    entries = [entry for stored in runs for entry in (stored.summary or {}).get("not_eligible", ())]
    return list({entry["draft"]: entry for entry in entries}.values())


def _stored(
    config: AuditionConfig, best: Judged, summary: Summary, extra: Mapping[str, Any]
) -> Outcome:
    card = best.card
    settings = replace(
        card.config,
        drafts=list(card.taken.traces),
        combine=[str(folder) for folder in config.combine],
        results_root=config.results_root,
        resume=None,
    )
    names = [card.config.model.name, "cards"]
    folder = RunFolder.create(config.results_root, "audition", names, asdict(settings))
    with running(folder):
        kept = ("environment", "models", "prompts", "prompts_sha256", "seed")
        folder.update_manifest({key: card.folder.manifest.get(key) for key in kept})
        folder.update_manifest({"combined": [Path(name).name for name in config.combine]})
        timings = [t for r in card.runs for t in timings_from(r.latency_samples)]
        folder.write_latency(latency_rows(timings), timings)
        folder.write_traces([t for group in card.taken.traces.values() for t in group])
        folder.write_results(best.rows)
        folder.write_summary(summary, extra)
    folder.update_manifest({"status": "failed" if summary.failures else "complete"})
    return shown(folder.path, 1 if summary.failures else 0)
