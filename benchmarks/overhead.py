"""What a speculative round costs beyond the forwards of its two models.

    python benchmarks/overhead.py

A target of more than ten million parameters and a small draft, both with random weights, run the
real loop. A model that counts its own seconds stands between the loop and
each of them, so that what is left of a generation's decode time is the loop's: drawing, accepting,
the host read, rewinding, bookkeeping. On a CPU a forward is done when it returns, and the share is
exact; the GPU's is in gpu.py, from step times.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from harness.config import rates_for
from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import speculative_rounds
from harness.decoding.protocols import Generation
from harness.decoding.sampling import SamplingParameters, Uniforms
from harness.models.cached import CachedModel
from harness.models.dummy import build
from harness.models.probe import cached_model
from harness.theory.acceptance import conditional

# 4,000 parameters per vocabulary entry; Qwen3-4B has 26,000, so drawing weighs less there
VOCAB = 4096
TARGET = {
    "family": "qwen3",
    "layers": 8,
    "hidden": 384,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 1152,
    "vocab": VOCAB,
    "tied_embeddings": True,
}
DRAFT = {**TARGET, "layers": 2, "hidden": 128, "heads": 2, "kv_heads": 1, "ffn": 384}
LIMIT = 0.05


class Counting:
    """A model that adds up the seconds its forwards take."""

    def __init__(self, model: CachedModel) -> None:
        self.model, self.seconds = model, 0.0
        self.device, self.vocab_size = model.device, model.vocab_size

    def prefill(self, tokens: Sequence[int]) -> None:
        self.model.prefill(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        start = time.perf_counter()
        logits = self.model.forward(tokens)
        self.seconds += time.perf_counter() - start
        return logits

    def rewind(self, count: int) -> None:
        self.model.rewind(count)


def share(target: Counting, draft: Counting, k: int, temperature: float, asked, seed: int) -> float:
    """The part of one generation's decode time that no forward explains."""
    sampling = SamplingParameters(temperature)
    prompt = [(17 * index + seed) % VOCAB for index in range(asked.context)]
    uniforms = Uniforms.keyed(seed, "overhead", 0, asked.new_tokens + k + 1, torch.device("cpu"))
    drafter = ModelDrafter(draft, sampling)
    target.prefill(prompt[:-1])
    drafter.begin(prompt)
    target.seconds = draft.seconds = 0.0
    start = time.perf_counter()
    generation = Generation(
        prompt=prompt,
        budget=asked.new_tokens,
        sampling=sampling,
        uniforms=uniforms,
        num_draft_tokens=k,
        synthetic=None if asked.alpha is None else conditional(rates_for(asked.alpha, k)),
    )
    for _ in speculative_rounds(target, drafter, generation):
        pass
    spent = time.perf_counter() - start
    return 1 - (target.seconds + draft.seconds) / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--k", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--alpha", type=float, help="impose this acceptance on the loop")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    networks = [build(shape, torch.float32, cpu, key="model") for shape in (TARGET, DRAFT)]
    target, draft = (Counting(cached_model(network, VOCAB, "x")) for network in networks)
    count = sum(tensor.numel() for tensor in networks[0].parameters())
    table = Table(title=f"overhead beyond model forwards; target of {count / 1e6:.1f} M parameters")
    for column in ("K", "temperature", "share of a round", "least", "most"):
        table.add_column(column, justify="right")
    rows = []
    for temperature in asked.temperature:
        for k in asked.k:
            with torch.inference_mode():
                shares = [
                    share(target, draft, k, temperature, asked, seed)
                    for seed in range(-1, asked.repetitions)
                ][1:]
            middle = statistics.median(shares)
            rows.append({"k": k, "temperature": temperature, "overhead": middle})
            table.add_row(
                str(k),
                f"{temperature:g}",
                *(f"{share:.1%}" for share in (middle, min(shares), max(shares))),
            )
    console = Console()
    console.print(table)
    worst = max(row["overhead"] for row in rows)
    console.print(f"worst cell: {worst:.1%} (aim: at most {LIMIT:.0%})")
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
