"""Tables as data: which door shows which, in the order a person reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.reporting.reading import (
    comparison_of,
    door_of,
    headline_of,
    latency_of,
    results_of,
    round_fit_of,
    summary_of,
    synthetic,
)
from harness.reporting.tables.bounds import bounds_table, reads_table
from harness.reporting.tables.breakeven import ideal_table, measured_table, rules_table
from harness.reporting.tables.card_ranking import card_tables
from harness.reporting.tables.cards import cards_table
from harness.reporting.tables.comparison import comparison_tables
from harness.reporting.tables.curves import batch_table, curve_table
from harness.reporting.tables.expense import (
    cost_table,
    draft_table,
    not_eligible_table,
)
from harness.reporting.tables.imposed import imposed_table
from harness.reporting.tables.latency import profile_table, verify_tables
from harness.reporting.tables.leaderboard import (
    leaderboard_tables,
)
from harness.reporting.tables.model import Column, Row, Table
from harness.reporting.tables.parts import parts_table, waterfall_table
from harness.reporting.tables.rules import thumb_table
from harness.reporting.tables.server_measurements import server_tables
from harness.reporting.tables.snapshot import snapshot_tables
from harness.reporting.tables.sweep import gap_table, sweep_tables
from harness.reporting.tables.verdicts import headline_table, prompt_set_table
from harness.reporting.tables.workload import (
    category_tables,
    least_regret_table,
    position_tables,
    request_table,
)
from harness.summary import CardDraftRow, CardRow

if TYPE_CHECKING:
    from harness.storage import StoredRun

__all__ = ["Column", "Row", "Table", "tables_of"]


def tables_of(run: "StoredRun") -> tuple[Table, ...]:
    """Every table of a run that has at least one row, most important first."""
    candidates = _DOORS.get(door_of(run), _sweep)(run)
    tables = [table for table in candidates if table is not None and table.rows]
    return tuple(
        replace(
            table, notes=tuple(note for note in table.notes if not _later(note, tables[index:]))
        )
        for index, table in enumerate(tables, start=1)
    )


def _later(note: str, tables: Sequence[Table]) -> bool:
    """Whether a remark is made again further down; it is then said only there."""
    return any(note in table.notes for table in tables)


def _sweep(run: "StoredRun") -> list[Table | None]:
    return [
        imposed_table(results_of(run)) if synthetic(run) else None,
        *sweep_tables(results_of(run)),
        thumb_table(summary_of(run).get("rules_of_thumb") or ()),
        gap_table(summary_of(run).get("replay_gaps") or ()),
        prompt_set_table(summary_of(run).get("per_prompt_set") or ()),
        headline_table(headline_of(run)),
        *verify_tables(latency_of(run)),
    ]


def _audition(run: "StoredRun") -> list[Table | None]:
    stored = summary_of(run)

    def listed(key: str) -> Sequence[Mapping[str, Any]]:
        return stored.get(key) or ()

    return [
        *card_tables(
            [CardRow(**entry) for entry in listed("cards")],
            [CardDraftRow(**entry) for entry in listed("card_drafts")],
        ),
        *leaderboard_tables(listed("leaderboards")),
        not_eligible_table(listed("not_eligible")),
        prompt_set_table(listed("per_prompt_set")),
        thumb_table(listed("rules_of_thumb")),
        draft_table(listed("leaderboards"), listed("memory_view")),
        *category_tables(listed("category_alpha")),
        *position_tables(listed("acceptance_by_position")),
        request_table(stored.get("request_view")),
        least_regret_table(listed("least_regret")),
        headline_table(headline_of(run)),
        cost_table(stored.get("costs")),
        *verify_tables(latency_of(run)),
    ]


def _profile(run: "StoredRun") -> list[Table | None]:
    results, latency, headline = results_of(run), latency_of(run), headline_of(run)
    stored, alphas = summary_of(run), [float(value) for value in run.config.get("alpha") or ()]
    return [
        profile_table(results, latency, headline),
        headline_table(headline),
        bounds_table(latency),
        reads_table(run.manifest.get("bytes_read") or ()),
        *verify_tables(latency)[:1],
        ideal_table(results),
        waterfall_table(run.parts),
        parts_table(run.parts),
        curve_table(latency, stored.get("skipped_cells") or ()),
        batch_table(latency, alphas),
        cards_table(stored.get("modelled_cards")),
    ]


def _breakeven(run: "StoredRun") -> list[Table | None]:
    results, summary = results_of(run), summary_of(run)
    config = {**run.config, **(summary.get("inputs") or {})}
    return [
        *(server_tables(fit) if (fit := round_fit_of(run)) else ()),
        measured_table(results, config),
        ideal_table(results, summary.get("by_k") or ()),
        rules_table(results, config),
        headline_table(headline_of(run)),
    ]


def _report(run: "StoredRun") -> list[Table | None]:
    comparison = comparison_of(run)
    return [*comparison_tables(comparison)] if comparison else []


def _snapshot(run: "StoredRun") -> list[Table | None]:
    return [*snapshot_tables(summary_of(run)), headline_table(headline_of(run))]


_DOORS = {
    "audition": _audition,
    "profile": _profile,
    "breakeven": _breakeven,
    "snapshot": _snapshot,
    "report": _report,
}
