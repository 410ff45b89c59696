"""Whether speculation left the output unchanged, prompt by prompt and draw by draw."""

from harness.reporting import formatting as fmt
from harness.reporting.tables.specification import Column, Table, table
from harness.summary import DistributionTest, Summary, TextCheck


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
