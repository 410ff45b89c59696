"""The typed, versioned record of an analysed run, `Summary`: the result of `analysis.analyse`.

It is written as summary.json and read back as the same type, and it is all that `harness.reporting`
reads. It holds numbers and reason codes; sentences are made in `harness.reporting`, and a caveat's
in its record. Times are in seconds, except in `ResultRow` and `LatencyRow`, which are rows of csv
files with fixed columns.

Reading order: `Summary` at the end of this module, then the records of the command in question.

The comment at each code names the values that it carries. `harness.reporting.sentences` has a
sentence for each reason of a verdict, `harness.analysis.caveats` the record of each caveat.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from harness.records import (
    OWN_LOOP,
    SCHEMA_VERSION,
    Decision,
    Failure,
    LatencyRow,
    PlanPolicy,
    ResultRow,
    Rule,
    ServerCommand,
    SkippedCell,
    Source,
    Varying,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Value = float | int | str | bool | None
Values = dict[str, Value]
Status = Literal["complete", "running", "failed", "unknown"]
# The values `draft` and `k` are those of the candidate with the largest speedup; `draft` is None
# where the run has one draft only.
VerdictReason = Literal[
    # Decided by an interval; draft, k, level (of the interval: all verdicts share one error)
    "held_out_gain",  # speculate
    "held_out_loss",  # does_not_pay; alpha, breakeven_alpha (either may be None)
    # Undecided with an interval
    # Needs prompts; prompts, prompts_needed (None: it cannot be estimated). Where a part was
    # measured in pairs, pairs_needed: how many prompts of all sets are to be measured then
    "interval_spans_one",
    # timing_share: timing's share of the variance; measured: whether the speedup was measured; by
    # pairs the values of interval_spans_one, too
    "timing_noise",
    "near_one",  # near: both bounds are within this distance of 1
    # Undecided without an interval
    "too_few_prompts",  # draft, k, prompts (measured ones where these are too few), needed
    "no_complete_prompt",  # prompt_set: a set without one; None where the run has none
    "greedy_texts_differ",  # texts, differing; of the first: prompt_set, prompt, k, position
    "greedy_texts_unjudged",  # the same values; resuming the run judges them
    # k: the worst; text_z, plain_z: of its texts against the target and against plain decoding
    "server_not_lossless",
    # Of an audition: a plain token took slow_s next to draft slow and fast_s next to draft fast;
    # draft, k, level, speedup and candidates as if it were decided
    "drafts_not_compared",
    # The timings cannot be right: k, prompt_set, speedup of the worst cell; clock: of a server
    "impossible_speedup",
    "given_numbers",  # break-even; k, measured (by a server), alpha, breakeven_alpha, near
    "not_timed",  # the engine's rounds were not timed; draft, k
    "nothing_accepted",  # does_not_pay
]
Doubt = tuple[VerdictReason, Values]  # why a verdict cannot be given, with the values to quote
Factor = Literal["acceptance", "slow_draft", "expensive_verify", "slow_loop"]
RuleOfThumbCode = Literal[
    "step_ratio",  # value: target step / draft step; least, ideal, k, breakeven_alpha
    # value: acceptance_rate; k, suggested_k, verdict_k (0: do not speculate; None: undecided)
    "suggested_k",
    "accepted_over_emitted",  # value: this share; least, alpha, breakeven_alpha, speedup
]


@dataclass(frozen=True)
class Visits:
    """The visits in which a server's cell was timed next to plain decoding, fewer than asked."""

    timed: int
    asked: int


@dataclass(frozen=True)
class RoundTokens:
    """The tokens per round of one K, by replay of the target's texts under an acceptance rule.

    K pays while a round costs fewer plain tokens than a round emits, on any engine. Reports advise
    by the lower bound over prompts (`pays_below`).
    """

    k: int
    tokens_per_round: float  # on the weighted workload, or the prompt set
    # tokens_per_round_lo, tokens_per_round_hi: 95 %, over prompts; None with too few.
    tokens_per_round_lo: float | None
    tokens_per_round_hi: float | None
    own_cost: float | None  # R(K) / R(0) where the run's speedups hold: a round in plain tokens
    interpolated: bool = False  # whether own_cost is interpolated between K that were timed
    given: bool = False  # whether own_cost follows from times that were given

    @property
    def pays_below(self) -> float:
        """The cost of a round, in plain tokens, below which K pays: a lower bound over prompts."""
        least = self.tokens_per_round_lo
        return self.tokens_per_round if least is None else least


@dataclass(frozen=True)
class MeasuredPart:
    """The prompts behind a verdict by replay and pairs (`harness.stats.verdict_interval`)."""

    prompts: int  # replayed prompts of the workload, or of the prompt set
    measured: int  # prompts of all sets on which the K was timed next to plain decoding
    # speedup_lo, speedup_hi: on exactly these prompts, 95 %; the error is that of timing alone
    speedup_lo: float
    speedup_hi: float


@dataclass(frozen=True)
class CandidateSpeedup:
    """The speedup of a draft at one K on an answer's prompts, not corrected for the choice.

    Where one K was measured next to plain decoding, what its rounds cost beyond their predicted
    price is in the speedup of each, and not in what was `predicted` of it.
    """

    draft: str
    k: int
    speedup: float
    # Whether it and the answer's candidate are equally fast within the 95 % error of their ratio
    tied: bool
    source: Source
    predicted: float | None = None
    p_min: float | None = None  # below which a token ends a draft; None: none does

    @property
    def name(self) -> tuple[str, int, float | None]:
        return self.draft, self.k, self.p_min


@dataclass(frozen=True)
class Answer:
    """The decision for one engine, at one temperature, on a workload or a prompt set.

    An engine whose rounds were not timed has no speedup: it is `not_measured`, or `does_not_pay`
    where a draft cannot gain at any cost of a round.
    """

    decision: Decision  # "speculate" only when the speedup's lower bound is above 1
    # draft, k: the pair to serve; undecided: the candidate with the largest speedup; not measured:
    # the one to measure; None and 0 where speculation does not pay.
    draft: str | None
    k: int
    temperature: float | None  # None where the numbers were given without one
    prompt_set: str  # a set's name, or "all" for the whole weighted workload
    # speedup, speedup_lo, speedup_hi: corrected for the selection; with too few prompts for that,
    # the uncorrected speedup without bounds.
    speedup: float | None
    speedup_lo: float | None
    speedup_hi: float | None
    reason: VerdictReason
    reason_values: Values = field(default_factory=dict[str, Value])
    # "own": the harness's loop; else a name of `engine=`; None where times or speedups were given
    engine: str | None = None
    timed: bool = True  # whether the engine's rounds were timed; else there is no speedup
    run: str | None = None  # the server run that timed them, where it is another run
    rule: Rule | None = None  # None where it is not known
    # "measured": the engine ran; "replayed": predicted, or without a speedup; "theory": arithmetic
    source: Source = "replayed"
    rounds: tuple[RoundTokens, ...] = ()  # of the named draft at every K, where it was replayed
    visits: Visits | None = None  # where no K of a server run has all visits that were asked for
    # chance, gain: the probability that the candidate pays, and the mean of its speedup - 1, by the
    # estimate and its error; None without an interval.
    chance: float | None = None
    gain: float | None = None
    # The prompts behind a verdict by replay and measured pairs; None for one without such pairs
    pairs: MeasuredPart | None = None
    candidates: tuple[CandidateSpeedup, ...] = ()  # that the answer chose from; empty if not timed
    # plain_s, request_tokens: of plain decoding on these prompts, seconds of a token, and tokens of
    # a request, the mean
    plain_s: float | None = None
    request_tokens: float | None = None
    # Of the draft and K that are named, the probability below which a token ends a draft
    p_min: float | None = None

    @classmethod
    def undecided(
        cls, temperature: float | None, prompt_set: str, reason: VerdictReason, values: Values
    ) -> "Answer":
        nothing = (None, None, None)
        return cls("undecided", None, 0, temperature, prompt_set, *nothing, reason, values)

    @property
    def speculates(self) -> bool:
        return self.decision == "speculate"

    @property
    def named(self) -> tuple[str | None, int]:
        """The draft and K to serve, else those that the reason quotes; None and 0 without any."""
        draft, k = self.reason_values.get("draft"), self.reason_values.get("k")
        return (
            self.draft or (draft if isinstance(draft, str) else None),
            self.k or (k if isinstance(k, int) else 0),
        )

    @property
    def name(self) -> tuple[str | None, int, float | None]:
        """The draft, K and threshold whose speedup this is."""
        return (*self.named, self.named_p_min)

    @property
    def named_p_min(self) -> float | None:
        """The threshold of what is named; None: none."""
        p_min = self.p_min or self.reason_values.get("p_min")
        return p_min if isinstance(p_min, float) else None

    @property
    def by_k(self) -> tuple[CandidateSpeedup, ...]:
        draft, _, p_min = self.name
        of_draft = (each for each in self.candidates if (each.draft, each.p_min) == (draft, p_min))
        return tuple(sorted(of_draft, key=lambda each: each.k))

    @property
    def within_reach(self) -> tuple[int, ...]:
        """The K to measure on another engine: the named one, its ties, and the next larger K.

        Where a round costs fewer plain tokens than here, a larger K is best.
        """
        k = self.named[1]
        ks = [each.k for each in self.by_k] or [entry.k for entry in self.rounds]
        tied = {k, *(each.k for each in self.by_k if each.tied)}
        larger = [each for each in sorted(ks) if each > max(tied)][:1]
        return tuple(sorted({*tied, *larger}))

    @property
    def saved_s_per_request(self) -> float | None:
        """Seconds of decoding that a request takes less than plainly; None where not known."""
        if self.plain_s is None or self.request_tokens is None or not self.speedup:
            return None
        return self.plain_s * self.request_tokens * (1.0 - 1.0 / self.speedup)

    @property
    def round(self) -> RoundTokens | None:
        """The tokens per round of the named K; None where they are not known."""
        return next((entry for entry in self.rounds if entry.k == self.named[1]), None)


@dataclass(frozen=True)
class Caveat:
    """A caveat on the numbers of a run: its code, and the values that its sentence quotes.

    `harness.analysis.caveats` has the record of each code.
    """

    code: str
    values: Values = field(default_factory=dict[str, Value])


@dataclass(frozen=True)
class ModelFacts:
    """One loaded model, as the manifest describes it."""

    role: str  # "target", "draft", or in an audition the draft's name
    name: str
    id: str | None = None  # hub id, folder or `embedded:<name>`
    weights: str | None = None  # "pretrained", "dummy", "embedded" or "gguf"
    # The implementation of its steps: "cuda_graphs", "lean" or "transformers"; None if unknown.
    engine: str | None = None
    engine_reason: str | None = None  # why it is not, or not entirely, the requested one
    compiled: bool | None = None  # whether a CUDA graph's work was compiled; None: no graph
    kind: str = "model"  # the kind of draft, a key of `engine_facts.draft_kinds.DRAFTS`
    layers: int | None = None  # of an early exit


@dataclass(frozen=True)
class SamplingFacts:
    """The sampling parameters of the run (`decode.*`), for serving commands."""

    rule: Rule = "ratio"
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    p_min: float | None = None  # on servers with a threshold, as the key has it


@dataclass(frozen=True)
class MadeWith:
    """The command, device and versions of a run; other facts are in its manifest.json."""

    command: str | None = None  # in a form that can be typed again
    # Its keys of texts and machine, also those of a run that it names; not quoted for a shell
    workload: tuple[str, ...] = ()
    device: str | None = None  # the card or processor
    versions: dict[str, str] = field(default_factory=dict[str, str])  # by name: python, torch, ...
    commit: str | None = None  # of the harness
    uncommitted: bool = False  # whether files differed from that commit


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run apart from its results: command, models, settings and status."""

    command: str  # the key of its page in `reporting.pages`: sweep, audition, server, ...
    folder: str  # the run folder's path as it was given
    status: Status
    created_utc: str | None
    model: str | None  # model, draft: names; draft is None for several drafts
    draft: str | None
    models: tuple[ModelFacts, ...] = ()  # the target first
    sampling: SamplingFacts = field(default_factory=SamplingFacts)
    serve_on: str | None = None  # the engine whose serving command is shown first (`engine=`)
    ks: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = ()
    seed: int | None = None
    prompts: int | None = None
    synthetic: bool = False  # whether acceptance was set (`decode.acceptance`) and not measured
    # Weights of the prompt sets in the workload, where they were given (`prompts.weights`) or
    # follow from a log
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    own_prompts: bool = False  # whether the prompts are the user's, or records of requests
    replay_only: bool = False  # whether no speculative generation was timed (mode=replay, audition)
    # measured_cells, failed_cells, partial_cells: rows of results.csv that were run.
    measured_cells: int = 0
    failed_cells: int = 0
    partial_cells: int = 0
    made_with: MadeWith = field(default_factory=MadeWith)
    # not_scored, ranked: the drafts that an audition's ranking lacks, and the number of drafts that
    # it has; 0 where something else failed as well.
    not_scored: tuple[str, ...] = ()
    ranked: int = 0

    def facts_of(self, draft: str | None) -> ModelFacts | None:
        """The facts of a draft; None for a look-up, and for a draft with nothing but a name."""
        return next((m for m in self.models if m.role != "target" and m.name == draft), None)

    @property
    def dummies(self) -> tuple[str, ...]:
        return tuple(model.name for model in self.models if model.weights == "dummy")


@dataclass(frozen=True)
class StepSummary:
    """The median step times of one draft and the target: measured, typed in or of another run."""

    draft: str  # its name; "" where latencies were typed
    draft_step_s: float
    target_step_s: float
    # target_prefill_s, draft_prefill_s: per prompt token
    target_prefill_s: float | None = None
    draft_prefill_s: float | None = None

    @property
    def c(self) -> float:
        """Draft step / target step."""
        return self.draft_step_s / self.target_step_s


# The origin of an engine's R(K) with a draft: the draft was measured on it; another draft of the
# same shape was; or R(K) is composed from another draft's, with this draft's own step times
Basis = Literal["measured", "same_shape", "composed"]


@dataclass(frozen=True)
class RoundSummary:
    """The times of a plain token, R(0), and of rounds, R(K), with one draft at one temperature."""

    draft: str  # its name; "" where latencies were typed
    temperature: float | None  # at which rounds were timed; None where none were
    # Timed "rounds" of the running loop; timed "requests" to a server; by the formula from timed
    # "steps" (a run that timed no rounds); by the formula from "typed" latencies.
    source: Literal["rounds", "requests", "steps", "typed"]
    plain_s: float  # R(0), one plain token
    round_s: dict[int, float]  # R(K) by K that was timed; other K are interpolated linearly
    visits: int = 0  # the number of visits that timed them
    # R(0) for speedups, where the target ran in a slower mode for this draft
    other_plain_s: float | None = None
    engine: str = "own"  # "own" for the harness's loop, else a server's engine
    run: str | None = None  # the server run that they are from, where it is another run
    basis: Basis = "measured"

    def relative(self, k: int) -> float:
        """R(K) / R(0): the cost of a round in plain tokens."""
        return self.round_s[k] / self.plain_s


@dataclass(frozen=True)
class Unstable:
    """A timing that cannot be right despite repetition: marked in tables, left out of plots."""

    reason: Literal[
        "verify_unlike_step",  # value: v(1), off 1 beyond its interval: they are one forward
        "verify_below_step",  # value: v(tokens), below 1 beyond its interval
        "verify_falls",  # value: this verify / a shorter one, below 1 beyond its interval
        "step_unlike_plain_token",  # value: target step / R(0), more than 15 % away from 1
        "speedup_above_most",  # value: a cell's speedup, above its tokens per round or K + 1
    ]
    value: float
    role: Literal["target", "draft"]
    kind: Literal["step", "verify", "cell"]
    tokens: int  # positions of the forward; of a cell its K
    # context_tokens, batch: of a forward; prompt_set, temperature: of a cell.
    context_tokens: int | None = None
    batch: int | None = None
    prompt_set: str | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Dropped:
    """The early elimination of a draft from an audition."""

    # prompts, of: prompts that it was measured on, of all
    prompts: int
    of: int
    slower_than: tuple[str | None, ...]  # drafts significantly faster; None is plain decoding


@dataclass(frozen=True)
class LeaderboardRow:
    """One draft at its best K, or plain decoding (draft None, k 0, speedup 1)."""

    rank: int  # from 1
    draft: str | None
    k: int
    # speedup, speedup_lo, speedup_hi: on the weighted workload, by replay
    speedup: float
    speedup_lo: float | None = None
    speedup_hi: float | None = None
    tokens_per_round: float | None = None
    # alpha, alpha_lo, alpha_hi: at this K, over all prompts
    alpha: float | None = None
    alpha_lo: float | None = None
    alpha_hi: float | None = None
    breakeven_alpha: float | None = None  # by the iid formula; None where even alpha = 1 loses
    probability_best: float | None = None  # share of draws in which no other row is faster
    dropped: Dropped | None = None  # where set, all numbers are of the prompts until elimination
    p_min: float | None = None  # below which a token ends a draft; None: none does


@dataclass(frozen=True)
class Leaderboard:
    """The drafts under one acceptance rule at one temperature, fastest first, the dropped last."""

    rule: Rule
    temperature: float
    engines: tuple[str, ...]  # the engines that accept by this rule
    rows: tuple[LeaderboardRow, ...]


@dataclass(frozen=True)
class ReplayCheck:
    """The gap between a cell's tokens per round, as the loop measured them, and replay's.

    Where rounds may propose fewer than K tokens, also that of the tokens drafted per round.
    """

    prompt_set: str
    temperature: float
    k: int
    gap_in_standard_errors: float | None  # measured - replayed; None with fewer than 2 prompts
    drafted_gap_in_standard_errors: float | None = None


CheckResult = Literal["PASS", "TIE", "FAIL", "OPEN", "UNTESTED", "UNJUDGED"]


@dataclass(frozen=True)
class TextCheck:
    """One speculative greedy text compared with plain decoding's."""

    prompt_set: str
    prompt: str
    repetition: int
    k: int
    # PASS: equal. TIE: different within rounding, or within the engine's noise. FAIL: different.
    # OPEN: different and not judged, since no model was loaded or the server gave no logprobs.
    # UNJUDGED: different, in a mixture of experts whose routing ties may be the cause.
    result: CheckResult
    first_difference: int | None = None  # position of the first token that differs; None: equal
    # target_margin, verify_margin: gap between the two best logits there, by a plain step and by a
    # forward of K + 1 positions. On an engine: the plain text's token less the other text's.
    target_margin: float | None = None
    verify_margin: float | None = None
    rounding: float | None = None  # largest difference there between logits by different forwards
    # Change of the logits there by near ties of routers; None where it was not needed to judge
    routing: float | None = None
    acceptance_rate: float | None = None
    # noise, noise_positions: the noise of an engine's margins in nats, where texts are judged by
    # it, and the number of positions that it was measured at (None where the checkpoint judges)
    noise: float | None = None
    noise_positions: int | None = None

    @property
    def id(self) -> tuple[str, str, int, int]:
        return self.prompt_set, self.prompt, self.repetition, self.k


@dataclass(frozen=True)
class TextLikelihood:
    """The log-likelihood of a server's sampled texts under the target, against its expectation.

    A token x that the target samples has, given the text before it, the expected log-probability
    -H (H is the entropy of the target's distribution) and a known variance. The sum of
    log target(x) + H over the texts is therefore a martingale, whatever the texts' lengths. Divided
    by the root of the summed variances it is standard normal for many tokens; for few tokens, or
    with a target that is nearly certain of most of them, it is skewed
    (`harness.analysis.server_lossless.normal_z`). A server that is not lossless drifts from 0.
    """

    temperature: float
    k: int  # 0: the plain server
    tokens: int
    excess: float  # sum of log target(x) + H, nats
    variance: float  # of the excess, nats squared
    log_probability: float  # sum of log target(x), nats
    third_cumulant: float = 0.0  # of the excess, nats cubed


@dataclass(frozen=True)
class DistributionTest:
    """A chi-square test of drawn tokens against the target's distribution at one offset."""

    temperature: float
    k: int
    offset: int  # 1 for the round's first token, K + 1 for its bonus
    draws: int
    bins: int  # cells of at least 5 expected draws, the rest pooled into one; 1 tests nothing
    chi2: float
    # Upper tail with bins - 1 degrees of freedom; `result` applies Holm's correction.
    p_value: float
    result: CheckResult


@dataclass(frozen=True)
class Explanation:
    """The obstacles to a gain of the verdict's draft, at one K and temperature."""

    draft: str
    k: int
    temperature: float
    factors: tuple[Factor, ...]  # those that alone would turn the loss into a gain
    c: float  # draft step / target step
    largest_c: float  # that breaks even; none does where it is not above 0


@dataclass(frozen=True)
class RuleOfThumb:
    """A common rule of thumb, applied to the given numbers; no verdict depends on it."""

    code: RuleOfThumbCode
    met: bool | None  # None where it is not known
    value: float
    values: Values = field(default_factory=dict[str, Value])  # the results of the arithmetic


@dataclass(frozen=True)
class DraftMemory:
    """The device memory that a draft takes, also as context and concurrent sequences lost."""

    draft: str
    weights_bytes: float
    # Compared with serving without a draft: of one sequence, and at the asked context; None where
    # the memory of the device or the target is not known
    context_tokens_lost: int | None = None
    sequences_lost: int | None = None


@dataclass(frozen=True)
class CardRow:
    """The decision and the token price on one card at one temperature."""

    place: int  # from 1, the cheapest token first
    # card, device: the short name, and the name that the driver reports
    card: str
    device: str
    temperature: float | None
    decision: Decision
    draft: str | None
    k: int
    speedup: float | None
    speedup_lo: float | None
    speedup_hi: float | None
    plain_s: float  # R(0), one plain token
    seconds_per_token: float  # with the draft where the verdict is to speculate, else without
    price_per_hour_usd: float | None
    plain_usd_per_million_tokens: float | None
    usd_per_million_tokens: float | None
    # rented_s, spent_usd: time of the run on a rented machine, and its cost at the card's price
    rented_s: float | None = None
    spent_usd: float | None = None


# Of the target's bandwidth: below it a draft's copies were disturbed by other work
DISTURBED = 0.7


@dataclass(frozen=True)
class MemoryBandwidth:
    """10^9 bytes per second, of a model's own where a cache holds it; no `gb_s`: not found."""

    gb_s: float | None = None
    buffer_bytes: int | None = None
    samples: int | None = None
    source: Literal["measured", "datasheet"] | None = None
    target_gb_s: float | None = None
    draft_gb_s: float | None = None

    @property
    def plausible(self) -> bool:
        """True where the models' own compare; a draft that reads far slower was disturbed.

        It is the smaller one, so whatever cache holds the target holds it as well.
        """
        if self.target_gb_s is None or self.draft_gb_s is None:
            return True
        return self.draft_gb_s >= DISTURBED * self.target_gb_s


@dataclass(frozen=True)
class StepBound:
    """The shares of a step's time: reading (MBU), arithmetic and overhead."""

    role: str
    model: str
    context_tokens: int
    batch: int
    # step_s, floor_s, mbu: as in latency.csv
    step_s: float
    floor_s: float
    mbu: float
    positions: int  # the most positions in one forward that were timed
    positions_ratio: float  # the time of that forward / the step
    arithmetic_share: float  # the most that a further position adds / the step
    overhead_share: float  # the rest, neither reading nor arithmetic
    bound: Literal["memory", "arithmetic", "overhead"]
    launch_bound: bool  # MBU below 0.4 and overhead above one half


@dataclass(frozen=True)
class StepCurve:
    """The step times of both models, and the target's verifies, at one context and batch."""

    context_tokens: int
    batch: int
    target_step_s: float
    draft_step_s: float
    # Entry i is a target forward over i + 1 positions, up to the first that is missing.
    verify_s: tuple[float, ...]
    target_mbu: float | None  # target_mbu, draft_mbu: None where no floor is known
    draft_mbu: float | None

    @property
    def c(self) -> float:
        """Draft step / target step."""
        return self.draft_step_s / self.target_step_s


@dataclass(frozen=True)
class CeilingAtK:
    """The ideal speedup and the break-even alpha of a K."""

    k: int
    ideal_speedup: float  # (K + 1) R(0) / R(K): every draft token accepted
    ideal_seconds_per_token: float
    breakeven_alpha: float | None


@dataclass(frozen=True)
class SpeedupByK:
    """The speedups at one alpha by the iid model, by K."""

    alpha: float
    speedups: dict[int, float]

    @property
    def best_k(self) -> int:
        """The K of the largest speedup; 0 where none is above 1."""
        best = max(self.speedups, key=lambda k: self.speedups[k])
        return best if self.speedups[best] > 1.0 else 0


@dataclass(frozen=True)
class ComparisonRow:
    """One cell in two runs: a row of comparison.csv, in this column order."""

    # reference, run: names of the two run folders; a ratio is run / reference, a difference run -
    # reference.
    reference: str
    run: str
    # reference_draft, draft: the draft of each run; they may differ
    reference_draft: str | None
    draft: str | None
    prompt_set: str | None  # a set, or "all" for the weighted workload
    temperature: float | None
    k: int
    status: Literal["complete", "partial"] = "complete"
    prompts: int | None = None  # the prompts that both runs have
    reference_ms_per_token: float | None = None
    ms_per_token: float | None = None
    reference_speedup: float | None = None
    speedup: float | None = None
    speedup_ratio: float | None = None
    speedup_ratio_lo: float | None = None
    speedup_ratio_hi: float | None = None
    p_value_holm: float | None = None  # of speedup_ratio = 1, two-sided, adjusted for all cells
    reference_alpha: float | None = None
    alpha: float | None = None
    alpha_difference: float | None = None


@dataclass(frozen=True)
class ComparedRun:
    """One run against the reference."""

    name: str  # of its folder
    row: ComparisonRow | None  # the cell that decides; None where no speedup can be compared
    cells: int  # cells with a p-value
    differing: int  # cells that differ significantly, by the adjusted p-value
    # threshold, outcome: `fail_below`, and whether the ratio passes it; None where it was not given
    threshold: float | None = None
    outcome: Literal["pass", "fail", "unclear"] | None = None


@dataclass(frozen=True)
class Difference:
    """A setting or fact of the environment in which runs differ, and its value in each run."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs compared with the first of them."""

    reference: str  # name of the first run
    runs: tuple[ComparedRun, ...]
    rows: tuple[ComparisonRow, ...]
    caveats: tuple[Caveat, ...]  # most important first
    differences: tuple[Difference, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.reference, *(run.name for run in self.runs))

    @property
    def failed(self) -> bool:
        return any(run.outcome == "fail" for run in self.runs)


@dataclass(frozen=True)
class ServedGate:
    """The lossless test of a server at one K and temperature, by the texts that it returned.

    Fields are None where nothing could be compared; without loaded weights there is no replay.
    """

    temperature: float
    k: int  # 0: the plain server, whose texts are tested against the target's
    texts: int
    # At temperature 0, of the texts: equal to plain decoding's in every visit; ties; real
    # differences. noise: of the engine's logits, in nats, by which texts are judged; None for the
    # harness's own loop.
    equal_texts: int | None = None
    tied_texts: int | None = None
    differing_texts: int | None = None
    noise: float | None = None
    # replayed_texts: texts whose rounds are compared with replay; equal_rounds, equal_drafted: of
    # them, those with the same counts, where a text determines its rounds.
    replayed_texts: int | None = None
    equal_rounds: int | None = None
    equal_drafted: int | None = None
    # rounds, expected_rounds: of all texts; rounds_z: their difference in standard deviations,
    # where a text does not determine its rounds. A difference shows another draft or another rule;
    # it does not show that texts are wrong.
    rounds: float | None = None
    expected_rounds: float | None = None
    rounds_z: float | None = None
    other_rule: Rule | None = None  # a rule whose replay fits the rounds, if the engine's does not
    # Above temperature 0: log-probability of a token under the target, its expectation, and the
    # difference of their sums in standard deviations (a martingale); plain_z: the difference to the
    # plain server's texts, likewise. Both are transformed to normal numbers (`normal_z`).
    nats_per_token: float | None = None
    expected_nats_per_token: float | None = None
    text_z: float | None = None
    plain_z: float | None = None
    # Whether every visit returned the same sampled texts, which chance does not explain
    repeats: bool = False
    # By the texts alone: those at K against plain decoding's, the plain server's against the
    # target's. None where nothing could be compared, plain decoding's texts are not the target's,
    # or texts that differ are not judged or too few.
    lossless: bool | None = None


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of a latency over requests, in seconds; None with too few requests."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


# A queue grows where the server needs this share more time than the requests took to arrive. A
# server that keeps up only has the requests left that it decodes when the last one arrives.
QUEUE_GROWS = 0.25


@dataclass(frozen=True)
class UserLatency:
    """The latencies that users of a server see, at one K under one load."""

    temperature: float
    k: int
    concurrency: int | None  # requests in flight; None where they arrive at random
    rate: float | None  # arrivals per second, where they arrive at random
    load: bool  # whether it is of a load (`LoadCell`), and not of requests sent one by one
    clock: Literal["client", "engine"]  # "engine": runs that did not store the client's times
    requests: int = 0
    # Time to first token; time per output token after it; time to the whole answer. None where the
    # server does not report them separately.
    first_token: Percentiles | None = None
    per_token: Percentiles | None = None
    request: Percentiles | None = None
    # Where requests arrive at random: the time that the server took beyond the last arrival / the
    # time of the arrivals
    behind: float | None = None

    @property
    def queue_grows(self) -> bool:
        return self.behind is not None and self.behind > QUEUE_GROWS


@dataclass(frozen=True)
class ServedCosts:
    """The costs of decoding on a server at one temperature; R(K) is in `RoundSummary`."""

    temperature: float
    # "other_sets": fitted on requests of other prompt sets; "synthetic": on servers that reject
    # every draft as well.
    source: Literal["synthetic", "other_sets"]
    plain_start_s: float  # of a plain request, besides its tokens
    start_s: float  # of a speculative request, besides its rounds
    plain_s: float  # of a plain token
    round_s: dict[int, float]  # of a round that drafts n tokens, by n; interpolated linearly


@dataclass(frozen=True)
class LoadCell:
    """The throughput of a server under one load at one K.

    A load is a number of requests side by side, or arrivals at a rate.
    """

    temperature: float
    k: int
    concurrency: int | None  # requests side by side; None under Poisson arrivals
    rate: float | None  # arrivals per second; None in a closed loop
    tokens_per_second: float  # of all requests together
    # throughput_ratio: to plain decoding under the same load; spread: between visits, relative.
    throughput_ratio: float | None = None
    spread: float | None = None
    visits: Visits | None = None  # None where no visit is lacking
    # Requests that the server decodes side by side, where these are fewer than the load: the others
    # wait in a queue. None where all fit, or the server does not report it.
    slots: int | None = None
    varying: Varying = ""  # how K changed while the server served; `k` is then the largest


@dataclass(frozen=True)
class ScheduleEntry:
    """The K to serve for a range of requests that are decoded side by side."""

    low: int
    high: int | None  # None: and above
    concurrency: int  # the measured concurrency, the highest in the range
    k: int  # the fastest, with the tokens per round of replay where they are known; 0: plain
    # Other K whose difference to it is within the spread of visits; empty: it is the fastest
    tied: tuple[int, ...]
    measured_ratio: float  # throughput / plain decoding's


@dataclass(frozen=True)
class Schedule:
    """K by the number of requests that are decoded side by side, at one temperature."""

    temperature: float
    entries: tuple[ScheduleEntry, ...]  # ascending, one per measured concurrency


@dataclass(frozen=True)
class ServedK:
    """One K on the whole weighted workload, measured."""

    temperature: float
    k: int
    speedup: float
    tokens_per_round: float | None


NotPredicted = Literal[
    "no_weights",  # target and draft are not loaded, so returned texts cannot be scored
    "no_texts",  # no text of plain decoding could be scored
    "no_counting",  # how the engine counts rounds is not known
    "no_costs",  # neither synthetic acceptance nor a second prompt set gives its round times
    "servers_failed",  # plain decoding, or every K, has no answer
    "costs_untold",  # no round times follow from the timed requests of other prompt sets
    "not_lossless",  # it samples from another distribution, so replay does not hold for it
]


@dataclass(frozen=True)
class ServedMemory:
    """The memory of both models on a server, as it was configured for the measurement.

    KV caches are those of all slots, full. A number that is not known is None.
    """

    k: int
    slots: int  # requests side by side
    context_tokens: int  # of each request at most
    kv_type: str | None  # of the target's KV cache, as the engine names it
    target_weights_bytes: float | None
    draft_weights_bytes: float | None
    target_kv_bytes_per_token: float | None
    draft_kv_bytes_per_token: float | None


@dataclass(frozen=True)
class StartedServers:
    """The K of the speculating servers that a run started."""

    asked: tuple[int, ...]  # every K of the run
    ks: tuple[int, ...]  # those with a server
    measured: tuple[int, ...]  # those measured on all prompts; others are predicted
    rejecting: tuple[int, ...] = ()  # those with a further server that rejects every draft

    @property
    def number(self) -> int:
        return len(self.ks) + len(self.rejecting)


@dataclass(frozen=True)
class ServedSummary:
    """The measurements of a server that ran the pair, and its predictions."""

    engine: str  # a name that `engine=` takes
    version: str
    rule: Rule | None  # None where it is not known
    clock: Literal["engine", "cpu"]  # "cpu": processor seconds of the server's process
    started: bool  # whether the run started it; else it attached to a running server
    commands: tuple[ServerCommand, ...] = ()  # that started it; empty where the run attached
    by_k: tuple[ServedK, ...] = ()
    latencies: tuple[UserLatency, ...] = ()  # by temperature, load and K
    gates: tuple[ServedGate, ...] = ()
    costs: tuple[ServedCosts, ...] = ()
    not_predicted: NotPredicted | None = None
    load: tuple[LoadCell, ...] = ()
    varying: tuple[LoadCell, ...] = ()  # of servers whose K changes
    varying_commands: dict[Varying, ServerCommand] = field(  # that started those servers
        default_factory=dict[Varying, ServerCommand]
    )
    schedules: tuple[Schedule, ...] = ()
    memory: ServedMemory | None = None  # of servers that the run started, with a draft
    servers: StartedServers | None = None  # None where the run attached to servers

    def ratios(self, temperature: float, concurrency: int) -> dict[int, float | None]:
        """The measured throughput / plain decoding's by K, at this many requests side by side."""
        cells = (cell for cell in self.load if cell.temperature == temperature)
        return {cell.k: cell.throughput_ratio for cell in cells if cell.concurrency == concurrency}

    def not_lossless(self, temperature: float) -> tuple[int, ...]:
        """The K above 0 that failed the lossless test at a temperature."""
        failed = (gate for gate in self.gates if gate.k and gate.lossless is False)
        return tuple(gate.k for gate in failed if gate.temperature == temperature)

    @property
    def lossless(self) -> bool | None:
        """True where every comparison was lossless; None where nothing was compared."""
        known = [gate.lossless for gate in self.gates if gate.lossless is not None]
        return all(known) if known else None


@dataclass(frozen=True)
class Counted:
    """The counters of a running server between two scrapes."""

    seconds: float
    rounds: int  # rounds that drafted
    accepted: int
    tokens: int  # tokens of answers
    requests: int | None = None  # that have their first token, or that ended; None: not counted
    drafted: int | None = None  # None: not counted
    accepted_at: tuple[int, ...] = ()  # rounds that accepted at least 1, 2, ...; empty: not counted

    @property
    def tokens_per_round(self) -> float | None:
        """1 + accepted / rounds; None without a round."""
        return 1.0 + self.accepted / self.rounds if self.rounds else None

    @property
    def drafted_per_round(self) -> float | None:
        return None if self.drafted is None or not self.rounds else self.drafted / self.rounds

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        return tuple(count / self.rounds for count in self.accepted_at) if self.rounds else ()


@dataclass(frozen=True)
class RunningServer:
    """The counters of a running server, which serves other users."""

    engine: str
    k: int  # the most that a round drafts; 0 where nothing was drafted, or that is not known
    ks: tuple[int, ...]  # as reported; several where the server adapts K, empty where not reported
    total: Counted | None  # None where no round was counted


@dataclass(frozen=True)
class PlanPoint:
    """The simulated latencies at a rate on one card: a percentile over requests, in seconds."""

    rate: float  # requests per second
    tpot_s: float  # time per output token after the first
    ttft_s: float  # time to first token
    # 95 % intervals over prompts and arrivals, at the asked rate; None with too few prompts
    tpot_lo_s: float | None = None
    tpot_hi_s: float | None = None
    ttft_lo_s: float | None = None
    ttft_hi_s: float | None = None


@dataclass(frozen=True)
class PlanChoice:
    """A draft and policy to serve, with the rate that one card serves within the goal."""

    draft: str | None  # None: plain decoding
    policy: PlanPolicy
    k: int  # the most that a round drafts; 0 is plain decoding
    ks: tuple[int, ...]  # of `by_load`: K by active requests, from 1 on; empty for one K
    capacity: float  # requests per second that one card serves while all slots are taken
    points: tuple[PlanPoint, ...]  # by rate, ascending, up to nearly the capacity
    at_rate: PlanPoint | None  # the asked rate on one card; None beyond its capacity
    largest_rate: float  # at which one card meets the goal; 0.0: at no simulated rate
    largest_rate_lo: float | None
    largest_rate_hi: float | None
    # largest_rate / plain decoding's, on the same prompts and arrivals; None where that is 0
    rate_ratio: float | None = None
    rate_ratio_lo: float | None = None
    rate_ratio_hi: float | None = None
    cards: int | None = None  # for the whole rate; None where one card meets the goal at no rate
    usd_per_hour: float | None = None
    usd_per_million_tokens: float | None = None
    capacity_lo: float | None = None
    capacity_hi: float | None = None
    on_engine: bool = True  # whether the engine has this policy with this kind of draft

    @property
    def drafts(self) -> bool:
        return any(self.ks) if self.policy == "by_load" else self.k > 0


@dataclass(frozen=True)
class PlanCheck:
    """A measured load, next to the same requests simulated at the costs of other prompts."""

    k: int
    concurrency: int | None  # of a closed loop
    requests: int
    # tokens_per_second, simulated_tokens_per_second: of a closed loop
    tokens_per_second: float | None
    simulated_tokens_per_second: float | None
    # Measured latencies are None where the server does not report them
    per_token: Percentiles | None
    simulated_per_token: Percentiles | None
    rate: float | None = None  # of requests that arrived at random
    first_token: Percentiles | None = None
    simulated_first_token: Percentiles | None = None


@dataclass(frozen=True)
class Plan:
    """The choices for a latency goal at a rate of requests, with the cards that each needs."""

    run: str  # the server run
    engine: str
    draft: str
    temperature: float
    slots: int  # requests that a card decodes side by side
    rate: float  # the asked rate of all cards, requests per second
    percentile: float
    # tpot_s, ttft_s: the goals; None where there is none
    tpot_s: float | None
    ttft_s: float | None
    arrivals: Literal["poisson", "recorded"]
    seeds: int
    requests: int  # of each seed
    prompts: int
    tokens: float  # tokens that a request returns, the mean
    choices: tuple[PlanChoice, ...]
    # The simulated rate from which on no choice with a draft has a shorter TPOT than plain decoding
    stops_paying: float | None = None
    checks: tuple[PlanCheck, ...] = ()

    def excess(self, point: PlanPoint) -> float:
        """The largest ratio of a point's latencies to their goals; up to 1 the goals are met."""
        pairs = ((point.tpot_s, self.tpot_s), (point.ttft_s, self.ttft_s))
        return max(value / goal for value, goal in pairs if goal is not None)

    @property
    def servable(self) -> tuple[PlanChoice, ...]:
        return tuple(each for each in self.choices if each.on_engine)

    @property
    def best(self) -> PlanChoice | None:
        """The choice that meets the goal with the fewest cards; of several, the largest rate."""
        able = [choice for choice in self.servable if choice.cards is not None]
        return min(able, key=lambda each: (each.cards, -each.largest_rate), default=None)

    @property
    def closest(self) -> PlanChoice:
        """The choice that comes closest to the goal at its lowest rate."""
        return min(self.servable, key=lambda each: self.excess(each.points[0]))

    @property
    def plain(self) -> PlanChoice:
        return next(choice for choice in self.choices if choice.k == 0)


@dataclass(frozen=True)
class Summary:
    """The analysed results of a run: the only input of a report.

    Every command fills `run`, `results`, `latency`, `failures` and `caveats`. A sweep, an audition
    and a break-even with a measured acceptance have verdicts; a sweep is an audition of one draft
    that also generates with speculation, so both fill the same fields. Fields that do not apply are
    empty.
    """

    run: RunFacts
    schema_version: int = SCHEMA_VERSION
    # By temperature, engine and prompt set, the engine whose rounds were timed first; every
    # decision in a report is one of these
    answers: tuple[Answer, ...] = ()
    failures: tuple[Failure, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    results: tuple[ResultRow, ...] = ()  # rows of results.csv
    latency: tuple[LatencyRow, ...] = ()  # rows of latency.csv, with memory floors where known
    steps: tuple[StepSummary, ...] = ()  # one entry per draft
    round_times: tuple[RoundSummary, ...] = ()  # the costs of predictions: by draft, temperature
    unstable: tuple[Unstable, ...] = ()  # timings that cannot be right despite repetition
    # Sweep and audition
    # One per acceptance rule and temperature, the verdict's rule first.
    leaderboards: tuple[Leaderboard, ...] = ()
    replay_checks: tuple[ReplayCheck, ...] = ()  # a sweep's loop against replay
    explanation: Explanation | None = None
    memory: tuple[DraftMemory, ...] = ()
    ineligible: tuple[Failure, ...] = ()  # drafts that cannot be used with this target, and why
    price_per_hour_usd: float | None = None
    plain_usd_per_million_tokens: float | None = None  # at the headline's temperature
    cards: tuple[CardRow, ...] = ()
    # Snapshot, and a sweep's greedy texts
    text_checks: tuple[TextCheck, ...] = ()
    distribution_tests: tuple[DistributionTest, ...] = ()
    # Profile
    bandwidth: MemoryBandwidth | None = None
    step_bounds: tuple[StepBound, ...] = ()
    step_curves: tuple[StepCurve, ...] = ()
    skipped_cells: tuple[SkippedCell, ...] = ()
    # Break-even
    ceilings: tuple[CeilingAtK, ...] = ()  # also of a profile
    speedups_by_k: tuple[SpeedupByK, ...] = ()  # at each alpha
    rules_of_thumb: tuple[RuleOfThumb, ...] = ()
    from_acceptance: tuple[ResultRow, ...] = ()  # rows of `results` from a given acceptance
    # By K, as a server measured its own speedups; where there are any, the verdict is of these
    server_speedups: dict[int, float] = field(default_factory=dict[int, float])
    # Server
    served: ServedSummary | None = None
    # Report of a running server's counters
    running: RunningServer | None = None
    # Report of several runs
    comparison: Comparison | None = None
    plan: Plan | None = None

    @property
    def shown(self) -> tuple[Answer, ...]:
        """The answers of the headline's engine, by temperature, the whole workload before sets.

        The engine is that of a server run; else the one that `engine=` names; else the one whose
        rounds were timed.
        """
        engine = next((answer.engine for answer in self.answers), None)
        engine = self.served.engine if self.served else self.run.serve_on or engine
        return tuple(answer for answer in self.answers if answer.engine == engine)

    @property
    def per_temperature(self) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.shown if answer.prompt_set == "all")

    @property
    def per_prompt_set(self) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.shown if answer.prompt_set != "all")

    @property
    def headline(self) -> Answer | None:
        """The first answer of a report: the whole workload at the first temperature.

        None where the headline's engine has no answer.
        """
        return next(iter(self.per_temperature), None)

    @property
    def usd_per_million_tokens(self) -> float | None:
        """The price of 10^6 tokens when serving as the headline says; None without a price."""
        plain, answer = self.plain_usd_per_million_tokens, self.headline
        if plain is None or answer is None or not answer.speculates or not answer.speedup:
            return plain
        return plain / answer.speedup

    @property
    def generated(self) -> tuple[ResultRow, ...]:
        """The measured rows of `alone`; the replayed ones where no speculation was timed."""
        source = "replayed" if self.run.replay_only else "measured"
        return tuple(row for row in self.alone if row.source == source)

    @property
    def alone(self) -> tuple[ResultRow, ...]:
        """The rows of results.csv without those of a server under load."""
        return tuple(row for row in self.results if row.concurrency == 1)

    @property
    def predicted_cells(self) -> tuple[tuple[ResultRow, ResultRow], ...]:
        """Of `alone` each measured row with K above 0, and the predicted one of its cell."""

        def cell(row: ResultRow) -> tuple[object, ...]:
            return row.draft, row.prompt_set, row.temperature, row.k

        predicted = {cell(row): row for row in self.alone if row.source == "replayed"}
        measured = [row for row in self.alone if row.source == "measured" and row.k]
        return tuple((row, predicted[cell(row)]) for row in measured if cell(row) in predicted)

    @property
    def drafts(self) -> tuple[str, ...]:
        """Every draft, in the order of the first leaderboard; plots colour them in this order."""
        ranked = [row.draft for board in self.leaderboards for row in board.rows]
        names = [*ranked, *(row.draft for row in self.results)]
        return tuple(dict.fromkeys(name for name in names if name is not None))


# Fields of an answer in summary.json under `verdict`, `per_temperature` and `per_prompt_set`
_OF_VERDICT = (
    *("decision", "draft", "k", "temperature", "prompt_set", "speedup", "speedup_lo"),
    *("speedup_hi", "reason", "reason_values"),
)


def to_json(summary: Summary) -> str:
    """The summary as the text of summary.json; NaN and infinity become null.

    For readers of the file it also has some values that follow from the answers.
    """
    record: dict[str, Any] = json.loads(adapter(Summary).dump_json(summary))
    for answer, entry in zip(summary.answers, record["answers"], strict=True):
        of_round = answer.round
        entry["servers"] = [] if answer.engine in (None, OWN_LOOP) else [answer.engine]
        entry["tokens_per_round"] = of_round and of_round.tokens_per_round
        entry["tokens_per_round_lo"] = of_round and of_round.tokens_per_round_lo
        entry["tokens_per_round_hi"] = of_round and of_round.tokens_per_round_hi
        entry["largest_round_cost"] = of_round and of_round.tokens_per_round

    def verdicts(answers: Sequence[Answer]) -> list[dict[str, Any]]:
        return [
            {"speculate": answer.speculates, **{name: entry[name] for name in _OF_VERDICT}}
            for answer, entry in zip(summary.answers, record["answers"], strict=True)
            if any(answer is each for each in answers)
        ]

    per_temperature = verdicts(summary.per_temperature)
    views = {
        "verdict": per_temperature[0] if per_temperature else None,
        "per_temperature": per_temperature,
        "per_prompt_set": verdicts(summary.per_prompt_set),
        "usd_per_million_tokens": summary.usd_per_million_tokens,
    }
    return json.dumps({**views, **record}, indent=2, ensure_ascii=False) + "\n"


def from_json(text: str | bytes) -> Summary:
    """The summary that `to_json` wrote; values that follow from the answers are not read.

    Raises:
        ValueError: other fields or types than this version writes.
    """
    return adapter(Summary).validate_json(text)


@cache
def adapter(record: type[Any]) -> "TypeAdapter[Any]":
    """Reads and writes a record as JSON."""
    from pydantic import TypeAdapter  # --help of every command imports this module

    return TypeAdapter(record)
