"""The kinds of drafts: one `DraftSpec` for each.

A kind is added by an entry of `DRAFTS` and the module that its `loader` names: a look-up
(`harness.decoding.lookups`), or a head in `harness.models.heads`. What it proposes is a chain of
tokens; what a tree of them would change is said in `harness.decoding.protocols`. Commands and
analysis decide what to do for a kind by a field of its entry. Which kinds an engine has, and how it
names them, is the engine's to say (`EngineSpec.drafts`, `alike` and `lines`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from harness.records import LONGEST_NGRAM, first

if TYPE_CHECKING:  # every command's --help imports this module
    from harness.summary import ModelFacts

# A key of DRAFTS; "unknown" where only a name is known of the draft: no engine has a line for it
DraftKind = str
UNKNOWN: DraftKind = "unknown"


@dataclass(frozen=True)
class DraftSpec:
    """A kind of draft.

    Attributes:
        phrase: what a sentence calls such a draft, with its article.
        weights: where they are: its `own`, in the checkpoint that its id names; in the
            `target_checkpoint`, unless its id names another; `target_layers`, shared with the
            loaded target; a `copy` of the target in another dtype; or `none`, since it looks its
            tokens up. A look-up has the name of its kind in the records.
        loader: what makes one, as "module:name"; "" for a model that transformers loads. Of a kind
            without weights a `LookupDrafter`, by the ids that end a text; else a function of its
            `ModelConf` and the loaded target, which gives a `LoadedHead` where it reads states, a
            `LoadedModel` where it does not.
        shape: what reads a head's sizes from its config.json, in the same form; "" for nothing.
        reads_states: whether it is a head, which drafts from hidden states of the target.
        chained: whether a head takes a pass for every token, and does not draft a block at once.
        replayed: whether replay says what it drafts. Else that depends on requests before, or on
            where rounds began, so that an engine that has it is measured, and no more.
        least_k: the smallest K at which it drafts.
        least_text: what a text must be longer than besides K before a look-up drafts.
    """

    phrase: str
    weights: Literal["own", "target_checkpoint", "target_layers", "copy", "none"] = "own"
    loader: str = ""
    shape: str = ""
    reads_states: bool = False
    chained: bool = False
    replayed: bool = True
    least_k: int = 1
    least_text: int = 0

    @property
    def looks_up(self) -> bool:
        """True where there is no model, and tokens are looked up."""
        return self.weights == "none"

    @property
    def has_checkpoint(self) -> bool:
        """True where its id names weights that an engine loads."""
        return self.weights in ("own", "target_checkpoint")

    @property
    def noun(self) -> str:
        """The phrase without its article."""
        return self.phrase.removeprefix("an ").removeprefix("a ")

    def has_own_checkpoint(self, draft: str, target: str) -> bool:
        """True where the weights of the draft of this id are not in the target's checkpoint."""
        return self.weights == "own" or (self.has_checkpoint and draft != target)

    @property
    def load(self) -> Callable[..., Any]:
        """The function that `loader` names, imported only now: not every command needs torch."""
        return resolve_name(self.loader)

    @property
    def read_shape(self) -> Callable[..., Any]:
        """The `HeadArchitecture` of a config.json and its name in errors, by what `shape` names."""
        return resolve_name(self.shape)


def _ngram_simple(name: str, size: int, loader: str) -> DraftSpec:
    """llama.cpp's look-up of exactly so many tokens (`SimpleNgramDrafter`)."""
    return DraftSpec(
        f"llama.cpp's {name}look-up",
        "none",
        loader=f"harness.decoding.lookups:{loader}",
        least_k=size,
        least_text=size + 2,
    )


_IN = "harness.models.heads"


def _head(phrase: str, name: str, **more: Any) -> DraftSpec:
    """A head, or another draft that reads states, whose loader has its module's name."""
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
    """True where the draft of a record, by its name there, looks its tokens up."""
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
