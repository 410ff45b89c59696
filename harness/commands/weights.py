"""Which weights may play together: random ones need an architecture, and random partners."""

from dataclasses import replace

from harness.config import ModelConf
from harness.records import UserError
from harness.theory.architecture import architecture_of

NGRAM = "ngram"


def check_dummy(role: str, model: ModelConf) -> None:
    """Random weights need an architecture, and nothing that only real weights have.

    Raises:
        UserError: naming the key.
    """
    if not isinstance(model.architecture, dict):
        raise UserError(
            f"{role}.weights=dummy: {role}={model.name} has no architecture in its config; choose "
            f"one that has ({role}=qwen3_4b) or give {role}.architecture={{family: qwen3, ...}}"
        )
    architecture_of(model.architecture, f"{role}.architecture")
    for key in ("quantization", "device_map"):
        if getattr(model, key) is not None:
            raise UserError(f"{role}.{key}: not with {role}.weights=dummy; leave it out")


def alike(target: ModelConf, draft: ModelConf) -> ModelConf:
    """An auditioned draft with the target's kind of weights: `drafts` has no keys for its entries.

    Raises:
        UserError: random weights are wanted, and the draft's config has no architecture.
    """
    if target.weights != "dummy" or draft.id == NGRAM:
        return draft
    if not isinstance(draft.architecture, dict):
        raise UserError(
            f"drafts: {draft.name} has no architecture in its config, so it cannot have random "
            "weights like the target; name drafts that have one, for example drafts=[qwen3_0_6b]"
        )
    architecture_of(draft.architecture, f"drafts: {draft.name}: architecture")
    return replace(draft, weights="dummy")


def check_alike(target: ModelConf, draft: ModelConf) -> None:
    """Refuse random weights beside real ones: a stand-in tokenizer fits no real one.

    Raises:
        UserError: one of each kind.
    """
    kinds = {"model": target.weights, "draft": draft.weights}
    if len(set(kinds.values())) > 1:
        said = " beside ".join(f"{role}.weights={kind}" for role, kind in kinds.items())
        raise UserError(
            f"{said}: their tokenizers cannot be compared; set both to dummy or both to pretrained"
        )
