"""The loops, on lookup-table models: no transformers, no files."""

import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from scipy.stats import chisquare
from stubs import CPU, TableModel
from torch.utils._python_dispatch import TorchDispatchMode

from harness.decoding.autoregressive import autoregressive_rounds
from harness.decoding.drafters import ModelDrafter
from harness.decoding.sampling import SamplingParameters, Uniforms, sampler_for
from harness.decoding.speculative import emitted_round, speculative_rounds
from harness.records import RULES, Round, Rule

PROMPT = (3, 1, 4, 1, 5)
GREEDY = SamplingParameters(0.0)
NO_EOS: frozenset[int] = frozenset()


def keyed(repetition: int = 0, positions: int = 80) -> Uniforms:
    return Uniforms.keyed(7, "set/prompt", repetition, positions, CPU)


class CountReads(TorchDispatchMode):
    """Counts what makes a device wait: a tensor's number or its whole read to the host.

    The stand-in models read their tokens themselves; those calls are not the loop's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __enter__(self) -> "CountReads":
        self._tolist = torch.Tensor.tolist
        outer = self

        def counted(tensor: torch.Tensor) -> object:
            caller = sys._getframe(1).f_code.co_filename
            outer.count += not caller.endswith("stubs.py")
            return outer._tolist(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *failure: object) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*failure)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def plain(
    sampling: SamplingParameters,
    *,
    budget: int = 40,
    eos: frozenset[int] = NO_EOS,
    prompt: tuple[int, ...] = PROMPT,
) -> list[int]:
    target = TableModel()
    target.prefill(prompt[:-1])
    rounds = autoregressive_rounds(
        target, prompt[-1], budget=budget, eos=eos, sampling=sampling, uniforms=keyed()
    )
    return [token for entry in rounds for token in entry.tokens]


def speculative(
    target: TableModel,
    draft: TableModel,
    k: int,
    *,
    sampling: SamplingParameters = GREEDY,
    budget: int = 40,
    eos: frozenset[int] = NO_EOS,
    prompt: tuple[int, ...] = PROMPT,
    rule: Rule = "ratio",
    uniforms: Uniforms | None = None,
) -> Iterator[Round]:
    drafter = ModelDrafter(draft, sampling, rule)
    target.prefill(prompt[:-1])
    drafter.begin(prompt)
    return speculative_rounds(
        target,
        drafter,
        prompt[-1],
        num_draft_tokens=k,
        budget=budget,
        eos=eos,
        sampling=sampling,
        uniforms=uniforms or keyed(),
        rule=rule,
    )


def text(rounds: list[Round]) -> list[int]:
    return [token for entry in rounds for token in entry.tokens]


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strangeness", [0.15, 0.4, 1.0])
def test_greedy_speculative_text_is_the_greedy_text(k: int, rule: Rule, strangeness: float) -> None:
    rounds = list(speculative(TableModel(), TableModel(strangeness=strangeness), k, rule=rule))
    assert text(rounds) == plain(GREEDY)


def test_the_identity_was_put_to_the_test_by_rejections_and_full_acceptances() -> None:
    rounds = list(speculative(TableModel(), TableModel(strangeness=0.4), 2))
    outcomes = Counter(entry.outcome for entry in rounds)
    assert outcomes["rejected"] / len(rounds) >= 0.3
    assert outcomes["bonus"] >= 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_draft_equal_to_the_target_is_always_accepted(k: int, temperature: float) -> None:
    rounds = list(
        speculative(TableModel(), TableModel(), k, sampling=SamplingParameters(temperature))
    )
    assert all(entry.outcome == "bonus" for entry in rounds[:-1])
    assert all(len(entry.tokens) == k + 1 for entry in rounds[:-1])


def test_target_forwards_are_rounds_and_nothing_else() -> None:
    target, draft = TableModel(), TableModel(strangeness=0.4)
    rounds = list(speculative(target, draft, 4))
    assert (target.forwards, target.prefills) == (len(rounds), 1)
    assert draft.forwards == 4 * len(rounds)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_is_read_back_to_the_host_once(rule: Rule, temperature: float) -> None:
    """Nothing asks a tensor for a number but the one `tolist` of a round."""
    rounds = speculative(
        TableModel(),
        TableModel(strangeness=0.4),
        4,
        sampling=SamplingParameters(temperature),
        rule=rule,
    )
    with CountReads() as reads:
        done = list(rounds)
    assert reads.count == len(done)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("budget", [1, 2, 3, 7, 40])
def test_the_budget_is_met_exactly(k: int, budget: int) -> None:
    rounds = list(speculative(TableModel(), TableModel(strangeness=0.2), k, budget=budget))
    assert text(rounds) == plain(GREEDY, budget=budget)
    assert len(text(rounds)) == budget


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("strangeness", [0.0, 0.4])
def test_the_text_ends_with_the_first_end_token(k: int, strangeness: float) -> None:
    for end in sorted(set(plain(GREEDY))):
        eos = frozenset({end})
        rounds = list(speculative(TableModel(), TableModel(strangeness=strangeness), k, eos=eos))
        assert text(rounds) == plain(GREEDY, eos=eos)
        assert text(rounds)[-1] == end


def test_a_one_token_prompt_needs_no_prefill() -> None:
    target = TableModel()
    rounds = list(speculative(target, TableModel(strangeness=0.4), 4, prompt=(2,)))
    assert text(rounds) == plain(GREEDY, prompt=(2,))


@pytest.mark.parametrize(
    ("tokens", "accepted", "budget", "eos", "expected"),
    [
        ([5, 6, 7, 8], 3, 9, (), Round((5, 6, 7, 8), 3, 3, "bonus")),
        ([5, 6, 7, 8], 1, 9, (), Round((5, 8), 1, 3, "rejected")),
        ([5, 6, 7, 8], 0, 1, (), Round((8,), 0, 3, "rejected")),
        ([5, 6, 7, 8], 3, 3, (), Round((5, 6, 7), 3, 3, "cut")),
        ([5, 6, 7, 8], 2, 2, (), Round((5, 6), 2, 3, "cut")),
        ([5, 6, 7, 8], 1, 2, (), Round((5, 8), 1, 3, "rejected")),
        ([5, 6, 7, 8], 3, 9, (6,), Round((5, 6), 2, 3, "cut")),
        ([5, 6, 7, 8], 3, 9, (7,), Round((5, 6, 7), 3, 3, "cut")),
        ([5, 6, 7, 8], 3, 9, (8,), Round((5, 6, 7, 8), 3, 3, "bonus")),
        ([5, 6, 7, 8], 1, 9, (8,), Round((5, 8), 1, 3, "rejected")),
        ([5, 6, 7, 8], 1, 9, (6,), Round((5, 8), 1, 3, "rejected")),
    ],
)
def test_a_round_emits_what_end_and_budget_allow(
    tokens: list[int], accepted: int, budget: int, eos: tuple[int, ...], expected: Round
) -> None:
    assert emitted_round(tokens, accepted, 3, budget, eos) == expected


def test_emitted_tokens_say_whether_they_are_the_drafts() -> None:
    assert Round((5, 6, 8), 2, 4, "rejected").from_draft == (True, True, False)
    assert Round((5, 6), 2, 4, "cut").from_draft == (True, True)


def test_every_token_marked_as_drafted_was_drafted() -> None:
    draft = TableModel(strangeness=0.4)
    position = 0
    for entry in speculative(TableModel(), draft, 4):
        position += entry.accepted
        assert sum(entry.from_draft) == entry.accepted
        assert entry.drafted == 4
    assert position > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [1, 3])
def test_sampled_text_has_the_target_law(rule: Rule, k: int) -> None:
    """Chi-square of the first two tokens over 3,000 keyed repetitions, vocabulary 4."""
    sampling = SamplingParameters(0.9)
    counts: Counter[tuple[int, ...]] = Counter()
    draws = 3000
    target, draft = TableModel(4), TableModel(4, strangeness=0.6)
    for repetition in range(draws):
        uniforms = keyed(repetition, 2 + k + 1)
        rounds = speculative(
            target,
            draft,
            k,
            sampling=sampling,
            budget=2,
            prompt=(1, 2),
            rule=rule,
            uniforms=uniforms,
        )
        counts[tuple(text(list(rounds)))] += 1
    law = sampler_for(sampling)
    first = law(target.logits((1, 2)).unsqueeze(0))[0]
    expected = {
        (a, b): draws * float(first[a] * law(target.logits((1, 2, a)).unsqueeze(0))[0, b])
        for a in range(4)
        for b in range(4)
    }
    kept = [pair for pair, count in expected.items() if count >= 5]
    observed = [counts[pair] for pair in kept]
    rest = sum(expected[pair] for pair in kept)
    scaled = [expected[pair] * sum(observed) / rest for pair in kept]
    assert chisquare(observed, scaled).pvalue > 1e-4


def test_the_same_key_gives_the_same_text_and_another_key_another() -> None:
    def once(repetition: int) -> list[int]:
        pair = (TableModel(), TableModel(strangeness=0.4))
        return text(
            list(
                speculative(*pair, 4, sampling=SamplingParameters(1.0), uniforms=keyed(repetition))
            )
        )

    assert once(0) == once(0)
    assert once(0) != once(1)


def test_noise_does_not_depend_on_how_much_of_it_is_asked_for() -> None:
    short, long = keyed(positions=5), keyed(positions=50)
    assert torch.equal(short.draft, long.draft[:5])
    assert torch.equal(short.resample, long.resample[:5])
    assert not torch.equal(short.draft, short.accept)
    assert float(long.accept.min()) > 0.0


@pytest.mark.parametrize(
    "sampling", [SamplingParameters(1.0, top_k=3), SamplingParameters(0.7, top_p=0.6)]
)
def test_top_k_and_top_p_bound_what_is_emitted(sampling: SamplingParameters) -> None:
    law = sampler_for(sampling)
    target = TableModel()
    rounds = list(speculative(target, TableModel(strangeness=0.5), 4, sampling=sampling))
    prefix: list[int] = [*PROMPT]
    for token in text(rounds):
        assert law(target.logits(tuple(prefix)).unsqueeze(0))[0, token] > 0
        prefix.append(token)


def test_top_k_one_is_greedy() -> None:
    rounds = list(
        speculative(
            TableModel(), TableModel(strangeness=0.4), 4, sampling=SamplingParameters(1.0, top_k=1)
        )
    )
    assert text(rounds) == plain(GREEDY)


def test_warping_agrees_with_softmax_of_scaled_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    assert torch.allclose(
        sampler_for(SamplingParameters(2.0))(logits), torch.softmax(logits / 2.0, -1)
    )


def test_greedy_has_no_law() -> None:
    with pytest.raises(ValueError, match="greedy"):
        sampler_for(GREEDY)
