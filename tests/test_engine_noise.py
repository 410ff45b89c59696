"""Greedy texts judged by an engine's own noise: ties pass, caches that are broken are caught."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from served_pair import embedded, shipped_requests
from torch import Tensor

from harness.analysis.lossless import LEAST_CHANCE, NOISE_FAILS, distrust, voiding
from harness.commands.server_greedy_texts import judged_by
from harness.config import DraftConf
from harness.decoding.model_drafter import ModelDrafter
from harness.engines.own import OwnLoop, OwnServer
from harness.engines.protocol import Asked, Completion
from harness.measurement.engine_noise import (
    LISTED,
    TIE_FACTOR,
    WANTED_POSITIONS,
    PlainText,
    ask_margins,
)
from harness.models.load import open_pair
from harness.records import first_difference
from harness.summary import TextCheck

NATS = 0.1  # of llama.cpp's kernels for Q4_K, by which a margin changes
PROMPTS, BUDGET = 10, 40


class Noisy:
    """A target whose logits depend on the shape of the batch, and whose cache may be broken."""

    def __init__(self, model: Any, nats: float, broken: Callable[[int], int] = int) -> None:
        self.model, self.nats, self.broken = model, nats, broken
        self.vocab_size, self.device = model.vocab_size, model.device
        self.held: list[int] = []

    def prefill(self, tokens: Sequence[int]) -> None:
        self.held = list(tokens)
        self.model.prefill(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        logits, fed = self.model.forward(tokens).clone(), tokens.tolist()
        if self.nats:
            for row in range(len(fed)):
                seed = abs(hash((*self.held, *fed[: row + 1], len(fed) > 1)))
                noise = np.random.default_rng(seed).normal(size=self.vocab_size)
                # A margin changes by four such numbers
                logits[row] += torch.tensor(0.5 * self.nats * noise, dtype=logits.dtype)
        self.held += fed
        return logits

    def rewind(self, count: int) -> None:
        count = min(self.broken(count), len(self.held))
        self.held = self.held[: len(self.held) - count]
        self.model.rewind(count)


class Listing(OwnServer):
    """The plain loop as a server that lists log-probabilities and has a prompt cache."""

    def __init__(self, loop: OwnLoop) -> None:
        super().__init__(loop, 0, None)
        self.target, self.asked = loop.target, list[Asked]()

    @torch.inference_mode()
    def generate(self, asked: Asked) -> Completion:
        self.asked.append(asked)
        if not asked.logprobs:
            return super().generate(asked)
        target, rows, prompt = self.target, list[Tensor](), list(asked.prompt)
        assert isinstance(target, Noisy)
        known = len(target.held) if target.held == prompt[: len(target.held)] else 0
        if not asked.cached or known >= len(prompt):
            known = len(prompt) - 1
        if target.held != prompt[:known]:
            target.prefill(prompt[:known])
        fed, tokens = prompt[known:], list[int]()
        for _ in range(asked.budget):
            rows.append(target.forward(torch.tensor(fed))[-1].log_softmax(-1))
            tokens.append(int(rows[-1].argmax()))
            fed = tokens[-1:]
        best = (row.topk(min(LISTED, len(row))) for row in rows)
        listed = tuple(
            dict(zip(each.indices.tolist(), each.values.tolist(), strict=True)) for each in best
        )
        return Completion(tuple(tokens), "budget", 0.0, likeliest=listed)


@cache
def pair() -> tuple[Any, Any, Any]:
    target, draft = embedded("tiny"), embedded("tiny_small", DraftConf)
    return target, *open_pair(target, draft)


def loop(nats: float = NATS, broken: Callable[[int], int] = int) -> OwnLoop:
    loaded, target, draft = pair()
    return OwnLoop(
        Noisy(target, nats, broken),
        lambda sampling, _: ModelDrafter(draft, sampling),
        loaded.eos,
        "greedy_draft",
        lambda: 0.0,
    )


def judged(k: int, nats: float, broken: Callable[[int], int] = int) -> list[TextCheck]:
    """The checks of a speculating server's texts, every one."""
    plain = Listing(loop(nats))
    requests = shipped_requests(pair()[0], PROMPTS // 2, budget=BUDGET)
    checks, waiting, equal = list[TextCheck](), [], []
    for request in requests:
        asked = request.asked._replace(prompt=tuple(request.tokens))
        texts = [server.generate(asked).tokens for server in (plain, loop(nats, broken).open(k))]
        position = first_difference(*texts)
        check = TextCheck(request.prompt_set, request.prompt, 0, k, "PASS", position)
        text = PlainText(asked, texts[0])
        if position is None:
            checks.append(check)
            equal.append(text)
            continue
        other = texts[1][position] if position < len(texts[1]) else None
        waiting.append((replace(check, result="OPEN"), replace(text, position=position, other=other)))
    plain.asked.clear()
    checks += judged_by(plain, k, waiting, iter(equal))
    if not waiting:
        assert not plain.asked
    return checks


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_near_tie_that_batches_round_the_other_way_voids_nothing(k: int) -> None:
    checks = judged(k, NATS)
    results = [check.result for check in checks]
    assert results.count("TIE") >= 1
    assert set(results) <= {"PASS", "TIE"}
    assert distrust(checks) is None
    for check in checks:
        if check.result == "TIE":
            assert check.noise == pytest.approx(NATS, rel=0.4)
            assert min(check.target_margin or 0, check.verify_margin or 0) <= TIE_FACTOR * NATS * 2


BROKEN = {
    "a rejected token stays": lambda count: max(0, count - 1),
    "an accepted token is lost": lambda count: count + 1,
    "nothing is rewound": lambda _: 0,
    "it is lost where all is accepted": lambda count: count or 1,
}
CASES = [case for case in product(BROKEN, (1, 2, 4)) if case != ("a rejected token stays", 1)][:10]


@pytest.mark.parametrize(("broken", "k"), CASES)
def test_a_cache_that_is_broken_on_purpose_is_caught(broken: str, k: int) -> None:
    """10 of 10, by an engine with the noise of 4 bits."""
    checks = judged(k, NATS, BROKEN[broken])
    assert voiding(checks)
    doubt = distrust(checks)
    assert doubt is not None
    assert doubt[0] == "greedy_texts_differ"
    assert doubt[1]["texts"] == PROMPTS
