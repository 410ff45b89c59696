"""Thousands of generations in one process: memory and open files stay as they are."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from harness import prompts as prompt_sets
from harness.cli import compose
from harness.commands.pair import ModelPair, open_pair
from harness.commands.requests import request
from harness.commands.tasks import grid_tasks
from harness.decoding.verification import rates_on
from harness.measurement.generations import Request, run_trial
from harness.storage import RunFolder

WARM_UP = 100


def soak(generations: int, root: Path, warm_up: int = WARM_UP) -> tuple[list[int], list[int]]:
    """Run and store so many generations, each with a seed of its own.

    Returns:
        Resident bytes and open files after the warm-up and then at every tenth of the rest.
    """
    grid = ["k=[1,2,4]", "temperature=[0,1]", "prompts.limit=4", "new_tokens=4", "threads=1"]
    config = compose("sweep", grid)
    pair = open_pair(config, prompt_sets.load(config.prompts))
    assert isinstance(pair, ModelPair)
    tasks = grid_tasks(pair.prompts, config, config.k, config.temperature)
    requests = [request(pair, config, task) for task in tasks]
    folder = RunFolder.create(root, "sweep", ["tiny"], {})
    process = psutil.Process()

    def run(count: int, first: int) -> None:
        for number in range(first, first + count):
            entry = seeded(requests, number)
            folder.trials.append(run_trial(entry, pair.target_model, pair.draft_model))

    rates = rates_on.cache_info().currsize  # of other tests in this process
    run(warm_up, 0)
    memory, files = [], []
    for part in range(11):
        gc.collect()
        memory.append(process.memory_info().rss)
        files.append(process.num_fds())
        if part < 10:
            share = (generations - warm_up) // 10
            run(share, warm_up + part * share)
    trials = folder.trials.read()
    assert len(trials) == generations
    assert all(trial.status == "ok" for trial in trials)
    assert rates_on.cache_info().currsize - rates <= 2 * len(config.k)
    return memory, files


def seeded(requests: Sequence[Request], number: int) -> Request:
    request = requests[number % len(requests)]
    return replace(request, cell=str(number), seed=request.seed + number)


def test_generations_leave_no_file_open(tmp_path: Path) -> None:
    _, files = soak(120, tmp_path, warm_up=20)
    assert max(files) == files[0]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_two_thousand_generations_grow_by_less_than_two_percent(tmp_path: Path) -> None:
    memory, files = soak(2000, tmp_path)
    shown = [round(size / 2**20, 1) for size in memory]
    assert memory[-1] < 1.02 * memory[0], shown
    assert max(files) == files[0]
