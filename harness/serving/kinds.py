"""The kinds of draft."""

from collections.abc import Mapping, Sequence
from typing import Literal, cast

from harness.records import LOOKUPS, first
from harness.summary import ModelFacts

# Unknown where only a name is known of the draft: no engine has a line for it
DraftKind = Literal[
    "model", "eagle3", "mtp", "medusa", "dflash", "ngram", "suffix", "early_exit", "copy", "unknown"
]
# What a sentence calls a draft of that kind
NAMES: Mapping[DraftKind, str] = {
    "model": "a draft model",
    "eagle3": "an EAGLE-3 head",
    "mtp": "MTP layers",
    "medusa": "Medusa heads",
    "dflash": "a DFlash drafter",
    "ngram": "an n-gram look-up",
    "suffix": "a suffix look-up",
    "early_exit": "early exit of the target's layers",
    "copy": "a copy of the target",
}
# Those that have weights of their own
WITH_WEIGHTS: tuple[DraftKind, ...] = ("model", "eagle3", "medusa", "dflash")


def kind_of(draft: str | None, models: Sequence[ModelFacts]) -> DraftKind:
    """The kind of a run's draft, by its name."""
    if draft in LOOKUPS:
        return cast("DraftKind", draft)
    target = first(models, role="target")
    facts = first((model for model in models if model is not target), name=draft)
    if facts is None or (facts.kind == "model" and facts.id is None):
        return "unknown"
    is_copy = facts.kind == "model" and target is not None and facts.id == target.id
    return "copy" if is_copy else facts.kind
