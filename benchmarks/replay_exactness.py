"""Replay against the real loop: the same rounds, from texts that were generated without a draft.

    python benchmarks/replay_exactness.py

Greedy: for every shipped prompt, embedded draft, the n-gram drafter and every K, the replayed
rounds must equal the loop's exactly. At a temperature both are random, and each cell is tested
twice, p-values adjusted by Holm over all cells, seeds fixed here:

independent: the loop's rounds against the replayed ones of independently drawn texts of the same
prompts (paired t-test). Where no two repetitions of a prompt differ in the loop there is no spread
to test with (a draft token that stands with chance .9999 does so 200 times, yet its mean is not 1):
such a cell is marked, and its own-text test is used instead.

own text: given the texts that the loop emitted, replay gives the whole distribution of the rounds,
not only their mean. The p-value of the observed total under it is exact, rare events included; for
the n-gram drafter, whose tokens stand or fall with the text, it is 1 or 0: equal or not.

Variance: of rounds per token, prompts held fixed, times the target tokens spent, replay's over the
loop's. Replay is the loop's mean given the text, so its is the lower one. The n-gram drafter has
nothing but the text's own variance on both sides, so there the ratio only compares two samples of
texts; it is shown, not judged.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import ttest_rel

from harness import prompts as prompt_sets
from harness.analysis.replayed import accept_chances, replayed
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
from harness.records import TextTrace, Trial
from harness.stats.jackknife import holm

MODEL_DRAFTS = ("tiny_good", "tiny_small", "tiny_unrelated")
DRAFTS = (*MODEL_DRAFTS, "ngram")
LOOP_SEED, REPLAY_SEED = 20260101, 20260102
THRESHOLD = 1e-3


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
            seed=REPLAY_SEED,
            eos=target.eos,
            model="tiny",
        )
        for prompt in prompt_sets.load(conf)
    ]
    return Family(model, drafts, prompts)


def _load(name: str) -> LoadedModel:
    return load(ModelConf(name=name, id=f"embedded:{name}"), torch.device("cpu"))


def greedy(models: Family, ks: Sequence[int]) -> tuple[int, list[str]]:
    """(Generations compared, those whose rounds differ)."""
    texts = generate_texts(models.target, models.prompts, name="model=tiny")
    compared, wrong = 0, []
    for draft in track(DRAFTS, "greedy", transient=True):
        by_k = replayed(models.traces(draft, texts, max(ks)), "ratio", ks)
        for row, text in enumerate(texts):
            for k in ks:
                trial = models.trial(text.request, draft, k)
                compared += 1
                if trial.tokens != text.tokens or trial.rounds != by_k[k].rounds[row]:
                    wrong.append(f"{draft} K={k} {text.request.prompt}")
    return compared, wrong


@dataclass(frozen=True)
class Cell:
    """The comparison of one cell. The variances are of rounds per token, per target token."""

    draft: str
    temperature: float
    k: int
    generations: int
    loop_rounds: float
    replayed_rounds: float
    p_independent: float | None
    p_own_text: float
    loop_variance: float
    replay_variance: float


def sampled(models: Family, ks: Sequence[int], temperature: float, generations: int) -> list[Cell]:
    repetitions = -(-generations // len(models.prompts))
    asked = [
        replace(prompt, sampling=SamplingParameters(temperature), repetition=repetition)
        for repetition in range(repetitions)
        for prompt in models.prompts
    ]
    texts = generate_texts(models.target, asked, name="model=tiny")
    lengths = np.array([float(len(text.tokens)) for text in texts])
    cells: list[Cell] = []
    for draft in DRAFTS:
        by_k = replayed(models.traces(draft, texts, max(ks)), "ratio", ks)
        for k in track(ks, f"T = {temperature:g}, {draft}", transient=True):
            trials = [models.trial(replace(one, seed=LOOP_SEED), draft, k) for one in asked]
            rounds = np.array([float(trial.rounds or 0) for trial in trials])
            tokens = np.array([float(trial.new_tokens or 0) for trial in trials])
            cells.append(
                Cell(
                    draft=draft,
                    temperature=temperature,
                    k=k,
                    generations=len(asked),
                    loop_rounds=float(rounds.mean()),
                    replayed_rounds=float(by_k[k].rounds.mean()),
                    p_independent=p_independent(rounds, by_k[k].rounds, repetitions),
                    p_own_text=p_own_text(models, draft, asked, trials, k),
                    loop_variance=variance(rounds, tokens, repetitions),
                    replay_variance=variance(by_k[k].rounds, lengths, repetitions),
                )
            )
    return cells


def p_independent(loop: np.ndarray, replay: np.ndarray, repetitions: int) -> float | None:
    """Of equal means; entry i of both answers the same prompt, by independent draws.

    None where the loop's rounds do not vary within any prompt.
    """
    if not np.ptp(loop.reshape(repetitions, -1), axis=0).any():
        return None
    return float(ttest_rel(loop, replay).pvalue)  # type: ignore[attr-defined]


def p_own_text(
    models: Family, draft: str, asked: Sequence[Request], trials: Sequence[Trial], k: int
) -> float:
    """Exact two-sided p-value of the loop's total rounds, given the texts that it emitted."""
    texts = [
        GeneratedText(
            request=replace(one, seed=LOOP_SEED),
            tokens=trial.tokens or (),
            stop_reason=trial.stop_reason or "budget",
        )
        for one, trial in zip(asked, trials, strict=True)
    ]
    shares = np.ones(1)
    for trace in models.traces(draft, texts, k):
        shares = np.convolve(shares, rounds_distribution(accept_chances(trace, "ratio", k)))
    seen = shares[sum(trial.rounds or 0 for trial in trials)]
    return min(1.0, float(shares[shares <= seen * (1 + 1e-9)].sum()))


def rounds_distribution(accept: np.ndarray) -> np.ndarray:
    """Distribution of the number of rounds on one text, [n + 1], from its end backwards."""
    length, k = accept.shape
    shares = np.zeros((length + 1, length + 1))
    shares[length, 0] = 1.0
    for start in range(length - 1, -1, -1):
        reach = 1.0
        for offset in range(min(k, length - start)):
            shares[start, 1:] += (
                reach * (1 - accept[start, offset]) * shares[start + offset + 1, :-1]
            )
            reach *= accept[start, offset]
        shares[start, 1:] += reach * shares[min(start + k + 1, length), :-1]
    return shares[0]


def variance(rounds: np.ndarray, tokens: np.ndarray, repetitions: int) -> float:
    """Variance of rounds per token, prompts held fixed, times the tokens spent on it."""
    residual = (rounds - rounds.sum() / tokens.sum() * tokens).reshape(repetitions, -1)
    return float(residual.var(axis=0, ddof=1).mean() / tokens.mean())


def show(
    console: Console, cells: Sequence[Cell], independent: Sequence[float], own: Sequence[float]
) -> None:
    table = Table(title="Loop and replay at a temperature (p-values adjusted by Holm)")
    for name in ("draft", "T", "K", "texts", "loop", "replayed", "independent", "own text", "var."):
        table.add_column(name, justify="left" if name == "draft" else "right")
    for cell, p, p_own in zip(cells, independent, own, strict=True):
        table.add_row(
            cell.draft,
            f"{cell.temperature:g}",
            str(cell.k),
            str(cell.generations),
            f"{cell.loop_rounds:.3f}",
            f"{cell.replayed_rounds:.3f}",
            f"{p:.3g}" if cell.p_independent is not None else "no spread",
            f"{p_own:.3g}",
            f"{cell.replay_variance / cell.loop_variance:.2f}x" if cell.loop_variance else "-",
        )
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.7, 1.0])
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--generations", type=int, default=200, help="per cell, at least")
    parser.add_argument("--limit", type=int, help="prompts per set in the greedy part; all")
    parser.add_argument("--sampled-limit", type=int, default=20, help="... in the sampled part")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    console = Console(width=110)
    console.print("command: python", " ".join(sys.argv), highlight=False)
    begin = perf_counter()
    compared, wrong = greedy(family(options.limit, options.new_tokens), options.k)
    console.print(f"greedy: {compared - len(wrong)} of {compared} generations have equal rounds")
    models = family(options.sampled_limit, options.new_tokens)
    cells = [
        cell
        for temperature in options.temperature
        for cell in sampled(models, options.k, temperature, options.generations)
    ]
    own_text = [cell.p_own_text for cell in cells]
    both = [cell.p_independent for cell in cells]
    independent = [p_own if p is None else p for p, p_own in zip(both, own_text, strict=True)]
    own, independent = ([p for p in holm(ps) if p is not None] for ps in (own_text, independent))
    adjusted = [*independent, *own]
    show(console, cells, independent, own)
    drafted = [cell for cell in cells if cell.draft != "ngram"]
    ratios = [cell.replay_variance / cell.loop_variance for cell in drafted if cell.loop_variance]
    if cells:
        console.print(
            f"least Holm-adjusted p over {len(cells)} cells: {min(independent):.3g} independent, "
            f"{min(own):.3g} own text; variance per target token "
            f"{np.median(ratios):.2f}x the loop's (median over the model drafts, "
            f"{min(ratios):.2f} to {max(ratios):.2f})"
        )
    console.print(f"{perf_counter() - begin:.0f} s")
    if options.json:
        content = {
            "command": sys.argv,
            "greedy": {"compared": compared, "different": wrong},
            "cells": [{**asdict(c), "p_holm": p} for c, p in zip(cells, adjusted, strict=True)],
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    good = not wrong and min(adjusted, default=1.0) > THRESHOLD and max(ratios, default=0.0) < 1.0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
