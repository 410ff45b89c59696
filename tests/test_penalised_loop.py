"""The sampled loop under a repetition penalty, on a pair of Markov chains small enough to list."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from harness.decoding.drafters import ModelDrafter
from harness.decoding.sampling import SamplingParameters, Uniforms, seen_tokens
from harness.decoding.speculative import speculative_rounds
from harness.records import RULES, Rule
from harness.theory.replay import accept_probabilities, by_start, replay

PENALTY, LENGTH, DRAWS, PROMPT = 2.5, 3, 1500, (0,)
CPU = torch.device("cpu")


class Chain:
    """A model whose logits depend on the last token alone."""

    def __init__(self, seed: int) -> None:
        self.table = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, 3)) * 1.5)
        self.vocab_size, self.device = 3, CPU

    def prefill(self, tokens: Sequence[int]) -> None:
        """Nothing to remember."""

    def rewind(self, count: int) -> None:
        """Nothing to forget."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def law(self, text: Sequence[int]) -> np.ndarray:
        """After this text, penalised by hand."""
        logits = self.table[text[-1]].numpy().copy()
        for token in set(text):
            logits[token] *= PENALTY if logits[token] < 0 else 1 / PENALTY
        weights = np.exp(logits)
        return weights / weights.sum()

    def along(self, tokens: Sequence[int]) -> list[np.ndarray]:
        return [self.law((*PROMPT, *tokens[:end])) for end in range(len(tokens))]


TARGET, DRAFT = Chain(1), Chain(2)
TEXTS = list(itertools.product(range(3), repeat=LENGTH))
CHANCES = np.array([np.prod([law[x] for law, x in zip(TARGET.along(t), t)]) for t in TEXTS])  # noqa: B905


def loops(rule: Rule, k: int) -> tuple[Counter[tuple[int, ...]], list[int]]:
    """The texts that the loop drew, and its rounds."""
    sampling = SamplingParameters(1.0, repetition_penalty=PENALTY)
    drawn: Counter[tuple[int, ...]] = Counter()
    rounds: list[int] = []
    for number in range(DRAWS):
        drafter = ModelDrafter(DRAFT, sampling, rule)
        drafter.begin(PROMPT)
        done = list(
            speculative_rounds(
                TARGET,
                drafter,
                PROMPT[-1],
                num_draft_tokens=k,
                budget=LENGTH,
                eos=(),
                sampling=sampling,
                uniforms=Uniforms.keyed(number, "chain", k, LENGTH + k + 1, CPU),
                rule=rule,
                seen=seen_tokens(PROMPT, 3, CPU),
            )
        )
        drawn[tuple(token for entry in done for token in entry.tokens)] += 1
        rounds.append(len(done))
    return drawn, rounds


@pytest.mark.parametrize(("rule", "k"), [("ratio", 2), *[(rule, 1) for rule in RULES[1:]]])
def test_the_loop_draws_the_penalised_target_and_needs_the_rounds_that_replay_expects(
    rule: Rule, k: int
) -> None:
    drawn, rounds = loops(rule, k)
    expected = CHANCES * DRAWS
    common = expected >= 5
    counts = np.array([drawn[text] for text in TEXTS], dtype=float)
    cells = [*zip(counts[common], expected[common], strict=True)]
    if not common.all():
        cells.append((counts[~common].sum(), expected[~common].sum()))
    table = np.array(cells)
    assert chisquare(table[:, 0], table[:, 1]).pvalue > 1e-4

    pairs = [list(zip(TARGET.along(t), DRAFT.along(t), t, strict=True)) for t in TEXTS]
    own = np.log([[target[x] for target, _, x in pair] for pair in pairs])
    other = np.log([[draft[x] for _, draft, x in pair] for pair in pairs])
    best = [[int(draft.argmax()) == x for _, draft, x in pair] for pair in pairs]
    chances = by_start(accept_probabilities(rule, own, other, best), k)
    mean = float(CHANCES @ replay(chances, [LENGTH] * len(TEXTS), [k])[k].rounds)
    assert np.mean(rounds) == pytest.approx(mean, abs=4 * np.std(rounds) / DRAWS**0.5)
