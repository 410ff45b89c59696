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

if TYPE_CHECKING:  # every command's --help imports this module, and must not wait for numpy
    import numpy as np
    from numpy.typing import NDArray

SCHEMA_VERSION = 2
# Of text, to estimate a length before any tokenizer is loaded
BYTES_PER_TOKEN = 4

Outcome = Literal["rejected", "bonus", "cut", "step"]
Rule = Literal["ratio", "exact_match", "greedy_draft", "block"]
# "not_measured": of an engine whose rounds were not timed
Decision = Literal["speculate", "does_not_pay", "undecided", "not_measured"]
Source = Literal["measured", "replayed", "theory"]
StopReason = Literal["eos", "stop_string", "budget"]
# The name of our own loop among the engines
OWN_LOOP = "own"
# Tokens that a look-up matches at most
LONGEST_NGRAM = 2
# Tokens that a round drafts at most, on any engine
MOST_K = 1024
# The temperature at which the likeliest token is taken
GREEDY = 0.0
# Share of all processors that other work may take without being said, or measured around
BUSY = 0.1
RULES: tuple[Rule, ...] = get_args(Rule)

# How a speculative greedy text compares with plain decoding's, in words
GREEDY_RESULTS = {"PASS": "equal", "TIE": "tie", "FAIL": "different", "OPEN": "not judged"}

Record = TypeVar("Record")
Key = TypeVar("Key", bound=Hashable)


def where(records: Iterable[Record], **wanted: object) -> list[Record]:
    """The records whose fields have these values."""
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
    """The first place at which two texts differ, or one has ended; None where they are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = None if len(one) == len(other) else min(len(one), len(other))
    return next((place for place, (a, b) in pairs if a != b), shorter)


class UserError(Exception):
    """Something the user can fix; one line that names the key or file and what to do.

    Several arguments are several such things.
    """

    @property
    def lines(self) -> tuple[str, ...]:
        """One for each."""
        return tuple(map(str, self.args))

    def __str__(self) -> str:
        return "; ".join(self.lines)


class NotInstalledError(UserError):
    """An engine that is not on this machine: a plan, for another machine, can be made without."""


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
        who: whose logits: "target" or "draft" in the loop, the model's name where it is known.
        position: in the text, from 0.
    """

    def __init__(self, who: str, position: int, text: str = "") -> None:
        """Name the model, the position and, where it is known, the text."""
        where = f"position {position}" + (f" of {text}" if text else "")
        super().__init__(
            f"{who}: its logits are not finite at {where}; check its weights or its dtype"
        )
        self.who, self.position = who, position


class Round(NamedTuple):
    """The tokens of one turn of a decoding loop."""

    # The emitted token ids, in order; never empty, never past end-of-text or the budget
    tokens: tuple[int, ...]
    accepted: int  # how many of them, from the first on, are the draft's
    drafted: int  # how many the draft proposed (those cut off included); 0 in plain decoding
    outcome: Outcome  # how the round ended; "step" is a plain target step without a draft

    @property
    def from_draft(self) -> tuple[bool, ...]:
        """For each emitted token, whether the draft proposed it."""
        return tuple(index < self.accepted for index in range(len(self.tokens)))


@dataclass(frozen=True)
class Prompt:
    """One prompt of a prompt set: a conversation, or its beginning up to the turn to answer."""

    prompt_set: str  # the set it belongs to (a shipped set, a file's stem, or its category field)
    id: str  # unique within its set
    # The user's turns, at least one; the target answers each, after those before it
    turns: tuple[str, ...]
    category: str | None = None  # a finer label inside the set, or None
    # answers[i] follows turns[i]; None, or absent, where the target must generate it
    answers: tuple[str | None, ...] = ()
    system: str | None = None  # the system message before the first turn, or None
    thinking: bool = False  # whether the chat template is asked for thinking mode
    first_turn: int = 1  # the first turn that is answered; those before it are context
    # The tools that it offers, as JSON text in OpenAI's form, for the chat template; or None
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
    """A log of requests of which a sample is generated."""

    # requests, sampled: of the log that can be generated from, and of these in the sample
    requests: int
    sampled: int
    unusable: int  # lines of the log that cannot
    # mean_bytes, sampled_bytes: of a prompt, in the log and by the weighted sample
    mean_bytes: float
    sampled_bytes: float
    # From the first time stamp to the last; None where requests have none
    span_s: float | None = None


def conversation_of(prompt: str, turn: int) -> str:
    """The id of the conversation that a turn's prompt belongs to, see `Prompt.up_to`."""
    return prompt.removesuffix(f"/{turn}") if turn > 1 else prompt


@dataclass(frozen=True, order=True)
class TextKey:
    """Which of a run's texts: one completion of the target for one prompt."""

    prompt_set: str
    prompt: str
    repetition: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.prompt_set}/{self.prompt}/{self.repetition}/{self.temperature}"


@dataclass(frozen=True, order=True)
class Cell:
    """A cell, which results are grouped by; k = 0 is plain decoding, which has no draft."""

    prompt_set: str
    temperature: float
    k: int
    draft: str | None = None


@dataclass(frozen=True)
class Trial:
    """One generation: a line of trials.jsonl. All counts are of emitted tokens only."""

    cell: str  # hash of everything that determines this generation; resume looks for it
    # prompt_set, prompt: which prompt (its id)
    prompt_set: str
    prompt: str
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
    # room[j - 1] = rounds that began with at least j text positions left, j = 1..K; the
    # denominators of acceptance_by_position
    room: tuple[int, ...] | None = None
    # prefill_s, draft_prefill_s: target's and draft's prefill, each synchronised
    prefill_s: float | None = None
    draft_prefill_s: float | None = None
    # From the end of every prefill to the first emitted token (or bundle)
    first_token_s: float | None = None
    decode_s: float | None = None  # from the end of every prefill to the last token
    stop_reason: StopReason | None = None
    peak_memory_bytes: int | None = None
    # The emitted token ids; on a server all that it returned, those of its prefill too, which
    # belong to no round and are in no other count
    tokens: tuple[int, ...] | None = None
    from_draft: tuple[int, ...] | None = None  # for each of them 1 if the draft proposed it, else 0
    turn: int = 1  # number of the turn that it answers; 1 for a prompt of one turn
    # Of the tokens, as a server told them with its completion at temperature 1; None where none was
    # asked
    logprobs: tuple[float, ...] | None = None
    # A server's request for one token, which was taken off this request to give decode_s; None
    # where the clock tells decoding apart, and in older runs
    one_token_s: float | None = None
    # Of a server's request, from sending it to its whole answer on the client's clock, whatever the
    # run's; None of other runs, and of older ones
    user_s: float | None = None
    # Of that, after the first token: by the server's clock where it tells, else what a request for
    # one token did not take
    user_decode_s: float | None = None

    @property
    def key(self) -> TextKey:
        """Which of the target's texts this is."""
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
    """One text of the target as one draft sees it: all that replay needs. n text positions.

    What a model drafts at a position depends on the text before it alone: its scores are [n]. What
    a head, a block drafter or an n-gram drafts depends on where the round starts as well: then the
    scores are [n, K], by start and offset from it, for the text position start + offset. Beyond the
    text they are NaN, or False.
    """

    # draft, draft_temperature: whose probabilities; a draft temperature other than the target's is
    # the free knob of the `ratio` rule
    draft: str
    draft_temperature: float
    # prompt_set, prompt, category, repetition: which prompt the text answers
    prompt_set: str
    prompt: str
    category: str | None
    repetition: int
    # temperature, top_k, top_p: the distribution the text was drawn from; each is its own text
    temperature: float
    top_k: int | None
    top_p: float | None
    prompt_tokens: int  # length of the prompt
    stop_reason: StopReason  # how the text ended
    tokens: "NDArray[np.int64]"  # [n] the target's token ids
    target_logprob: "NDArray[np.float64]"  # [n] of the token
    # [n] or [n, K] of the token under the draft, sampled like the target; may be -inf
    draft_logprob: "NDArray[np.float64]"
    # [n] or [n, K] whether the token is the draft's most likely one
    draft_is_argmax: "NDArray[np.bool_]"
    # [n] tokens proposed from each start, at most K; None where it is K from all
    proposed: "NDArray[np.int64] | None" = None
    # Whether proposed tokens are looked up rather than drawn from a distribution; one is then
    # accepted exactly where it is the text's, under every rule
    chosen: bool = False
    turn: int = 1  # which turn of its conversation the prompt ends with
    k: int = 0  # of the server that returned the text; 0 where the target decoded it plainly

    @property
    def depth(self) -> int | None:
        """The largest K of scores by start and offset; None where they serve every K."""
        return self.draft_logprob.shape[1] if self.draft_logprob.ndim == 2 else None

    @property
    def key(self) -> TextKey:
        """Which of the target's texts this is."""
        return TextKey(self.prompt_set, self.prompt, self.repetition, self.temperature)

    @property
    def conversation(self) -> str:
        """Id of the conversation that the prompt is a turn of: the unit of all statistics."""
        return conversation_of(self.prompt, self.turn)


@dataclass(frozen=True, eq=False)
class DraftConfidence:
    """Confidences of a draft in what it drafts where it leaves one of the target's texts."""

    # draft, prompt_set, prompt, repetition, temperature: whose, on which text
    draft: str
    prompt_set: str
    prompt: str
    repetition: int
    temperature: float
    # Of a draft whose scores are by position, [n + 1, K]: row i is of a drafted token at text
    # position i that is not the text's, the draft's probability of it, then of each that it drafts
    # after it. Row n is of what it drafts beyond the text's end. Where the draft chooses its
    # tokens, entry 0 is that of its choice in every row. NaN where the draft cannot leave the text.
    # Of a draft whose scores are by start, [n, K]: row s is of one round from start s, drawn given
    # the text. 0 where a draft would not have drafted so far at any threshold.
    values: "NDArray[np.float64]"

    @property
    def key(self) -> TextKey:
        """Which of the target's texts this is."""
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
    # after the other; only times taken side by side make an honest ratio
    beside: str | None = None


@dataclass(frozen=True)
class RoundTiming:
    """Consecutive rounds of the running loop, timed together: a line of rounds.jsonl.

    They belong to no measured cell: their prompts are made for them, so that a prediction from
    their times can be held against the cells.
    """

    # From 0; timings of one draft and visit were taken within moments of one another, so that their
    # ratios are free of the machine's drift
    visit: int
    # model, draft: names; the draft is that of the pair, also where k is 0
    model: str
    draft: str
    k: int  # tokens proposed in every round; 0 is plain decoding
    temperature: float  # of target and draft
    context_tokens: int  # of the prompt
    batch: int  # sequences side by side
    rounds: int  # how many, at least 4 of our own loop; the tokens where k is 0
    new_tokens: int  # emitted by them
    seconds: float  # from the end of every prefill to the last round's end
    # Tokens proposed; None where every round proposes k. A request of a server that drafts fewer
    # near its budget has two budgets, so that its start can be told from its rounds.
    drafted: int | None = None
    one_token_s: float | None = None  # as in `Trial`
    # Of all processor time while its visit lasted, what was neither idle nor this process's: other
    # processes, and what the hypervisor took. None where that was not read.
    other_share: float | None = None

    @property
    def disturbed(self) -> bool:
        """True where other work took so much of the machine that the visit may be off."""
        return (self.other_share or 0.0) > BUSY


# Between a prompt set's name and 1 or 2: the group of a load where there is one set alone
HALF = ", half "


def set_of(group: str) -> str:
    """The prompt set that a group of requests is, or is a half of."""
    return group.rpartition(HALF)[0] or group


# How a server's K changes while it serves: not, by the number of requests, as the engine decides
Varying = Literal["", "schedule", "adaptive"]


@dataclass(frozen=True)
class Scrape:
    """The counters of a running server since it was started: a line of scrapes.jsonl."""

    at_s: float  # seconds since the first scrape
    tokens: int  # of answers
    rounds: int  # that drafted
    # Those that have their first token, or that ended; None where they are not counted
    requests: int | None = None
    # drafted, accepted: tokens; None likewise
    drafted: int | None = None
    accepted: int | None = None
    # Rounds that accepted at least 1, 2, ... tokens; empty likewise
    accepted_at: tuple[int, ...] = ()
    k: int | None = None  # tokens that a round drafts; None where it does not tell


@dataclass(frozen=True)
class LoadTiming:
    """Requests that a server decoded side by side: a line of loads.jsonl.

    Every request is sent with its full budget in one load and with a part of it in another, so
    that what a request costs besides its rounds can be told apart.
    """

    visit: int  # from 0; loads of one visit were taken within moments of one another
    # model, draft, k, temperature: as in `RoundTiming`
    model: str
    draft: str
    k: int
    temperature: float
    # Name of the requests that are sent together: their prompt set's, or a half of it where there
    # is one set alone. What iterations cost in one group predicts the others.
    group: str
    # Requests in flight, each followed by the next as it ends; None where they arrive at random
    concurrency: int | None
    rate: float | None  # arrivals per second, a Poisson process; None in a closed loop
    texts: tuple[str, ...]  # "prompt set/prompt" of each request, in the order of sending
    budgets: tuple[int, ...]  # tokens that each may return
    returned: tuple[int, ...]  # tokens that each returned, the prefill's among them
    rounds: tuple[int | None, ...]  # of each; None where the engine does not tell
    user_s: tuple[float, ...]  # of each, from sending it to its whole answer, on the client's clock
    seconds: float  # of the whole load, on the run's clock; with a rate, on the client's
    # Of each, what of `user_s` came after its first token, by the server's clock; None where it
    # does not tell, empty in older runs
    user_decode_s: tuple[float | None, ...] = ()
    # Requests that the server decodes side by side; None where it does not tell
    slots: int | None = None
    varying: Varying = ""  # how its K changed meanwhile; `k` is the largest of them then
    # due_s, sent_s: of each that arrived at random, when it was to be sent and when it was, after
    # the load's begin; empty in a closed loop and in older runs
    due_s: tuple[float, ...] = ()
    sent_s: tuple[float, ...] = ()
    # Of each, the time of its prefill by the server's clock, the iteration that it was in; None
    # where the server does not tell, empty in older runs
    user_prefill_s: tuple[float | None, ...] = ()
    # Processors that neither the run's servers nor the client kept busy meanwhile, on average; None
    # where that is not known
    others: float | None = None
    # Of a token that the plain server decoded alone, before the load and after it, by its own
    # clock: how fast the machine was. Empty where it does not tell, in older runs.
    alone_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class LatencyRow:
    """One row of latency.csv, in the contract's column order.

    Of `kind` round, `tokens` is K, 0 for a plain token, and `temperature` is set.
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


# The part of a round in which a recorded verify and accept are one launch
VERIFY_AND_ACCEPT = "verify + accept"


@dataclass(frozen=True)
class PartTiming:
    """Raw samples of a part of a round, or of a whole round of the real loop: rows of parts.csv."""

    k: int  # num_draft_tokens; 0 for plain decoding
    # draft, verify, accept, "verify + accept" (recorded as one graph), host, rewind; or round, a
    # whole turn of the loop; or, at k = 0, step: a bare target forward
    part: str
    samples_s: tuple[float, ...]  # one duration per round, seconds
    tokens: tuple[int, ...] = ()  # of a round, the tokens emitted by each; else empty


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One row of results.csv, in the contract's column order. None is written as an empty field.

    `speedup` of a measured row is baseline ms_per_token / this row's, over the same prompts;
    of a theory row it is what the formula predicts from this run's step times. `engine` is "own"
    for our own loop, else the server's name; `concurrency` is how many requests ran side by side.
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
# Of our own loop: elapsed seconds, or the processor time of this process
LoopClock = Literal["wall", "cpu"]
# What is printed at the end of a command: the answer, the tables that it is read from too, or all
Verbose = bool | Literal["tables"]


@dataclass(frozen=True)
class ServerCommand:
    """The command that starts a server, as it was measured and in production."""

    k: int  # tokens that it drafts per round; 0 decodes plainly
    slots: int  # requests that it has room for side by side
    line: str  # as it was measured, for a shell, without where it listens
    # The same without what only the measurement needed: its context and slots, its share of the
    # device, threads and counters. None in runs of earlier versions.
    production: str | None = None
    context_tokens: int | None = None  # that each request has room for
    # Of the files that it reads; None where they are the checkpoints
    weights_bytes: int | None = None


@dataclass(frozen=True)
class ServerMemory:
    """The memory settings of a server on a card: an entry of the manifest's `server_memory`."""

    # k, slots: as of `ServerCommand`
    k: int
    slots: int
    # free, total, weights, servers: the card just before, see `engines.http_server.CardMemory`
    free: int
    total: int
    weights: int
    servers: int
    # That follow from it, with their values; not known before the server starts
    flags: Mapping[str, str]
    rejects: bool = False  # whether it rejects every draft, so that it is none of the commands


@dataclass(frozen=True)
class ServingEngine:
    """The engine of a server run: the manifest's `engine`."""

    name: str  # as `engine=` has it
    version: str  # as the engine reports it
    rule: Rule | None = None  # by which it accepts drafted tokens; None where it cannot be known
    # first_position, shortens_last_draft: how it counts (`harness.serving.round_counting`); None
    # where it counts no rounds
    first_position: int | None = None
    shortens_last_draft: bool | None = None
    # A draft that is sampled draws among so many of its likeliest tokens
    draft_top_k: int | None = None
    # Whose seconds the run stores: the engine's, or its process's processor time
    clock: ServerClock = "engine"
    # Whether its round times come from servers that are told to reject every draft
    synthetic: bool = False
    started: bool = False  # whether the run started its servers; else it attached to them
    # Host and port of each server that was attached to, the plain one first
    urls: tuple[str, ...] = ()
    # That its servers were started with; empty where the run attached to them
    commands: tuple[ServerCommand, ...] = ()
    # Whether a draft that is sampled takes the request's temperature alone; runs of an earlier
    # version scored it with all of its sampling parameters
    draft_by_temperature: bool = False
    # Of both models, on an engine that serves them in one and was told which; else None
    dtype: str | None = None
    # The commands of the servers whose K changes while they serve, by how it does
    varying: dict[Varying, ServerCommand] = field(default_factory=dict[Varying, ServerCommand])

    def started_with(self, memory: Sequence[ServerMemory]) -> "ServingEngine":
        """The engine with the flags of each command that its server was started with last.

        The engine is noted when the first servers answer, and a share of a card is known only when
        a server starts.
        """
        flags = {(each.k, each.slots): each.flags for each in memory if not each.rejects}
        commands = tuple(
            replace(each, line=" ".join((each.line, *chain(*flags[each.k, each.slots].items()))))
            if (each.k, each.slots) in flags
            else each
            for each in self.commands
        )
        return replace(self, commands=commands)


# How many tokens a server drafts: a fixed number, or one by how many requests are active
PlanPolicy = Literal["fixed", "by_load"]


@dataclass(frozen=True)
class SimulatedChoice:
    """Waits of users with a choice of a plan: percentiles of (TPOT, TTFT), in seconds."""

    draft: str | None  # None: plain decoding
    policy: PlanPolicy
    k: int  # the most that a round drafts
    ks: tuple[int, ...]  # of `by_load`: K by how many are active, from 1 on; empty of one K
    on_engine: bool  # whether the engine has the policy, with drafts of this kind
    # Requests per second that one card serves while all slots are taken; without each part of the
    # seeds, and with each group of the prompts replaced
    capacity: float
    capacity_without_seeds: tuple[float, ...]
    capacity_without_prompts: tuple[float, ...]
    rates: tuple[float, ...]  # [rate] requests per second, ascending
    waits_s: tuple[Sequence[float], ...]  # [rate]
    without_seeds_s: tuple[Sequence[Sequence[float]], ...]  # [rate][part]
    # [rate][group]; empty at rates at which no prompts were replaced
    without_prompts_s: tuple[Sequence[Sequence[float]], ...]


# Why a card's clocks are lower than they could be, as its driver says: heat (the hardware's or the
# software's slowdown), a power brake of the board, another slowdown of it, its power limit
ThrottleReason = Literal["hw_thermal", "sw_thermal", "power_brake", "hw_slowdown", "power_cap"]


@dataclass(frozen=True)
class CardState:
    """A card at one moment; None for what its driver does not tell."""

    # sm_mhz, memory_mhz: clocks now
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    # max_sm_mhz, max_memory_mhz: the highest that they can be
    max_sm_mhz: float | None = None
    max_memory_mhz: float | None = None
    # power_w, power_limit_w: drawn now, and at most
    power_w: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None  # at most, unless somebody changes the limit
    temperature_c: float | None = None  # of the chip
    throttled: tuple[ThrottleReason, ...] | None = None  # what lowers its clocks now
    idle: bool | None = None  # whether its clocks are low because nothing runs


@dataclass(frozen=True)
class Spread:
    """The lowest, the median and the highest of some readings."""

    lowest: float
    median: float
    highest: float


@dataclass(frozen=True)
class CardReadings:
    """Readings of a card while a run measured: an entry of the manifest's `card_readings`."""

    samples: int  # moments at which it was read
    # Of them, those at which it was not idle; what follows is of these, or of all where it always
    # was
    busy: int
    # As of `CardState`; of max_sm_mhz, max_memory_mhz and the two power limits the lowest
    sm_mhz: Spread | None = None
    memory_mhz: Spread | None = None
    power_w: Spread | None = None
    temperature_c: Spread | None = None
    max_sm_mhz: float | None = None
    max_memory_mhz: float | None = None
    power_limit_w: float | None = None
    # Samples at which each reason held; None where the driver does not tell
    throttled: Mapping[ThrottleReason, int] | None = None
    capped_sm_mhz: float | None = None  # the median SM clock while the power limit held it down
    default_power_limit_w: float | None = None
    device: str | None = None  # which card; None in runs of a version that read one alone


@dataclass(frozen=True)
class Failure:
    """A cell, or a draft, that could not be finished, and why."""

    where: str  # what it is, in words
    error: str
    draft: str | None = None  # its name, where a whole draft broke down


# `server_*` of servers: rounds that reject every draft, requests for a part of the budget, and
# requests side by side
Measurement = Literal[
    "plain_tokens",
    "rounds",
    "round_parts",
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

    Two are equal that are of the same measurement, whatever their errors.
    """

    what: Measurement
    error: str = field(default="", compare=False)  # in one line
    # draft, k, temperature, rejects, varying: of which, where it has them; `rejects` as of
    # `ServerMemory`, `varying` as of `LoadTiming`
    draft: str | None = None
    k: int | None = None
    temperature: float | None = None
    rejects: bool = False
    varying: Varying = ""


@dataclass(frozen=True)
class MachineLoad:
    """Processors that other work kept busy while a run measured, on average, and all there are."""

    load: float
    processors: int
