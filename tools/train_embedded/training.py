"""The training loop: documents into batches, batches into a model, a model into a folder.

A row is one document, from its first token on: as at inference, positions start at the prompt and
nothing stands before it. Documents of like length share a batch, so little padding is wasted.
"""

import random
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from tools.train_embedded.corpus import documents
from tools.train_embedded.recipes import Recipe
from tools.train_embedded.vocabulary import END_TOKEN, PAD_TOKEN

TOKENS_PER_STEP = 2048
POOL_DOCUMENTS = 512
WARMUP_STEPS = 100
FINAL_SHARE_OF_RATE = 0.02
IGNORED = -100  # the label that cross entropy skips


class Example(NamedTuple):
    """Token ids of one document, and how many of them are the prompt's."""

    ids: list[int]
    prompt_tokens: int


class Batch(NamedTuple):
    """Right-padded ids and labels, int64 [rows, longest row]."""

    ids: Tensor
    labels: Tensor


class Progress(NamedTuple):
    """Where training stands: steps done, and the mean loss since the last report."""

    step: int
    loss: float


def batches(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Yield batches of at most `TOKENS_PER_STEP` tokens, padding included, for ever."""
    stream = documents(recipe.mixture, recipe.seed)
    rng = random.Random(recipe.seed)
    vocabulary = tokenizer.get_vocab()
    end_id, pad_id = vocabulary[END_TOKEN], vocabulary[PAD_TOKEN]
    while True:
        pool = list(islice(stream, POOL_DOCUMENTS))
        texts = tokenizer([document.text for document in pool]).input_ids
        prompts = tokenizer([document.prompt for document in pool]).input_ids
        examples = [
            Example([*text, end_id], len(prompt))
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        groups = _groups_of_like_length(examples)
        rng.shuffle(groups)
        for group in groups:
            yield _pad(group, pad_id)


def _groups_of_like_length(examples: list[Example]) -> list[list[Example]]:
    groups: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda example: -len(example.ids)):
        longest = len(groups[-1][0].ids) if groups[-1] else 0
        if longest * (len(groups[-1]) + 1) > TOKENS_PER_STEP:
            groups.append([])
        groups[-1].append(example)
    return groups


def _pad(group: list[Example], pad_id: int) -> Batch:
    # Prompts carry no loss: nobody samples them, and their blanks are random by design.
    longest = max(len(example.ids) for example in group)
    ids = torch.full((len(group), longest), pad_id)
    labels = torch.full((len(group), longest), IGNORED)
    for row, example in enumerate(group):
        tokens = torch.tensor(example.ids)
        ids[row, : len(tokens)] = tokens
        labels[row, example.prompt_tokens : len(tokens)] = tokens[example.prompt_tokens :]
    return Batch(ids, labels)


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained model; the recipe's seed decides its weights."""
    torch.manual_seed(recipe.seed)
    vocabulary = tokenizer.get_vocab()
    end_id, pad_id = vocabulary[END_TOKEN], vocabulary[PAD_TOKEN]
    model = Qwen3ForCausalLM(recipe.config(end_id, pad_id))
    # No sampling defaults: how to decode is for the caller to say.
    model.generation_config = GenerationConfig(eos_token_id=end_id, pad_token_id=pad_id)
    return model


def train(
    model: Qwen3ForCausalLM,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    report_every: int = 50,
) -> Iterator[Progress]:
    """Train the model in place: AdamW, warm-up, cosine decay, gradients clipped at norm 1.

    Yields:
        The progress, every `report_every` steps and at the end.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.02
    )
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=WARMUP_STEPS),
            torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer,
                recipe.steps - WARMUP_STEPS,
                eta_min=recipe.learning_rate * FINAL_SHARE_OF_RATE,
            ),
        ],
        milestones=[WARMUP_STEPS],
    )
    losses: list[float] = []
    model.train()
    for step, batch in enumerate(islice(batches(recipe, tokenizer), recipe.steps), start=1):
        loss = model(input_ids=batch.ids, labels=batch.labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.item())
        if step % report_every == 0 or step == recipe.steps:
            yield Progress(step, sum(losses) / len(losses))
            losses.clear()
    model.eval()
