"""What a plan over many stored texts takes: memory, and time.

    python benchmarks/plan_memory.py [--texts 100000] [--tokens 64]

Synthetic texts at temperature 1 are stored with a copy of the server run in tests/frozen, whose
loads price them, at costs that are set (tests/timed_server.py); then it is read and planned. Memory
hangs on the texts and hardly on how much is simulated, so that is little: 2 sequences of 400
requests. What 100,000 requests take as they enter is said by `benchmarks/simulation.py`.
"""

import argparse
import resource
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Process
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import numpy as np

from harness.analysis.plan_simulation import simulated_plan
from harness.cli import compose
from harness.records import TextTrace
from harness.storage import RunFolder, load

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from timed_server import stored_timed


def main() -> None:
    """Print the memory and the time of a plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        copied = stored_timed(Path(folder))
        # In a process of its own, whose memory is not the plan's
        storing = Process(target=store, args=(copied, asked.texts, asked.tokens))
        storing.start()
        storing.join()
        run = load(copied)
        assert len(run.traces) > asked.texts
    words = ("run=x", "rate=20", "tpot_ms=30", "temperature=[1]", "seeds=2", "requests=400")
    begin = process_time()
    server, _ = simulated_plan(run, compose("plan", [*words]))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"a plan over {server.prompts:,} prompts, {asked.tokens} tokens each: {memory:.2f} GiB of"
        f" memory at most, {process_time() - begin:.0f} s"
    )


def store(run: Path, number: int, size: int) -> None:
    """Put so many texts to those that a run has."""
    folder = RunFolder(run, load(run).manifest)
    first = next(each for each in folder.traces() if each.temperature == 1.0 and each.k == 0)
    folder.add_traces([*made(first, number, size)])


def made(like: TextTrace, number: int, size: int) -> Iterator[TextTrace]:
    """So many texts, each of a prompt of its own."""
    random = np.random.default_rng(3)
    for prompt in range(number):
        draft_logprob = np.log(random.random(size))
        yield replace(
            like,
            prompt=f"made{prompt}",
            repetition=0,
            tokens=random.integers(0, 1000, size),
            target_logprob=np.log(random.random(size)),
            draft_logprob=draft_logprob,
            draft_is_argmax=draft_logprob > -0.7,
        )


if __name__ == "__main__":
    main()
