"""Facts of an engine, in one record: acceptance rules, drafts, counting and serving lines.

A module next to this one has the record of each engine, and `harness.serving.engines` lists them.
Configuration, commands, analysis, reporting and the rented machines read them there. How a server
is started and asked is in the module of `harness.engines` that the record names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.records import Rule, Varying
from harness.serving.drafts import DRAFTS, DraftKind
from harness.serving.round_counting import Counting
from harness.summary import SamplingFacts

# Of every engine that serves DFlash drafters
BLOCK = (
    "It fills a block of K + 1 positions; a run fills the drafter's whole block, or draft.block= of"
    " them, so give draft.block=K+1 to draft the same."
)
# Of a block whose first position drafts too
ANCHORED_BLOCK = (
    "It fills a block of K positions; a run fills the drafter's whole block, or draft.block= of"
    " them, so give draft.block=K to draft the same."
)


@dataclass(frozen=True)
class PairToServe:
    """The pair and settings that a serving line is written for."""

    target: str  # an id or a folder, and so is the draft
    draft: str
    k: int
    temperature: float
    sampling: SamplingFacts
    rule: Rule | None = None  # by which its server is to accept; None: the engine's default
    synthetic: bool = False  # whether the run's acceptance was set, and not measured
    kind: DraftKind = "model"
    layers: int | None = None  # of an early exit

    @property
    def weights(self) -> str | None:
        """The draft's checkpoint; None where it has none of its own."""
        own = DRAFTS[self.kind].has_own_checkpoint(self.draft, self.target)
        return self.draft if own else None


@dataclass(frozen=True)
class ServingLine:
    """One engine's line for one kind of draft."""

    line: Callable[[PairToServe], str]  # the text to paste
    note: str = ""  # what to know of it, a whole sentence; "" for nothing
    # Notes that depend on what is served
    more: Callable[[PairToServe], Sequence[str]] = lambda _: ()


@dataclass(frozen=True)
class Completions:
    """Differences of requests to a server's `/v1/completions` from OpenAI's."""

    samplers: tuple[str, ...] = ()  # sampling parameters besides temperature and top_p
    k: str | None = None  # the field that asks for a K, where a request may
    # Whether it completes with the model that it was started with unless it is told another, and
    # lists others besides
    one_model: bool = False


@dataclass(frozen=True)
class VaryingK:
    """A way in which an engine changes K while it serves.

    Attributes:
        flag: that turns it on.
        kinds: of draft, those that it does so with.
        takes: these in words.
        largest_k: that it may draft; None where that is the largest it is told.
    """

    flag: str
    kinds: frozenset[DraftKind]
    takes: str
    largest_k: int | None = None


@dataclass(frozen=True, eq=False)
class EngineSpec:
    """An engine. Its name is what `engine=` and stored runs say, its title what readers know."""

    name: str
    title: str
    # By which it can accept, its default first; empty where that cannot be known
    rules: tuple[Rule, ...] = ()
    # The engine that this one is with another setting: a report has a line and a row for it, and it
    # is measured as that engine with `decode.rule`
    variant_of: str | None = None
    # As headlines, rows of the grid and leaderboards name it, where not by its title
    phrase: str = ""
    row_name: str = ""
    ranked_as: str = ""

    # ---- what it accepts and counts --------------------------------------------------------------

    # None where it counts no rounds
    counting: Counting | None = None
    # Whether prompts are in one iteration with requests that decode
    mixes_prompts: bool = False
    # Whether a draft that is sampled takes the request's temperature alone, and no top_p, min_p or
    # penalty of it; and among how many of its likeliest tokens it draws, None: all
    draft_by_temperature: bool = False
    draft_top_k: int | None = None
    # Whether a draft model also reads every batch that the target verifies, in one forward
    draft_reads_verified: bool = False
    # Kinds of draft of which it proposes token for token what a run here does, so that the run's
    # speedup holds
    alike: frozenset[DraftKind] = frozenset()
    stops_early: bool = False  # whether it can stop drafting at a threshold, as our loop can
    # Builds or platforms that do not accept by its rule above temperature 0, in words; "": none
    unknown_above_zero: str = ""

    # ---- what to paste ---------------------------------------------------------------------------

    version: str = ""  # whose syntax the lines have
    plain: Callable[[PairToServe], str] = lambda _: ""  # of the target alone
    # By the kinds of draft that it has; no report has a line or a row for an engine without
    lines: Mapping[DraftKind, ServingLine] = field(default_factory=dict[DraftKind, ServingLine])
    line_title: str = ""  # of a variant: what its lines' title says besides
    language: str = "sh"
    sampling_in_requests: bool = True  # whether requests say how to sample, and not the line
    reads_gguf: bool = False
    # A line that imposes these rates of acceptance on random weights
    check_line: Callable[[PairToServe, Sequence[float]], str] | None = None
    # One server whose K follows the load, of a pair at the largest K; by the measured command of
    # each K, K by the least load, and the largest load. None where a server has one K
    schedule: Callable[[PairToServe, Mapping[int, str], Mapping[int, int], int], str] | None = None
    # What changes the K of one server, by who decides it: a schedule, or the engine itself
    varying: Mapping[Varying, VaryingK] = field(default_factory=dict[Varying, VaryingK])
    # What to know of K by load, by K by the least load and the largest load
    schedule_notes: Callable[[Mapping[int, int], int], Sequence[str]] = lambda *_: ()
    # Flags for context, slots and the like, which a measurement sets for its own requests, in words
    in_production: str = ""
    slots_flag: str | None = None  # what gives a server more slots
    # Without which neighbouring slots alone share a pass; None where all active requests do
    unified_flag: str | None = None
    # What sets the type of the target's cache and of the draft's, f16 without it; None: the dtype
    cache_flags: tuple[str, str] | None = None

    # ---- how `server` measures it ----------------------------------------------------------------

    # The module whose `adapter` starts and asks it; None where it is not measured
    client: str | None = None
    starts: bool = True  # whether it starts the servers; else they run already
    drafts: tuple[DraftKind, ...] = ("model",)  # kinds that are measured
    completions: Completions = Completions()  # of the client `harness.engines.openai`
    # Where a server that is started can be told which drafts to accept
    synthetic: Literal["everywhere", "on CUDA", "nowhere"] = "nowhere"
    # Whether it refuses a K above a checkpoint's number of MTP layers that is no multiple of it
    mtp_multiples: bool = False
    # Whether its plain server lists the log-probabilities of the likeliest tokens by their ids
    lists_logprobs: bool = False
    k_per_request: bool = False  # whether one address serves every K
    tries_threads: bool = False  # whether several numbers of threads are tried, where none is asked
    one_dtype: bool = False  # whether servers are told one dtype, and hold both models in it
    alone: bool = False  # whether a server takes all of its device, so that one runs at a time
    # What tells a server its share of a card's memory; None where it takes what it needs
    memory_flag: str | None = None
    rented: str = ""  # what pip installs in its image on rented machines; "" where it has none
    # A Python wheel of its server, whose name the version then begins with; "": there is none
    wheel: str = ""

    @property
    def rule(self) -> Rule | None:
        """The rule by which it accepts by default; None where that cannot be known."""
        return self.rules[0] if self.rules else None

    @property
    def in_headlines(self) -> str:
        """Its name in a sentence."""
        return self.phrase or self.title

    @property
    def in_rows(self) -> str:
        """Its name among others."""
        return self.row_name or self.title

    def has_k_by_load(self, kind: DraftKind) -> bool:
        """True where one server drafts by a schedule of K by load, with drafts of a kind."""
        schedule = self.varying.get("schedule")
        return schedule is not None and kind in schedule.kinds


def changes(k_by_load: Mapping[int, int]) -> dict[int, int]:
    """K by the least load from which it holds, each change of K once; ascending."""
    merged: dict[int, int] = {}
    for load, k in sorted(k_by_load.items()):
        if not merged or [*merged.values()][-1] != k:
            merged[load] = k
    return merged
