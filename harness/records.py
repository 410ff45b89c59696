"""The records that pass between the packages and are stored in a run folder, all frozen.

A field's name is part of the run folder's contract and carries its unit (`_ms`, `_s`, `_bytes`,
`_tokens`). Counts are stored, and rates derived from them where they are shown (`harness.theory`).

The words are those of harness/reporting/metrics.md: a *round* is one draft-verify cycle; it ends
*rejected* (a correction follows the accepted tokens), with a *bonus* (all K accepted) or *cut*
(end-of-text or the budget stopped it early, so that neither happened).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args

if TYPE_CHECKING:  # --help of every command imports this module, and must not wait for numpy
    import numpy as np
    from numpy.typing import NDArray

SCHEMA_VERSION = 2
# Bytes of text for a token, to estimate a length before any tokenizer is loaded
BYTES_PER_TOKEN = 4

Outcome = Literal["rejected", "bonus", "cut", "step"]
Rule = Literal["ratio", "exact_match", "greedy_draft", "block"]
# "not_measured": an engine whose rounds were not timed
Decision = Literal["speculate", "does_not_pay", "undecided", "not_measured"]
Source = Literal["measured", "replayed", "theory"]
StopReason = Literal["eos", "stop_string", "budget"]
# The engine name of the harness's own loop
OWN_LOOP = "own"
# Tokens that a look-up matches at most
LONGEST_NGRAM = 2
# Tokens that a round drafts at most, on any engine
MOST_K = 1024
# The temperature at which the likeliest token is taken
GREEDY = 0.0
RULES: tuple[Rule, ...] = get_args(Rule)

# The results of comparing a speculative greedy text with plain decoding's, as reports print them
GREEDY_RESULTS = {"PASS": "equal", "TIE": "tie", "FAIL": "different", "OPEN": "not judged"}

Record = TypeVar("Record")
Key = TypeVar("Key", bound=Hashable)


def where(records: Iterable[Record], **wanted: object) -> list[Record]:
    return [
        record
        for record in records
        if all(getattr(record, name) == value for name, value in wanted.items())
    ]


def first(records: Iterable[Record], **wanted: object) -> Record | None:
    """The first record whose fields have these values; None where there is none."""
    return next(iter(where(records, **wanted)), None)


def grouped(records: Iterable[Record], key: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    """The records by their key, keys in the order in which they appear."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first index at which two texts differ, or one has ended; None where they are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = None if len(one) == len(other) else min(len(one), len(other))
    return next((place for place, (a, b) in pairs if a != b), shorter)


class UserError(Exception):
    """An error that the user can fix: one line that names the key or file and what to do.

    With several arguments, one line for each.
    """

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(map(str, self.args))

    def __str__(self) -> str:
        return "; ".join(self.lines)


class NotInstalledError(UserError):
    """An engine that is not installed here; plans for another machine can do without it."""


def in_one_line(error: BaseException) -> str:
    """An error's text in one line, with its type unless the text was written for the user."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of a library's error, at most `most` characters; else the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:most].rstrip(".")


class BrokenLogitsError(UserError):
    """A model's logits are NaN, +inf or all -inf: damaged weights, or a dtype too narrow for them.

    Attributes:
        who: the model of the logits: "target" or "draft" in the loop, else the model's name.
        position: in the text, from 0.
    """

    def __init__(self, who: str, position: int, text: str = "") -> None:
        where = f"position {position}" + (f" of {text}" if text else "")
        super().__init__(
            f"{who}: its logits are not finite at {where}; check its weights or its dtype"
        )
        self.who, self.position = who, position


class Round(NamedTuple):
    """The tokens of one turn of a decoding loop."""

    # The emitted token ids, in order; never empty, never past end-of-text or the budget
    tokens: tuple[int, ...]
    accepted: int  # number of emitted tokens, from the first on, that are the draft's
    drafted: int  # number of proposed tokens, including those cut off; 0 in plain decoding
    outcome: Outcome  # how the round ended; "step" is a plain target step without a draft


@dataclass(frozen=True)
class Prompt:
    """One prompt of a prompt set: a conversation, or its beginning up to the turn to answer."""

    prompt_set: str  # the set it belongs to (a shipped set, a file's stem, or its category field)
    id: str  # unique within its set
    # The user's turns, at least one; the target answers them in order
    turns: tuple[str, ...]
    category: str | None = None  # a finer label inside the set, or None
    # answers[i] follows turns[i]; None, or absent, where the target must generate it
    answers: tuple[str | None, ...] = ()
    system: str | None = None  # the system message before the first turn, or None
    thinking: bool = False  # whether the chat template is asked for thinking mode
    first_turn: int = 1  # the first turn that is answered; those before it are context
    # The tools in the prompt, as JSON text in OpenAI's form, for the chat template; or None
    tools: str | None = None
    # The file or data set and the line or row that it was read from, for errors
    origin: str = field(default="", compare=False)

    @property
    def answered(self) -> range:
        """The turns, from 1, whose answers are generated and measured."""
        return range(self.first_turn, len(self.turns) + 1)

    def up_to(self, turn: int, answers: Sequence[str]) -> "Prompt":
        """The prompt that generates the answer to a turn.

        Args:
            turn: from 1. Turn 1 keeps the conversation's id, a later one has `/turn` behind it.
            answers: to all turns before it.
        """
        name = self.id if turn == 1 else f"{self.id}/{turn}"
        return replace(self, id=name, turns=self.turns[:turn], answers=tuple(answers[: turn - 1]))


@dataclass(frozen=True)
class SampledLog:
    """A log of requests, and the sample of it that a run generates."""

    requests: int  # usable requests of the log
    sampled: int  # requests in the sample
    unusable: int  # lines of the log that are no usable requests
    # mean_bytes, sampled_bytes: bytes of a prompt, the means of the log and of the weighted sample
    mean_bytes: float
    sampled_bytes: float
    # From the first time stamp to the last; None where requests have none
    span_s: float | None = None


def conversation_of(prompt: str, turn: int) -> str:
    """The id of the conversation that a turn's prompt belongs to, see `Prompt.up_to`."""
    return prompt.removesuffix(f"/{turn}") if turn > 1 else prompt


@dataclass(frozen=True, order=True)
class TextKey:
    """The key of a text: one completion of the target for one prompt."""

    prompt_set: str
    prompt: str
    repetition: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.prompt_set}/{self.prompt}/{self.repetition}/{self.temperature}"


@dataclass(frozen=True, order=True)
class Cell:
    """The key of a cell, by which results are grouped; k = 0 is plain decoding, without a draft."""

    prompt_set: str
    temperature: float
    k: int
    draft: str | None = None


@dataclass(frozen=True)
class Trial:
    """One generation: a line of trials.jsonl. All counts are of emitted tokens only."""

    cell: str  # hash of everything that determines this generation; resume looks for it
    prompt_set: str
    prompt: str  # its id
    repetition: int
    k: int  # num_draft_tokens; 0 is plain decoding, for which every draft count is None
    temperature: float
    rule: Rule | None
    status: Literal["ok", "failed"]
    error: str | None = None
    # model, draft: the model that decodes, and the draft that proposes to it (None for k = 0)
    model: str | None = None
    draft: str | None = None
    category: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    rejected: int | None = None
    bonus: int | None = None
    cut: int | None = None
    # accepted_lengths[j] = rounds in which exactly j draft tokens were kept
    accepted_lengths: tuple[int, ...] | None = None
    # prefill_s, draft_prefill_s: target's and draft's prefill, each synchronised
    prefill_s: float | None = None
    draft_prefill_s: float | None = None
    first_token_s: float | None = None  # from the end of every prefill to the first token
    decode_s: float | None = None  # from the end of every prefill to the last token
    stop_reason: StopReason | None = None
    peak_memory_bytes: int | None = None
    # The emitted token ids; of a server all returned tokens, also those of its prefill, which
    # belong to no round and are in no other count
    tokens: tuple[int, ...] | None = None
    turn: int = 1  # number of the turn that it answers; 1 for a prompt of one turn
    # The tokens' log-probabilities at temperature 1, as a server returned them; None where they
    # were not requested
    logprobs: tuple[float, ...] | None = None
    # A server's request for one token, subtracted to give decode_s; None where that is timed alone
    one_token_s: float | None = None
    user_s: float | None = None  # from sending a server's request to its answer, client's clock
    # The part of user_s after the first token: by the server's clock, or if it does not report
    # that, user_s less the time of a request for one token
    user_decode_s: float | None = None

    @property
    def key(self) -> TextKey:
        return TextKey(self.prompt_set, self.prompt, self.repetition, self.temperature)

    @property
    def cell_key(self) -> Cell:
        """The cell of a run of one pair that this generation belongs to."""
        return Cell(self.prompt_set, self.temperature, self.k)

    @property
    def conversation(self) -> str:
        """Id of the conversation that the prompt is a turn of: the unit of all statistics."""
        return conversation_of(self.prompt, self.turn)


@dataclass(frozen=True, eq=False)
class TextTrace:
    """The scores of one text of the target under one draft: the input of replay. n text positions.

    The tokens that a model drafts depend only on the text before them: its scores are [n]. Those of
    a head, a block drafter or an n-gram also depend on the start of the round: the scores are
    [n, K], by start and offset from it, for the text position start + offset. Beyond the text they
    are NaN, or False.
    """

    draft: str
    draft_temperature: float  # which the `ratio` rule leaves free
    prompt_set: str
    prompt: str
    category: str | None
    repetition: int
    temperature: float
    top_k: int | None
    top_p: float | None
    prompt_tokens: int  # length of the prompt
    stop_reason: StopReason  # how the text ended
    tokens: "NDArray[np.int64]"  # [n] the target's token ids
    target_logprob: "NDArray[np.float64]"  # [n] log-probability of the token under the target
    # [n] or [n, K] log-probability under the draft, with its sampling parameters; may be -inf
    draft_logprob: "NDArray[np.float64]"
    # [n] or [n, K] whether the token is the draft's most likely one
    draft_is_argmax: "NDArray[np.bool_]"
    # [n] tokens proposed from each start, at most K; None where it is K from every start
    proposed: "NDArray[np.int64] | None" = None
    # Whether proposed tokens are looked up rather than sampled; under every rule such a token is
    # accepted exactly where it is the text's
    chosen: bool = False
    turn: int = 1  # the last turn of the prompt in its conversation
    k: int = 0  # of the server that returned the text; 0 where the target decoded it plainly

    @property
    def depth(self) -> int | None:
        """The largest K of scores by start and offset; None where they hold for every K."""
        return self.draft_logprob.shape[1] if self.draft_logprob.ndim == 2 else None

    @property
    def key(self) -> TextKey:
        return TextKey(self.prompt_set, self.prompt, self.repetition, self.temperature)

    @property
    def conversation(self) -> str:
        """Id of the conversation that the prompt is a turn of: the unit of all statistics."""
        return conversation_of(self.prompt, self.turn)


@dataclass(frozen=True, eq=False)
class DraftConfidence:
    """The confidences of a draft in the tokens that it drafts off one of the target's texts."""

    draft: str
    prompt_set: str
    prompt: str
    repetition: int
    temperature: float
    # For a draft whose scores are by position, [n + 1, K]: row i has the draft's probability of a
    # drafted token at text position i that is not the text's, then of each token drafted after it.
    # Row n is of tokens drafted beyond the text's end. Where the draft takes its likeliest token,
    # entry 0 is that of its choice in every row. NaN where the draft cannot leave the text.
    # For a draft whose scores are by start, [n, K]: row s is of one round from start s, drawn given
    # the text. 0 where the draft would not have drafted so far at any threshold.
    values: "NDArray[np.float64]"

    @property
    def key(self) -> TextKey:
        return TextKey(self.prompt_set, self.prompt, self.repetition, self.temperature)


@dataclass(frozen=True)
class StepTiming:
    """Raw samples of one timed step: the input of a latency.csv row."""

    role: Literal["target", "draft"]
    model: str
    # "step" (one token), "verify" (`tokens` = 1..K + 1 after a context) or "prefill"
    kind: Literal["step", "verify", "prefill"]
    tokens: int  # positions computed by the forward
    context_tokens: int  # positions in the cache before it
    batch: int  # sequences side by side
    samples_s: tuple[float, ...]  # one duration per repetition, seconds
    # The draft whose forwards were interleaved with these, where several drafts were timed one
    # after the other; only interleaved times have a ratio free of the machine's drift
    beside: str | None = None


@dataclass(frozen=True)
class RoundTiming:
    """Consecutive rounds of the running loop, timed together: a line of rounds.jsonl.

    They belong to no measured cell: they have prompts of their own, so that a prediction from their
    times can be tested on the cells.
    """

    # From 0; the timings of one draft in one visit were taken in immediate succession, so that
    # their ratios are free of the machine's drift
    visit: int
    # model, draft: names; the draft is that of the pair, also where k is 0
    model: str
    draft: str
    k: int  # tokens proposed in every round; 0 is plain decoding
    temperature: float  # of target and draft
    context_tokens: int  # of the prompt
    batch: int  # sequences side by side
    rounds: int  # number of rounds, at least 4 in the harness's loop; of tokens where k is 0
    new_tokens: int  # emitted by these rounds
    seconds: float  # from the end of every prefill to the last round's end
    # Tokens proposed; None where every round proposes k. A server drafts fewer near the budget, and
    # every request is sent with two budgets, which separates its start from its rounds.
    drafted: int | None = None
    one_token_s: float | None = None  # as in `Trial`
    # Of an audition that visits its drafts in turn: the number of the turn, from 0, in which each
    # draft has one visit; None of a visit apart from the other drafts'
    turn: int | None = None


# Where a run has one prompt set, each half of it is a group of requests: "chat, half 1"
HALF = ", half "


def set_of(group: str) -> str:
    """The prompt set of a group of requests, which is a whole set or a half of one."""
    return group.rpartition(HALF)[0] or group


# How a server's K changes while it serves: "" not at all, "schedule" by the number of requests,
# "adaptive" as the engine decides
Varying = Literal["", "schedule", "adaptive"]


@dataclass(frozen=True)
class Scrape:
    """The counters of a running server since it was started: a line of scrapes.jsonl."""

    at_s: float  # seconds since the first scrape
    tokens: int  # tokens of answers
    rounds: int  # rounds that drafted
    # Requests that have their first token, or that ended; None where they are not counted
    requests: int | None = None
    # drafted, accepted: tokens; None where they are not counted
    drafted: int | None = None
    accepted: int | None = None
    # Rounds that accepted at least 1, 2, ... tokens; empty where they are not counted
    accepted_at: tuple[int, ...] = ()
    k: int | None = None  # tokens that a round drafts; None where it is not reported


@dataclass(frozen=True)
class LoadTiming:
    """Requests that a server decoded side by side: a line of loads.jsonl.

    Every request is sent with its full budget in one load and with a part of it in another, so
    that the cost of its start can be separated from that of its rounds.
    """

    visit: int  # from 0; the loads of one visit were timed in immediate succession
    # model, draft, k, temperature: as in `RoundTiming`
    model: str
    draft: str
    k: int
    temperature: float
    # Name of the group of requests that are sent together: their prompt set, or a half of it where
    # the run has one set. The costs of iterations in one group predict the other groups.
    group: str
    # Requests in flight, each replaced by the next as it ends; None where they arrive at random
    concurrency: int | None
    rate: float | None  # arrivals per second, a Poisson process; None in a closed loop
    texts: tuple[str, ...]  # "prompt set/prompt" of each request, in the order of sending
    budgets: tuple[int, ...]  # tokens that each request may return
    returned: tuple[int, ...]  # tokens that each request returned, including the prefill's
    rounds: tuple[int | None, ...]  # of each request; None where the engine does not report them
    user_s: tuple[float, ...]  # from sending each to its whole answer, on the client's clock
    seconds: float  # of the whole load, on the run's clock; with a rate, on the client's
    # The part of each `user_s` after the first token, by the server's clock; None: not reported
    user_decode_s: tuple[float | None, ...] = ()
    # Requests that the server decodes side by side; None where it is not reported
    slots: int | None = None
    varying: Varying = ""  # how K changed during the load; `k` is then the largest
    # due_s, sent_s: where requests arrive at random, the time at which each was due and the time at
    # which it was sent, from the load's begin; empty in a closed loop
    due_s: tuple[float, ...] = ()
    sent_s: tuple[float, ...] = ()
    # The time of each prefill by the server's clock: the iteration that it was part of; None where
    # it is not reported, empty in older runs
    user_prefill_s: tuple[float | None, ...] = ()
    # Processors that other processes than the run's servers and client kept busy during the load,
    # on average; None where it is not known
    others: float | None = None
    # Seconds of a token that the plain server decoded alone, before and after the load, by its own
    # clock: a measure of the machine's speed. Empty where it is not reported, and in older runs.
    alone_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class LatencyRow:
    """One row of latency.csv, in the contract's column order.

    In rows of `kind` round, `tokens` is K, 0 for a plain token, and `temperature` is set.
    """

    role: str
    model: str
    kind: str
    tokens: int
    context_tokens: int
    batch: int
    median_ms: float
    p10_ms: float
    p90_ms: float
    samples: int
    floor_ms: float | None = None
    mbu: float | None = None
    bandwidth_source: Literal["measured", "datasheet"] | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class CopyBandwidth:
    """The measured bandwidth of copying a device's memory."""

    gb_s: float  # bytes read and written, 10^9 per second; the median of `samples` copies
    buffer_bytes: int  # of one buffer, source or copy
    samples: int


@dataclass(frozen=True)
class SkippedCell:
    """A context and batch whose forwards were not timed, and why."""

    context_tokens: int
    batch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One row of results.csv, in the contract's column order. None is written as an empty field.

    `speedup` of a measured row is baseline ms_per_token / this row's, over the same prompts; of a
    theory row it is the formula's prediction from this run's step times. `engine` is "own" for the
    harness's loop, else the server's name; `concurrency` is the number of requests side by side.
    """

    model: str | None = None
    draft: str | None = None
    prompt_set: str | None = None
    temperature: float | None = None
    k: int
    source: Source
    status: Literal["complete", "failed", "partial"] = "complete"
    error: str | None = None
    prompts: int | None = None
    new_tokens: int | None = None
    rounds: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    rejected: float | None = None
    acceptance_rate: float | None = None
    alpha: float | None = None
    alpha_lo: float | None = None
    alpha_hi: float | None = None
    mean_acceptance_length: float | None = None
    tokens_per_round: float | None = None
    rule: Rule | None = None
    ms_per_token: float | None = None
    ms_per_token_p50: float | None = None
    ms_per_token_p90: float | None = None
    tokens_per_second: float | None = None
    ttft_ms: float | None = None
    speedup: float | None = None
    speedup_lo: float | None = None
    speedup_hi: float | None = None
    request_speedup: float | None = None
    breakeven_alpha: float | None = None
    peak_memory_bytes: int | None = None
    engine: str = "own"
    concurrency: int = 1


ServerClock = Literal["engine", "cpu"]
# The clock of the harness's loop: elapsed seconds, or the processor time of this process
LoopClock = Literal["wall", "cpu"]
# The length of the report that a command prints: the answer, with "tables" also the tables that it
# is read from, with True every table
Verbose = bool | Literal["tables"]


@dataclass(frozen=True)
class ServerCommand:
    """The command that starts a server, as it was measured and in production."""

    k: int  # tokens that it drafts per round; 0: plain decoding
    slots: int  # requests that it decodes side by side at most
    line: str  # the measured command for a shell, without host and port
    # The command without the flags that only the measurement needed: context, slots, share of the
    # device's memory, threads and counters
    production: str
    context_tokens: int | None = None  # of each request at most
    # Bytes of the files that it reads; None where these are the checkpoints
    weights_bytes: int | None = None


@dataclass(frozen=True)
class ServerMemory:
    """The memory settings of a server on a card: an entry of the manifest's `server_memory`."""

    # k, slots: as in `ServerCommand`
    k: int
    slots: int
    # free, total, weights, servers: the card before the start, see `engines.http_server.CardMemory`
    free: int
    total: int
    weights: int
    servers: int
    # The flags that follow from the card's memory, with their values
    flags: Mapping[str, str]
    rejects: bool = False  # whether the server rejects every draft; it is then not in `commands`


@dataclass(frozen=True)
class ServingEngine:
    """The engine of a server run: the manifest's `engine`."""

    name: str  # a name of `engine=`
    version: str  # as the engine reports it
    rule: Rule | None = None  # its acceptance rule; None where it cannot be known
    # first_position, shortens_last_draft: how it counts rounds; None where it counts none
    # (`harness.engine_facts.spec`)
    first_position: int | None = None
    shortens_last_draft: bool | None = None
    # The number of likeliest tokens among which a sampled draft draws
    draft_top_k: int | None = None
    # The clock of the stored seconds: the engine's, or the processor time of its process
    clock: ServerClock = "engine"
    # Whether its round times come from servers that reject every draft (synthetic acceptance)
    synthetic: bool = False
    started: bool = False  # whether the run started its servers; else it attached to them
    # Host and port of each server that the run attached to, the plain one first
    urls: tuple[str, ...] = ()
    # The commands that started its servers; empty where the run attached to them
    commands: tuple[ServerCommand, ...] = ()
    # Whether a sampled draft uses the request's temperature but not its other sampling parameters
    draft_by_temperature: bool = False
    # The dtype of both models, where the engine was given one for both; else None
    dtype: str | None = None
    # The commands of the servers whose K changes while they serve
    varying: dict[Varying, ServerCommand] = field(default_factory=dict[Varying, ServerCommand])

    def started_with(self, memory: Sequence[ServerMemory]) -> "ServingEngine":
        """The engine with commands that have the flags of `memory`.

        The engine is stored when the first servers answer, and the flags for a card's memory are
        known only when each server starts.
        """
        flags = {(each.k, each.slots): each.flags for each in memory if not each.rejects}
        commands = tuple(
            replace(each, line=" ".join((each.line, *chain(*flags[each.k, each.slots].items()))))
            if (each.k, each.slots) in flags
            else each
            for each in self.commands
        )
        return replace(self, commands=commands)


# How many tokens a server drafts: a fixed number, or a number by the active requests
PlanPolicy = Literal["fixed", "by_load"]


@dataclass(frozen=True)
class SimulatedChoice:
    """The simulated latencies of a plan's choice: percentiles of (TPOT, TTFT), in seconds."""

    draft: str | None  # None: plain decoding
    policy: PlanPolicy
    k: int  # the most that a round drafts
    ks: tuple[int, ...]  # of `by_load`: K by active requests, from 1 on; empty for one K
    on_engine: bool  # whether the engine has this policy with this kind of draft
    # Requests per second that one card serves while all slots are taken; also without each part of
    # the seeds, and with each group of the prompts replaced (for intervals)
    capacity: float
    capacity_without_seeds: tuple[float, ...]
    capacity_without_prompts: tuple[float, ...]
    rates: tuple[float, ...]  # [rate] requests per second, ascending
    waits_s: tuple[Sequence[float], ...]  # [rate]
    without_seeds_s: tuple[Sequence[Sequence[float]], ...]  # [rate][part]
    # [rate][group]; empty at rates at which no prompts were replaced
    without_prompts_s: tuple[Sequence[Sequence[float]], ...]


# The driver's reasons for lowered clocks: heat (a slowdown by hardware or by software), a power
# brake of the board, another slowdown by hardware, the power limit
ThrottleReason = Literal["hw_thermal", "sw_thermal", "power_brake", "hw_slowdown", "power_cap"]


@dataclass(frozen=True)
class CardState:
    """The state of a card at one moment; None for values that its driver does not report."""

    sm_mhz: float | None = None  # the present clock
    max_sm_mhz: float | None = None  # the highest possible clock
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None  # the limit unless somebody changes it
    temperature_c: float | None = None  # of the chip
    throttled: tuple[ThrottleReason, ...] | None = None  # the reasons for lowered clocks
    idle: bool | None = None  # whether the clocks are low because nothing runs


@dataclass(frozen=True)
class Spread:
    """The lowest, the median and the highest of some readings."""

    lowest: float
    median: float
    highest: float


@dataclass(frozen=True)
class CardReadings:
    """The readings of a card while a run measured: an entry of the manifest's `card_readings`."""

    samples: int  # number of readings
    # Readings while the card was not idle. The values below are of these, or of all readings where
    # the card was always idle.
    busy: int
    # As in `CardState`; of max_sm_mhz and the two power limits the lowest
    sm_mhz: Spread | None = None
    temperature_c: Spread | None = None
    max_sm_mhz: float | None = None
    power_limit_w: float | None = None
    # Readings with each reason; None where the driver does not report them
    throttled: Mapping[ThrottleReason, int] | None = None
    capped_sm_mhz: float | None = None  # the median SM clock while the power limit lowered it
    default_power_limit_w: float | None = None
    device: str | None = None  # the card


@dataclass(frozen=True)
class Failure:
    """A cell, or a draft, that failed, with its error."""

    where: str  # the cell or draft as text
    error: str
    draft: str | None = None  # its name, where a whole draft failed


# `server_rounds`: rounds that reject every draft; `server_starts`: requests for a part of the
# budget; `server_loads`: requests side by side
Measurement = Literal[
    "plain_tokens",
    "rounds",
    "draft_scores",
    "returned_texts",
    "distribution_test",
    "server_rounds",
    "server_starts",
    "server_loads",
]


@dataclass(frozen=True)
class NotMeasured:
    """A measurement that failed while the run went on: an entry of the manifest's `not_measured`.

    Two entries of the same measurement are equal, whatever their errors.
    """

    what: Measurement
    error: str = field(default="", compare=False)  # in one line
    # draft, k, temperature, rejects, varying: of the measurement, where they apply; `rejects` as in
    # `ServerMemory`, `varying` as in `LoadTiming`
    draft: str | None = None
    k: int | None = None
    temperature: float | None = None
    rejects: bool = False
    varying: Varying = ""


@dataclass(frozen=True)
class MachineLoad:
    """The processors that other work kept busy while a run measured, and their number in all."""

    load: float
    processors: int
