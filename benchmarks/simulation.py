"""Rounds of a simulated server per second of one core, by policy and length of the texts.

    python benchmarks/simulation.py

Texts at temperature 0 of which 70 % of the tokens would be accepted, arriving at random at a rate
that keeps most of the slots busy.
"""

from collections.abc import Callable
from time import process_time

import numpy as np

from harness.simulation.policies import Fixed, Oracle, Tier, Tiers
from harness.simulation.requests import Text, at_random
from harness.simulation.server import Costs, Policy, simulate
from harness.theory.replay import by_start

K, REQUESTS, REPEATS = 3, 6000, 3


def main() -> None:
    for length, slots in ((20, 4), (120, 4), (120, 16)):
        random = np.random.default_rng(2)
        flags = random.random((50, length)) < 0.7
        most = np.arange(length - 1, -1, -1)
        texts = [
            Text("", "", 20, by_start(row[None].astype(np.float64), K)[0], most) for row in flags
        ]
        made = [text.certain for text in texts]
        requests = [each for each in made if each is not None]
        sent = [requests[at] for at in random.integers(0, len(requests), REQUESTS)]
        costs = Costs([[1.0] * (K + 1)] * (slots + 1))
        arrivals = at_random(REQUESTS, random) * length / slots
        makers: dict[str, Callable[[Costs], Policy]] = {
            "plain": lambda _: Fixed(0),
            f"K={K}": lambda _: Fixed(K),
            "tiers": lambda _: Tiers(K, (Tier(1, (1, K)),)),
            "oracle": lambda costs: Oracle(K, costs),
        }
        for name, make in makers.items():
            seconds: list[float] = []
            for _ in range(REPEATS):
                begin = process_time()
                rounds = simulate(sent, arrivals, costs, make(costs)).rounds.sum()
                seconds.append(process_time() - begin)
            speed = f"{rounds / min(seconds) / 1e6:.2f} million rounds a second"
            print(f"{length:4d} tokens, {slots:2d} slots, {name:6s} {speed}")


if __name__ == "__main__":
    main()
