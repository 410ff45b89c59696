"""What `harness.analysis.analyse` makes of a stored run: one typed, versioned record, `Summary`.

It is written as summary.json and read back as the same type, and it is all that `harness.reporting`
reads. It holds numbers and reason codes; every sentence is made in `harness.reporting`. Times are
in seconds, except in `ResultRow` and `LatencyRow`, which are rows of csv files with fixed columns.

Reading order: `Summary` at the end of this module, then the records of the command in question.

Behind each code stand the values that it carries. `harness.reporting.sentences` has a sentence for
each reason of a verdict, `harness.analysis.caveats` the record of each caveat.
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
# `draft` and `k` name the best-looking candidate; `draft` is None where the run has one draft only.
VerdictReason = Literal[
    # With an interval; draft, k, and level: that of the interval, which shares the report's error
    "held_out_gain",  # speculate
    "held_out_loss",  # does_not_pay; alpha, breakeven_alpha (either may be None)
    # Undecided: what would decide it
    "interval_spans_one",  # more prompts; prompts, prompts_needed (None: these cannot say how many)
    # timing_share: of the variance; measured: whether seconds are, and not predicted from rounds
    "timing_noise",
    "near_one",  # near: both bounds are within it of 1
    # Undecided without an interval
    "too_few_prompts",  # draft, k, prompts (replayed, or measured where these are too few), needed
    "no_complete_prompt",  # prompt_set: the set without one; None where no prompt at all
    "greedy_texts_differ",  # texts, differing; of the first: prompt_set, prompt, k, position
    "greedy_texts_unjudged",  # the same; resuming the run judges them
    # k: the worst; text_z, plain_z: how far its texts are from the target's, and from plain ones
    "server_not_lossless",
    # The timings cannot be right: k, prompt_set, speedup of the worst cell; clock: of a server
    "impossible_speedup",
    "given_numbers",  # break-even; k, measured (by a server), alpha, breakeven_alpha, near
    "not_timed",  # of an engine whose rounds were not timed; draft, k
    "nothing_accepted",  # does_not_pay
]
Doubt = tuple[VerdictReason, Values]  # why a verdict cannot be given, with the values to quote
Factor = Literal["acceptance", "slow_draft", "expensive_verify", "slow_loop", "launch_bound_engine"]
RuleOfThumbCode = Literal[
    "step_ratio",  # value is target step / draft step: least, ideal, k, breakeven_alpha
    # value is acceptance_rate: k, suggested_k, verdict_k (0: do not speculate; None: undecided)
    "suggested_k",
    "accepted_over_emitted",  # value is that share: least, alpha, breakeven_alpha, speedup
]


@dataclass(frozen=True)
class Visits:
    """In how many visits a server was timed next to plain decoding, where some are lacking."""

    timed: int
    asked: int


@dataclass(frozen=True)
class RoundTokens:
    """What a round of one K emits, by replay of the target's own texts under an acceptance rule.

    K pays while a round costs fewer plain tokens than this: it is also the largest cost at which K
    pays, on whatever engine. What is advised is on the safe side of the prompts (`pays_below`).
    """

    k: int
    tokens_per_round: float  # on the weighted workload, or the prompt set
    # tokens_per_round_lo, tokens_per_round_hi: 95 %, over prompts; None with too few.
    tokens_per_round_lo: float | None
    tokens_per_round_hi: float | None
    own_cost: float | None  # in plain tokens, what a round costs where the run's speedups hold
    interpolated: bool = False  # whether that lies between those of other K, which were timed
    given: bool = False  # whether that follows from times that were given

    @property
    def pays_below(self) -> float:
        """The cost of a round, in plain tokens, below which K pays on prompts like these."""
        least = self.tokens_per_round_lo
        return self.tokens_per_round if least is None else least


@dataclass(frozen=True)
class MeasuredPart:
    """What a verdict by replay and measured pairs rests on (`harness.stats.two_phase`)."""

    prompts: int  # of the workload, or the prompt set; all of them replayed
    measured: int  # of all sets, on which the K ran next to plain decoding: a round's price
    speedup_lo: float  # with speedup_hi: on these very prompts, at 95 %: the error of timing alone
    speedup_hi: float
    chance_to_decide: float  # that the pairs which are still to be measured, if any, decide


@dataclass(frozen=True)
class Answer:
    """What is known of one engine, at one temperature, on a workload or a prompt set.

    Of an engine whose rounds were timed: what to serve on it. Of another there is no speedup: it
    is `not_measured`, or `does_not_pay` where nothing that its rounds may cost lets a draft gain.
    """

    decision: Decision  # "speculate" only when the speedup's lower bound is above 1
    # draft, k: the choice, or the best-looking candidate where undecided, or the one to measure
    # where nothing was; None and 0 where speculation does not pay.
    draft: str | None
    k: int
    temperature: float | None  # None where the numbers came from elsewhere and do not say
    prompt_set: str  # a set's name, or "all" for the whole weighted workload
    # speedup, speedup_lo, speedup_hi: free of the selection's optimism; with too few prompts for
    # that, the plain speedup without bounds.
    speedup: float | None
    speedup_lo: float | None
    speedup_hi: float | None
    reason: VerdictReason
    reason_values: Values = field(default_factory=dict[str, Value])
    # "own" for our own loop, else as `engine=` names it; None where times or speedups were given
    engine: str | None = None
    timed: bool = True  # whether its rounds were timed; else there is no speedup
    run: str | None = None  # the server run that timed them, where that is another run
    rule: Rule | None = None  # None where it is not known
    # "measured": that engine ran; "replayed": predicted, or without a speedup; "theory": arithmetic
    source: Source = "replayed"
    rounds: tuple[RoundTokens, ...] = ()  # of the named draft at every K, where it was replayed
    visits: Visits | None = None  # where no K of a server run has all that were asked for
    # chance, gain: that the named candidate pays, and the mean of its speedup - 1, by the estimate
    # and its error; None without an interval.
    chance: float | None = None
    gain: float | None = None
    # Of a verdict by replay and measured pairs; None of one that was cross-fitted
    pairs: MeasuredPart | None = None

    @classmethod
    def undecided(
        cls, temperature: float | None, prompt_set: str, reason: VerdictReason, values: Values
    ) -> "Answer":
        """Without a choice or a speedup."""
        nothing = (None, None, None)
        return cls("undecided", None, 0, temperature, prompt_set, *nothing, reason, values)

    @property
    def speculates(self) -> bool:
        """Whether a draft is to be served."""
        return self.decision == "speculate"

    @property
    def named(self) -> tuple[str | None, int]:
        """The draft and K to serve; where there are none, those that the numbers are of; or 0."""
        draft, k = self.reason_values.get("draft"), self.reason_values.get("k")
        return (
            self.draft or (draft if isinstance(draft, str) else None),
            self.k or (k if isinstance(k, int) else 0),
        )

    @property
    def round(self) -> RoundTokens | None:
        """What a round of the named K emits; None where that is not known."""
        return next((entry for entry in self.rounds if entry.k == self.named[1]), None)


@dataclass(frozen=True)
class Caveat:
    """What a reader must know before acting: a code, and the values its sentence quotes.

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
    weights: str | None = None  # "pretrained", "dummy" or "embedded"
    # What ran its steps: "cuda_graphs", "lean" or "transformers"; None if unknown.
    engine: str | None = None
    engine_reason: str | None = None  # why it is not the requested engine, or not all of it
    compiled: bool | None = None  # whether a CUDA graph's work was compiled; None: no graph
    # What a draft is, of `serving.drafts.DRAFTS`, and the layers of an early exit
    kind: str = "model"
    layers: int | None = None


@dataclass(frozen=True)
class SamplingFacts:
    """How the run drew tokens (`decode.*`), for serving lines."""

    rule: Rule = "ratio"
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_threshold: float | None = None


@dataclass(frozen=True)
class MadeWith:
    """What made a run, where it is known; all else is in the run's manifest.json."""

    command: str | None = None  # as it can be typed again
    device: str | None = None  # its card or processor
    versions: dict[str, str] = field(default_factory=dict[str, str])  # by name: python, torch, ...
    commit: str | None = None  # of the harness
    uncommitted: bool = False  # whether files differed from it


@dataclass(frozen=True)
class RunFacts:
    """Which run this is: what a report says of it apart from numbers."""

    command: str  # which one made it: sweep, audition, profile, breakeven, snapshot or report
    folder: str  # the run folder's path as it was given
    status: Status
    created_utc: str | None
    model: str | None  # model, draft: names; draft is None for several drafts
    draft: str | None
    models: tuple[ModelFacts, ...] = ()  # the target first
    sampling: SamplingFacts = field(default_factory=SamplingFacts)
    serve_on: str | None = None  # the server whose line is shown first (`engine=`); an engine
    ks: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = ()
    seed: int | None = None
    prompts: int | None = None
    synthetic: bool = False  # whether acceptance was set (`decode.acceptance`) instead of found
    # Of the prompt sets in the workload, where they were given (`prompts.weights`), or are a log's.
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    own_prompts: bool = False  # whether prompts are the user's, or records of requests
    replay_only: bool = False  # whether no speculative generation was timed (mode=replay, audition)
    # measured_cells, failed_cells, partial_cells: rows of results.csv that were run.
    measured_cells: int = 0
    failed_cells: int = 0
    partial_cells: int = 0
    made_with: MadeWith = field(default_factory=MadeWith)
    # not_scored, ranked: drafts of an audition that its ranking lacks, and how many it has; 0 where
    # something else failed as well.
    not_scored: tuple[str, ...] = ()
    ranked: int = 0

    def facts_of(self, draft: str | None) -> ModelFacts | None:
        """What is known of a draft; None for a look-up, and for one that only has a name."""
        return next((m for m in self.models if m.role != "target" and m.name == draft), None)

    @property
    def dummies(self) -> tuple[str, ...]:
        """Names of the models with random weights."""
        return tuple(model.name for model in self.models if model.weights == "dummy")


@dataclass(frozen=True)
class StepSummary:
    """Median step times of one draft with the target, measured, typed in or of another run."""

    draft: str  # its name; "" where latencies were typed
    draft_step_s: float
    target_step_s: float
    context_tokens: int | None = None  # in the cache before the timed step; None where typed
    target_prefill_s: float | None = None  # both prefills: per prompt token
    draft_prefill_s: float | None = None

    @property
    def c(self) -> float:
        """Draft step / target step."""
        return self.draft_step_s / self.target_step_s


# How another engine's R of a draft is known: that draft was measured there; another one of the same
# shape was; or R follows from another draft's, whose own steps take another time
Basis = Literal["measured", "same_shape", "composed"]


@dataclass(frozen=True)
class RoundSummary:
    """What a plain token and a round cost with one draft at one temperature: R(0) and R(K)."""

    draft: str  # its name; "" where latencies were typed
    temperature: float | None  # at which rounds were timed; None where none were
    # "rounds" of the running loop were timed; "requests" to a server; "steps" by the formula from
    # timed steps (a run that timed no rounds); "typed" by the formula from typed latencies.
    source: Literal["rounds", "requests", "steps", "typed"]
    plain_s: float  # R(0), one plain token
    round_s: dict[int, float]  # R(K) by K, where it was timed; rounds in between lie on a line
    visits: int = 0  # how often they were timed
    # The plain token that speedups are over, where the target ran in a slower way for this draft
    other_plain_s: float | None = None
    engine: str = "own"  # whose rounds they are: our own loop's, or a server's
    run: str | None = None  # the server run that they are from, where that is another run
    basis: Basis = "measured"

    def relative(self, k: int) -> float:
        """R(K) / R(0): what a round costs in plain tokens, timed next to it."""
        return self.round_s[k] / self.plain_s


@dataclass(frozen=True)
class Unstable:
    """A timing that cannot be right, after it was repeated: marked in tables, left out of plots."""

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
    draft: str | None = (
        None  # of a step, which every draft of an audition has timed next to its own
    )


@dataclass(frozen=True)
class OutlierCell:
    """A measured cell whose speedup a few generations decide."""

    prompt_set: str
    temperature: float
    k: int
    speedup: float  # the ratio of sums, as in results.csv
    trimmed_speedup: float  # the same without the 10 % slowest and fastest generations
    generations: int  # how many took far longer, or far less, than the others' rounds


@dataclass(frozen=True)
class Dropped:
    """A draft of an audition that was measured no further, since it loses (early elimination)."""

    prompts: int  # prompts, of: on how many of how many prompts it was measured
    of: int
    slower_than: tuple[str | None, ...]  # significantly: drafts; None is plain decoding


@dataclass(frozen=True)
class LeaderboardRow:
    """One draft at its best K, or plain decoding (draft None, k 0, speedup 1)."""

    rank: int  # from 1
    draft: str | None
    k: int
    speedup: float  # like its bounds: of the weighted workload, by replay
    speedup_lo: float | None = None
    speedup_hi: float | None = None
    tokens_per_round: float | None = None
    alpha: float | None = None  # like its bounds: at this K, over all prompts
    alpha_lo: float | None = None
    alpha_hi: float | None = None
    breakeven_alpha: float | None = None  # the iid formula's; None where even alpha = 1 loses
    probability_best: float | None = None  # share of draws in which no other row is faster
    draft_memory_bytes: float | None = None  # weights of the draft; None if unknown
    usd_per_million_tokens: float | None = None  # None without a price
    dropped: Dropped | None = None  # all numbers are then of the prompts before that
    corrected: bool = False  # whether its speedup is a verdict's, less the optimism of choosing it


@dataclass(frozen=True)
class Leaderboard:
    """The drafts under one acceptance rule at one temperature, fastest first, the dropped last."""

    rule: Rule
    temperature: float
    engines: tuple[str, ...]  # who accepts by this rule
    rows: tuple[LeaderboardRow, ...]


@dataclass(frozen=True)
class AcceptanceByPosition:
    """Share of rounds, among those with at least j positions left, with at least j accepted.

    Measured ones are there for every prompt set, temperature and K that ran, and for all sets
    together; replayed ones for each draft at its best K, all sets together.
    """

    draft: str
    prompt_set: str  # "all" for all sets together
    temperature: float
    k: int
    source: Source  # "measured" (the loop) or "replayed"
    shares: tuple[float, ...]  # entry j - 1 for position j

    @property
    def non_increasing(self) -> tuple[float, ...]:
        """The shares as a server's synthetic acceptance takes them: never increasing."""
        return tuple(min(self.shares[: index + 1]) for index in range(len(self.shares)))


@dataclass(frozen=True)
class CategoryAlpha:
    """Alpha of one draft on one category of prompts (their prompt set where they have none)."""

    temperature: float
    draft: str
    k: int
    category: str
    prompts: int  # how many; too few give no interval
    accepted: float  # accepted, judged: expected counts; alpha is their quotient
    judged: float
    alpha: float | None
    alpha_lo: float | None
    alpha_hi: float | None


@dataclass(frozen=True)
class AdaptiveRow:
    """Drafting up to K tokens, and no more after one less likely than the threshold; replayed."""

    k: int
    threshold: float  # 0: always K
    tokens_per_round: float
    drafted_per_round: float
    speedup: float  # predicted
    speedup_lo: float | None = None  # 95 % interval; None with too few prompts
    speedup_hi: float | None = None


@dataclass(frozen=True)
class AdaptiveDrafting:
    """What adaptive drafting could bring to one draft.

    Where there are prompts enough for an interval, `fixed` and `best` are less the optimism of
    choosing them, by prompts that were held out. Every other number is as the prompts have it.
    """

    draft: str
    temperature: float
    rule: Rule
    fixed: AdaptiveRow  # the best K without a threshold
    best: AdaptiveRow  # the best threshold and K
    thresholds: tuple[AdaptiveRow, ...]  # every threshold at that K


@dataclass(frozen=True)
class ReplayCheck:
    """One cell's tokens per round as the loop measured and as replay expects them.

    Tokens drafted per round too, where rounds may propose fewer than K.
    """

    prompt_set: str
    temperature: float
    k: int
    prompts: int
    measured_tokens_per_round: float
    replayed_tokens_per_round: float
    gap_in_standard_errors: float | None  # None with fewer than 2 prompts
    p_value: float | None  # two-sided, Student's
    measured_drafted_per_round: float | None = None
    replayed_drafted_per_round: float | None = None
    drafted_gap_in_standard_errors: float | None = None


CheckResult = Literal["PASS", "TIE", "FAIL", "OPEN", "UNTESTED", "UNJUDGED"]


@dataclass(frozen=True)
class TextCheck:
    """One speculative greedy text compared with plain decoding's."""

    prompt_set: str
    prompt: str
    repetition: int
    k: int
    # PASS equal; TIE different within rounding, or within the engine's noise; FAIL different; OPEN
    # different and not judged, since no model was loaded or the server told nothing; UNJUDGED
    # different, in a mixture whose routing ties may do as much.
    result: CheckResult
    first_difference: int | None = None  # position of the first token that differs; None: none does
    # target_margin, verify_margin: between the two best logits there, by a plain step and by a
    # forward of K + 1 positions. On an engine, of the plain text's token over the other text's.
    target_margin: float | None = None
    verify_margin: float | None = None
    rounding: float | None = None  # largest difference there between logits by different forwards
    # How much near ties of routers change logits there; None where that was not needed to judge.
    routing: float | None = None
    acceptance_rate: float | None = None
    # What an engine's margins change by, nats, where it is judged by that, and over how many
    # positions that was measured; None over how many where the checkpoint judges.
    noise: float | None = None
    noise_positions: int | None = None

    @property
    def id(self) -> tuple[str, str, int, int]:
        """Which text it is of."""
        return self.prompt_set, self.prompt, self.repetition, self.k


@dataclass(frozen=True)
class TextLikelihood:
    """How likely sampled texts of a server are under the target, against the target's own.

    Given what precedes it, a token of the target's own has the expected log-probability -H, the
    distribution's entropy, and a known variance. So the sum over the texts of log target(x) + H is
    a martingale, whatever the texts' lengths, and divided by the root of the summed variances it is
    a standard normal number, for many tokens; for fewer, and for a target that is sure of most of
    them, it is skew (`harness.analysis.server_lossless.normal_z`). A server that is not lossless
    drifts from 0.
    """

    temperature: float
    k: int  # 0: the plain server
    tokens: int
    excess: float  # sum of log target(x) + H, nats
    variance: float  # of that sum, nats squared
    log_probability: float  # sum of log target(x), nats
    third_cumulant: float = 0.0  # of the excess, nats cubed; 0 in runs of an earlier version


@dataclass(frozen=True)
class DistributionTest:
    """A chi-square of drawn tokens against the target's exact distribution at one offset."""

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
    """Why the verdict is what it is, for its draft: counterfactuals, one factor at a time."""

    draft: str  # draft, k, temperature: the cell they are of
    k: int
    temperature: float
    decision: Decision  # the verdict's
    speedup: float  # what R(K) and the workload's tokens per round give
    alpha: float  # measured or replayed at this K
    breakeven_alpha: float | None  # None where even alpha = 1 loses
    ceiling: float  # the speedup at alpha = 1
    # K c + v + loop = R(K), in target steps, so speedup = tokens per round x plain / (K c + v +
    # loop).
    plain: float  # R(0) / target step
    c: float  # c, c_allowed: draft step / target step, and the largest at which it breaks even
    c_allowed: float
    v: float  # verify / target step
    speedup_at_v1: float  # if a verify cost one step
    loop: float  # what steps do not explain of R(K): accepting, sampling, host work
    speedup_without_loop: float  # if rounds and plain tokens took no more than their forwards
    # What alone would turn a loss into a gain, the most telling first.
    factors: tuple[Factor, ...] = ()
    launch_bound: bool = False  # whether steps take far longer than their bytes need
    # floor_c, floor_k, floor_speedup: with both steps at their memory floors; None if unknown.
    floor_c: float | None = None
    floor_k: int | None = None
    floor_speedup: float | None = None
    # draft_floor_share, target_floor_share: memory floor / measured step.
    draft_floor_share: float | None = None
    target_floor_share: float | None = None


@dataclass(frozen=True)
class RuleOfThumb:
    """A rule in circulation, and the given numbers under it; shown, never obeyed."""

    code: RuleOfThumbCode
    met: bool | None  # None where it is not known
    value: float
    values: Values = field(default_factory=dict[str, Value])  # what the arithmetic says instead


@dataclass(frozen=True)
class DraftMemory:
    """What a draft takes of the device's memory, in context and concurrency lost."""

    draft: str
    device: str | None
    weights_bytes: float
    kv_bytes_per_token: float
    fits: bool  # whether the weights alone do
    context_tokens: int  # tokens of cache that fit, of one sequence or all together
    context_tokens_lost: int  # to what fits without a draft
    sequences: int  # concurrent sequences at the asked context
    sequences_lost: int


@dataclass(frozen=True)
class CardRow:
    """What to serve with on one card at one temperature; cheapest token first."""

    place: int  # from 1
    card: str  # card, device: its short name, and what it calls itself
    device: str
    temperature: float | None
    decision: Decision
    draft: str | None
    k: int
    speedup: float | None
    speedup_lo: float | None
    speedup_hi: float | None
    plain_s: float  # R(0), one plain token
    seconds_per_token: float  # of what the verdict says to serve; plain decoding's unless it pays
    price_per_hour_usd: float | None
    plain_usd_per_million_tokens: float | None
    usd_per_million_tokens: float | None
    # rented_s, spent_usd: how long a rented machine took for the run, at the card's price.
    rented_s: float | None = None
    spent_usd: float | None = None


@dataclass(frozen=True)
class Bandwidth:
    """Memory bandwidth that floors are computed with, 10^9 bytes per second."""

    gb_s: float
    source: Literal["measured", "datasheet"]
    # target_gb_s, draft_gb_s: at each model's own working set, where measured.
    target_gb_s: float | None = None
    draft_gb_s: float | None = None


@dataclass(frozen=True)
class StepBound:
    """What a step's time goes to."""

    role: str
    model: str
    context_tokens: int
    batch: int
    step_s: float  # step_s, floor_s, mbu: as in latency.csv
    floor_s: float
    mbu: float
    positions: int  # the most positions in one forward that were timed
    positions_ratio: float  # that forward / the step: how little the time depends on the work
    arithmetic_share: float  # of the step, by what a further position adds at most
    overhead_share: float  # what neither reading nor arithmetic explains
    bound: Literal["memory", "arithmetic", "overhead"]
    launch_bound: bool  # MBU below 0.4 and overhead above one half


@dataclass(frozen=True)
class RoundPart:
    """One part of a round (draft, verify, accept, host, rewind) and its seconds."""

    name: str
    seconds: float


@dataclass(frozen=True)
class WaterfallStep:
    """One step from K + 1, a round at the price of a plain token, to that of timed rounds."""

    cause: str  # a code: free (K + 1), draft, verify, accept, rewind, host, unexplained, acceptance
    speedup: float  # after it
    factor: float  # that it brought
    # What the cause's sentence quotes: draft, verify in plain tokens; tokens per round; or None.
    value: float | None = None


@dataclass(frozen=True)
class RoundBreakdown:
    """One K's round of the real loop in parts, and the waterfall that follows."""

    k: int
    rounds: int  # how many were timed in parts
    round_s: float  # R(K)
    parts: tuple[RoundPart, ...]
    unexplained_s: float  # round_s - the sum of the parts
    tokens_per_round: float
    step_s: float  # step_s, plain_s: a bare target step, and one token of plain decoding, R(0)
    plain_s: float
    speedup: float
    waterfall: tuple[WaterfallStep, ...]

    @property
    def unexplained_share(self) -> float:
        """Of the round."""
        return self.unexplained_s / self.round_s


@dataclass(frozen=True)
class StepCurve:
    """Step times at one context and batch at which both models were timed."""

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

    @property
    def largest_k(self) -> int:
        """Whose verify was timed."""
        return len(self.verify_s) - 1


@dataclass(frozen=True)
class CeilingAtK:
    """What a K could give at best, and needs at least."""

    k: int
    ideal_speedup: float  # (K + 1) R(0) / R(K): every draft token accepted
    ideal_seconds_per_token: float
    breakeven_alpha: float | None


@dataclass(frozen=True)
class SpeedupByK:
    """The speedup at one alpha by the iid model, by K."""

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
    reference_draft: str | None  # reference_draft, draft: the drafts in either; they may differ
    draft: str | None
    prompt_set: str | None  # a set, or "all" for the weighted workload
    temperature: float | None
    k: int
    status: Literal["complete", "partial"] = "complete"
    prompts: int | None = None  # that both runs have
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
    cells: int  # how many cells have a p-value
    differing: int  # how many of them differ significantly, by the adjusted p-value
    # threshold, outcome: `fail_below` and whether the ratio passes; None where not asked for.
    threshold: float | None = None
    outcome: Literal["pass", "fail", "unclear"] | None = None


@dataclass(frozen=True)
class Difference:
    """A setting or fact of the environment in which runs differ, and its value in each run."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class EngineRow:
    """What one engine gained at one K, measured on prompts of every set of its run."""

    run: str  # name of its folder
    engine: str  # as `engine=` has it; "own" is our own loop
    version: str | None
    draft: str
    temperature: float
    k: int
    concurrency: int  # requests side by side
    speedup: float | None  # to the same engine's plain decoding; of throughput above 1 request
    speedup_lo: float | None = None
    speedup_hi: float | None = None
    lossless: bool = True  # False where its speculation was seen to change what is generated
    prompts: int | None = None  # timed plainly and at this K; None under load


@dataclass(frozen=True)
class RunCompared:
    """What one of the runs that are compared is of."""

    name: str  # of its folder
    command: str
    draft: str | None
    engine: str  # as `engine=` has it; "own" is our own loop
    version: str | None  # of the engine
    seed: int | None
    weights: Mapping[str, float] = field(default_factory=dict[str, float])  # empty: equal ones


@dataclass(frozen=True)
class Comparison:
    """Runs compared with the first of them."""

    reference: str  # name of the first run
    runs: tuple[ComparedRun, ...]
    rows: tuple[ComparisonRow, ...]
    caveats: tuple[Caveat, ...]  # most important first
    differences: tuple[Difference, ...]
    engines: tuple[EngineRow, ...] = ()  # where one of the runs is a server's
    every: tuple[RunCompared, ...] = ()  # the reference first

    @property
    def names(self) -> tuple[str, ...]:
        """Of all runs, the reference first."""
        return (self.reference, *(run.name for run in self.runs))

    @property
    def failed(self) -> bool:
        """Whether a run's speedup fell below the threshold."""
        return any(run.outcome == "fail" for run in self.runs)


@dataclass(frozen=True)
class ServedCell:
    """One cell of a server, next to what was predicted of it."""

    prompt_set: str
    temperature: float
    k: int
    # measured: plain seconds per token / this K's, on the run's clock; None where it is predicted
    # alone, for another K was chosen to be measured
    speedup: float | None
    tokens_per_round: float | None  # the server's; None where it counts no rounds
    # By replay of the plain server's texts and this engine's round times, which have not seen the
    # cell
    predicted: float | None = None
    visits: Visits | None = None  # None where it has all that were asked for

    @property
    def error(self) -> float | None:
        """Of the prediction: predicted / measured - 1."""
        if self.predicted is None or self.speedup is None:
            return None
        return self.predicted / self.speedup - 1.0


@dataclass(frozen=True)
class ServedGate:
    """Whether a server at one K is lossless at one temperature, by what it returned.

    What cannot be compared is None: without weights at hand there is no replay.
    """

    temperature: float
    k: int  # 0: the plain server, whose texts must be the target's as well
    texts: int
    # At temperature 0, of the texts: equal to plain decoding's in every visit; ties; and real
    # differences. noise: of the engine, by which they are judged, nats; None of our own loop.
    equal_texts: int | None = None
    tied_texts: int | None = None
    differing_texts: int | None = None
    noise: float | None = None
    # replayed_texts: those whose rounds are compared with replay's; equal_rounds, equal_drafted: of
    # them, those with exactly the same counts, where the rule leaves one way to decode a text.
    replayed_texts: int | None = None
    equal_rounds: int | None = None
    equal_drafted: int | None = None
    # rounds, expected_rounds: of all texts; rounds_z: their difference in standard deviations,
    # where a text has several ways. Other rounds make a draft that is not the scored one, or
    # another rule; they say nothing of the texts.
    rounds: float | None = None
    expected_rounds: float | None = None
    rounds_z: float | None = None
    other_rule: Rule | None = None  # whose replay the rounds fit, where they do not the engine's
    # Above temperature 0: log-probability of a token under the target, its expectation, and how
    # many standard deviations their sums are apart (a martingale); plain_z: the same of its
    # difference to that of the plain server's texts. Both as a normal number (`normal_z`).
    nats_per_token: float | None = None
    expected_nats_per_token: float | None = None
    text_z: float | None = None
    plain_z: float | None = None
    # Whether every visit returned the same texts although the target is not so sure of them.
    repeats: bool = False
    # By the texts alone: those of K as plain decoding's, and the plain server's as the target's.
    # None where nothing could be compared, plain decoding's texts are not the target's, or texts
    # differ that are not judged or too few to tell.
    lossless: bool | None = None


@dataclass(frozen=True)
class Percentiles:
    """Of a time over requests, in seconds; None where there are too few requests to tell."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


# A server that takes this much longer than requests come is behind; one that is not ends with the
# requests that it is decoding when the last one comes
QUEUE_GROWS = 0.25


@dataclass(frozen=True)
class UserLatency:
    """What those who send requests to a server wait for, at one K under one load."""

    temperature: float
    k: int
    # Of requests that were sent one by one and of a closed loop: how many are in flight. `rate`:
    # arrivals per second, where they arrive at random. `load`: whether it is one of `LoadCell`s'.
    concurrency: int | None
    rate: float | None
    load: bool
    clock: Literal["client", "engine"]  # "engine": of runs that did not store what the client saw
    requests: int = 0
    # Until the first token; of each further one (seconds after the first / tokens after it); of the
    # whole answer. None where the server does not tell them apart.
    first_token: Percentiles | None = None
    per_token: Percentiles | None = None
    request: Percentiles | None = None
    visits: Visits | None = None  # None where it has all that were asked for
    # Where requests arrive at random: the share that met the run's goals (None without one), and
    # how much longer the server took than requests came, relative to that time.
    within_goals: float | None = None
    behind: float | None = None

    @property
    def queue_grows(self) -> bool:
        """Whether more arrives than the server can serve."""
        return self.behind is not None and self.behind > QUEUE_GROWS


@dataclass(frozen=True)
class OtherK:
    """What gains more at another K than at the one to serve: a prompt set, or a temperature."""

    temperature: float
    prompt_set: str  # "all": the whole workload, at a temperature that is not the headline's
    k: int  # its own fastest
    speedup: float
    served_k: int  # the headline's; 0 where nothing pays on the whole workload
    served_speedup: float  # at that K
    # ratio_lo, ratio_hi: of speedup / served_speedup over prompts; None with too few of them.
    ratio_lo: float | None
    ratio_hi: float | None


@dataclass(frozen=True)
class ServedCosts:
    """What decoding costs on a server at one temperature; round times are in `RoundSummary`."""

    temperature: float
    # Requests of the other prompt sets; with "synthetic" also servers that reject every draft.
    source: Literal["synthetic", "other_sets"]
    plain_start_s: float  # of a plain request, besides its tokens
    start_s: float  # of a speculative request, besides its rounds
    plain_s: float  # of a plain token
    round_s: dict[int, float]  # of a round that drafts n tokens, by n; in between on a line


@dataclass(frozen=True)
class LoadCell:
    """A server under one load at one K: requests side by side, or arriving at a rate."""

    temperature: float
    k: int
    concurrency: int | None  # requests side by side; None under Poisson arrivals
    rate: float | None  # arrivals per second; None in a closed loop
    requests: int
    tokens_per_second: float  # of all requests together
    ms_per_token: float  # of one user: request seconds / tokens, the median
    # throughput_ratio: to plain decoding under the same load; predicted_ratio: the same at the
    # rounds that replay expects; spread: of repetitions, relative.
    throughput_ratio: float | None = None
    predicted_ratio: float | None = None
    spread: float | None = None
    visits: Visits | None = None  # None where it has all that were asked for
    # Requests that the servers decode side by side, where these are fewer: the others wait, and
    # what is measured is a queue. None where there is room, or servers do not tell.
    slots: int | None = None
    varying: Varying = ""  # how K changed while the server served; `k` is the largest then
    tokens_per_round: float | None = None  # of a server whose K changed, where it told every round


@dataclass(frozen=True)
class ScheduleEntry:
    """Which K to serve while so many requests are decoded side by side."""

    low: int
    high: int | None  # None: and above
    concurrency: int  # at which it was measured, the highest of them
    k: int  # the fastest, by `predicted_ratio` where it is known; 0 for plain decoding
    # Further K whose distance to it is within the spread of repetitions; empty: it leads
    tied: tuple[int, ...]
    # Throughput / plain decoding's, at the rounds that replay expects, and measured
    predicted_ratio: float | None
    measured_ratio: float
    # What K chosen so by all visits but one lack, in that one, to the fastest K of all visits; None
    # where there are fewer than two visits.
    loss: float | None


@dataclass(frozen=True)
class Schedule:
    """K by how many requests are decoded side by side, at one temperature."""

    temperature: float
    entries: tuple[ScheduleEntry, ...]  # ascending, one per measured concurrency


@dataclass(frozen=True)
class ServedK:
    """One K on the whole weighted workload, measured."""

    temperature: float
    k: int
    speedup: float
    tokens_per_round: float | None
    round_cost: float | None  # R(K) / R(0): what a round costs in plain tokens


NotPredicted = Literal[
    "no_weights",  # no target and draft are loaded here, so returned texts cannot be scored
    "no_texts",  # they were to be, and no text of plain decoding was scored
    "no_counting",  # how the engine counts rounds is not known
    "no_costs",  # neither synthetic acceptance nor a second prompt set gives its round times
    "servers_failed",  # plain decoding, or every K, has no answer
    "costs_untold",  # requests of other prompt sets were timed, and tell no round times
    "not_lossless",  # it draws from another distribution, so replay does not tell its rounds
]


@dataclass(frozen=True)
class ServedMemory:
    """What both models take of a server's memory, as it was configured for the measurement.

    Caches are those of all its slots, full. A number that is not known is None.
    """

    k: int
    slots: int  # requests side by side
    context_tokens: int  # that each of them has room for
    kv_type: str | None  # of the target's cache, as the engine names it
    target_weights_bytes: float | None
    draft_weights_bytes: float | None
    target_kv_bytes_per_token: float | None
    draft_kv_bytes_per_token: float | None


@dataclass(frozen=True)
class StartedServers:
    """The speculating servers that a run started; one that drafts for each K, and others."""

    asked: tuple[int, ...]  # every K that the run is of
    ks: tuple[int, ...]  # those with a server
    measured: tuple[int, ...]  # those that it was asked all prompts at; others are predicted
    rejecting: tuple[int, ...] = ()  # those with one more, that rejects every draft

    @property
    def number(self) -> int:
        """How many."""
        return len(self.ks) + len(self.rejecting)


@dataclass(frozen=True)
class ServedSummary:
    """A server that ran the pair: what it is, and what a prediction of it is worth."""

    engine: str  # a name that `engine=` takes
    version: str
    rule: Rule | None  # None where it is not known
    clock: Literal["engine", "cpu"]  # "cpu": processor seconds of the server's process
    started: bool  # by this run; else it was attached to
    commands: tuple[ServerCommand, ...] = ()  # that started it; empty where it ran before
    cells: tuple[ServedCell, ...] = ()
    by_k: tuple[ServedK, ...] = ()
    other_ks: tuple[OtherK, ...] = ()
    latencies: tuple[UserLatency, ...] = ()  # by temperature, load and K
    gates: tuple[ServedGate, ...] = ()
    costs: tuple[ServedCosts, ...] = ()
    not_predicted: NotPredicted | None = None
    load: tuple[LoadCell, ...] = ()
    varying: tuple[LoadCell, ...] = ()  # of servers whose K changed
    varying_commands: dict[Varying, ServerCommand] = field(  # that started these
        default_factory=dict[Varying, ServerCommand]
    )
    schedules: tuple[Schedule, ...] = ()
    memory: ServedMemory | None = None  # of servers that the run started, with a draft
    servers: StartedServers | None = None  # None where it attached to servers that ran

    def ratios(self, temperature: float, concurrency: int) -> dict[int, float | None]:
        """By K the measured throughput / plain decoding's, with so many requests side by side."""
        cells = (cell for cell in self.load if cell.temperature == temperature)
        return {cell.k: cell.throughput_ratio for cell in cells if cell.concurrency == concurrency}

    def not_lossless(self, temperature: float) -> tuple[int, ...]:
        """The K that were seen to change what is generated at a temperature."""
        failed = (gate for gate in self.gates if gate.k and gate.lossless is False)
        return tuple(gate.k for gate in failed if gate.temperature == temperature)

    @property
    def lossless(self) -> bool | None:
        """Whether every gate that compared anything was passed; None where none did."""
        known = [gate.lossless for gate in self.gates if gate.lossless is not None]
        return all(known) if known else None


@dataclass(frozen=True)
class Counted:
    """What a running server counted between two scrapes."""

    seconds: float
    rounds: int  # that drafted
    accepted: int
    tokens: int  # of answers
    requests: int | None = None  # that have their first token, or that ended; None: not counted
    drafted: int | None = None
    accepted_at: tuple[int, ...] = ()  # rounds that accepted at least 1, 2, ...; empty likewise

    @property
    def tokens_per_round(self) -> float | None:
        """1 + accepted / rounds; None without a round."""
        return 1.0 + self.accepted / self.rounds if self.rounds else None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """The share of rounds that accepted at least 1, 2, ... tokens."""
        return tuple(count / self.rounds for count in self.accepted_at) if self.rounds else ()


@dataclass(frozen=True)
class RunningServer:
    """What the counters of a server say that serves others."""

    engine: str
    k: int  # the most that a round drafts; 0 where nothing was drafted
    ks: tuple[int, ...]  # as the server told; several where it adapts, empty where it does not tell
    total: Counted | None  # None where no round was counted


@dataclass(frozen=True)
class PlanPoint:
    """What users wait for at a rate on one card, simulated: a percentile over requests, seconds."""

    rate: float  # requests per second
    tpot_s: float  # time per output token after the first
    ttft_s: float  # time to first token
    # Over prompts and arrivals, at the asked rate; None with too few prompts.
    tpot_lo_s: float | None = None
    tpot_hi_s: float | None = None
    ttft_lo_s: float | None = None
    ttft_hi_s: float | None = None


@dataclass(frozen=True)
class PlanChoice:
    """A way to serve, and what it holds."""

    draft: str | None  # None: plain decoding
    policy: PlanPolicy
    k: int  # the most that a round drafts; 0 is plain decoding
    ks: tuple[int, ...]  # of `by_load`: K by how many are active, from 1 on; empty of one K
    capacity: float  # requests per second that one card serves while all slots are taken
    points: tuple[PlanPoint, ...]  # by rate, ascending, up to what is nearly the capacity
    at_rate: PlanPoint | None  # the asked rate on one card; None beyond its capacity
    largest_rate: float  # at which one card meets the goal; 0.0: none that was simulated
    largest_rate_lo: float | None
    largest_rate_hi: float | None
    # That rate / plain decoding's, on the same prompts and arrivals; None where plain has none.
    rate_ratio: float | None = None
    rate_ratio_lo: float | None = None
    rate_ratio_hi: float | None = None
    cards: int | None = None  # for the whole rate; None where one card meets the goal at no rate
    usd_per_hour: float | None = None
    usd_per_million_tokens: float | None = None
    capacity_lo: float | None = None
    capacity_hi: float | None = None
    on_engine: bool = True  # whether the engine has the policy, with drafts of this kind

    @property
    def drafts(self) -> bool:
        """Whether it speculates at all."""
        return any(self.ks) if self.policy == "by_load" else self.k > 0


@dataclass(frozen=True)
class PlanCheck:
    """A measured load next to the same requests, simulated at costs of the other prompts."""

    k: int
    concurrency: int | None  # of a closed loop
    requests: int
    # Of a closed loop
    tokens_per_second: float | None
    simulated_tokens_per_second: float | None
    # Measured ones are None where the server does not tell
    per_token: Percentiles | None
    simulated_per_token: Percentiles | None
    rate: float | None = None  # of requests that arrived at random
    first_token: Percentiles | None = None
    simulated_first_token: Percentiles | None = None


@dataclass(frozen=True)
class Plan:
    """Which K meets a latency goal at a rate of requests, and on how many cards."""

    run: str  # the server run
    engine: str
    draft: str
    temperature: float
    slots: int  # requests that a card decodes side by side
    rate: float  # asked for, of all cards
    percentile: float
    tpot_s: float | None  # the goal; None where there is none
    ttft_s: float | None
    arrivals: Literal["poisson", "recorded"]
    seeds: int
    requests: int  # of each seed
    prompts: int
    tokens: float  # that a request returns, the mean
    choices: tuple[PlanChoice, ...]
    # The least simulated rate at which no speculation has a shorter TPOT than plain decoding.
    stops_paying: float | None = None
    checks: tuple[PlanCheck, ...] = ()

    def excess(self, point: PlanPoint) -> float:
        """The larger of a point's percentiles / their goals; the goal is met up to 1."""
        pairs = ((point.tpot_s, self.tpot_s), (point.ttft_s, self.ttft_s))
        return max(value / goal for value, goal in pairs if goal is not None)

    @property
    def servable(self) -> tuple[PlanChoice, ...]:
        """The choices that the engine can be started with."""
        return tuple(each for each in self.choices if each.on_engine)

    @property
    def best(self) -> PlanChoice | None:
        """The one that meets the goal with the fewest cards; of several the largest rate."""
        able = [choice for choice in self.servable if choice.cards is not None]
        return min(able, key=lambda each: (each.cards, -each.largest_rate), default=None)

    @property
    def closest(self) -> PlanChoice:
        """The one that misses the goal by least at its least rate."""
        return min(self.servable, key=lambda each: self.excess(each.points[0]))

    @property
    def plain(self) -> PlanChoice:
        """Plain decoding."""
        return next(choice for choice in self.choices if choice.k == 0)


@dataclass(frozen=True)
class Summary:
    """What a run says, and all that a report reads.

    Every command fills `run`, `results`, `latency`, `failures` and `caveats`. A sweep, an audition
    and a break-even with a measured acceptance have verdicts; a sweep is the one-draft case of an
    audition with generations next to it, so both fill the same fields. What does not apply is
    empty.
    """

    run: RunFacts
    schema_version: int = SCHEMA_VERSION
    # By temperature, engine and prompt set, that of the engine whose rounds were timed first; all
    # that is said to be decided is one of these.
    answers: tuple[Answer, ...] = ()
    failures: tuple[Failure, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    results: tuple[ResultRow, ...] = ()  # rows of results.csv
    latency: tuple[LatencyRow, ...] = ()  # rows of latency.csv, with memory floors where known
    steps: tuple[StepSummary, ...] = ()  # one entry per draft
    round_times: tuple[RoundSummary, ...] = ()  # what prices predictions: by draft, temperature
    unstable: tuple[Unstable, ...] = ()  # timings that cannot be right, though they were repeated
    # Sweep and audition
    outlier_cells: tuple[OutlierCell, ...] = ()
    # One per acceptance rule and temperature, the verdict's rule first.
    leaderboards: tuple[Leaderboard, ...] = ()
    acceptance_by_position: tuple[AcceptanceByPosition, ...] = ()
    category_alpha: tuple[CategoryAlpha, ...] = ()
    adaptive: tuple[AdaptiveDrafting, ...] = ()
    replay_checks: tuple[ReplayCheck, ...] = ()  # a sweep's loop against replay
    explanation: Explanation | None = None
    memory: tuple[DraftMemory, ...] = ()
    ineligible: tuple[Failure, ...] = ()  # drafts that cannot be used with this target, and why
    # generation_s, scoring_s: what an audition's completions and scores took.
    generation_s: float | None = None
    scoring_s: float | None = None
    price_per_hour_usd: float | None = None
    plain_usd_per_million_tokens: float | None = None  # at the headline's temperature
    cards: tuple[CardRow, ...] = ()
    # Snapshot, and a sweep's greedy texts
    text_checks: tuple[TextCheck, ...] = ()
    distribution_tests: tuple[DistributionTest, ...] = ()
    # Profile
    bandwidth: Bandwidth | None = None
    step_bounds: tuple[StepBound, ...] = ()
    rounds: tuple[RoundBreakdown, ...] = ()
    step_curves: tuple[StepCurve, ...] = ()
    skipped_cells: tuple[SkippedCell, ...] = ()
    # Break-even
    ceilings: tuple[CeilingAtK, ...] = ()  # the profile's too
    speedups_by_k: tuple[SpeedupByK, ...] = ()  # at each alpha
    rules_of_thumb: tuple[RuleOfThumb, ...] = ()
    from_acceptance: tuple[ResultRow, ...] = ()  # those of `results` that a measured one gave
    # By K, of a server that measured itself; the verdict is of these where there are any
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

        That is the engine of a server run; else the one that `engine=` names, or whose rounds were
        timed.
        """
        engine = next((answer.engine for answer in self.answers), None)
        engine = self.served.engine if self.served else self.run.serve_on or engine
        return tuple(answer for answer in self.answers if answer.engine == engine)

    @property
    def per_temperature(self) -> tuple[Answer, ...]:
        """Of them those on the whole workload."""
        return tuple(answer for answer in self.shown if answer.prompt_set == "all")

    @property
    def per_prompt_set(self) -> tuple[Answer, ...]:
        """Of them those on a prompt set alone."""
        return tuple(answer for answer in self.shown if answer.prompt_set != "all")

    @property
    def headline(self) -> Answer | None:
        """The answer that a report leads with: the whole workload at the first temperature.

        None where nothing is known of the engine.
        """
        return next(iter(self.per_temperature), None)

    @property
    def usd_per_million_tokens(self) -> float | None:
        """What 10^6 tokens cost as the headline says to serve; None without a price."""
        plain, answer = self.plain_usd_per_million_tokens, self.headline
        if plain is None or answer is None or not answer.speculates or not answer.speedup:
            return plain
        return plain / answer.speedup

    @property
    def generated(self) -> tuple[ResultRow, ...]:
        """The rows of results.csv that stand for generations, each cell once.

        Those that were measured; where nothing was, those that were replayed.
        """
        source = "replayed" if self.run.replay_only else "measured"
        return tuple(row for row in self.alone if row.source == source)

    @property
    def on_few_prompts(self) -> tuple[ResultRow, ...]:
        """Of these, the rows on at most half of the prompts that another K was run on.

        A sweep in looks (until=decided) measures most K on the first prompts of each set alone.
        """
        most: dict[tuple[float | None, str | None], int] = {}
        for row in self.generated:
            cell = row.temperature, row.prompt_set
            most[cell] = max(most.get(cell, 0), row.prompts or 0)
        return tuple(
            row
            for row in self.generated
            if row.prompts and 2 * row.prompts <= most[row.temperature, row.prompt_set]
        )

    @property
    def alone(self) -> tuple[ResultRow, ...]:
        """The rows of results.csv without those of a server under load."""
        return tuple(row for row in self.results if row.concurrency == 1)

    @property
    def drafts(self) -> tuple[str, ...]:
        """Every draft, in the order of the first leaderboard: their place is their colour."""
        ranked = [row.draft for board in self.leaderboards for row in board.rows]
        names = [*ranked, *(row.draft for row in self.results)]
        return tuple(dict.fromkeys(name for name in names if name is not None))


# What summary.json says of an answer under `verdict`, `per_temperature` and `per_prompt_set`
_OF_VERDICT = (
    *("decision", "draft", "k", "temperature", "prompt_set", "speedup", "speedup_lo"),
    *("speedup_hi", "reason", "reason_values"),
)


def to_json(summary: Summary) -> str:
    """The summary as the text of summary.json; NaN and infinity become null.

    For those who read the file, some of what follows from the answers stands in it as well.
    """
    record: dict[str, Any] = json.loads(_adapter().dump_json(summary))
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
    """The summary that `to_json` wrote; what follows from the answers is not read.

    Raises:
        ValueError: other fields or types than this version writes.
    """
    return _adapter().validate_json(text)


@cache
def _adapter() -> "TypeAdapter[Summary]":
    from pydantic import TypeAdapter  # --help of every command imports this module

    return TypeAdapter(Summary)
