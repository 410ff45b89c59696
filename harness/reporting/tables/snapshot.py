"""Whether speculation left the output unchanged, prompt by prompt and draw by draw."""

from collections.abc import Iterable, Mapping
from typing import Any

from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table

GREEDY_COLUMNS = (
    Column("result", "left", key=True),
    Column("K", key=True),
    Column("prompt set", "left"),
    Column("prompt", "left", key=True, flexible=True),
    Column("acceptance\n_rate"),
    Column("first\ndifference"),
    Column("target\nmargin"),
    Column("speculative\nmargin"),
)
SAMPLED_COLUMNS = (
    Column("result", "left", key=True),
    Column("K", key=True),
    Column("temperature", key=True),
    Column("offset"),
    Column("draws"),
    Column("bins"),
    Column("chi-square"),
    Column("p-value"),
)
GREEDY_NOTES = (
    "PASS: the same tokens as plain decoding. TIE: they first differ where both tokens are as"
    " likely as the best one, within rounding. FAIL: they differ elsewhere, or by more than"
    " rounding does.",
    "first difference: the token position; margins: the gap between the two likeliest tokens"
    " there, in logits.",
)
SAMPLED_NOTES = (
    "Tokens drawn by speculative decoding after one forced prefix, against the exact target"
    " probabilities, at each offset of a round.",
)


def snapshot_tables(summary: Mapping[str, Any]) -> tuple[Table, ...]:
    """The greedy comparison and the sampled test, whichever were made."""
    greedy = [Row(_greedy(entry)) for entry in _listed(summary, "prompts")]
    sampled = [Row(_sampled(entry)) for entry in _listed(summary, "sampled")]
    outputs = "Greedy output, speculative against plain"
    laws = "Sampled output against the target's law"
    tables = (
        Table(outputs, GREEDY_COLUMNS, tuple(greedy), GREEDY_NOTES),
        Table(laws, SAMPLED_COLUMNS, tuple(sampled), SAMPLED_NOTES),
    )
    return tuple(table for table in tables if table.rows)


def _listed(summary: Mapping[str, Any], key: str) -> Iterable[Mapping[str, Any]]:
    return summary.get(key) or ()


def _greedy(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        fmt.text(entry.get("result")),
        fmt.text(entry.get("k")),
        fmt.text(entry.get("prompt_set")),
        fmt.text(entry.get("prompt")),
        fmt.percent(entry.get("acceptance_rate")),
        fmt.count(entry.get("first_difference")),
        fmt.decimal(entry.get("target_margin"), 4),
        fmt.decimal(entry.get("spec_margin"), 4),
    )


def _sampled(entry: Mapping[str, Any]) -> tuple[str, ...]:
    p_value = entry.get("p_value")
    return (
        fmt.text(entry.get("result")),
        fmt.text(entry.get("k")),
        fmt.temperature(entry.get("temperature")),
        fmt.count(entry.get("offset")),
        fmt.count(entry.get("draws")),
        fmt.count(entry.get("bins")),
        fmt.decimal(entry.get("chi2")),
        fmt.EMPTY if p_value is None else f"{p_value:.3g}",
    )
