"""Synthetic acceptance: rates that are set, their prediction, and the sweep that shows both."""

import itertools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import ran, sample

from harness.analysis.cells import expected_tokens_per_round as expected_on_texts
from harness.config import rates_for
from harness.decoding import loops
from harness.decoding.protocols import Proposal
from harness.decoding.sampling import SamplingParameters
from harness.decoding.verification import Decision, verify_synthetic
from harness.records import UserError
from harness.storage import StoredRun
from harness.theory.acceptance import (
    alpha_from_acceptance_rate,
    conditional,
    expected_tokens_per_round,
)
from tests.stubs import TableModel, decoded, generation_of

pytestmark = pytest.mark.usefixtures("few_samples")
RATES = (0.8, 0.6, 0.6, 0.15)


def test_accepted_lengths_have_the_rates_that_were_set_exactly() -> None:
    chances = conditional(RATES)
    shares: dict[int, float] = defaultdict(float)
    target = torch.eye(5, dtype=torch.float64)
    cells = [[(chance / 2, chance), ((1 + chance) / 2, 1 - chance)] for chance in chances]
    for combination in itertools.product(*cells):
        uniforms = torch.tensor([mid for mid, _ in combination], dtype=torch.float64)
        rates = torch.tensor(chances, dtype=torch.float64)
        decision = verify_synthetic(target, uniforms, rates, None)
        assert int(decision.next_token) == int(decision.accepted)
        drawn = verify_synthetic(
            target, uniforms, rates, torch.full((5,), 0.5, dtype=torch.float64)
        )
        assert drawn == decision
        shares[int(decision.accepted)] += float(np.prod([size for _, size in combination]))
    for j, rate in enumerate(RATES, start=1):
        at_least = sum(share for accepted, share in shares.items() if accepted >= j)
        assert at_least == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize("temperature", sample([0.0, 1.0], 1.0))
def test_a_loop_needs_the_rounds_that_are_predicted(temperature: float) -> None:
    target, draft = TableModel(5), TableModel(5, strangeness=0.8)
    rounds, texts, length = [], 250, 23
    sampling = SamplingParameters(temperature)
    for seed in range(texts):
        more = {"seed": seed, "sampling": sampling, "synthetic": conditional(RATES)}
        rounds.append(len(decoded(target, draft, generation_of([1], length, 4, **more))))
    expected = length / expected_on_texts(RATES, [length])
    error = np.std(rounds, ddof=1) / np.sqrt(texts)
    assert abs(np.mean(rounds) - expected) < 4 * error
    assert error < 0.03 * expected


def test_a_recorded_graph_finds_the_rates_of_a_generation_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses: list[int] = []

    def watched(target, accept, rates, resample) -> Decision:
        addresses.append(rates.data_ptr())
        return verify_synthetic(target, accept, rates, resample)

    monkeypatch.setattr(loops, "verify_synthetic", watched)
    for seed in range(2):
        generation = generation_of([1], 4, 4, seed=seed, synthetic=RATES)
        verifier = loops.Verifier(TableModel(5), generation)
        proposal = Proposal(torch.zeros(4, dtype=torch.long), None)
        verifier.decide(torch.eye(5), proposal, *verifier.uniforms(0, 4))
        del verifier
        # What would be handed out where the rates lay, had they been freed
        others = [torch.rand(4) for _ in range(50)]
        assert addresses[0] not in {other.data_ptr() for other in others}
    assert addresses[0] == addresses[1]


def test_expected_tokens_per_round_are_those_of_the_formula_where_texts_are_long() -> None:
    expected = expected_tokens_per_round(0.7, 4)
    assert expected_on_texts(rates_for(0.7, 4), [4000]) == pytest.approx(expected, rel=1e-3)
    assert expected_on_texts(rates_for(1.0, 3), [40]) == pytest.approx(4.0)
    assert expected_on_texts(rates_for(0.0, 3), [40]) == pytest.approx(1.0)
    alphas = {1: 0.429, 4: alpha_from_acceptance_rate(0.342, 4)}
    assert expected_on_texts(rates_for(alphas, 4), [8000]) == pytest.approx(1 + 4 * 0.342, rel=1e-3)
    assert rates_for(alphas, 1) == (0.429,)
    assert rates_for({"2": [0.5, 0.25]}, 2) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("acceptance", "k", "message"),
    [
        (1.2, 1, "decode.acceptance: 1.2 is not a rate"),
        ([0.5, -0.1], 2, "-0.1 is not a rate"),
        ([0.5, 0.6], 2, "0.6 follows 0.5; give unconditional rates"),
        ([0.5, 0.4], 3, "2 rates, but K=3 needs 3"),
        ({2: 0.5}, 1, r"no entry for K=1; it has \[2\]"),
        ("high", 1, "'high' is not a rate"),
        (True, 1, "True is not a rate"),
    ],
)
def test_rates_that_cannot_be_are_refused(acceptance: object, k: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rates_for(acceptance, k)


def swept(tmp_path: Path, *more: str) -> StoredRun:
    words = ["prompts.limit=2", "temperature=[0.0]", "new_tokens=12", "k=[1,2]", "threads=1"]
    return ran("sweep", tmp_path, *words, *more)


def test_a_sweep_predicts_from_rates_that_were_set(tmp_path: Path) -> None:
    run = swept(tmp_path, "decode.acceptance=[0.9,0.5]")
    rows = run.results.set_index(["source", "prompt_set", "k"])
    lengths = [t.new_tokens or 0 for t in run.trials if t.k == 2 and t.prompt_set == "easy"]
    expected = expected_on_texts((0.9, 0.5), lengths)
    assert rows.loc[("replayed", "easy", 2), "tokens_per_round"] == pytest.approx(expected)
    cells = rows.reset_index().groupby("source")[["prompt_set", "k"]].agg(list)
    by_source = cells.to_dict("index")
    assert by_source["replayed"] == by_source["measured"]
    assert float(str(rows.loc[("measured", "easy", 2), "speedup"])) > 0
    assert "Acceptance is synthetic" in (run.folder / "report.md").read_text()
