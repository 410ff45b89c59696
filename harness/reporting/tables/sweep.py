"""Tables of a sweep: cells by temperature, prompt set and K; checks.

The prediction and the break-even alpha of a cell come from its replayed row. Where nothing was
generated (mode=replay) the replayed rows take the place of the measured ones, as the title says.
"""

from typing import NamedTuple

from harness import formatting as fmt
from harness.engine_facts.draft_kinds import looks_up
from harness.records import ResultRow, grouped
from harness.reporting import grid
from harness.reporting.sentences.run import greedy_counts
from harness.reporting.tables import stability
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import (
    Answer,
    DistributionTest,
    ReplayCheck,
    Summary,
    TextCheck,
    Unstable,
)


class SweepCell(NamedTuple):
    """The row of one K, with its prediction and the faults of its timing."""

    row: ResultRow
    predicted: ResultRow | None
    unstable: Unstable | None
    replay: ReplayCheck | None  # its tokens per round, measured and by replay
    of: int  # prompts of the set that the run decoded
    answer: Answer | None  # of the set, where it names this K

    @property
    def prompts(self) -> str | None:
        """The prompts that it was measured on, as "8 of 32"; None where these are all."""
        partial = self.row.prompts is not None and self.row.prompts < self.of
        return f"{self.row.prompts} of {self.of}" if partial else None

    @property
    def acceptance_rate(self) -> float | None:
        """The acceptance rate of a server that does not report alpha; None where alpha is known."""
        return None if self.row.alpha is not None else self.row.acceptance_rate

    @property
    def speedup(self) -> fmt.Bounded | None:
        """The speedup on all prompts of the set, with its interval; None for plain decoding.

        Where a part of them was measured it is the answer's, or follows from what rounds took and
        from the tokens per round that replay has of all.
        """
        row, predicted = self.row, self.predicted
        if self.prompts is None or not row.k or not predicted:
            return fmt.bounded(row) if row.k else None
        if self.answer is not None:
            return fmt.bounded(self.answer)
        if not row.speedup or not row.tokens_per_round or not predicted.tokens_per_round:
            return None
        return row.speedup * predicted.tokens_per_round / row.tokens_per_round, None, None

    @property
    def predicted_speedup(self) -> float | None:
        """Tokens per round by replay x R(0) / R(K); None for plain decoding."""
        return self.predicted.speedup if self.predicted and self.row.k else None

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1."""
        predicted, measured = self.predicted_speedup, (self.speedup or (None,))[0]
        return predicted / measured - 1 if predicted and measured else None

    @property
    def breakeven(self) -> float | str | None:
        """The break-even alpha of this K; "none" where even alpha = 1 is predicted to lose."""
        if self.row.k == 0 or looks_up(self.row.draft):
            return None
        for row in (self.row, self.predicted):
            if row is not None and row.breakeven_alpha is not None:
                return row.breakeven_alpha
        return fmt.NO_ROOT if self.predicted or self.row.source == "replayed" else None


CELLS: tuple[Column[SweepCell], ...] = (
    Column("prompt set", lambda cell: cell.row.prompt_set or "all", key=True),
    Column("T", lambda cell: cell.row.temperature or 0.0, fmt.temperature, key=True),
    Column("K", lambda cell: cell.row.k, fmt.count, key=True),
    Column("prompts", lambda cell: cell.prompts),
    Column("ms/tok", lambda cell: cell.row.ms_per_token, fmt.milliseconds),
    Column("acceptance\n_rate", lambda cell: cell.acceptance_rate, fmt.percent),
    Column("alpha\n[lo, hi]", lambda cell: fmt.bounded(cell.row, "alpha"), fmt.alpha),
    Column("break-even\nalpha", lambda cell: cell.breakeven, fmt.alpha),
    Column("tokens/\nround", lambda c: c.row.tokens_per_round if c.row.k else None, fmt.decimal),
    Column("replay\ngap", lambda c: c.replay and c.replay.gap_in_standard_errors, fmt.deviations),
    Column("speedup\n[lo, hi]", lambda cell: cell.speedup, fmt.speedup),
    Column("predicted\nspeedup", lambda cell: cell.predicted_speedup, fmt.speedup),
    Column("prediction\nerror", lambda cell: cell.error, fmt.signed_percent),
    stability.column(lambda cell: cell.unstable),
)

PROMPTS_NOTE = (
    "prompts: measured ones; their speedup is that of all prompts of the set, by the tokens per"
    " round that replay has of these."
)
ALPHA_NOTE = (
    "Compare break-even alpha with alpha, never with acceptance_rate (accepted / drafted), which"
    " falls with K by construction."
)
GAP_NOTE = (
    "replay gap: tokens/round measured less replayed, in standard errors; several beyond 2 mean"
    " that loop and replay disagree."
)
SERVED_NOTE = (
    "Predicted: tokens per round by replay of the plain server's texts, at what its rounds take by"
    " requests of other cells."
)
CPU_NOTE = "Times are processor seconds of the server's process, and not what a user waits for."
REPLAYED_NOTE = (
    "Predicted: tokens per round from completions of the target that the draft scored, x R(0) /"
    " R(K). Nothing was generated with speculation."
)
THRESHOLD_NOTE = (
    "A round at a threshold drafts fewer tokens than K and pays below break-even alpha, which is of"
    " K tokens. Drafts ended at {}."
)
NO_ROOT_NOTE = "break-even alpha none: even alpha = 1 loses at that K."


def cells_of(summary: Summary) -> list[SweepCell]:
    """Every prompt set, temperature and K that was run, temperatures ascending."""
    rows = summary.generated
    predicted = {_cell_key(row): row for row in summary.alone if row.source == "replayed"}
    sizes: dict[tuple[float | None, str | None], int] = {}
    for row in summary.alone:
        cell = row.temperature, row.prompt_set
        sizes[cell] = max(sizes.get(cell, 0), row.prompts or 0)
    answers = {
        (each.prompt_set, each.temperature, *each.named): each
        for each in summary.answers
        if each.timed
    }
    checks = {(each.prompt_set, each.temperature, each.k): each for each in summary.replay_checks}
    groups = grouped(rows, lambda row: (row.temperature or 0.0, row.prompt_set or "all"))
    return [
        SweepCell(
            row,
            None if row.source != "measured" else predicted.get(_cell_key(row)),
            stability.of_cell(summary, row),
            checks.get((row.prompt_set or "", row.temperature or 0.0, row.k)),
            sizes[row.temperature, row.prompt_set],
            answers.get((row.prompt_set or "", row.temperature, row.draft, row.k)),
        )
        for _, group in sorted(groups.items(), key=lambda item: item[0][0])
        for row in sorted(group, key=lambda row: row.k)
    ]


def cells_table(summary: Summary) -> Table:
    """The cells of a run, with their predictions."""
    cells = cells_of(summary)
    run, served = summary.run, summary.served
    title = f"Cells {grid.timed_place(summary)}{grid.timed_by(served)}"
    return table(
        f"{title} (predicted)" if run.replay_only else title,
        CELLS,
        cells,
        notes=(
            *(_incomplete(cell.row) for cell in cells if cell.row.status != "complete"),
            ALPHA_NOTE if any(cell.acceptance_rate is not None for cell in cells) else "",
            NO_ROOT_NOTE if any(cell.breakeven == fmt.NO_ROOT for cell in cells) else "",
            GAP_NOTE if summary.replay_checks else "",
            SERVED_NOTE if served and any(cell.predicted for cell in cells) else "",
            CPU_NOTE if served and served.clock == "cpu" else "",
            _thresholds(summary),
            PROMPTS_NOTE if any(cell.prompts for cell in cells) else "",
            _greedy_texts(summary),
            stability.note(summary, "cell"),
            REPLAYED_NOTE if run.replay_only else "",
        ),
    )


def _incomplete(row: ResultRow) -> str:
    at = f"{row.prompt_set}, temperature {fmt.temperature(row.temperature)}, K={row.k}"
    return f"{at} is {row.status}{f': {row.error}' if row.error else '.'}"


def _thresholds(summary: Summary) -> str:
    """A note on the thresholds at which a sweep's K are shown; "" without any."""
    timed = [answer for answer in summary.answers if answer.timed and answer.prompt_set == "all"]
    if summary.served is not None or not any(e.p_min for a in timed for e in a.candidates):
        return ""
    if summary.run.replay_only:
        return THRESHOLD_NOTE.format("the p_min that is fastest for their K")
    each = (f"p_min={a.named_p_min or 0:g} (T={a.temperature:g})" for a in timed)
    return THRESHOLD_NOTE.format(", ".join(each))


def _greedy_texts(summary: Summary) -> str:
    """A note on a sweep's texts at temperature 0; "" for a server run, which has a table."""
    if summary.served is not None or not summary.text_checks:
        return ""
    return f"Greedy texts against plain decoding's: {greedy_counts(summary.text_checks)}."


def _cell_key(row: ResultRow) -> tuple[object, ...]:
    return (row.model, row.draft, row.prompt_set, row.temperature, row.k)


def _logits(value: float) -> str:
    return fmt.decimal(value, 4)


TEXTS: tuple[Column[TextCheck], ...] = (
    Column("result", lambda check: check.result, key=True),
    Column("K", lambda check: check.k, fmt.count, key=True),
    Column("prompt set", lambda check: check.prompt_set),
    Column("prompt", lambda check: check.prompt, key=True, flexible=True),
    Column("acceptance\n_rate", lambda check: check.acceptance_rate, fmt.percent),
    Column("first\ndifference", lambda check: check.first_difference, fmt.count),
    Column("target\nmargin", lambda check: check.target_margin, _logits),
    Column("speculative\nmargin", lambda check: check.verify_margin, _logits),
)
DISTRIBUTIONS: tuple[Column[DistributionTest], ...] = (
    Column("result", lambda test: test.result, key=True),
    Column("K", lambda test: test.k, fmt.count, key=True),
    Column("temperature", lambda test: test.temperature, fmt.temperature, key=True),
    Column("offset", lambda test: test.offset, fmt.count),
    Column("draws", lambda test: test.draws, fmt.count),
    Column("bins", lambda test: test.bins, fmt.count),
    Column("chi-square", lambda test: test.chi2, fmt.decimal),
    Column("p-value", lambda test: test.p_value, lambda value: f"{value:.3g}"),
)
TEXT_NOTES = (
    "PASS: the same tokens as plain decoding. TIE: they first differ where both tokens are as"
    " likely as the best one, within rounding. FAIL: they differ elsewhere, or by more than"
    " rounding does.",
    "first difference: the token position; margins: the gap between the two likeliest tokens"
    " there, in logits.",
)
DISTRIBUTION_NOTES = (
    "Tokens drawn by speculative decoding after one fixed prefix, against the exact target"
    " probabilities, at each offset of a round.",
)


def text_table(summary: Summary) -> Table:
    title = "Greedy output, speculative against plain"
    differ = any(check.first_difference is not None for check in summary.text_checks)
    notes = TEXT_NOTES if differ else TEXT_NOTES[:1]
    return table(title, TEXTS, summary.text_checks, notes=notes)


def distribution_table(summary: Summary) -> Table:
    title = "Sampled output against the target's distribution"
    return table(title, DISTRIBUTIONS, summary.distribution_tests, notes=DISTRIBUTION_NOTES)
