"""Adaptive drafting stops where the draft is unsure, and changes no law."""

import itertools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.cli import compose
from harness.commands import sweep
from harness.decoding.adaptive import ThresholdDrafter
from harness.decoding.sampling import SamplingParameters, Uniforms
from harness.decoding.speculative import speculative_rounds
from harness.decoding.verification import verify_sampled
from harness.records import Round, UserError
from harness.storage import load
from tests.stubs import TableModel
from tests.test_verification import cells, random_law, resample_cells, sequence_law

K = 3


class Chain:
    """A draft whose law is a table; what it has been fed is its memory."""

    device = torch.device("cpu")

    def __init__(self, law) -> None:
        self.law = law
        self.cache: list[int] = []

    @property
    def vocab_size(self) -> int:
        return 3

    def prefill(self, tokens) -> None:
        self.cache = list(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = []
        for token in tokens.tolist():
            self.cache.append(token)
            rows.append(self.law(tuple(self.cache[1:])).log())
        return torch.stack(rows)

    def rewind(self, count: int) -> None:
        del self.cache[len(self.cache) - count :]


def proposals(law, threshold: float) -> dict[tuple[int, ...], float]:
    """Law of what the production drafter proposes, by the midpoints of its draws' cells."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    grids = [
        cells(
            [
                value
                for prefix in itertools.product(range(3), repeat=index)
                for value in law(prefix).cumsum(0).tolist()
            ]
        )
        for index in range(K)
    ]
    for combination in itertools.product(*grids):
        drafter = ThresholdDrafter(Chain(law), SamplingParameters(1.0), "ratio", threshold)
        drafter.begin([0])
        uniforms = torch.tensor([mid for mid, _ in combination], dtype=torch.float64)
        tokens = tuple(drafter.propose(K, uniforms).tokens.tolist())
        found[tokens] += float(np.prod([size for _, size in combination]))
    return found


def test_emitted_tokens_have_the_target_law_exactly() -> None:
    target_law, draft_law, threshold = random_law(1), random_law(2), 0.4
    proposed = proposals(draft_law, threshold)
    assert {len(tokens) for tokens in proposed} == {1, 2, 3}
    total: dict[tuple[int, ...], float] = defaultdict(float)
    for drafted, weight in proposed.items():
        count = len(drafted)
        target = torch.stack([target_law(drafted[:i]) for i in range(count + 1)])
        draft = torch.stack([draft_law(drafted[:i]) for i in range(count)])
        ratios = [float(target[i, t] / draft[i, t]) for i, t in enumerate(drafted)]
        for flags in itertools.product(*(cells([ratio]) for ratio in ratios)):
            accept = torch.tensor([mid for mid, _ in flags], dtype=torch.float64)
            tokens = torch.tensor(drafted)
            probe = verify_sampled(target, tokens, draft, accept, torch.full((count + 1,), 0.5))
            for mid, length in resample_cells(target, draft, int(probe.accepted)):
                uniforms = torch.full((count + 1,), mid, dtype=torch.float64)
                decision = verify_sampled(target, tokens, draft, accept, uniforms)
                share = weight * length * float(np.prod([size for _, size in flags]))
                emitted = (*drafted[: int(decision.accepted)], int(decision.next_token))
                for rest in itertools.product(range(3), repeat=K + 1 - len(emitted)):
                    whole = emitted + rest
                    tail = [
                        float(target_law(whole[:i])[whole[i]]) for i in range(len(emitted), K + 1)
                    ]
                    total[whole] += share * float(np.prod(tail))
    for tokens, probability in sequence_law(target_law, K + 1).items():
        assert total[tokens] == pytest.approx(probability, abs=1e-12)


def rounds(threshold: float, temperature: float = 0.0) -> list[Round]:
    target = TableModel()
    drafter = ThresholdDrafter(
        TableModel(strangeness=0.3), SamplingParameters(temperature), "ratio", threshold
    )
    target.prefill([1, 2])
    drafter.begin([1, 2, 3])
    found = speculative_rounds(
        target,
        drafter,
        3,
        num_draft_tokens=4,
        budget=60,
        eos=(),
        sampling=SamplingParameters(temperature),
        uniforms=Uniforms.keyed(0, "p", 0, 70, torch.device("cpu")),
    )
    return list(found)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_greedy_text_does_not_depend_on_the_threshold(threshold: float) -> None:
    texts = [token for entry in rounds(threshold) for token in entry.tokens]
    target = TableModel()
    target.prefill([1, 2])
    last = torch.tensor([3])
    for token in texts:
        last = target.forward(last).argmax(-1)
        assert int(last) == token


def test_the_threshold_decides_how_much_is_drafted() -> None:
    assert {entry.drafted for entry in rounds(0.0)} == {4}
    assert {entry.drafted for entry in rounds(1.0)} == {1}
    some = [entry.drafted for entry in rounds(0.5, temperature=1.0)]
    assert set(some) > {1}
    assert max(some) <= 4


def test_a_sweep_drafts_adaptively_and_predicts_nothing(tmp_path: Path) -> None:
    settings = [
        f"results_root={tmp_path}",
        "prompts.limit=2",
        "temperature=[0.0]",
        "new_tokens=12",
        "k=[4]",
        "threads=1",
        "decode.stop=threshold",
        "decode.stop_threshold=0.9",
    ]
    outcome = sweep.run(compose("sweep", settings))
    assert outcome.folder is not None
    run = load(outcome.folder)
    own = [trial for trial in run.trials if trial.k == 4]
    assert sum(t.drafted or 0 for t in own) < 4 * sum(t.rounds or 0 for t in own)
    assert set(run.results.source) == {"measured"}
    with pytest.raises(UserError, match="backend=eager"):
        sweep.run(compose("sweep", [*settings, "backend=cuda_graphs"]))
    with pytest.raises(UserError, match="only a sweep with mode=measure"):
        sweep.run(compose("sweep", [*settings, "mode=replay"]))
