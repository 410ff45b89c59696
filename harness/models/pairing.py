"""May these two models play together? Same tokens for the same text, or the pair is refused.

Sizes prove nothing: siblings pad their embeddings to different widths, and strangers can have equal
ones. What counts is that both tokenizers map the same strings to the same ids, and texts to the
same sequences.
"""

from harness.models.cached import CachedModel
from harness.models.load import LoadedModel
from harness.models.probe import cached_model
from harness.records import UserError

PROBE_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "def add(a, b):\n\treturn a + b  # 3.14159",
    "Zürich, 東京, Ελλάδα; naïve café … 🙂",
    "  leading and trailing spaces  \n\n",
)


def check_tokenizers(target: LoadedModel, draft: LoadedModel) -> None:
    """Refuse a pair whose tokenizers differ in vocabulary map, special tokens or encodings.

    Raises:
        UserError: they do; the first difference is named.
    """
    difference = tokenizer_difference(target, draft)
    if difference:
        raise UserError(
            f"draft={draft.name}: another tokenizer than model={target.name} ({difference}); "
            "choose a draft of the target's own family"
        )


def tokenizer_difference(target: LoadedModel, draft: LoadedModel) -> str | None:
    """The first difference between two tokenizers, in words; None where they agree."""
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours != theirs:
        text = min(ours.items() ^ theirs.items())[0]
        return (
            f"token {text!r} is {ours.get(text, 'absent')} in the target's vocabulary and "
            f"{theirs.get(text, 'absent')} in the draft's; {len(ours)} and {len(theirs)} tokens"
        )
    for name in ("bos_token_id", "eos_token_id"):
        left, right = getattr(target.tokenizer, name), getattr(draft.tokenizer, name)
        if left != right:
            return f"{name} is {left} and {right}"
    for text in PROBE_TEXTS:
        if target.tokenizer(text)["input_ids"] != draft.tokenizer(text)["input_ids"]:
            return f"{text!r} is encoded differently"
    return None


def open_pair(
    target: LoadedModel, draft: LoadedModel, backend: str = "eager"
) -> tuple[CachedModel, CachedModel]:
    """Check the tokenizers, then wrap both with the logit width that they share.

    Embeddings padded to different widths are fine: no tokenizer id lies in the padding, and both
    laws are cut to the narrower one.

    Raises:
        UserError: the tokenizers differ, or a cache cannot be rewound.
    """
    check_tokenizers(target, draft)
    shared = min(target.vocab_size, draft.vocab_size)
    highest = max(target.tokenizer.get_vocab().values(), default=0)
    if highest >= shared:
        raise UserError(
            f"draft={draft.name}: the tokenizer has an id {highest}, beyond the {shared} rows of "
            "the narrower embedding; choose a draft of the target's own family"
        )
    return (
        cached_model(target.network, shared, f"model={target.name}", backend),
        cached_model(draft.network, shared, f"draft={draft.name}", backend),
    )
