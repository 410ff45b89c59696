"""Our loop against transformers' own generate and assisted generation: same pair, same work.

    python benchmarks/vs_transformers.py

The peer is put at its best: K constant, confidence threshold 0, no default top-k, and the single
warp of a LogitsProcessorList (its default warps the draft twice; a row shows what that costs).
Every prompt is run by every contestant in turn, in rotating order, so that drift hits all alike;
a cell is the ratio of seconds per emitted token, the median over repetitions. At temperature 0 the
texts must be identical.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper
from transformers.utils import logging as hf_logging

from harness import prompts as prompt_sets
from harness.cli import compose
from harness.commands.pair import ModelPair, open_pair
from harness.commands.requests import request
from harness.commands.tasks import EncodedPrompt, Task
from harness.measurement.generations import run_trial

Contestant = Callable[[EncodedPrompt, int, float], tuple[float, list[int]]]


def ours(pair: ModelPair, config) -> Contestant:
    def run(entry: EncodedPrompt, k: int, temperature: float) -> tuple[float, list[int]]:
        start = time.perf_counter()
        asked = request(pair, config, Task(entry, temperature, k, 0))
        trial = run_trial(asked, pair.target_model, pair.draft_model)
        return time.perf_counter() - start, list(trial.tokens or ())

    return run


def peer(pair: ModelPair, new_tokens: int, *, double_warp: bool = False) -> Contestant:
    target, draft = cast(Any, pair.target.network), pair.draft.network
    eos = sorted(pair.target.eos)

    def run(entry: EncodedPrompt, k: int, temperature: float) -> tuple[float, list[int]]:
        settings: dict = {"max_new_tokens": new_tokens, "eos_token_id": eos, "pad_token_id": eos[0]}
        arguments: dict = {}
        if temperature == 0:
            settings["do_sample"] = False
        else:
            own = temperature if double_warp else 1.0
            settings |= {"do_sample": True, "temperature": own, "top_k": 0, "top_p": 1.0}
            if not double_warp and temperature != 1.0:
                arguments["logits_processor"] = LogitsProcessorList(
                    [TemperatureLogitsWarper(float(temperature))]
                )
        if k:
            draft.generation_config.num_assistant_tokens = k
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
            arguments["assistant_model"] = draft
        ids = torch.tensor([entry.tokens])
        start = time.perf_counter()
        with torch.inference_mode():
            output = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(**settings),
                **arguments,
            )
        return time.perf_counter() - start, output[0, len(entry.tokens) :].tolist()

    return run


def cell(
    contestants: dict[str, Contestant],
    pair: ModelPair,
    k: int,
    temperature: float,
    repetitions: int,
) -> tuple[dict[str, float], bool]:
    """Seconds per token of each contestant (median over repetitions), and whether texts agree."""
    names = list(contestants)
    totals: dict[str, list[float]] = {name: [] for name in names}
    identical = True
    for repetition in range(repetitions + 1):
        seconds = dict.fromkeys(names, 0.0)
        tokens = dict.fromkeys(names, 0)
        for turn, entry in enumerate(pair.prompts):
            start = turn % len(names)
            texts = {}
            for name in names[start:] + names[:start]:
                spent, texts[name] = contestants[name](entry, k, temperature)
                seconds[name] += spent
                tokens[name] += len(texts[name])
            if temperature == 0:
                identical &= len({tuple(text) for text in texts.values()}) == 1
        if repetition:  # the first one warms up
            for name in names:
                totals[name].append(seconds[name] / tokens[name])
    return {name: statistics.median(values) for name, values in totals.items()}, identical


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--k", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=3, help="per prompt set")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    hf_logging.set_verbosity_error()
    config = compose(
        "sweep",
        [f"prompts.limit={asked.prompts}", f"new_tokens={asked.new_tokens}", "threads=1"],
    )
    pair = open_pair(config, prompt_sets.load(config.prompts))
    assert isinstance(pair, ModelPair)
    contestants = {"ours": ours(pair, config), "transformers": peer(pair, asked.new_tokens)}
    table = Table(title="seconds per token, whole requests: transformers / ours")
    for column in ("K", "temperature", "ours ms/tok", "transformers ms/tok", "ratio", "same text"):
        table.add_column(column, justify="right")
    ratios, rows = [], []
    for temperature in asked.temperature:
        for k in [0, *asked.k]:
            times, same = cell(contestants, pair, k, temperature, asked.repetitions)
            ratio = times["transformers"] / times["ours"]
            if k:
                ratios.append(ratio)
            rows.append({"k": k, "temperature": temperature, "ratio": ratio, "same": same, **times})
            table.add_row(
                str(k) if k else "0 (plain)",
                f"{temperature:g}",
                f"{times['ours'] * 1e3:.2f}",
                f"{times['transformers'] * 1e3:.2f}",
                f"{ratio:.2f}x",
                ("yes" if same else "NO") if temperature == 0 else "-",
            )
    console = Console()
    console.print(table)
    console.print(
        f"geometric mean over K >= 1: {statistics.geometric_mean(ratios):.2f}x, "
        f"least {min(ratios):.2f}x"
    )
    console.print(
        "peer settings: num_assistant_tokens=K, schedule constant, confidence threshold 0, "
        "temperature=1 top_k=0 top_p=1 with a TemperatureLogitsWarper; one thread"
    )
    double = {
        "single warp": peer(pair, asked.new_tokens),
        "double warp": peer(pair, asked.new_tokens, double_warp=True),
    }
    times, _ = cell(double, pair, 4, 0.5, asked.repetitions)
    console.print(
        "transformers with its default double warp, K=4, temperature 0.5: "
        f"{times['double warp'] / times['single warp']:.2f}x the time of its single warp"
    )
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
