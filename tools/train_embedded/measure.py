"""What the family is worth: how often each draft is accepted, and how much cheaper its step is.

alpha needs no speculative loop. Speculative sampling emits text of the target's distribution, and
accepts the draft's proposal at a position with probability min(1, draft(x) / target(x)), x being
the target's token (Leviathan et al. 2023, section 2.3). So: sample text from the target, score it
once with each draft, average.
"""

import json
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from harness.models.cached import cache_argument
from tools.train_embedded.recipes import PROMPT_SETS_DIR, Recipe

BUDGET_TOKENS = 48
CONTEXT_TOKENS = 64


class Continuations(NamedTuple):
    """Texts that the target generated after one prompt.

    Attributes:
        ids: Prompt and continuation, int64 [rows, prompt_tokens + budget].
        prompt_tokens: Length of the prompt.
        kept: True where the text has not ended before, bool [rows, budget].
    """

    ids: Tensor
    prompt_tokens: int
    kept: Tensor


class Acceptance(NamedTuple):
    """How often a draft's token would be accepted on one prompt set."""

    sampled: float
    greedy: float


def load(recipe: Recipe) -> PreTrainedModel:
    """Load a committed model of the family, in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(recipe.folder).eval()


def load_tokenizer(recipe: Recipe) -> Tokenizer:
    """Load the tokenizer in a committed model's folder."""
    return AutoTokenizer.from_pretrained(recipe.folder)


def read_prompts(kind: str) -> list[str]:
    """The prompts of a shipped set, `easy` or `hard`."""
    text = (PROMPT_SETS_DIR / f"{kind}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in text.splitlines()]


@torch.inference_mode()
def continue_prompt(
    target: PreTrainedModel,
    prompt_ids: Sequence[int],
    samples: int,
    generator: torch.Generator,
    budget: int = BUDGET_TOKENS,
) -> Continuations:
    """Generate a greedy text (row 0) and `samples` texts at temperature 1."""
    cache = DynamicCache(config=target.config)
    pieces = [torch.tensor([list(prompt_ids)]).repeat(1 + samples, 1)]
    alive, kept = torch.ones(1 + samples, dtype=torch.bool), []
    for _ in range(budget):
        logits = target(pieces[-1], **{cache_argument(target) or "": cache}).logits[:, -1]
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        token[0] = logits[0].argmax()
        pieces.append(token)
        kept.append(alive)
        alive = alive & (token[:, 0] != target.config.eos_token_id)
    return Continuations(torch.cat(pieces, 1), len(prompt_ids), torch.stack(kept, 1))


@torch.inference_mode()
def _log_probs(model: PreTrainedModel, texts: Continuations) -> Tensor:
    """Log-probabilities at every continued position, float32 [rows, budget, vocabulary]."""
    logits = model(texts.ids[:, :-1], use_cache=False).logits[:, texts.prompt_tokens - 1 :]
    return logits.log_softmax(-1)


def accept_probabilities(target_log: Tensor, draft_log: Tensor, texts: Continuations) -> Tensor:
    """Probability that each token would be accepted, had the draft proposed there.

    Args:
        target_log: The target's log-probabilities, float32 [rows, budget, vocabulary].
        draft_log: The draft's, likewise.
        texts: What the target generated.

    Returns:
        float32 [rows, budget]: in row 0 whether the draft's argmax is the token, in the others
        min(1, draft(x) / target(x)).
    """
    emitted = texts.ids[:, texts.prompt_tokens :, None]
    log_ratio = draft_log.gather(-1, emitted) - target_log.gather(-1, emitted)
    accepted = log_ratio[..., 0].clamp(max=0.0).exp()
    accepted[0] = (draft_log[0].argmax(-1) == emitted[0, :, 0]).float()
    return accepted


def measure_acceptance(
    target: PreTrainedModel,
    drafts: Sequence[PreTrainedModel],
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    samples: int,
    seed: int,
) -> list[Acceptance]:
    """Acceptance of each draft over the prompts, pooled over the positions before texts end."""
    generator = torch.Generator().manual_seed(seed)
    sampled: list[list[Tensor]] = [[] for _ in drafts]
    greedy: list[list[Tensor]] = [[] for _ in drafts]
    for prompt in prompts:
        texts = continue_prompt(target, tokenizer(prompt).input_ids, samples, generator)
        target_log = _log_probs(target, texts)
        for index, draft in enumerate(drafts):
            accepted = accept_probabilities(target_log, _log_probs(draft, texts), texts)
            greedy[index].append(accepted[0][texts.kept[0]])
            sampled[index].append(accepted[1:][texts.kept[1:]])
    return [
        Acceptance(torch.cat(at_one).mean().item(), torch.cat(at_zero).mean().item())
        for at_one, at_zero in zip(sampled, greedy, strict=True)
    ]


@torch.inference_mode()
def step_times_ms(models: Sequence[PreTrainedModel], samples: int = 60) -> list[float]:
    """Median time of a one-token step after `CONTEXT_TOKENS` tokens, models taking turns."""
    times: list[list[float]] = [[] for _ in models]
    context = torch.arange(CONTEXT_TOKENS)[None]
    for _ in range(samples):
        for model, taken in zip(models, times, strict=True):
            cache = DynamicCache(config=model.config)
            model(context, **{cache_argument(model) or "": cache})
            start = time.perf_counter()
            model(context[:, :1], **{cache_argument(model) or "": cache})
            taken.append(1000 * (time.perf_counter() - start))
    return [float(np.median(taken)) for taken in times]
