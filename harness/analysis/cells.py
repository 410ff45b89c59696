"""From generations to counts, and from counts to rows of results.csv: one row per cell.

Every rate here is a ratio of sums over generations, never a mean of ratios: a long text counts for
more than a short one, as it does for the machine. A cell's speedup is taken over the generations
(prompt, repetition) that finished both in it and in its baseline, the k = 0 cell of the same prompt
set and temperature, so that a prompt that failed on one side shifts neither. Seconds of the
running loop are winsorised for it (`steadied`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import bdtrc

from harness.records import Cell, ResultRow, TextKey, TextTrace, Trial, grouped
from harness.stats.jackknife import (
    CONFIDENCE,
    Array,
    Estimate,
    Variance,
    exponential,
    half_width,
    joined,
    log_speedup,
    share_interval,
)
from harness.stats.verdict_interval import spread_winsorised
from harness.summary import Visits
from harness.theory.acceptance import conditional
from harness.theory.replay import Replayed, replay
from harness.theory.speedup import RoundTimes

Count = Callable[[Trial], float]
PromptId = tuple[str, str]
# Share of a K's generations at either end that is winsorised: a quarter, as of the pairs of a
# verdict, leaves too few of a cell's to tell their error by
WINSORISED = 0.125
# Texts that tell their rounds stand for a cell if they have this share of its tokens
TELLING = 0.9
# A caveat says that gaps exceed their intervals where chance would have it so this rarely
RARE = 0.025

# ---- counts of generations -----------------------------------------------------------------------


def decode_s(trial: Trial) -> float:
    """Seconds from the end of every prefill to the last token."""
    return trial.decode_s or 0.0


def request_s(trial: Trial) -> float:
    """Seconds of the whole request: both prefills and the decoding."""
    return (trial.prefill_s or 0.0) + (trial.draft_prefill_s or 0.0) + (trial.decode_s or 0.0)


def new_tokens(trial: Trial) -> float:
    return trial.new_tokens or 0


def accepted(trial: Trial) -> float:
    return trial.accepted or 0


def judged(trial: Trial) -> float:
    """Draft tokens accepted or rejected: the denominator of alpha."""
    return (trial.accepted or 0) + (trial.rejected or 0)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Their quotient; None where either is missing or the denominator is 0."""
    return numerator / denominator if numerator is not None and denominator else None


def telling_rounds(done: Sequence[Trial]) -> list[Trial]:
    """The completed texts that tell their rounds; none where the others have many tokens.

    They may be unlike the others: on llama.cpp those of a look-up that fill their budget, in which
    little is copied.
    """
    telling = [trial for trial in done if trial.rounds is not None]
    share = sum(map(new_tokens, telling)) >= TELLING * sum(map(new_tokens, done))
    return telling if share else []


def latest(trials: Sequence[Trial]) -> list[Trial]:
    """One trial per generation: the last that finished, else the last failure."""
    kept: dict[tuple[TextKey, int], Trial] = {}
    for trial in trials:
        name = trial.key, trial.k
        if trial.status == "ok" or name not in kept or kept[name].status != "ok":
            kept.pop(name, None)  # in the order of the time in which each was made
            kept[name] = trial
    return list(kept.values())


def completed(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that finished and emitted something."""
    return [trial for trial in trials if trial.status == "ok" and trial.new_tokens]


def timed(trials: Sequence[Trial]) -> list[Trial]:
    """The trials without the texts that were made in batches, for replay, and have no times."""
    return [trial for trial in trials if trial.decode_s is not None or trial.status == "failed"]


def steadied(trials: Sequence[Trial], times: RoundTimes | None) -> list[Trial]:
    """The completed trials of one K, in order of time, with the seconds winsorised.

    What is winsorised is what a generation took next to its rounds' price, of plain decoding next
    to its tokens. They are as they are where that is not known.
    """
    done = completed(trials)
    k = done[0].k if done else 0
    if not done or times is None or not times.covers(k):
        return done
    if any(not t.decode_s or (k and (t.rounds is None or t.drafted is None)) for t in done):
        return done
    empty, drafted = times.relative(0), (times.relative(k) - times.relative(0)) / max(1, k)
    costs = np.array(
        [(t.rounds or 0) * empty + (t.drafted or 0) * drafted if k else new_tokens(t) for t in done]
    )
    took = np.array([decode_s(trial) for trial in done])
    steady = costs * np.exp(spread_winsorised(np.log(took / costs), WINSORISED))
    return [replace(t, decode_s=float(s)) for t, s in zip(done, steady, strict=True)]


def per_prompt(trials: Sequence[Trial], counts: Sequence[Count]) -> dict[PromptId, Array]:
    """Counts by (prompt set, conversation), in order, summed over repetitions and turns."""
    sums: dict[PromptId, Array] = {}
    for trial in sorted(trials, key=lambda trial: (trial.prompt_set, trial.conversation)):
        values = np.array([count(trial) for count in counts], dtype=np.float64)
        name = (trial.prompt_set, trial.conversation)
        sums[name] = sums[name] + values if name in sums else values
    return sums


def prompts_of(texts: Iterable[Trial | TextTrace]) -> tuple[list[PromptId], list[int]]:
    """The prompts of n texts, sorted, and [n] which of them each answers."""
    of_text = [(text.prompt_set, text.conversation) for text in texts]
    prompts = sorted(set(of_text))
    place = {name: row for row, name in enumerate(prompts)}
    return prompts, [place[name] for name in of_text]


def paired_sums(
    trials: Sequence[Trial], baseline: Sequence[Trial], seconds: Count = decode_s
) -> dict[PromptId, Array]:
    """[4] of each prompt: plain seconds and tokens, then a cell's, over what was timed in both."""
    done, plain = (
        {trial.key: trial for trial in completed(each) if trial.decode_s is not None}
        for each in (trials, baseline)
    )
    shared = done.keys() & plain.keys()
    after, before = (
        per_prompt([each[key] for key in shared], [seconds, new_tokens]) for each in (done, plain)
    )
    return {name: np.concatenate([before[name], after[name]]) for name in after}


# ---- measured rows -------------------------------------------------------------------------------


def measured_rows(
    trials: Sequence[Trial],
    *,
    model: str,
    draft: str,
    times: Mapping[float, RoundTimes],
    steady: bool = False,
) -> list[ResultRow]:
    """One row per prompt set, temperature and K, in that order, from one pair's generations.

    Baseline rows carry the draft's name too, so that a pair's rows stay together. `times` are by
    temperature; where there are none a row has no break-even alpha. With `steady` speedups are of
    winsorised seconds: those of a server's requests are low quantiles already.
    """
    cells = grouped(latest(trials), lambda trial: trial.cell_key)
    return [
        replace(
            _measured_row(cell, cells, times.get(cell.temperature), steady),
            model=model,
            draft=draft,
        )
        for cell in sorted(cells)
    ]


def _measured_row(
    cell: Cell, cells: Mapping[Cell, Sequence[Trial]], times: RoundTimes | None, steady: bool
) -> ResultRow:
    trials = cells[cell]
    done = completed(trials)
    failed = [trial for trial in trials if trial.status == "failed"]
    error = f"{len(failed)} of {len(trials)} generations failed, first: " if failed else ""
    row = ResultRow(
        prompt_set=cell.prompt_set,
        temperature=cell.temperature,
        k=cell.k,
        source="measured",
        status="partial" if failed and done else "failed" if failed else "complete",
        error=f"{error}{failed[0].error}" if failed else None,
        rule=next((trial.rule for trial in trials if trial.k > 0), None),
        breakeven_alpha=times.break_even_alpha(cell.k) if cell.k and times else None,
    )
    if not done:
        return row
    row = _with_measured_times(row, done)
    if cell.k == 0:
        return replace(row, speedup=1.0, request_speedup=1.0)
    row = _with_acceptance(row, done)
    done, baseline = (
        steadied(each, times if steady else None)
        for each in (done, cells.get(replace(cell, k=0), []))
    )
    return _with_speedup(row, done, baseline)


def few_visits(timed: int, asked: int | None) -> Visits | None:
    """The visits that were timed next to plain decoding; None where these are all, or not known."""
    return Visits(timed, asked) if asked is not None and timed < asked else None


def few_visits_error(visits: Visits) -> str:
    """The error of a partial row of a server, that was timed in some visits only."""
    return f"timed in {visits.timed} of {visits.asked} visits next to plain decoding"


def with_times(row: ResultRow, seconds: Array, tokens: Array) -> ResultRow:
    """A row with what the seconds and tokens of its texts, or prompts, come to; [n] of both."""
    each_ms, ms_per_token = 1e3 * seconds / tokens, 1e3 * float(seconds.sum() / tokens.sum())
    return replace(
        row,
        new_tokens=round(float(tokens.sum())),
        ms_per_token=ms_per_token,
        ms_per_token_p50=float(np.percentile(each_ms, 50)),
        ms_per_token_p90=float(np.percentile(each_ms, 90)),
        tokens_per_second=ratio(1e3, ms_per_token),
    )


def with_counts(row: ResultRow, counts: Replayed) -> ResultRow:
    accepted, drafted = float(counts.accepted.sum()), float(counts.drafted.sum())
    return replace(
        row,
        rounds=float(counts.rounds.sum()),
        drafted=drafted,
        accepted=accepted,
        rejected=float(counts.rejected.sum()),
        acceptance_rate=ratio(accepted, drafted),
        alpha=ratio(accepted, float(counts.judged.sum())),
        mean_acceptance_length=counts.mean_acceptance_length,
        tokens_per_round=counts.tokens_per_round,
    )


def priced(row: ResultRow, rounds: RoundTimes) -> ResultRow:
    """A row with the speedup of its tokens per round at R(K), 1 of plain decoding, and times."""
    speedup = rounds.speedup(row.tokens_per_round or 1.0, row.k) if row.k else 1.0
    ms_per_token = 1e3 * rounds.baseline_s / speedup
    return replace(
        row,
        ms_per_token=ms_per_token,
        tokens_per_second=ratio(1e3, ms_per_token),
        speedup=speedup,
        breakeven_alpha=rounds.break_even_alpha(row.k) if row.k else None,
    )


def _with_measured_times(row: ResultRow, done: Sequence[Trial]) -> ResultRow:
    tokens = np.array([new_tokens(trial) for trial in done])
    prompts = len({trial.conversation for trial in done})
    row = replace(row, prompts=prompts, new_tokens=int(tokens.sum()))
    if any(trial.decode_s is None for trial in done):  # as a server's records may be
        return row
    first_s = [
        request_s(trial) - decode_s(trial) + trial.first_token_s
        for trial in done
        if trial.first_token_s is not None
    ]
    peaks = [trial.peak_memory_bytes for trial in done if trial.peak_memory_bytes is not None]
    return replace(
        with_times(row, np.array([decode_s(trial) for trial in done]), tokens),
        ttft_ms=1e3 * float(np.median(first_s)) if first_s else None,
        peak_memory_bytes=max(peaks, default=None),
    )


def _with_acceptance(row: ResultRow, done: Sequence[Trial]) -> ResultRow:
    rounds, drafted, kept, rejected = (
        _total([getattr(trial, name) for trial in done])
        for name in ("rounds", "drafted", "accepted", "rejected")
    )
    counted = telling_rounds(done)
    row = replace(
        row,
        rounds=rounds,
        drafted=drafted,
        accepted=kept,
        rejected=rejected,
        acceptance_rate=ratio(kept, drafted),
        mean_acceptance_length=None if kept is None or not rounds else 1.0 + kept / rounds,
        tokens_per_round=ratio(
            sum(map(new_tokens, counted)), sum(float(trial.rounds or 0) for trial in counted)
        ),
    )
    if kept is None or rejected is None:
        return row
    sums = np.array(list(per_prompt(done, [accepted, judged]).values()))
    lo, hi = share_interval(*sums.T) or (None, None)
    return replace(row, alpha=ratio(kept, kept + rejected), alpha_lo=lo, alpha_hi=hi)


def _total(counts: Sequence[int | None]) -> float | None:
    """Their sum; None where any is not known, as on a server that does not tell."""
    known = [count for count in counts if count is not None]
    return float(sum(known)) if len(known) == len(counts) else None


def _with_speedup(row: ResultRow, done: Sequence[Trial], baseline: Sequence[Trial]) -> ResultRow:
    sums = [*paired_sums(done, baseline).values()]
    if not sums or any(trial.decode_s is None for trial in (*done, *baseline)):
        return row
    plain_s, plain_tokens, seconds, tokens = np.array(sums).T
    of_requests = paired_sums(done, baseline, request_s).values()
    plain_request_s, _, whole_s, _ = np.array([*of_requests]).T
    log = log_speedup(plain_s, plain_tokens, seconds, tokens)
    lo, hi = exponential(log.interval(skew=True)) or (None, None)

    def speedup(before_s: Array, after_s: Array) -> float | None:
        before = before_s.sum() / plain_tokens.sum()
        return ratio(float(before), float(after_s.sum() / tokens.sum()))

    return replace(
        row,
        speedup=speedup(plain_s, seconds),
        speedup_lo=lo,
        speedup_hi=hi,
        request_speedup=speedup(plain_request_s, whole_s),
    )


# ---- next to predictions -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Gap:
    """One measured cell's log(predicted / measured speedup), and the variance of its own."""

    value: float
    variance: Variance

    @classmethod
    def of(
        cls,
        predicted: Mapping[PromptId, Array],
        measured: Mapping[PromptId, Array],
        costs: Variance,
    ) -> "Gap | None":
        """On the prompts that both have, with the error of `costs`; None where too few tell it."""
        names = [name for name in predicted if name in measured]
        if not names:
            return None

        def log(sums: Mapping[PromptId, Array]) -> Estimate:
            return log_speedup(*np.array([sums[name] for name in names]).T)

        gap = log(predicted) - log(measured)
        if gap.variance is None:
            return None
        return cls(float(gap.value), joined([gap.variance, costs]))

    @property
    def exceeds(self) -> bool:
        """True where it is beyond its interval."""
        return abs(self.value) > float(half_width(self.variance, CONFIDENCE))


@dataclass(frozen=True, eq=False)
class PredictionError:
    """The gaps of the measured cells of one temperature, at least one; predictions err by them.

    A prediction's interval covers what replay and the timing of rounds leave open: other prompts,
    other visits. It knows nothing of what both share and generations do not, such as rounds that
    were timed on another text, or a machine that had another speed. What the gaps vary by beyond
    their sampling errors is that error. It is estimated without weights, so that no cell decides
    alone, as the mean of gap^2 - its sampling variance (as the variance between studies in a
    meta-analysis: Hedges, "A random effects model for effect sizes", 1983; about 0, which
    predictions claim). It is added to the variance of every prediction at that temperature, of
    cells that were not measured too: rounds are timed for each temperature apart.
    """

    gaps: Mapping[Cell, Gap]

    @property
    def variance(self) -> Variance:
        """The variance of any prediction's logarithm, besides its own."""
        squares = [gap.value**2 - float(gap.variance.value) for gap in self.gaps.values()]
        return Variance(np.array(max(0.0, np.mean(squares))), np.array(float(len(squares))))

    @property
    def outside(self) -> int:
        """The number of measured cells outside of their predictions' intervals."""
        return sum(gap.exceeds for gap in self.gaps.values())

    @property
    def off(self) -> bool:
        """True where more cells are outside than by chance."""
        outside, cells = self.outside, len(self.gaps)
        return outside > 0 and bool(bdtrc(outside - 1, cells, 1.0 - CONFIDENCE) <= RARE)

    @property
    def worst(self) -> tuple[Cell, Gap]:
        """The cell that differs most."""
        return max(self.gaps.items(), key=lambda item: abs(item[1].value))


def prediction_errors(gaps: Mapping[Cell, Gap | None]) -> dict[float, PredictionError]:
    """By temperature, what the cells say whose gap is known; of those that have any."""
    known = {cell: gap for cell, gap in gaps.items() if gap is not None}
    cells = grouped(known, lambda cell: cell.temperature)
    return {at: PredictionError({cell: known[cell] for cell in of}) for at, of in cells.items()}


# ---- acceptance ----------------------------------------------------------------------------------


def expected_tokens_per_round(rates: Sequence[float], lengths: Sequence[int]) -> float:
    """Expected tokens per round at a synthetic acceptance, on all these texts together.

    Rate j is the share of rounds that keep at least j tokens, as in vLLM's
    `synthetic_acceptance_rates`; given that all before it were, position j is kept with probability
    rate_j / rate_(j-1). With these chances replay gives the expected rounds of a text exactly, the
    cut of its last round included.
    """
    k, longest = len(rates), max(lengths)
    chances = np.broadcast_to(np.array(conditional(rates)), (len(lengths), longest, k))
    return sum(lengths) / float(replay(chances, lengths, [k])[k].rounds.sum())
