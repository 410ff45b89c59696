"""What an audition costs next to its target generation, and to running the loop in every cell.

    python benchmarks/replay_cost.py

8 K x 3 temperatures x 4 drafts on every shipped prompt: the target's texts are generated once per
temperature, batched; each draft scores them; replay gives all K under all three acceptance rules.
The loop is run on a sample of the cells and prompts, and its seconds per emitted token are scaled
to the texts of all cells (a rule per cell: the other two would be two more loops).
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from harness import prompts as prompt_sets
from harness.analysis.replayed import replayed
from harness.config import SHIPPED_SETS, ModelConf, PromptsConf
from harness.decoding.lookups import NgramDrafter
from harness.decoding.sampling import SamplingParameters
from harness.measurement.draft_scores import lookup_traces, score_texts
from harness.measurement.generations import Draft, Request, run_trial
from harness.measurement.target_texts import GeneratedText, generate_texts
from harness.models.cached import CachedModel
from harness.models.load import LoadedModel, load
from harness.models.probe import cached_model
from harness.models.tokenizer import encode
from harness.records import RULES, TextTrace, Trial

MODEL_DRAFTS = ("tiny_good", "tiny_small", "tiny_unrelated")
DRAFTS = (*MODEL_DRAFTS, "ngram")
KS = (1, 2, 3, 4, 5, 6, 8, 10)
TEMPERATURES = (0.0, 0.7, 1.0)
SAMPLED_KS = (1, 4, 10)


@dataclass(frozen=True)
class Family:
    """The embedded target, what proposes to it, and the shipped prompts."""

    target: CachedModel
    drafts: Mapping[str, Draft]
    prompts: Sequence[Request]

    def traces(self, draft: str, texts: Sequence[GeneratedText], k: int) -> list[TextTrace]:
        model = self.drafts[draft]
        if callable(model):
            return lookup_traces(texts, "ngram", num_draft_tokens=k, draft_name=draft)
        assert isinstance(model, CachedModel)
        return score_texts(texts, self.target, model, draft_name=draft)

    def trial(self, asked: Request, draft: str, k: int) -> Trial:
        return run_trial(replace(asked, draft=draft, k=k), self.target, self.drafts[draft])


def family(limit: int | None, new_tokens: int) -> Family:
    target = _load("tiny")
    model = cached_model(target.network, target.vocab_size, target.shown)
    drafts: dict[str, Draft] = {"ngram": lambda request: NgramDrafter(request.eos)}
    for name in MODEL_DRAFTS:
        draft = _load(name)
        drafts[name] = cached_model(draft.network, draft.vocab_size, draft.shown)
    conf = PromptsConf(sets=list(SHIPPED_SETS), limit=limit)
    prompts = [
        Request(
            cell="",
            prompt_set=prompt.prompt_set,
            prompt=prompt.id,
            category=prompt.category,
            tokens=encode(target.tokenizer, prompt, conf),
            repetition=0,
            sampling=SamplingParameters(0.0),
            budget=new_tokens,
            seed=1,
            eos=target.eos,
            model="tiny",
        )
        for prompt in prompt_sets.load(conf)
    ]
    return Family(model, drafts, prompts)


def _load(name: str) -> LoadedModel:
    return load(ModelConf(name=name, id=f"embedded:{name}"), torch.device("cpu"))


def timed(work: Callable[[], object]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin


class Audition:
    """One audition, stage by stage."""

    def __init__(self, models: Family, batch: int) -> None:
        self.models, self.batch = models, batch
        self.asked = [
            replace(prompt, sampling=SamplingParameters(temperature))
            for temperature in TEMPERATURES
            for prompt in models.prompts
        ]
        self.texts: list[GeneratedText] = []
        self.traces: dict[str, list[TextTrace]] = {}

    def generate(self) -> None:
        self.texts = generate_texts(
            self.models.target, self.asked, name="model=tiny", batch=self.batch
        )

    def score(self, draft: str) -> None:
        self.traces[draft] = self.models.traces(draft, self.texts, max(KS))

    def replay(self) -> None:
        for traces in self.traces.values():
            for temperature in TEMPERATURES:
                chosen = [trace for trace in traces if trace.temperature == temperature]
                for rule in RULES:
                    replayed(chosen, rule, KS)

    def stages(self) -> dict[str, float]:
        """Seconds of each stage of one whole audition."""
        seconds = {"target generation": timed(self.generate)}
        for draft in DRAFTS:
            seconds[f"scoring by {draft}"] = timed(lambda draft=draft: self.score(draft))
        return {**seconds, "replay, 3 rules": timed(self.replay)}

    @property
    def tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)


def loop_seconds(models: Family, tokens: int, stride: int) -> tuple[float, int, int]:
    """(Seconds for the loop in every cell, scaled; cells run; generations run)."""
    per_token: list[float] = []
    generations = 0
    for draft in DRAFTS:
        for temperature in TEMPERATURES:
            for k in SAMPLED_KS:
                seconds = emitted = 0.0
                for prompt in models.prompts[::stride]:
                    begin = perf_counter()
                    trial = models.trial(
                        replace(prompt, sampling=SamplingParameters(temperature)), draft, k
                    )
                    seconds += perf_counter() - begin
                    emitted += trial.new_tokens or 0
                    generations += 1
                per_token.append(seconds / emitted)
    every_cell = tokens * len(DRAFTS) * len(KS)
    return float(np.mean(per_token)) * every_cell, len(per_token), generations


def show(console: Console, stages: Sequence[tuple[str, float]], tokens: int) -> None:
    generation = stages[0][1]
    table = Table(title=f"One audition: {tokens} target tokens, median over the runs")
    for name in ("stage", "seconds", "of generation"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for name, seconds in stages:
        table.add_row(name, f"{seconds:.2f}", f"{seconds / generation:.2f}x")
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--limit", type=int, help="prompts per set; all")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3, help="whole auditions; medians are shown")
    parser.add_argument("--stride", type=int, default=16, help="the loop runs every n-th prompt")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    console = Console(width=110)
    console.print("command: python", " ".join(sys.argv), highlight=False)
    models = family(options.limit, options.new_tokens)
    warm = replace(models, prompts=[replace(prompt, budget=4) for prompt in models.prompts[:4]])
    Audition(warm, options.batch).stages()
    audition = Audition(models, options.batch)
    runs = [audition.stages() for _ in range(options.runs)]
    stages = [(name, float(np.median([run[name] for run in runs]))) for name in runs[0]]
    total = sum(seconds for _, seconds in stages)
    ratio = float(np.median([sum(run.values()) / run["target generation"] for run in runs]))
    show(console, [*stages, ("total", total)], audition.tokens)
    loop, cells, generations = loop_seconds(models, audition.tokens, options.stride)
    every = len(DRAFTS) * len(KS) * len(TEMPERATURES)
    console.print(f"total / generation alone: {ratio:.2f}x (must be <= 1.5)")
    console.print(
        f"the loop in all {every} cells: {loop:.0f} s, {loop / total:.0f}x the audition (scaled "
        f"from {generations} generations in {cells} cells)"
    )
    if options.json:
        content = {
            "command": sys.argv,
            "seconds": dict(stages),
            "runs": runs,
            "ratio_to_generation": ratio,
            "loop_seconds_scaled": loop,
            "loop_cells_run": cells,
            "ratio_to_loop": loop / total,
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if ratio <= 1.5 else 1


if __name__ == "__main__":
    sys.exit(main())
