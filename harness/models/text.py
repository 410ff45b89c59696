"""From a prompt to token ids, through the model's chat template where it has one."""

from typing import Any

from harness.config import PromptsConf
from harness.records import Prompt, UserError


def encode(tokenizer: Any, prompt: Prompt, conf: PromptsConf) -> tuple[int, ...]:
    """Token ids of the prompt's first turn, as the model expects to be spoken to.

    Raises:
        UserError: a chat template is demanded and there is none, or the prompt has no tokens.
    """
    text = prompt.turns[0]
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if conf.chat_template == "always" and not has_template:
        raise UserError(
            "prompts.chat_template=always: this tokenizer has no chat template; use auto or never"
        )
    if has_template and conf.chat_template != "never":
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
