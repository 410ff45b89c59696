"""Greedy texts judged by an engine's own noise: ties pass, caches that are broken are caught."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.analysis.lossless import LEAST_CHANCE, NOISE_FAILS, by_text, distrust, voiding
from harness.commands.server_judging import judged_by
from harness.decoding.drafters import ModelDrafter
from harness.decoding.sampling import SamplingParameters
from harness.engines import llamacpp, sglang, vllm
from harness.engines.own import OwnLoop, OwnServer
from harness.engines.protocol import Asked, Completion
from harness.measurement.engine_noise import (
    LEAST_POSITIONS,
    LISTED,
    TIE_FACTOR,
    WANTED_POSITIONS,
    Margins,
    PlainText,
    ask_margins,
)
from harness.records import first_difference
from harness.summary import TextCheck

NATS = 0.12  # llama.cpp's kernels for Q4_K change a margin by so much on two cores
VOCAB, POSITIONS, MEMORY, SPREAD = 64, 512, 0.8, 4.0
TEXTS, BUDGET = 15, 32
GREEDY = SamplingParameters(0.0)


class Model:
    """Logits that are a sum over the cached tokens, the last ones' most, and over the position.

    They depend on the shape of the batch besides, and the cache may be broken.
    """

    vocab_size, device = VOCAB, torch.device("cpu")

    def __init__(
        self, seed: int, nats: float = 0.0, broken: Callable[[int], int] = int, off: float = 0.0
    ) -> None:
        """Make weights of a `seed`, or a draft's that are `off` by a share; see BROKEN."""
        random = np.random.default_rng(seed)
        self.weights = random.normal(scale=SPREAD, size=(VOCAB + POSITIONS, VOCAB))
        self.weights += off * np.random.default_rng(-seed % 997).normal(
            scale=SPREAD, size=self.weights.shape
        )
        self.nats, self.broken, self.held = nats, broken, list[int]()

    def prefill(self, tokens: Sequence[int]) -> None:
        self.held = list(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        fed, rows = tokens.tolist(), list[np.ndarray]()
        for token in fed:
            self.held.append(token)
            near = self.held[:-24:-1]
            share = MEMORY ** np.arange(len(near))
            row = share @ self.weights[near] + self.weights[VOCAB + len(self.held) % POSITIONS]
            if self.nats:
                shape = np.random.default_rng([*near, len(self.held), len(fed) > 1])
                # A margin changes by four such numbers
                row = row + shape.normal(scale=self.nats / 2, size=VOCAB)
            rows.append(row)
        return torch.tensor(np.array(rows))

    def rewind(self, count: int) -> None:
        count = min(self.broken(count), len(self.held) - 1)
        self.held = self.held[: len(self.held) - count]


class Listing(OwnServer):
    """A plain server that lists log-probabilities, and may use its prompt cache."""

    def __init__(self, model: Model, cached: bool = True) -> None:
        super().__init__(loop(model), 0, None)
        self.model, self.cached, self.asked = model, cached, list[Asked]()

    def generate(self, asked: Asked) -> Completion:
        self.asked.append(asked)
        held, prompt, rows = self.model.held, list(asked.prompt), list[Tensor]()
        same = first_difference(held, prompt)
        known = (len(held) if same is None else same) if asked.cached and self.cached else 0
        known = min(known, len(prompt) - 1)
        self.model.prefill(prompt[:known])
        fed, tokens = prompt[known:], list[int]()
        for _ in range(asked.budget):
            rows.append(self.model.forward(torch.tensor(fed))[-1].log_softmax(-1))
            tokens.append(int(rows[-1].argmax()))
            fed = tokens[-1:]
        best = [row.topk(LISTED) for row in rows if asked.logprobs]
        listed = (dict(zip(b.indices.tolist(), b.values.tolist(), strict=True)) for b in best)
        return Completion(tuple(tokens), "budget", 0.0, likeliest=tuple(listed))


def loop(model: Model, draft: Model | None = None) -> OwnLoop:
    def drafter(sampling: SamplingParameters, _: int) -> ModelDrafter:
        assert draft is not None
        return ModelDrafter(draft, sampling)

    return OwnLoop(model, drafter, frozenset(), "greedy_draft", lambda: 0.0)


def checks_of(
    k: int, seed: int, broken: Callable[[int], int] = int, texts: int = TEXTS
) -> list[TextCheck]:
    """Every check of a speculating server's texts, next to a plain one of the same noise."""
    plain = Listing(Model(seed, NATS))
    checks, waiting, equal = list[TextCheck](), list[tuple[TextCheck, PlainText]](), []
    for number in range(texts):
        random = np.random.default_rng((seed, number))
        asked = Asked(tuple(map(int, random.integers(VOCAB, size=12))), GREEDY, 0, BUDGET)
        speculating = loop(Model(seed, NATS, broken), Model(seed, off=0.3)).open(k)
        text, other = (server.generate(asked).tokens for server in (plain, speculating))
        position = first_difference(text, other)
        check = TextCheck("easy", f"p{number}", 0, k, "PASS", position)
        if position is None:
            checks.append(check)
            equal.append(PlainText(asked, text))
        else:
            entry = PlainText(asked, text, position, other[position])
            waiting.append((replace(check, result="OPEN"), entry))
    plain.asked.clear()
    judged = judged_by(plain, k, waiting, iter(equal)) if waiting else []
    assert all(asked.logprobs for asked in plain.asked)
    return [*checks, *judged]


def test_near_ties_are_told_from_real_differences_and_void_no_k() -> None:
    differing: list[TextCheck] = []
    for seed, k in enumerate((1, 2, 3, 4, 8)):
        checks = checks_of(k, seed)
        assert len(checks) == TEXTS
        assert distrust(checks) is None
        differing += [check for check in checks if check.result != "PASS"]
    judged = [check for check in differing if check.result != "OPEN"]
    assert len(judged) > 10
    assert sum(check.result == "FAIL" for check in judged) <= 1
    for check in judged:
        assert check.noise == pytest.approx(NATS, rel=0.4)
        assert (check.noise_positions or 0) >= LEAST_POSITIONS
        assert check.target_margin is not None


BROKEN: dict[str, Callable[[int], int]] = {
    "a rejected token stays in the cache": lambda count: max(0, count - 1),
    "an accepted token is lost": lambda count: count + 1,
    "nothing is rewound": lambda _: 0,
    "a token is lost where all are accepted": lambda count: count or 1,
}


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_cache_that_is_broken_on_purpose_is_caught(broken: str, k: int) -> None:
    checks = checks_of(k, 1, BROKEN[broken], texts=6)
    assert voiding(checks)
    doubt = distrust(checks)
    assert doubt is not None
    assert doubt[0] == "greedy_texts_differ"
    assert doubt[1]["texts"] == 6


def draws(name: str, random: np.random.Generator, *size: int) -> np.ndarray:
    if name == "normal":
        return random.normal(size=size)
    return random.laplace(size=size) if name == "Laplace" else random.standard_t(3, size=size)


@pytest.mark.parametrize(("name", "most"), [("normal", 5e-4), ("Laplace", 0.01), ("t", 0.04)])
def test_of_the_texts_that_noise_changes_few_are_called_real(name: str, most: float) -> None:
    random, runs = np.random.default_rng(1), 40_000
    noise = np.sqrt((draws(name, random, runs, WANTED_POSITIONS) ** 2).mean(1))
    at_difference = np.abs(draws(name, random, runs))
    # A margin that is even between 0 and far away is below a noise d with a chance like d
    beyond = np.maximum(at_difference - TIE_FACTOR * noise, 0.0)
    assert beyond.sum() / at_difference.sum() < most


def some(results: str, k: int = 4, noise: float | None = NATS) -> list[TextCheck]:
    words = {"p": "PASS", "t": "TIE", "F": "FAIL", "o": "OPEN"}
    return [
        TextCheck("easy", f"p{number}", 0, k, words[each], noise=noise)  # type: ignore[arg-type]
        for number, each in enumerate(results)
    ]


@pytest.mark.parametrize(
    ("results", "void"),
    [
        ("F" + 14 * "p", False),
        ("FF" + 13 * "p", False),
        ("FFF" + 12 * "p", True),
        (15 * "t", False),
        ("FF" + 5 * "t", True),
        ("FF" + 6 * "p", False),
        ("F", False),
        ("FF", True),
        ("FF" + 20 * "o", True),
    ],
)
def test_a_k_is_void_where_more_texts_differ_than_the_error_rate_explains(
    results: str, void: bool
) -> None:
    checks = some(results)
    assert bool(voiding(checks)) == void
    # In every visit it is the same text
    again = [replace(check, repetition=1) for check in checks]
    assert bool(voiding([*checks, *again])) == void
    assert len(by_text([*checks, *again])) == len(checks)
    # Our own loop has no noise, and the other K no part in it
    assert bool(voiding(some(results, noise=None))) == ("F" in results)
    assert {check.k for check in voiding([*checks, *some("FFF", k=2)])} == ({2, 4} if void else {2})


def test_what_a_lossless_server_is_void_by_is_as_rare_as_said() -> None:
    random = np.random.default_rng(2)
    real = (random.random((4000, 15)) < NOISE_FAILS).sum(1)
    voided = {count: bool(voiding(some(count * "F" + (15 - count) * "p"))) for count in range(16)}
    assert np.mean([voided[int(count)] for count in real]) < LEAST_CHANCE


@pytest.mark.parametrize("cached", [True, False])
def test_noise_is_found_with_and_without_a_prompt_cache(cached: bool) -> None:
    plain = Listing(Model(3, NATS), cached)
    asked = Asked((1, 2, 3, 4, 5, 6, 7), GREEDY, 0, 64)
    text = PlainText(asked, plain.generate(asked).tokens)
    margins = ask_margins(plain, text, 2, WANTED_POSITIONS)
    assert margins is not None
    assert np.sqrt(np.mean(np.square(margins.changes))) == pytest.approx(NATS, rel=0.5)
    assert (margins.step, margins.batch) == (None, None)
    # The text is generated once; then each request is K + 1 tokens longer than the one before
    lengths = [len(each.prompt) for each in plain.asked[2:]]
    assert [each.budget for each in plain.asked[2:]] == [1] * len(lengths)
    assert set(np.diff(lengths)) == {3}


def test_a_server_that_lists_nothing_leaves_texts_open() -> None:
    plain = Listing(Model(3, NATS))
    asked = Asked((1, 2, 3), GREEDY, 0, 16)
    text = plain.generate(asked).tokens
    check = TextCheck("easy", "p", 0, 4, "OPEN", 3)
    differing = [(check, PlainText(asked, text, 3, (text[3] + 1) % VOCAB))]

    class Silent(Listing):
        def generate(self, asked: Asked) -> Completion:
            return replace(super().generate(asked), likeliest=())

    silent = Silent(Model(3, NATS))
    assert judged_by(silent, 4, differing, iter(())) == []
    assert len(silent.asked) == 1


def test_a_text_that_ends_early_is_a_real_difference() -> None:
    plain = Listing(Model(3, NATS))
    asked = Asked((1, 2, 3), GREEDY, 0, 48)
    check = TextCheck("easy", "p", 0, 2, "OPEN", 9)
    entry = PlainText(asked, plain.generate(asked).tokens, 9)
    (judged,) = judged_by(plain, 2, [(check, entry)], iter(()))
    assert judged.result == "FAIL"


def test_a_kernel_that_is_wrong_for_batches_makes_no_ties_of_its_errors() -> None:
    """Its own errors would be the noise by which they are judged."""
    plain = Listing(Model(3, NATS), cached=True)
    asked = Asked((1, 2, 3), GREEDY, 0, 64)
    text = plain.generate(asked).tokens
    check = TextCheck("easy", "p", 0, 4, "OPEN", 9)
    entry = PlainText(asked, text, 9, (text[9] + 1) % VOCAB)

    class WrongInBatches(Listing):
        def generate(self, asked: Asked) -> Completion:
            done = super().generate(asked)
            if asked.budget > 1:
                return done
            (listed,) = done.likeliest
            best = max(listed, key=listed.__getitem__)
            return replace(done, likeliest=({**listed, best: listed[best] - 3.0},))

    (judged,) = judged_by(
        WrongInBatches(Model(3, NATS), cached=True), 4, [(check, entry)], iter(())
    )
    assert (judged.result, judged.noise) == ("OPEN", pytest.approx(3.0, rel=0.2))


def test_a_margin_far_below_zero_is_no_tie() -> None:
    assert not Margins(step=1.0, batch=-3.0, changes=()).is_tie(0.1)
    assert Margins(step=-0.3, batch=-3.0, changes=()).is_tie(0.1)


def entry(*pairs: tuple[int, float], token: int) -> dict[str, Any]:
    """What llama.cpp lists at a position."""
    listed = [{"id": each, "logprob": logprob} for each, logprob in pairs]
    return {"id": token, "logprob": pairs[0][1] if pairs else 0.0, "top_logprobs": listed}


def test_every_engines_lists_are_read_by_token_id() -> None:
    """llama.cpp lists no entry for a token that leaves a character incomplete."""
    timings = {"predicted_n": 2, "predicted_ms": 1.0}
    entries = [entry((5, -0.5), (9, -1.5), token=5), entry(token=7)]
    logprobs = {
        "token_logprobs": [-0.5, 0.0],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:9": -1.5}, None],
    }
    meta = {
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.5, 5, None], [0.0, 7, None]],
        "output_top_logprobs": [[[-0.5, 5, None], [-1.5, 9, None]], None],
    }
    of_llamacpp = {"tokens": [5, 7], "timings": timings, "completion_probabilities": entries}
    for record in (
        llamacpp.parse(of_llamacpp),
        vllm.parse({"choices": [{"token_ids": [5, 7], "logprobs": logprobs}]}),
        sglang.parse({"output_ids": [5, 7], "meta_info": meta}),
    ):
        assert record.likeliest == ({5: -0.5, 9: -1.5}, {})
        assert record.logprobs == (-0.5, 0.0)
    entries = [entry((token, -0.5), token=token) for token in (5, 8, 7)]
    answer = {**of_llamacpp, "tokens": [5, 195, 8, 7], "completion_probabilities": entries}
    assert llamacpp.parse(answer).likeliest == ({5: -0.5}, {}, {8: -0.5}, {7: -0.5})


def test_a_timed_request_asks_for_no_log_probabilities_and_uses_no_cache() -> None:
    timed = Asked((1, 2), GREEDY, 0, 4)
    wanted = timed._replace(logprobs=LISTED, cached=True)
    of_llamacpp, of_vllm, of_sglang = (
        [module.request_body(asked) for asked in (timed, wanted)]
        for module in (llamacpp, vllm, sglang)
    )
    assert [(body["n_probs"], body["cache_prompt"]) for body in of_llamacpp] == [
        (0, False),
        (LISTED, True),
    ]
    assert [body.get("logprobs") for body in of_vllm] == [None, LISTED]
    assert [body.get("return_tokens_as_token_ids") for body in of_vllm] == [None, True]
    assert [(body["return_logprob"], body["top_logprobs_num"]) for body in of_sglang] == [
        (False, 0),
        (True, LISTED),
    ]
