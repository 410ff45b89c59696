"""Train an EAGLE-3 head for `tiny` on its own texts: `python -m tools.train_embedded.eagle3`.

The target completes prompts of its corpus, those of the shipped sets left out: three quarters at
temperature 1, the rest greedily. The head learns the target's distributions over its reduced
vocabulary, the tokens that the target generates most, from every start of these texts, K drafts
deep: what it is fed after the first draft is its own output, as when it drafts (EAGLE-3's
training-time test). Minutes on one thread; two are slower.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from harness.decoding.sampling import SamplingParameters
from harness.measurement.generations import Request
from harness.measurement.target_texts import GeneratedText, generate_texts
from harness.models.cached import CachedModel, output_weight
from harness.models.heads.eagle3 import Eagle3Network, default_layers
from tools.train_embedded.corpus import documents
from tools.train_embedded.head_files import Layout, save_head
from tools.train_embedded.measure import load, load_tokenizer, read_prompts
from tools.train_embedded.recipes import FAMILY_DIR, TARGET
from tools.train_embedded.vocabulary import CONTEXT_TOKENS

FOLDER = FAMILY_DIR / "tiny_eagle3"
PROMPTS, GREEDY_SHARE, BUDGET = 2048, 0.25, 64
DRAFT_VOCABULARY = 512
STEPS, BATCH = 1712, 8
LEARNING_RATE, CLIP = 2e-3, 0.5
# Drafts per start that are trained, and the weight of each next one
DEPTH, DECAY = 4, 0.8
SEED = 5

console = Console()


def texts_of(target: PreTrainedModel, count: int = PROMPTS) -> list[GeneratedText]:
    """Completions of corpus prompts by the target."""
    tokenizer = load_tokenizer(TARGET)
    shipped = {*read_prompts("easy"), *read_prompts("hard")}
    drawn = (document.prompt for document in documents(TARGET.mixture, SEED))
    prompts = list(islice((prompt for prompt in drawn if prompt not in shipped), count))
    requests = [
        Request(
            cell="",
            prompt_set="corpus",
            prompt=str(index),
            category=None,
            tokens=tuple(ids),
            sampling=SamplingParameters(0.0 if index < GREEDY_SHARE * count else 1.0),
            budget=BUDGET,
            repetition=0,
            seed=SEED,
            eos=frozenset({target.config.eos_token_id}),
            model=TARGET.name,
        )
        for index, ids in enumerate(tokenizer(prompts).input_ids)
    ]
    model = CachedModel(target, target.config.vocab_size)
    return generate_texts(model, requests, name=TARGET.name, batch=64)


def new_head(target: PreTrainedModel, texts: Sequence[GeneratedText]) -> Eagle3Network:
    """An untrained head, its output matrix the target's rows of the tokens it can draft."""
    torch.manual_seed(SEED)
    counts = Counter(token for text in texts for token in text.tokens)
    kept = torch.tensor(sorted(token for token, _ in counts.most_common(DRAFT_VOCABULARY)))
    config = LlamaConfig(
        hidden_size=TARGET.width,
        intermediate_size=TARGET.inner,
        num_attention_heads=TARGET.heads,
        num_key_value_heads=TARGET.kv_heads,
        head_dim=TARGET.head_dim,
        vocab_size=target.config.vocab_size,
        num_hidden_layers=1,
        rms_norm_eps=target.config.rms_norm_eps,
        max_position_embeddings=CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    head = Eagle3Network(
        config,
        target_hidden=TARGET.width,
        layers=default_layers(TARGET.layers),
        draft_vocabulary=len(kept),
        vocabulary=target.config.vocab_size,
        norm_before_residual=False,
    )
    for name, weight in head.named_parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(
                weight, 0.0, 0.02 if "lm_head" in name else weight.shape[1] ** -0.5
            )
    with torch.no_grad():
        head.lm_head.weight.copy_(output_weight(target)[kept])
    head.d2t.copy_(kept - torch.arange(len(kept)))
    head.t2d.zero_()[kept] = True
    embedding: Any = target.get_input_embeddings()
    head.embed_tokens = torch.nn.Embedding.from_pretrained(embedding.weight.detach())
    return head


def batches(texts: Sequence[GeneratedText]) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids [rows, width] padded on the right, and which are the target's; for ever."""
    order = random.Random(SEED)
    while True:
        shuffled = order.sample(texts, len(texts))
        for begin in range(0, len(shuffled) - BATCH + 1, BATCH):
            rows = shuffled[begin : begin + BATCH]
            width = max(len(row.request.tokens) + len(row.tokens) for row in rows)
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            is_text = torch.zeros(len(rows), width, dtype=torch.bool)
            for index, row in enumerate(rows):
                whole = torch.tensor([*row.request.tokens, *row.tokens])
                ids[index, : len(whole)] = whole
                is_text[index, len(row.request.tokens) : len(whole)] = True
            yield ids, is_text


def loss_of(
    head: Eagle3Network, target: PreTrainedModel, ids: Tensor, is_text: Tensor, depth: int = DEPTH
) -> Tensor:
    """Cross-entropy to the target's distributions, over the drafts from every start.

    Where the target's likeliest token cannot be drafted, nothing is learned.
    """
    with torch.no_grad():
        output = target(ids[:, :-1], use_cache=False, output_hidden_states=True)
    states = torch.cat([output.hidden_states[layer] for layer in head.layers], dim=-1)
    best = head.t2d[output.logits.argmax(-1)]
    wanted = output.logits[..., head.t2d].softmax(-1)
    count = ids.shape[1] - 2
    total, weights = torch.zeros(()), 0.0
    for offset, rows in enumerate(head.passes(ids[:, :-1], states[:, :-1], depth)):
        # Row t predicts token t + 2 + offset, which the target does at the position before
        before, at = slice(1 + offset, 1 + count), slice(2 + offset, 2 + count)
        known = is_text[:, at] & best[:, before]
        logs = head.draft_logits(rows).log_softmax(-1)
        losses = -(wanted[:, before] * logs).sum(-1)
        total = total + DECAY**offset * losses[known].mean()
        weights += DECAY**offset
    return total / weights


def train(
    head: Eagle3Network,
    target: PreTrainedModel,
    texts: Sequence[GeneratedText],
    steps: int,
) -> Iterator[tuple[int, float]]:
    """Train in place; yields the steps done and the mean loss since, every 50."""
    trained = [weight for name, weight in head.named_parameters() if "embed" not in name]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses: list[float] = []
    for step, (ids, is_text) in enumerate(islice(batches(texts), steps), start=1):
        loss = loss_of(head, target, ids, is_text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            yield step, sum(losses) / len(losses)
            losses.clear()


def main() -> None:
    """Train, and save in the layout that is asked for; 16 bits keep the files small."""
    parser = argparse.ArgumentParser(description="Train the embedded EAGLE-3 head.")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--layout", choices=("specforge", "speculators"), default="specforge")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    layout: Layout = arguments.layout
    torch.set_num_threads(1)
    target = load(TARGET).requires_grad_(requires_grad=False)
    begin = time.perf_counter()
    texts = texts_of(target)
    console.print(f"{len(texts)} texts of {TARGET.name} in {time.perf_counter() - begin:.0f} s")
    head = new_head(target, texts)
    for step, loss in train(head, target, texts, arguments.steps):
        seconds = time.perf_counter() - begin
        console.print(f"step {step:>5} of {arguments.steps}  loss {loss:.4f}  {seconds:.0f} s")
    save_head(head.to(torch.bfloat16), arguments.folder, layout, f"embedded:{TARGET.name}")


if __name__ == "__main__":
    main()
