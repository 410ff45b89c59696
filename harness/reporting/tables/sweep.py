"""What was generated at each K, by draft, temperature and prompt set; checks; adaptive drafting.

A row is a K; what was predicted for it, and its break-even alpha, are in the replayed row of the
same cell. Where nothing was generated (mode=replay) replayed rows stand in the measured ones' place
and the title says so; where both were made, `replay_table` shows them next to each other.
"""

from typing import NamedTuple

from harness import formatting as fmt
from harness.records import ResultRow, grouped
from harness.reporting import grid
from harness.reporting.sentences.run import greedy_counts
from harness.reporting.tables import stability
from harness.reporting.tables.specification import Column, Table, table
from harness.serving.drafts import looks_up
from harness.summary import (
    AdaptiveDrafting,
    AdaptiveRow,
    DistributionTest,
    OutlierCell,
    ReplayCheck,
    Summary,
    TextCheck,
    Unstable,
)


class Cell(NamedTuple):
    """One K's row, the prediction for it, and what is wrong with its timing."""

    row: ResultRow
    predicted: ResultRow | None
    unstable: Unstable | None
    outlier: OutlierCell | None
    few: bool  # whether another K was measured on twice as many prompts or more
    of: int  # prompts of the set that the run decoded, plainly and for replay too

    @property
    def prompts(self) -> str | None:
        """On how many prompts it was measured, "8 of 32"; None where on all."""
        partial = self.row.prompts is not None and self.row.prompts < self.of
        return f"{self.row.prompts} of {self.of}" if partial else None

    @property
    def speedup(self) -> fmt.Bounded | None:
        """With its interval; None of the baseline."""
        return fmt.bounded(self.row) if self.row.k else None

    @property
    def predicted_speedup(self) -> float | None:
        """Tokens per round by replay x R(0) / R(K); None of the baseline."""
        return self.predicted.speedup if self.predicted and self.row.k else None

    @property
    def error(self) -> float | None:
        """Of the prediction: predicted / measured - 1; None where it is of more prompts."""
        predicted, measured = self.predicted_speedup, self.row.speedup
        if self.prompts is not None and self.row.status == "complete":
            return None
        return predicted / measured - 1 if predicted and measured else None

    @property
    def breakeven(self) -> float | str | None:
        """The alpha this K needs; "none" where even alpha = 1 is predicted to lose."""
        if self.row.k == 0 or looks_up(self.row.draft):
            return None
        for row in (self.row, self.predicted):
            if row is not None and row.breakeven_alpha is not None:
                return row.breakeven_alpha
        return fmt.NO_ROOT if self.predicted or self.row.source == "replayed" else None


CELLS: tuple[Column[Cell], ...] = (
    Column("K", lambda cell: cell.row.k, fmt.count, key=True),
    Column("prompts", lambda cell: cell.prompts),
    Column("tok/s", lambda cell: cell.row.tokens_per_second, fmt.rate),
    Column("ms/tok", lambda cell: cell.row.ms_per_token, fmt.milliseconds),
    Column("acceptance\n_rate", lambda cell: cell.row.acceptance_rate, fmt.percent),
    Column("alpha\n[lo, hi]", lambda cell: fmt.bounded(cell.row, "alpha"), fmt.alpha),
    Column("speedup\n[lo, hi]", lambda cell: cell.speedup, fmt.speedup),
    Column("trimmed\nspeedup", lambda c: c.outlier and c.outlier.trimmed_speedup, fmt.speedup),
    Column("predicted\nspeedup", lambda cell: cell.predicted_speedup, fmt.speedup),
    Column("prediction\nerror", lambda cell: cell.error, fmt.signed_percent),
    Column("tokens/\nround", lambda c: c.row.tokens_per_round if c.row.k else None, fmt.decimal),
    Column("break-even\nalpha", lambda cell: cell.breakeven, fmt.alpha),
    stability.column(lambda cell: cell.unstable),
)
EXPECTED: Column[Cell] = Column(
    "tokens/round\nexpected",
    lambda cell: cell.predicted.tokens_per_round if cell.predicted and cell.row.k else None,
    fmt.decimal,
)
REPLAY: tuple[Column[ReplayCheck], ...] = (
    Column("prompt set", lambda check: check.prompt_set, key=True),
    Column("temperature", lambda check: check.temperature, fmt.temperature, key=True),
    Column("K", lambda check: check.k, fmt.count, key=True),
    Column("tokens/round\nmeasured", lambda check: check.measured_tokens_per_round, fmt.decimal),
    Column("tokens/round\nreplayed", lambda check: check.replayed_tokens_per_round, fmt.decimal),
    Column("gap, in\nstandard errors", lambda check: check.gap_in_standard_errors, fmt.deviations),
    Column("drafted/round\nmeasured", lambda check: check.measured_drafted_per_round, fmt.decimal),
    Column("drafted/round\nreplayed", lambda check: check.replayed_drafted_per_round, fmt.decimal),
    Column(
        "drafted gap, in\nstandard errors",
        lambda check: check.drafted_gap_in_standard_errors,
        fmt.deviations,
    ),
)

BEST_NOTE = "best: the fastest row of this table. Act on the verdict, not on this row. {of_verdict}"
OF_ROWS = (
    "A verdict's speedup is its row's, less what choosing the best row adds by chance: nothing"
    " where there was one to choose, or where every part of the prompts chooses the same. Its"
    " interval is wider than the row's: the workload and its prompt sets share one error rate."
)
OF_PAIRS = (
    "A verdict's speedup may lie above or below its row's: it is of the replayed rounds of all"
    " prompts, at the cost of a round in all measured generations; a row is of the measured prompts"
    " of its set alone."
)
PROMPTS_NOTE = (
    "prompts: on how many of the set's prompts the row was measured. A sweep that ends when its"
    " verdicts are decided (until=decided) measures their K on as many as that takes and the other"
    " K on a few; rows of few prompts do not compare with rows of more. Predicted speedups are of"
    " all prompts, so such rows have no prediction error. until=all measures every cell."
)
REPLAYED_NOTE = (
    "Predicted: tokens per round from completions of the target that the draft scored, x R(0) /"
    " R(K). Nothing was generated with speculation."
)
OUTLIER_NOTE = (
    "trimmed speedup: without the slowest and fastest tenth of the generations, where a few of them"
    " decide the speedup."
)
LENGTH_NOTE = (
    "The mean acceptance length that vLLM and llama.cpp print, 1 + accepted / rounds, is"
    " tokens/round or a little more: they count drafts that were accepted beyond the end of a text."
)
NO_ROOT_NOTE = "Break-even alpha none: even alpha = 1 loses at that K."
EXPECTED_NOTE = "tokens/round expected: computed from the acceptance that was set, not measured."
REPLAY_NOTE = (
    "tokens/round replayed: computed from plain decoding's completions, the same for every K. By"
    " chance about one gap of 20 is beyond 2; several, or one far beyond, mean that loop and replay"
    " disagree."
)


def of_verdicts(summary: Summary) -> str:
    """How the speedup of a verdict differs from that of its row."""
    return OF_PAIRS if any(answer.pairs is not None for answer in summary.answers) else OF_ROWS


def sweep_tables(summary: Summary) -> list[Table]:
    """Every draft, temperature and prompt set that was run, temperatures ascending."""
    rows = summary.generated
    predicted = {_where(row): row for row in summary.alone if row.source == "replayed"}
    few = summary.on_few_prompts
    sizes: dict[tuple[float | None, str | None], int] = {}
    for row in summary.alone:
        cell = row.temperature, row.prompt_set
        sizes[cell] = max(sizes.get(cell, 0), row.prompts or 0)
    outliers = {(cell.prompt_set, cell.temperature, cell.k): cell for cell in summary.outlier_cells}

    def cell_of(row: ResultRow) -> Cell:
        return Cell(
            row,
            None if row.source != "measured" else predicted.get(_where(row)),
            stability.of_cell(summary, row),
            outliers.get((row.prompt_set or "", row.temperature or 0.0, row.k)),
            row in few,
            sizes[row.temperature, row.prompt_set],
        )

    drafts = list(dict.fromkeys(row.draft for row in rows if row.k > 0 and row.draft))
    made = []
    for draft in drafts or [None]:
        of_draft = [row for row in rows if row.k == 0 or row.draft == draft]
        groups = grouped(of_draft, lambda row: (row.temperature or 0.0, row.prompt_set or "all"))
        for (temperature, prompt_set), group in sorted(groups.items(), key=lambda item: item[0][0]):
            of_set = f"temperature {fmt.temperature(temperature)}, {prompt_set} prompts"
            place = f"{grid.timed_place(summary)}{grid.timed_by(summary.served)}"
            name = f"{of_set}, {place}"
            title = f"{draft}, {name}" if len(drafts) > 1 else name[0].upper() + name[1:]
            made.append(_cells_table(title, [cell_of(row) for row in group], summary))
    return made


def replay_table(summary: Summary) -> Table:
    """Tokens per round as the loop gave them and as replay expects them, cell by cell."""
    title = "Replayed next to measured"
    return table(title, REPLAY, summary.replay_checks, notes=(REPLAY_NOTE,))


def _cells_table(title: str, cells: list[Cell], summary: Summary) -> Table:
    run, ordered = summary.run, sorted(cells, key=lambda cell: cell.row.k)
    stable = [cell for cell in ordered if cell.unstable is None and not cell.few]
    fastest = max(stable, key=lambda c: (c.row.speedup or 0.0) if c.row.k else 1.0, default=None)
    speculated = any(cell.row.k and cell.row.speedup is not None for cell in ordered)
    incomplete = [cell.row for cell in ordered if cell.row.status != "complete"]
    return table(
        f"{title} (predicted)" if run.replay_only else title,
        (*CELLS, EXPECTED) if run.synthetic else CELLS,
        ordered,
        best=lambda cell: speculated and cell is fastest,
        notes=(
            *(f"K={r.k} is {r.status}" + (f": {r.error}" if r.error else ".") for r in incomplete),
            NO_ROOT_NOTE if any(cell.breakeven == fmt.NO_ROOT for cell in ordered) else "",
            BEST_NOTE.format(of_verdict=of_verdicts(summary)) if speculated else "",
            PROMPTS_NOTE if any(cell.prompts for cell in ordered) else "",
            LENGTH_NOTE if summary.served and any(c.row.tokens_per_round for c in ordered) else "",
            _greedy_texts(summary),
            OUTLIER_NOTE if any(cell.outlier for cell in ordered) else "",
            stability.note(summary, "cell"),
            EXPECTED_NOTE if run.synthetic else "",
            REPLAYED_NOTE if run.replay_only else "",
        ),
    )


def _greedy_texts(summary: Summary) -> str:
    """How a sweep's texts at temperature 0 compare; a server's gate has a table of its own."""
    if summary.run.command != "sweep" or not summary.text_checks:
        return ""
    return f"Greedy texts against plain decoding's: {greedy_counts(summary.text_checks)}."


def _where(row: ResultRow) -> tuple[object, ...]:
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
    """The greedy comparison, text by text."""
    title = "Greedy output, speculative against plain"
    differ = any(check.first_difference is not None for check in summary.text_checks)
    notes = TEXT_NOTES if differ else TEXT_NOTES[:1]
    return table(title, TEXTS, summary.text_checks, notes=notes)


def distribution_table(summary: Summary) -> Table:
    """The test of sampled tokens, offset by offset."""
    title = "Sampled output against the target's distribution"
    return table(title, DISTRIBUTIONS, summary.distribution_tests, notes=DISTRIBUTION_NOTES)


class Threshold(NamedTuple):
    """One threshold of one draft."""

    drafting: AdaptiveDrafting
    row: AdaptiveRow


ADAPTIVE: tuple[Column[AdaptiveDrafting], ...] = (
    Column("draft", lambda entry: entry.draft, key=True),
    Column("T", lambda entry: entry.temperature, fmt.temperature, key=True),
    Column("best\nK", lambda entry: entry.fixed.k, fmt.count),
    Column("speedup\n[lo, hi]", lambda entry: fmt.bounded(entry.fixed), fmt.speedup),
    Column("best\nthreshold", lambda entry: entry.best.threshold, fmt.decimal),
    Column("K at\nmost", lambda entry: entry.best.k, fmt.count),
    Column("adaptive speedup\n[lo, hi]", lambda entry: fmt.bounded(entry.best), fmt.speedup),
    Column("best K\nper round", lambda entry: entry.best_k_per_round, fmt.speedup),
    Column("flag\noracle", lambda entry: entry.flag_oracle, fmt.speedup),
)
THRESHOLDS: tuple[Column[Threshold], ...] = (
    Column("draft", lambda entry: entry.drafting.draft, key=True),
    Column("T", lambda entry: entry.drafting.temperature, fmt.temperature, key=True),
    Column("K at\nmost", lambda entry: entry.row.k, fmt.count, key=True),
    Column("threshold", lambda entry: entry.row.threshold, fmt.decimal),
    Column("tokens/\nround", lambda entry: entry.row.tokens_per_round, fmt.decimal),
    Column("drafted/\nround", lambda entry: entry.row.drafted_per_round, fmt.decimal),
    Column("adaptive speedup\n[lo, hi]", lambda entry: fmt.bounded(entry.row), fmt.speedup),
)
ADAPTIVE_NOTES = (
    "Replayed, and priced by timed rounds of a fixed number of draft tokens. Reading every draft"
    " step back, which a threshold needs, is in those of a sweep with decode.stop=threshold, not in"
    " those of an audition. Best K and best threshold: less the optimism of choosing them, by"
    " held-out prompts, where there are enough for an interval; by threshold: as these prompts have"
    " them.",
    "No rule beats the flag oracle, which knows what draft tokens will be accepted, at this K at"
    " most. Best K per round knows the accept probabilities of the text and chooses before it"
    " drafts: above temperature 0 a threshold may beat it, since it sees the drafted tokens.",
)
WITHOUT = "it gives its tokens no probability that a threshold could be compared with."


def adaptive_tables(summary: Summary) -> list[Table]:
    """The best threshold of each draft, then every threshold at its K."""
    rows = [Threshold(entry, row) for entry in summary.adaptive for row in entry.thresholds]
    title = "Adaptive drafting (decode.stop=threshold)"
    ranked = dict.fromkeys(
        row.draft for board in summary.leaderboards for row in board.rows if row.dropped is None
    )
    known = {None, *(entry.draft for entry in summary.adaptive)}
    without = ", ".join(str(draft) for draft in ranked if draft not in known)
    lacking = f"Not available for {without}: {WITHOUT}" if without else ""
    return [
        table(title, ADAPTIVE, summary.adaptive, notes=(*ADAPTIVE_NOTES, lacking)),
        table("Adaptive drafting by threshold", THRESHOLDS, rows),
    ]
