"""vLLM itself: `make test-servers` installs its CPU build apart from .venv and runs these.

The pairs are the embedded ones, one thread each, temperature 0 unless said. Servers stand side by
side, one per K and a plain one. -s prints what was measured.
"""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from served_pair import KS, Served

from harness.cli import compose
from harness.commands import server as command
from harness.decoding.sampling import SamplingParameters
from harness.engines.protocol import EngineFacts, Server
from harness.measurement.returned_texts import ReturnedText, likelihood_test
from harness.measurement.served import (
    ServedRequest,
    ServedTexts,
    fit_costs,
    served_texts,
    visit,
)
from harness.records import ServerClock
from harness.storage import load
from harness.summary import TextLikelihood

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(shutil.which("vllm") is None, reason="no vllm on PATH"),
    pytest.mark.timeout(3000),
]
PAIRS = ("tiny_good", "tiny_small")
SETS = ("easy", "hard")
PROMPTS, VISITS = 5, 8
# Its release 0.32 for CPUs draws other tokens than the target's where it drafts above T = 0
NOT_LOSSLESS = "0.32"


@dataclass(frozen=True)
class Measured:
    """A pair that was measured.

    Attributes:
        pair: the pair.
        servers: by K, still running.
        facts: of the engine.
        requests: every request of every visit but the first.
    """

    pair: Served
    servers: Mapping[int, Server]
    facts: EngineFacts
    requests: Sequence[ServedRequest]

    def of(self, prompt_set: str, clock: ServerClock) -> Mapping[int, ServedTexts]:
        chosen = [each for each in self.requests if each.request.prompt_set == prompt_set]
        return served_texts(chosen, self.facts, clock)

    def full(self, texts: ServedTexts) -> ServedTexts:
        budget = self.pair.requests[0].budget
        return texts.only(lambda request: request.budget == budget)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that decodes plainly; every pair has this target."""
    pair = Served(tmp_path_factory.mktemp("plain"), PAIRS[0], PROMPTS)
    with pair.vllm().open(0) as server:
        yield server


@pytest.fixture(scope="module", params=PAIRS)
def measured(
    request: pytest.FixtureRequest, plain: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Measured]:
    pair = Served(tmp_path_factory.mktemp(request.param), request.param, PROMPTS)
    engine = pair.vllm()
    random = np.random.default_rng(20261122)
    with ExitStack() as stack:
        servers = {0: plain, **{k: stack.enter_context(engine.open(k)) for k in KS}}
        visits = [
            list(visit(servers, pair.requests, number, random, "cpu")) for number in range(VISITS)
        ]
        later = [each for done in visits[1:] for each in done]
        yield Measured(pair, servers, plain.facts, later)


def test_rounds_and_drafted_tokens_equal_replay_and_texts_equal_plain(measured: Measured) -> None:
    for prompt_set in SETS:
        by_k = measured.of(prompt_set, "engine")
        plain = [text.completion.tokens for text in by_k[0].texts]
        for k in KS:
            texts = by_k[k].texts
            done = [text.completion for text in texts]
            expected = measured.pair.replayed(texts, measured.facts, k)
            assert [each.tokens for each in done] == plain
            np.testing.assert_array_equal([each.rounds for each in done], expected.rounds)
            np.testing.assert_array_equal([each.drafted for each in done], expected.drafted)
            print(
                f"{measured.pair.draft.name} {prompt_set} K = {k}: rounds"
                f" {sum(each.rounds or 0 for each in done)} replayed {expected.rounds.sum():.0f}"
                f" in {len(texts)} texts"
            )


@pytest.mark.parametrize("clock", ["engine", "cpu"])
def test_speedups_of_a_prompt_set_are_predicted_from_the_other(
    measured: Measured, clock: ServerClock
) -> None:
    errors: list[float] = []
    sets = {name: measured.of(name, clock) for name in SETS}
    for name, other in (SETS, SETS[::-1]):
        replays = {k: measured.pair.replayed(sets[other][k].texts, measured.facts, k) for k in KS}
        costs = fit_costs(
            sets[other][0], {k: (sets[other][k], replays[k]) for k in KS}, measured.facts
        )
        full = {k: measured.full(texts) for k, texts in sets[name].items()}
        for k in KS:
            predicted = costs.speedup(measured.pair.replayed(full[k].texts, measured.facts, k))
            speedup = full[0].decode_s.sum() / full[k].decode_s.sum()
            errors.append(predicted / speedup - 1)
            print(
                f"{measured.pair.draft.name} {name} K = {k}, {clock}: {speedup:.3f}x measured,"
                f" {predicted:.3f}x predicted, {100 * errors[-1]:+.1f} %"
            )
    assert np.median(np.abs(errors)) <= 0.05


def test_a_build_that_is_not_lossless_above_temperature_0_is_caught(measured: Measured) -> None:
    pair, sampling, z = measured.pair, SamplingParameters(1.0), {}
    for k in (0, 4):
        texts = [
            ReturnedText(
                replace(request, sampling=sampling),
                measured.servers[k].generate(
                    request.tokens, sampling, request.seed, request.budget
                ),
            )
            for request in pair.requests
        ]
        test = likelihood_test(texts, pair.target_model)
        z[k] = test.z
        print(
            f"{pair.draft.name} T = 1, K = {k}, vLLM {measured.facts.version}: z {test.z:+.1f},"
            f" {test.log_probability / test.tokens:.2f} nats per token,"
            f" {(test.log_probability - test.excess) / test.tokens:.2f} expected"
        )
    assert abs(z[0]) < 3
    assert (z[4] < -5) == measured.facts.version.startswith(NOT_LOSSLESS)


def test_the_command_server_measures_it_and_says_that_it_is_not_lossless(tmp_path: Path) -> None:
    words = [
        *("engine=vllm", "servers=2", "threads=1", "flags=[--enforce-eager]", "own_loop=false"),
        *("k=[4]", "temperature=[0,1]", "new_tokens=48", "repetitions=2", "prompts.limit=3"),
    ]
    outcome = command.run(compose("server", [f"results_root={tmp_path}", *words]))
    assert outcome.folder is not None
    run = load(outcome.folder)
    assert Counter((trial.k, trial.temperature) for trial in run.trials) == dict.fromkeys(
        [(k, t) for k in (0, 4) for t in (0.0, 1.0)], 12
    )
    for trial in run.trials:
        assert trial.status == "ok"
        assert trial.decode_s
        if trial.k:
            assert trial.rounds is not None
            assert trial.drafted == 4 * trial.rounds
            assert trial.accepted_lengths is not None  # it tells each of its rounds
    entry = run.manifest["engine"]
    assert (entry["name"], entry["rule"], entry["synthetic"]) == ("vllm", "greedy_draft", False)
    texts = [check for check in run.checks if not isinstance(check, TextLikelihood)]
    assert {check.result for check in texts} == {"PASS"}
    z = {check.k: check.z for check in run.checks if isinstance(check, TextLikelihood)}
    assert abs(z[0]) < 4
    assert (z[4] < -5) == entry["version"].startswith(NOT_LOSSLESS)
