"""Rebuild the embedded family and measure it: `python -m tools.train_embedded.train`.

Training takes two processes of one thread each (models this small run slower with more): the
target in one, the drafts in the other. Then the table is printed, and the exit status is 1 if the
family does not do what it is for: a draft that pays on easy text and does not on hard text, one
that is worse, one that is useless. `--measure-only` measures the committed weights.
"""

import argparse
import multiprocessing
import shutil
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from tools.train_embedded.measure import (
    Acceptance,
    load,
    load_tokenizer,
    measure_acceptance,
    read_prompts,
    step_times_ms,
)
from tools.train_embedded.recipes import (
    DRAFTS,
    GOOD,
    RECIPES,
    SMALL,
    TARGET,
    TOKENIZER_SEED,
    UNRELATED,
    Recipe,
)
from tools.train_embedded.training import new_model, train
from tools.train_embedded.vocabulary import train_tokenizer

SAMPLES_PER_PROMPT = 8
SAMPLING_SEED = 0
KINDS = ("easy", "hard")

console = Console()


class Requirement(NamedTuple):
    """A bound on what was measured."""

    text: str
    value: float
    met: bool


class Measured(NamedTuple):
    """The family's numbers: acceptance by (draft name, kind of text), step time by name."""

    acceptance: dict[tuple[str, str], Acceptance]
    step_ms: dict[str, float]


def train_models(recipes: Sequence[Recipe]) -> None:
    """Train these models one after the other and save each with the tokenizer."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    tokenizer = train_tokenizer(TOKENIZER_SEED)
    for recipe in recipes:
        start = time.perf_counter()
        model = new_model(recipe, tokenizer)
        for progress in train(model, recipe, tokenizer):
            left_s = (time.perf_counter() - start) * (recipe.steps / progress.step - 1)
            console.print(
                f"{recipe.name:<15} step {progress.step:>5} of {recipe.steps}  "
                f"loss {progress.loss:.4f}  {left_s / 60:.1f} min left"
            )
        shutil.rmtree(recipe.folder, ignore_errors=True)
        tokenizer.save_pretrained(recipe.folder)
        model.save_pretrained(recipe.folder)


def train_family() -> None:
    """Train all four models, the target at the same time as the drafts."""
    # Spawned, not forked: torch's thread pools do not survive a fork.
    workers = [
        multiprocessing.get_context("spawn").Process(target=train_models, args=(recipes,))
        for recipes in ((TARGET,), DRAFTS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        console.print("training failed; see above")
        sys.exit(1)


def measure_family() -> Measured:
    """Measure the committed weights over every shipped prompt."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    models = [load(recipe) for recipe in RECIPES]
    tokenizer = load_tokenizer(TARGET)
    acceptance = {}
    for kind in KINDS:
        measured = measure_acceptance(
            models[0], models[1:], tokenizer, read_prompts(kind), SAMPLES_PER_PROMPT, SAMPLING_SEED
        )
        acceptance |= {
            (draft.name, kind): value for draft, value in zip(DRAFTS, measured, strict=True)
        }
    times = step_times_ms(models)
    return Measured(
        acceptance, {recipe.name: ms for recipe, ms in zip(RECIPES, times, strict=True)}
    )


def requirements(measured: Measured) -> list[Requirement]:
    """What the family must do, with the measured value of each."""

    def alpha(recipe: Recipe, kind: str) -> float:
        return measured.acceptance[recipe.name, kind].sampled

    easy, hard = alpha(GOOD, "easy"), alpha(GOOD, "hard")
    ratio = measured.step_ms[TARGET.name] / measured.step_ms[GOOD.name]
    rows = [
        Requirement("tiny_good alpha on easy >= 0.80", easy, easy >= 0.80),
        Requirement("tiny_good alpha on hard <= 0.70", hard, hard <= 0.70),
        Requirement("tiny step / tiny_good step >= 3", ratio, ratio >= 3),
    ]
    for kind in KINDS:
        gap = alpha(GOOD, kind) - alpha(SMALL, kind)
        stranger = alpha(UNRELATED, kind)
        rows += [
            Requirement(f"tiny_small alpha on {kind} lower by >= 0.08", gap, gap >= 0.08),
            Requirement(f"tiny_unrelated alpha on {kind} < 0.30", stranger, stranger < 0.30),
        ]
    return rows


def print_report(measured: Measured, checked: Sequence[Requirement]) -> None:
    """Print the numbers, then the requirements."""
    table = Table(
        title="embedded family",
        padding=(0, 0),
        caption="ratio: target step / step. alpha: temperature 1; greedy: match rate at 0",
    )
    table.add_column("model", no_wrap=True)
    for column in ("parameters", "step ms", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for kind in KINDS:
        table.add_column(f"{kind}\nalpha", justify="right", no_wrap=True)
        table.add_column(f"{kind}\ngreedy", justify="right", no_wrap=True)
    for recipe in RECIPES:
        step_ms = measured.step_ms[recipe.name]
        cells = [
            f"{load(recipe).num_parameters():,}",
            f"{step_ms:.2f}",
            f"{measured.step_ms[TARGET.name] / step_ms:.2f}",
        ]
        for kind in KINDS:
            rates = measured.acceptance.get((recipe.name, kind), ())
            cells += [f"{rate:.3f}" for rate in rates] or ["", ""]
        table.add_row(recipe.name, *cells)
    console.print(table)
    for requirement in checked:
        mark = "ok    " if requirement.met else "MISSED"
        console.print(f"{mark} {requirement.text}: {requirement.value:.3f}")


def main() -> int:
    """Train unless asked not to, measure, report; 1 if a requirement is missed."""
    parser = argparse.ArgumentParser(description="Rebuild and measure the embedded family.")
    parser.add_argument("--measure-only", action="store_true", help="measure the committed weights")
    if not parser.parse_args().measure_only:
        train_family()
    measured = measure_family()
    checked = requirements(measured)
    print_report(measured, checked)
    return 0 if all(requirement.met for requirement in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
