"""Tokenizers: token ids of conversations, stop strings, and the comparison of two tokenizers.

A prompt is formatted by the model's chat template where it has one. Without one (a base model, or
prompts.chat_template=never) the texts of a conversation are joined with a blank line between them:
turn, answer, turn.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from jinja2 import TemplateError

from harness.config import PromptsConf
from harness.models.gguf_file import GgufTokenizer
from harness.records import Prompt, UserError, in_one_line

SEPARATOR = "\n\n"
# Texts that two tokenizers must encode to the same ids
COMPARED_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "def add(a, b):\n\treturn a + b  # 3.14159",
    "Zürich, 東京, Ελλάδα; naïve café … 🙂",
    "  leading and trailing spaces  \n\n",
)
# Of the tokens in which two tokenizers differ, those that are named
SHOWN_TOKENS = 3
# As text, and as vocabularies write it
WHITE_SPACE = " \t\r\n▁ĠĊĉč"


def encode(tokenizer: Any, prompt: Prompt, conf: PromptsConf) -> tuple[int, ...]:
    """The token ids of a prompt up to its last turn, in the form that the model expects."""
    where = f"prompt {prompt.prompt_set}/{prompt.id}"
    system_key = "prompts.system" if prompt.system == conf.system else where
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if conf.chat_template == "always" and not has_template:
        raise UserError(
            "prompts.chat_template=always: this tokenizer has no chat template; use auto or never"
        )
    if has_template and conf.chat_template != "never":
        ids = _through_template(tokenizer, prompt, system_key)
    elif prompt.system is not None:
        why = "prompts.chat_template=never" if has_template else "this tokenizer has no template"
        raise UserError(
            f"{system_key}: a system message goes through the chat template, and {why}; "
            "without one the turns are passed as plain text, so leave it out or write it into the "
            "prompt"
        )
    else:
        pieces = zip_longest(prompt.turns, prompt.answers)
        text = SEPARATOR.join(text for pair in pieces for text in pair if text)
        # verbose: of a text that is too long the harness's own error says more
        ids = tokenizer(text, verbose=False)["input_ids"]
    if not ids:
        raise UserError(f"{where}: it has no tokens; give it text")
    return tuple(int(token) for token in ids)


def has_thinking_mode(tokenizer: Any) -> bool:
    """True where the chat template has another prompt in thinking mode."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    plain = Prompt("", "a first prompt", ("Hello.",))
    try:
        modes = [_through_template(tokenizer, replace(plain, thinking=on)) for on in (False, True)]
    except UserError:  # the run's own prompts may be such that it can be rendered
        return False
    return list(modes[0]) != list(modes[1])


def check_thinking(tokenizer: Any, prompts: Sequence[Prompt], conf: PromptsConf) -> None:
    """Refuse a thinking mode that the chat template ignores."""
    thinking = next((prompt for prompt in prompts if prompt.thinking), None)
    if thinking is None:
        return
    first = thinking.up_to(1, ())
    plain = Prompt(first.prompt_set, first.id, first.turns, system=first.system)
    if encode(tokenizer, first, conf) == encode(tokenizer, plain, conf):
        raise UserError(
            f"prompts.enable_thinking={conf.enable_thinking}: the prompts are the same with and "
            "without it (no chat template, or one without a thinking mode); use false"
        )


def _renders(tokenizer: Any, prompt: Prompt) -> bool:
    """True where the chat template can render a prompt."""
    try:
        _through_template(tokenizer, prompt)
    except UserError:
        return False
    return True


def _through_template(tokenizer: Any, prompt: Prompt, system_key: str = "") -> Any:
    """A prompt's ids by the chat template; `system_key` says where a system message is from."""
    messages: list[dict[str, str]] = []
    if prompt.system is not None:
        messages.append({"role": "system", "content": prompt.system})
    for turn, answer in zip_longest(prompt.turns, prompt.answers):
        messages.append({"role": "user", "content": turn or ""})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    try:
        return tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            enable_thinking=prompt.thinking,
            return_dict=True,
            **({} if prompt.tools is None else {"tools": json.loads(prompt.tools)}),
        )["input_ids"]
    # A template is code that comes with the model
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as e:
        reason = in_one_line(e)[:200].rstrip(".")
        if prompt.system is not None and _renders(tokenizer, replace(prompt, system=None)):
            raise UserError(
                f"{system_key}: the chat template of {tokenizer.name_or_path} has no place for a"
                f" system message ({reason}); leave it out or write it into the prompt"
            ) from e
        raise UserError(
            f"prompt {prompt.prompt_set}/{prompt.id}: the chat template of "
            f"{tokenizer.name_or_path} cannot render it ({reason}); fix the template, leave the "
            "prompt out, or use prompts.chat_template=never"
        ) from e


class StopStrings:
    """A `StopRule` that ends a text with the token that completes one of some strings.

    Only the last tokens are decoded: enough for the longest string, and for a character whose bytes
    begin in an earlier token. The prompt is not searched.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        """Stop at any of `strings`, none of them empty."""
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        # A token has at least one byte
        self._reach = max(len(string.encode()) for string in strings) + 4

    def __call__(self, text: Sequence[int], tokens: Sequence[int]) -> int | None:
        """The number of `tokens` after `text` up to a stop string; None without one."""
        before = list(text[-self._reach :]) if text else []
        if not self._contains([*before, *tokens]):
            return None
        ends = range(1, len(tokens) + 1)
        return next((n for n in ends if self._contains([*before, *tokens[:n]])), None)

    def _contains(self, tokens: Sequence[int]) -> bool:
        decoded: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return any(string in decoded for string in self._strings)


def stop_rule(tokenizer: Any, strings: Sequence[str] | None) -> StopStrings | None:
    """The stop rule for these strings; None without any."""
    return StopStrings(tokenizer, strings) if strings else None


def tokenizer_difference(target: Any, draft: Any) -> str | None:
    """Why a draft reads another text from a target's ids; None where it reads the same.

    Every id that the target can emit in ordinary text must be the same token in both, and both must
    cut texts into the same ids. Tokens that are set apart from ordinary text may differ
    (`special_difference`). Widths of embeddings are not compared: models of one family pad them
    differently, and unrelated models can have the same.
    """
    target_ids, draft_ids = target.get_vocab(), draft.get_vocab()
    apart = _set_apart(target)
    ordinary = {text: token for text, token in target_ids.items() if text not in apart}
    differing = [text for text, token in ordinary.items() if draft_ids.get(text) != token]
    if differing:
        text = min(differing, key=ordinary.__getitem__)
        return (
            f"token {text!r} is {ordinary[text]} in the target's vocabulary and "
            f"{draft_ids.get(text, 'absent')} in the draft's; {len(differing)} of "
            f"{len(ordinary)} ordinary tokens differ"
        )
    if isinstance(target, GgufTokenizer) and isinstance(draft, GgufTokenizer):
        return target.cut_difference(draft)
    apart |= _set_apart(draft)
    for text in COMPARED_TEXTS:
        # A draft is given ids, so what its tokenizer puts before a text, or keeps whole in it, is
        # not compared
        if any(token in text for token in apart):
            continue
        ids = [each(text, add_special_tokens=False)["input_ids"] for each in (target, draft)]
        if ids[0] != ids[1]:
            return f"{text!r} is encoded differently, to {len(ids[0])} and {len(ids[1])} tokens"
    return None


def special_difference(target: Any, draft: Any) -> str | None:
    """The tokens that differ between two tokenizers of the same ordinary text; None without any."""
    target_ids, draft_ids = target.get_vocab(), draft.get_vocab()
    differing = sorted(target_ids.items() ^ draft_ids.items(), key=lambda item: (item[1], item[0]))
    texts = list(dict.fromkeys(text for text, _ in differing))
    if not texts:
        return None
    shown = [
        f"{text!r} is {target_ids.get(text, 'absent')} in the target's vocabulary and "
        f"{draft_ids.get(text, 'absent')} in the draft's"
        for text in texts[:SHOWN_TOKENS]
    ]
    more = len(texts) - len(shown)
    return "; ".join([*shown, *([f"{more} more tokens differ"] if more else [])])


def _set_apart(tokenizer: Any) -> set[str]:
    """The tokens of no ordinary text: special ones, and those added after the vocabulary's end.

    Added tokens between others, and added white space, are ordinary (Gemma, GPT-NeoX).
    """
    ids: dict[str, int] = tokenizer.get_vocab()
    try:
        added = tokenizer.added_tokens_decoder
    except (AttributeError, NotImplementedError):  # a stand-in; transformers' mistral-common
        special = set(getattr(tokenizer, "all_special_ids", ()))
        return {text for text, token in ids.items() if token in special}
    end = max((token for token in ids.values() if token not in added), default=-1)
    return {
        entry.content
        for token, entry in added.items()
        if entry.special or (token > end and entry.content.strip(WHITE_SPACE))
    }
