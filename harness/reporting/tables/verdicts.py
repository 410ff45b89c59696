"""The other verdicts, and the named numbers that stand beside them."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.reporting import formatting as fmt
from harness.reporting.tables.model import Column, Row, Table

DECISIONS = {
    "speculate": "speculate",
    "does_not_pay": "do not speculate",
    "undecided": "undecided",
}
VERDICT_COLUMNS = (
    Column("prompt set", "left", key=True),
    Column("temperature", key=True),
    Column("decision", "left"),
    Column("draft", "left"),
    Column("K"),
    Column("speedup [lo, hi]"),
)
HEADLINE_COLUMNS = (Column("quantity", "left", key=True), Column("value"))
LABELS = {
    "step_ratio": "step ratio: target step / draft step",
    "c": "c: draft step / target step",
    "draft_step_ms": "draft step, ms",
    "target_step_ms": "target step, ms",
    "draft_ms": "draft step, ms",
    "target_ms": "target step, ms",
    "context_tokens": "context of the timed steps, tokens",
    "ideal_speedup": "ideal speedup (every draft token accepted)",
    "ideal_k": "K of the ideal speedup",
    "price_per_hour_usd": "the card, USD per hour",
    "plain_usd_per_million_tokens": "plain decoding, USD per 10^6 tokens",
    "usd_per_million_tokens": "as the verdict says, USD per 10^6 tokens",
    "measured_bandwidth_gb_s": "copy bandwidth measured here, GB/s",
    "datasheet_bandwidth_gb_s": "bandwidth of the data sheet, GB/s",
    "target_mbu": "target step: MBU (memory floor / time)",
    "draft_mbu": "draft step: MBU (memory floor / time)",
    "target_step_overhead_share": "target step: overhead, neither reading nor arithmetic",
    "draft_step_overhead_share": "draft step: overhead, neither reading nor arithmetic",
    "largest_unexplained_share": "a round beyond its parts, the largest share of any K",
    "best_cell_speedup": "largest speedup of one cell (picked, so flattering)",
    "best_cell_k": "its K",
    "best_cell_prompt_set": "its prompt set",
    "best_cell_temperature": "its temperature",
}


def prompt_set_table(verdicts: Sequence[Mapping[str, Any]]) -> Table | None:
    """Each prompt set judged alone, marked as such."""
    rows = tuple(
        Row(
            (
                fmt.text(verdict.get("prompt_set")),
                fmt.temperature(verdict.get("temperature")),
                DECISIONS.get(str(verdict.get("decision")), fmt.text(verdict.get("decision"))),
                fmt.text(verdict.get("draft")),
                fmt.text(verdict.get("k")),
                fmt.speedup(*(verdict.get(key) for key in ("speedup", "speedup_lo", "speedup_hi"))),
            )
        )
        for verdict in verdicts
    )
    note = "Each prompt set judged alone: right only for a server that sees nothing else."
    return Table("Each prompt set alone", VERDICT_COLUMNS, rows, (note,)) if rows else None


def headline_table(headline: Mapping[str, Any]) -> Table | None:
    """The named numbers of the summary, each under its own name."""
    rows = tuple(
        Row((LABELS.get(name, name), _headline_value(name, value)))
        for name, value in headline.items()
    )
    return Table("In numbers", HEADLINE_COLUMNS, rows) if rows else None


def _headline_value(name: str, value: Any) -> str:
    if isinstance(value, bool | str) or value is None:
        return fmt.text(value)
    if name.endswith("_bytes"):
        return fmt.memory(value)
    if "usd" in name.split("_"):
        return fmt.dollars(value)
    if name.endswith("_ms"):
        return fmt.milliseconds(value)
    if name.endswith("_share"):
        return fmt.percent(value)
    if name.endswith(("_mbu", "_gb_s")):
        return fmt.decimal(value)
    if "speedup" in name or name == "step_ratio":
        return fmt.speedup(value)
    if name == "c" or name.endswith("alpha"):
        return fmt.alpha(value)
    if name.endswith("_per_second"):
        return fmt.rate(value)
    if name.startswith("acceptance_rate"):
        return fmt.percent(value)
    return fmt.text(value)
