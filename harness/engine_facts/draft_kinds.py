"""The kinds of drafts: one `DraftSpec` for each.

A kind is added by an entry of `DRAFTS` and the module that its `loader` names: a look-up
(`harness.decoding.lookups`), or a head in `harness.models.heads`. A draft proposes a chain of
tokens; `harness.decoding.protocols` describes what a tree would change. Commands and analysis
decide by the fields of an entry. The kinds that an engine has, and its names for them, are in the
engine's record (`EngineSpec.drafts`, `alike` and `lines`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from harness.records import LONGEST_NGRAM, first

if TYPE_CHECKING:  # every command's --help imports this module
    from harness.summary import ModelFacts

# A key of DRAFTS, or "unknown" for a draft of which only the name is known; no engine serves that
DraftKind = str
UNKNOWN: DraftKind = "unknown"


@dataclass(frozen=True)
class DraftSpec:
    """A kind of draft."""

    phrase: str  # the name of such a draft in a sentence, with its article
    # Where they are: `own`, in the checkpoint that its id names; `target_checkpoint`, there unless
    # its id names another; `target_layers`, shared with the loaded target; `copy`, the target in
    # another dtype; `none` for a look-up, which has the name of its kind in the records
    weights: Literal["own", "target_checkpoint", "target_layers", "copy", "none"] = "own"
    # The function that loads it, as "module:name"; "" for a model that transformers loads. For a
    # look-up it takes the ids that end a text and returns a `LookupDrafter`; else it takes the
    # `ModelConf` and the loaded target and returns a `LoadedHead` where it reads states, otherwise
    # a `LoadedModel`.
    loader: str = ""
    shape: str = ""  # the function that reads a head's sizes from its config.json; or ""
    reads_states: bool = False  # whether it drafts from hidden states of the target
    chained: bool = False  # whether a head takes a forward for every token, not one for a block
    # Whether replay can tell what it drafts. Otherwise that depends on earlier requests, or on
    # where rounds began, and engines with it are only measured.
    replayed: bool = True
    least_k: int = 1  # the smallest K at which it drafts
    least_text: int = 0  # a look-up drafts only in a text that is longer than K plus this number

    @property
    def looks_up(self) -> bool:
        return self.weights == "none"

    @property
    def has_checkpoint(self) -> bool:
        """True where its id names weights that an engine loads."""
        return self.weights in ("own", "target_checkpoint")

    @property
    def noun(self) -> str:
        return self.phrase.removeprefix("an ").removeprefix("a ")

    def has_own_checkpoint(self, draft: str, target: str) -> bool:
        """True where the weights of the draft of this id are not in the target's checkpoint."""
        return self.weights == "own" or (self.has_checkpoint and draft != target)

    @property
    def load(self) -> Callable[..., Any]:
        """The function that `loader` names; it is imported here, since few commands need torch."""
        return resolve_name(self.loader)

    @property
    def read_shape(self) -> Callable[..., Any]:
        """The function that `shape` names: takes a config.json, returns a `HeadArchitecture`."""
        return resolve_name(self.shape)


def _ngram_simple(name: str, size: int, loader: str) -> DraftSpec:
    """llama.cpp's look-up of exactly `size` tokens (`SimpleNgramDrafter`)."""
    return DraftSpec(
        f"llama.cpp's {name}look-up",
        "none",
        loader=f"harness.decoding.lookups:{loader}",
        least_k=size,
        least_text=size + 2,
    )


_IN = "harness.models.heads"


def _head(phrase: str, name: str, **more: Any) -> DraftSpec:
    """A draft that reads states; the name of its module is also that of its loader."""
    return DraftSpec(phrase, loader=f"{_IN}.{name}:load_{name}", reads_states=True, **more)


DRAFTS: dict[DraftKind, DraftSpec] = {
    "model": DraftSpec("a draft model"),
    "eagle3": _head("an EAGLE-3 head", "eagle3", shape=f"{_IN}.eagle3:eagle3_shape", chained=True),
    "eagle": _head("an EAGLE head", "eagle", shape=f"{_IN}.eagle:eagle_shape", chained=True),
    "peagle": _head("a P-EAGLE head", "peagle"),
    "pard": _head("a PARD draft", "pard"),
    "mtp": _head("MTP layers", "mtp", weights="target_checkpoint", chained=True),
    "medusa": _head("Medusa heads", "medusa"),
    "dflash": _head("a DFlash drafter", "dflash"),
    "dspark": _head("a DSpark drafter", "dspark"),
    "early_exit": DraftSpec(
        "early exit of the target's layers",
        "target_layers",
        loader="harness.models.load:early_exit",
    ),
    "copy": DraftSpec("a copy of the target", "copy"),
    "ngram": DraftSpec("an n-gram look-up", "none", loader="harness.decoding.lookups:NgramDrafter"),
    "ngram_simple": _ngram_simple("n-gram ", LONGEST_NGRAM, "SimpleNgramDrafter"),
    "ngram_simple_1": _ngram_simple("one-token ", 1, "one_token_ngram"),
    "ngram_simple_12": _ngram_simple("default ", 12, "default_ngram"),
    "ngram_mod": DraftSpec("llama.cpp's hashed n-grams", "none", replayed=False),
}


def looks_up(draft: str | None) -> bool:
    return draft in DRAFTS and DRAFTS[draft].looks_up


def kind_of(draft: str | None, models: "Sequence[ModelFacts]") -> DraftKind:
    """The kind of a run's draft, by its name in the records."""
    if draft is not None and looks_up(draft):
        return draft
    target = first(models, role="target")
    facts = first((model for model in models if model is not target), name=draft)
    if facts is None or facts.kind not in DRAFTS or (facts.kind == "model" and facts.id is None):
        return UNKNOWN
    is_copy = facts.kind == "model" and target is not None and facts.id == target.id
    return "copy" if is_copy else facts.kind
