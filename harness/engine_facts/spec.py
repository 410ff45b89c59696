"""The record of an engine: acceptance rules, drafts, counting of rounds and serving commands.

The record of each engine is in a module next to this one, and `engines.py` lists them.
Configuration, commands, analysis, reporting and the rented machines read them there. The module of
`harness.engines` that a record names starts the server and sends requests to it.

Counting. Replay follows how an engine counts rounds and drafted tokens.

At temperature 0 engines should return the same text, and at one K take the same rounds in the
middle of it. They differ at its begin and end:

- Most take the first token from the logits of the prefill, so that rounds begin at the second
  (position 1). Those of the harness's loop begin at position 0.
- Near the budget llama.cpp drafts at most as many tokens as can still be emitted before the
  round's own; with one left it takes a plain step. vLLM always drafts K, and cuts the text.

From the sources. For llama.cpp and vLLM the counts were compared with replay of returned texts,
token for token; SGLang's were not.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from harness.engine_facts.draft_kinds import DRAFTS, DraftKind
from harness.records import Rule, ServingEngine, Varying
from harness.summary import SamplingFacts

if TYPE_CHECKING:  # every command's --help imports this module, and must not wait for numpy
    import numpy as np
    from numpy.typing import NDArray

# A shorter budget is the whole budget / SHORTER, and at least SHORTEST tokens
SHORTER, SHORTEST = 4, 4
# The note of every engine that serves DFlash drafters
BLOCK = (
    "It fills a block of K + 1 positions; a run fills the drafter's whole block, or draft.block= of"
    " them, so give draft.block=K+1 to draft the same."
)
# The note on a block whose first position drafts too
ANCHORED_BLOCK = (
    "It fills a block of K positions; a run fills the drafter's whole block, or draft.block= of"
    " them, so give draft.block=K to draft the same."
)


@dataclass(frozen=True)
class Counting:
    """The position at which an engine's rounds begin, and the length of its last drafts."""

    # Position in a returned text, from 0, at which the first round begins; the tokens before it
    # come from the prefill and belong to no round
    first_position: int
    shortens_last_draft: bool  # whether a draft is shortened to the tokens left in the budget

    def decoded(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens of a returned text that rounds emitted."""
        return tokens[self.first_position :]

    def proposed(self, k: int, budget: int) -> "NDArray[np.intp]":
        """The tokens drafted by a round from each start: `proposed` of `harness.theory.replay`.

        Args:
            k: tokens of a full draft.
            budget: tokens that a request may return at most, including the prefill's.

        Returns:
            Shape (budget - first_position,); 0 is a plain step.
        """
        import numpy as np

        left = np.arange(budget - self.first_position, 0, -1)
        return np.minimum(k, left - 1) if self.shortens_last_draft else np.full(len(left), k)


def counting_of(engine: ServingEngine | None) -> Counting | None:
    """The counting of a measured engine; None without an engine, or where it counts no rounds."""
    if engine is None or engine.first_position is None or engine.shortens_last_draft is None:
        return None
    return Counting(engine.first_position, engine.shortens_last_draft)


def shorter_budget(budget: int) -> int:
    """A part of a request's budget; timing both separates the request's start from its rounds."""
    return max(SHORTEST, budget // SHORTER)


@dataclass(frozen=True)
class PairToServe:
    """The pair and the settings of a serving command."""

    # target, draft: hub ids or folders
    target: str
    draft: str
    k: int
    temperature: float
    sampling: SamplingFacts
    rule: Rule | None = None  # the acceptance rule of the server; None: the engine's default
    synthetic: bool = False  # whether the run's acceptance was set, and not measured
    kind: DraftKind = "model"
    layers: int | None = None  # of an early exit
    p_min: float = 0.0  # the probability below which a draft's token ends its draft; 0: none

    @property
    def of_files(self) -> bool:
        return self.target.endswith(".gguf")  # which the command names as they are

    @property
    def weights(self) -> str | None:
        """The draft's checkpoint; None where it has none of its own."""
        own = DRAFTS[self.kind].has_own_checkpoint(self.draft, self.target)
        return self.draft if own else None


@dataclass(frozen=True)
class ServingLine:
    """The serving command of one engine with one kind of draft."""

    line: Callable[[PairToServe], str]  # makes the command
    note: str = ""  # a note on it, a whole sentence; or ""
    # Further notes, which depend on the pair
    more: Callable[[PairToServe], Sequence[str]] = lambda _: ()


@dataclass(frozen=True)
class Completions:
    """The differences of requests to a server's `/v1/completions` from OpenAI's."""

    samplers: tuple[str, ...] = ()  # sampling parameters besides temperature and top_p
    # The field of a request that sets K, where there is one; then one address serves every K
    k: str | None = None
    # Whether requests must not name a model: the server uses the one that it was started with
    one_model: bool = False


@dataclass(frozen=True)
class VaryingK:
    """A way in which an engine changes K while it serves."""

    flag: str  # that enables it
    kinds: frozenset[DraftKind]  # of draft that it works with
    takes: str  # these kinds as text
    largest_k: int | None = None  # that it may draft; None: the largest configured one


@dataclass(frozen=True, eq=False)
class EngineSpec:
    """The facts of an engine."""

    name: str  # in `engine=` and in stored runs
    title: str  # in reports
    # Its acceptance rules, the default first; empty where they cannot be known
    rules: tuple[Rule, ...] = ()
    # The engine that this one is with another setting. A variant has its own serving command and
    # row in reports, and is measured as that engine with `decode.rule`.
    variant_of: str | None = None
    # phrase, row_name: its name in headlines and in rows of the grid, where it is not the title
    phrase: str = ""
    row_name: str = ""

    # ---- acceptance and counting -----------------------------------------------------------------

    # None where it counts no rounds
    counting: Counting | None = None
    # Whether prefills are in one iteration with requests that decode
    mixes_prompts: bool = False
    # Whether a sampled draft uses the request's temperature without its top_p, min_p and penalty
    draft_by_temperature: bool = False
    # The number of likeliest tokens among which a sampled draft draws; None: all
    draft_top_k: int | None = None
    # Whether a draft model also reads every batch that the target verifies, in one forward
    draft_reads_verified: bool = False
    # The kinds of draft that propose exactly the tokens of the harness's, so that a run's
    # acceptance holds
    alike: frozenset[DraftKind] = frozenset()
    stops_early: bool = False  # whether it can stop drafting at a threshold, as the harness can
    # Whether the token below its threshold is not proposed; the harness proposes it. The threshold
    # is compared with the probability among the `draft_top_k` likeliest tokens.
    drops_unlikely: bool = False
    # Builds or platforms that do not accept by its rule above temperature 0, as text; "": none
    unknown_above_zero: str = ""

    # ---- serving commands ------------------------------------------------------------------------

    version: str = ""  # the version of the commands' syntax
    plain: Callable[[PairToServe], str] = lambda _: ""  # the command without a draft
    # By kind of draft; an engine without commands is not in reports
    lines: Mapping[DraftKind, ServingLine] = field(default_factory=dict[DraftKind, ServingLine])
    line_title: str = ""  # a variant's addition to the title of its commands
    language: str = "sh"
    sampling_in_requests: bool = True  # whether requests have the sampling parameters
    reads_gguf: bool = False
    # Makes the command of one server whose K follows the load. It takes the pair at the largest K,
    # the measured command of each K, K by the least load, and the largest load. None where a server
    # has one K.
    schedule: Callable[[PairToServe, Mapping[int, str], Mapping[int, int], int], str] | None = None
    # The ways in which the K of one server can change: by a schedule, or as the engine decides
    varying: Mapping[Varying, VaryingK] = field(default_factory=dict[Varying, VaryingK])
    # Makes notes on K by load, from K by the least load and the largest load
    schedule_notes: Callable[[Mapping[int, int], int], Sequence[str]] = lambda *_: ()
    # Its flags for context, slots, and memory or threads, which a measurement sets for its requests
    in_production: tuple[str, ...] = ()
    slots_flag: str | None = None  # the flag for the number of slots
    # The flag without which only neighbouring slots share a forward; None where all requests do
    unified_flag: str | None = None
    # The flags for the types of the target's and the draft's KV cache, which are f16 without them;
    # None where the type is the dtype
    cache_flags: tuple[str, str] | None = None

    # ---- measurement by `server` -----------------------------------------------------------------

    # The module that has its `adapter`; None where it is not measured
    client: str | None = None
    starts: bool = True  # whether its servers are started here; else they must already run
    drafts: tuple[DraftKind, ...] = ("model",)  # kinds that are measured
    completions: Completions = Completions()  # for the client `harness.engines.openai`
    # Where a server that is started can have synthetic acceptance
    synthetic: Literal["everywhere", "on CUDA", "nowhere"] = "nowhere"
    # Whether it refuses a K above a checkpoint's number of MTP layers that is no multiple of it
    mtp_multiples: bool = False
    # Whether its plain server lists the log-probabilities of the likeliest tokens by their ids
    lists_logprobs: bool = False
    tries_threads: bool = False  # whether several numbers of threads are tried, if none is given
    one_dtype: bool = False  # whether servers are given one dtype for both models
    alone: bool = False  # whether a server takes all of its device, so that one runs at a time
    # The flag for a server's share of a card's memory; None where it takes only what it needs
    memory_flag: str | None = None
    rented: str = ""  # the pip requirement of its image on rented machines; "" without an image
    # A Python wheel of its server, with whose name the version then begins; "": there is none
    wheel: str = ""

    @property
    def rule(self) -> Rule | None:
        return self.rules[0] if self.rules else None

    @property
    def in_headlines(self) -> str:
        return self.phrase or self.title

    @property
    def in_rows(self) -> str:
        return self.row_name or self.title

    def variant(
        self,
        *,
        name: str,
        row_name: str,
        setting: str,
        kinds: Collection[DraftKind],
        rule: Rule,
        note: str = "",
    ) -> "EngineSpec":
        """The engine with a setting by which it accepts by another rule, for some kinds of draft.

        `note` is added to the serving lines.
        """
        lines = {kind: self.lines[kind] for kind in kinds}
        return replace(
            self,
            name=name,
            rules=(rule,),
            variant_of=self.name,
            phrase=f"{self.title} with {setting}",
            row_name=row_name,
            alike=frozenset(kinds),
            lines={
                k: replace(each, note=f"{each.note} {note}".strip()) for k, each in lines.items()
            },
            line_title=f", {setting}",
            client=None,
            rented="",
        )

    def has_k_by_load(self, kind: DraftKind) -> bool:
        """True where one server can follow a schedule of K by load with this kind of draft."""
        schedule = self.varying.get("schedule")
        return schedule is not None and kind in schedule.kinds


def ranges(k_by_load: Mapping[int, int], largest: int) -> list[list[int]]:
    """[lowest load, highest load, K] wherever K changes; the last one reaches `largest`."""
    merged = changes(k_by_load)
    ends = [*(low - 1 for low in [*merged][1:]), max(largest, *merged)]
    return [[low, high, k] for (low, k), high in zip(merged.items(), ends, strict=True)]


def changes(k_by_load: Mapping[int, int]) -> dict[int, int]:
    """K by the least load, ascending, without loads at which K does not change."""
    merged: dict[int, int] = {}
    for load, k in sorted(k_by_load.items()):
        if not merged or [*merged.values()][-1] != k:
            merged[load] = k
    return merged
