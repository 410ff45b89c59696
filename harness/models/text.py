"""From a prompt to token ids, through the model's chat template where it has one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError

from harness.config import PromptsConf
from harness.records import Prompt, UserError


def encode(tokenizer: Any, prompt: Prompt, conf: PromptsConf) -> tuple[int, ...]:
    """Token ids of the prompt's first turn, as the model expects to be spoken to.

    Raises:
        UserError: a chat template is demanded and there is none, or it cannot render the prompt,
            or the prompt has no tokens.
    """
    text = prompt.turns[0]
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if conf.chat_template == "always" and not has_template:
        raise UserError(
            "prompts.chat_template=always: this tokenizer has no chat template; use auto or never"
        )
    if has_template and conf.chat_template != "never":
        with _template_explained(tokenizer, prompt):
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                add_generation_prompt=True,
                enable_thinking=conf.enable_thinking,
                return_dict=True,
            )["input_ids"]
    else:
        ids = tokenizer(text)["input_ids"]
    if not ids:
        raise UserError(f"prompt {prompt.prompt_set}/{prompt.id}: it has no tokens; give it text")
    return tuple(int(token) for token in ids)


@contextmanager
def _template_explained(tokenizer: Any, prompt: Prompt) -> Iterator[None]:
    """Turn what a chat template, a program of the model's makers, raises into one line."""
    try:
        yield
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as e:
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:200].rstrip(".")
        raise UserError(
            f"prompt {prompt.prompt_set}/{prompt.id}: the chat template of "
            f"{tokenizer.name_or_path} cannot render it ({reason}); mend the template, leave the "
            "prompt out, or use prompts.chat_template=never"
        ) from e


class StopStrings:
    """Ends a text with the token that completes one of some strings (a `StopRule`).

    Only the last tokens are decoded anew, as many as can hold a string with what a token of several
    bytes may have left open before it. The prompt is not looked at.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        """Stop at any of `strings`, none of them empty."""
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        # A token has at least one byte
        self._reach = max(len(string.encode()) for string in strings) + 4

    def __call__(self, text: Sequence[int], tokens: Sequence[int]) -> int | None:
        """How many of `tokens`, which follow `text`, are kept; None where the text goes on."""
        before = list(text[-self._reach :]) if text else []
        if not self._stands_in([*before, *tokens]):
            return None
        ends = range(1, len(tokens) + 1)
        return next((n for n in ends if self._stands_in([*before, *tokens[:n]])), None)

    def _stands_in(self, tokens: Sequence[int]) -> bool:
        decoded: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return any(string in decoded for string in self._strings)


def stop_rule(tokenizer: Any, strings: Sequence[str] | None) -> StopStrings | None:
    """The rule for these strings; None where there are none."""
    return StopStrings(tokenizer, strings) if strings else None
