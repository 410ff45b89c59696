"""Replay against exact enumeration: of accept flags, and of the speculative process itself."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from harness.records import RULES, UserError
from harness.theory.acceptance import expected_tokens_per_round, positions_at_k
from harness.theory.acceptance_rules import accept_probabilities
from harness.theory.replay import (
    by_start,
    replay,
    rounds_variance,
)

COUNTS = ("rounds", "drafted", "accepted", "rejected", "bonus", "cut")


def loop_over_flags(flag, length, k, proposed):
    """The loop on one text once every flag[start, offset] is known; offsets count from 0."""
    start, counts = 0, Counter()
    while start < length:
        left, drafts = length - start, min(k, proposed[start])
        counts["rounds"] += 1
        counts["drafted"] += drafts
        counts["proposed", drafts] += 1
        kept = 0
        while kept < min(drafts, left) and flag[start, kept]:
            kept += 1
        counts["accepted"] += kept
        counts["kept", kept] += 1
        outcome = "cut" if kept == left else "bonus" if kept == drafts else "rejected"
        counts[outcome] += 1
        start += kept if outcome == "cut" else kept + 1
    counts["rounds", "squared"] = counts["rounds"] ** 2
    return counts


def expected_over_flags(chances, length, k, proposed, *, by_position=False):
    """Expectation over all independent flags; [start, offset] chances, or those of positions."""
    places = [(s, i) for s in range(length) for i in range(min(k, length - s))]
    names = {place: sum(place) if by_position else place for place in places}
    free = sorted(set(names.values()))
    chance = {names[place]: chances[place] for place in places}
    totals = defaultdict(float)
    for values in itertools.product((0, 1), repeat=len(free)):
        drawn = dict(zip(free, values, strict=True))
        weight = math.prod(chance[n] if v else 1 - chance[n] for n, v in drawn.items())
        flag = {place: drawn[name] for place, name in names.items()}
        for name, count in loop_over_flags(flag, length, k, proposed).items():
            totals[name] += weight * count
    return totals


def assert_equal(replayed, text, expected, k):
    for name in COUNTS:
        assert getattr(replayed, name)[text] == pytest.approx(expected[name], abs=1e-10), name
    for name, key, numbers in (
        ("accepted_lengths", "kept", range(k + 1)),
        ("proposals", "proposed", range(k + 1)),
    ):
        counts = [expected[key, n] for n in numbers]
        assert getattr(replayed, name)[text] == pytest.approx(counts, abs=1e-10), name


@pytest.mark.parametrize("k", range(1, 7))
def test_replay_equals_the_loop_over_all_flags_on_texts_of_differing_lengths(k):
    rng = np.random.default_rng(k)
    lengths = [1, 2, 5, 8, 7]
    chances = rng.uniform(0.0, 1.0, (5, 8))
    chances[1, 0], chances[2, 1] = 0.0, 1.0
    by_offset = by_start(chances, 6)
    replayed = replay(by_offset, lengths, [k])[k]
    for text, length in enumerate(lengths):
        expected = expected_over_flags(by_offset[text], length, k, [k] * length, by_position=True)
        assert_equal(replayed, text, expected, k)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    "proposed", [None, [0, 3, 1, 2], [2, 0, 0, 1], [0, 0, 0, 0], [3, 3, 3, 3]], ids=str
)
def test_replay_equals_the_loop_for_chances_and_proposals_that_depend_on_the_start(k, proposed):
    """A round that proposes fewer tokens than K ends in a bonus after them."""
    chances = np.random.default_rng(20 + k).uniform(0.0, 1.0, (2, 4, 3))
    both = None if proposed is None else [proposed, proposed]
    replayed = replay(chances, [4, 3], [k], proposed=both)[k]
    for text, length in enumerate([4, 3]):
        expected = expected_over_flags(chances[text], length, k, proposed or [k] * length)
        assert_equal(replayed, text, expected, k)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("proposed", [[3, 3, 3, 3], [3, 2, 1, 0], [0, 3, 1, 2]], ids=str)
def test_the_variance_of_rounds_is_that_over_all_flags(k, proposed):
    chances = np.random.default_rng(40 + k).uniform(0.0, 1.0, (2, 4, 3))
    certain = (chances[1, :3] > 0.5).astype(float)  # as where a draft is not sampled
    texts = [chances[0], chances[1, :3], certain]
    variances = rounds_variance(texts, [np.array(proposed)] * 3, k)
    for text, variance in zip(texts, variances, strict=True):
        expected = expected_over_flags(text, len(text), k, proposed)
        assert variance == pytest.approx(
            expected["rounds", "squared"] - expected["rounds"] ** 2, abs=1e-10
        )
    assert variances[2] == 0.0


def test_padding_beyond_a_text_is_not_read():
    chances = np.array([[0.5, 0.25, np.nan, 7.0]])
    short = replay(by_start(chances[:, :2], 3), [2], [1, 3])
    padded = replay(by_start(chances, 3), [2], [1, 3])
    for k in (1, 3):
        assert padded[k].accepted_lengths == pytest.approx(short[k].accepted_lengths)


def by_position(counts):
    """Entry j - 1: the share of rounds that kept at least j tokens, as an engine's counters say."""
    at_least = counts.accepted_lengths.sum(axis=0)[::-1].cumsum()[::-1]
    return at_least[1:] / at_least[0]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_long_iid_text_gives_the_iid_formulas(k):
    replayed = replay(by_start(np.full((2, 3000), 0.7), 8), [3000, 2500], [k])[k]
    expected = expected_tokens_per_round(0.7, k)
    assert replayed.tokens_per_round == pytest.approx(expected, rel=2e-3)
    assert replayed.mean_acceptance_length == pytest.approx(expected, rel=2e-3)
    assert replayed.alpha == pytest.approx(0.7, abs=1e-9)
    assert replayed.acceptance_rate == pytest.approx((expected - 1) / k, rel=3e-3)
    rates = [0.7**j for j in range(1, k + 1)]
    assert by_position(replayed) == pytest.approx(rates, rel=k * 1e-3)


@pytest.mark.parametrize("stretch", [4, 20, 100])
@pytest.mark.parametrize("last", [3, 5, 7, 8])
def test_rates_of_longer_drafts_give_those_of_a_smaller_k_in_easy_and_hard_stretches(last, stretch):
    rng = np.random.default_rng(0)
    easy = np.repeat(rng.random((200, 400 // stretch)) < 0.5, stretch, axis=1)
    chances = by_start(np.where(easy, 0.95, 0.35), last)
    replayed = replay(chances, [400] * 200, range(1, last + 1))
    rates = by_position(replayed[last])
    for k, of_k in replayed.items():
        found, exact = positions_at_k(rates, k), (last + 1) % (k + 1) == 0
        tokens = 1.0 + sum(by_position(of_k))
        assert 1.0 + sum(found) == pytest.approx(tokens, rel=0.003 if exact else 0.02)
        assert found == pytest.approx(by_position(of_k), rel=0.004 if exact else 0.04)
        assert tokens > 1.03 * (1.0 + sum(rates[:k])) or stretch == 4 or k > last // 2


def test_easy_and_hard_stretches_emit_fewer_tokens_than_the_iid_formula_says():
    """Why a decision should not rest on the iid formulas."""
    stretches = np.tile(np.repeat([0.95, 0.35], 20), 25)
    replayed = replay(by_start(stretches[None], 4), [1000], [4])[4]
    iid = expected_tokens_per_round(replayed.alpha, 4)
    assert 0.94 < replayed.tokens_per_round / iid < 0.99


# The speculative process itself, on a pair of first-order Markov chains over three tokens.

# The given first token and five emitted ones.
LENGTH = 6
TARGET = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])
DRAFT = np.array([[0.4, 0.1, 0.5], [0.2, 0.5, 0.3], [0.7, 0.3, 0.0]])


class Process:
    """Exact distribution of the speculative loop, written from its definition."""

    def __init__(self, rule, k, eos, length=LENGTH, target=None, draft=None):
        self.rule, self.k, self.eos, self.length = rule, k, eos, length
        # The next token's distribution after a text; of block verification alone any others
        self.target = target or (lambda text: TARGET[text[-1]])
        self.draft = draft or (lambda text: DRAFT[text[-1]])

    def ended(self, text):
        return len(text) == self.length or (self.eos is not None and text[-1:] == (self.eos,))

    def judge(self, last):
        """(chance, emitted token, accepted?) of one drafted position after token `last`."""
        target, draft = TARGET[last], DRAFT[last]
        if self.rule == "exact_match":
            for proposed, sampled in itertools.product(range(3), repeat=2):
                yield draft[proposed] * target[sampled], sampled, proposed == sampled
            return
        if self.rule == "greedy_draft":
            best = int(np.argmax(draft))
            for token in range(3):
                yield target[token], token, token == best
            return
        residual = np.maximum(target - draft, 0.0) / np.maximum(target - draft, 0.0).sum()
        for proposed in range(3):
            if draft[proposed] > 0:
                keep = min(1.0, target[proposed] / draft[proposed])
                yield draft[proposed] * keep, proposed, True
                for token in range(3):
                    yield draft[proposed] * (1 - keep) * residual[token], token, False

    def block(self, text) -> Iterator[tuple[float, tuple[int, ...], int, str]]:
        """A round of block verification, by the definition of Sun et al. 2024 (algorithm 2)."""
        for drafted in itertools.product(range(3), repeat=self.k):
            texts = [(*text, *drafted[:i]) for i in range(self.k + 1)]
            targets = [self.target(each) for each in texts]
            drafts = [self.draft(each) for each in texts[:-1]]
            weight = math.prod(row[token] for row, token in zip(drafts, drafted, strict=True))
            if not weight:
                continue
            stands = [1.0]
            for i, token in enumerate(drafted):
                stands.append(min(1.0, stands[-1] * targets[i][token] / drafts[i][token]))
            residuals = [
                np.maximum(p * row - draft, 0.0)
                for p, row, draft in zip(stands, targets, drafts, strict=False)
            ]
            for accepted in range(self.k, -1, -1):  # the last that its uniform accepts
                stops, row = stands[-1], targets[-1]
                if accepted < self.k:
                    row = residuals[accepted]
                    left = row.sum()
                    stops = left / (left + 1 - stands[accepted]) if left else stands[accepted] == 1
                share = weight * (stops if accepted else 1.0)
                weight -= share
                whole = next((i for i in range(1, accepted + 1) if self.ended(texts[i])), None)
                if whole is not None:
                    yield share, texts[whole], whole, "cut"
                elif share:
                    outcome = "bonus" if accepted == self.k else "rejected"
                    for token, chance in enumerate(row / row.sum()):
                        yield share * chance, (*texts[accepted], token), accepted, outcome

    def round(self, text, kept=0) -> Iterator[tuple[float, tuple[int, ...], int, str]]:
        """(chance, text after the round, accepted, outcome) from a text that has not ended."""
        if self.rule == "block":
            yield from self.block(text)
            return
        if kept == self.k:
            for token in range(3):
                yield TARGET[text[-1]][token], (*text, token), kept, "bonus"
            return
        for chance, token, accepted in self.judge(text[-1]):
            longer = (*text, token)
            if not accepted:
                yield chance, longer, kept, "rejected"
            elif self.ended(longer):
                yield chance, longer, kept + 1, "cut"
            else:
                for rest, end, count, outcome in self.round(longer, kept + 1):
                    yield chance * rest, end, count, outcome

    def expectations(self):
        """(expected counts, chances of the emitted text), after the given first token 0."""

        @cache
        def outcomes(text):
            return tuple(self.round(text))

        counts, emitted = defaultdict(float), {}
        reached: dict[tuple[int, ...], float] = {(0,): 1.0}
        while reached:
            text = min(reached, key=len)
            weight = reached.pop(text)
            counts["rounds"] += weight
            counts["drafted"] += weight * self.k
            for chance, longer, accepted, outcome in outcomes(text):
                counts["accepted"] += weight * chance * accepted
                counts[outcome] += weight * chance
                into = emitted if self.ended(longer) else reached
                into[longer] = into.get(longer, 0.0) + weight * chance
        return counts, emitted


def target_texts(eos, length=LENGTH, target=lambda text: TARGET[text[-1]]):
    """Every text the target can emit after token 0, with its probability."""
    ended: dict[tuple[int, ...], float] = {}
    open_texts: dict[tuple[int, ...], float] = {(0,): 1.0}
    while open_texts:
        text, chance = open_texts.popitem()
        for token in range(3):
            longer = (*text, token)
            over = len(longer) == length or token == eos
            (ended if over else open_texts)[longer] = chance * target(text)[token]
    return ended


def factors(rule, texts):
    """accept_prob of each text and its mean over the next token, padded with 0."""
    chances, means = np.zeros((2, len(texts), max(map(len, texts)) - 1))
    with np.errstate(divide="ignore"):
        log_target, log_draft = np.log(TARGET), np.log(DRAFT)
    mean_by_last = {
        "ratio": np.minimum(TARGET, DRAFT).sum(1),
        "exact_match": (TARGET * DRAFT).sum(1),
        "greedy_draft": TARGET[range(3), DRAFT.argmax(1)],
    }[rule]
    for row, text in enumerate(texts):
        for i, (last, token) in enumerate(itertools.pairwise(text)):
            chances[row, i] = accept_probabilities(
                rule, log_target[last, token], log_draft[last, token], token == DRAFT[last].argmax()
            )
            means[row, i] = mean_by_last[last]
    return chances, means


OF_POSITIONS = tuple(rule for rule in RULES if rule != "block")


def random_rows(seed):
    """A distribution over three tokens that depends on the whole text."""
    return cache(lambda text: np.random.default_rng([seed, *text]).dirichlet(np.ones(3)))


@pytest.mark.parametrize("eos", [None, 2])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("pair", range(3))
def test_replay_of_block_verification_equals_its_process(pair, k, eos):
    target, draft = random_rows(pair), random_rows(10 + pair)
    counts, emitted = Process("block", k, eos, 5, target, draft).expectations()
    texts = target_texts(eos, 5, target)
    assert set(emitted) <= set(texts)
    scores = np.zeros((2, len(texts), 4))
    for row, (text, chance) in enumerate(texts.items()):
        assert emitted.get(text, 0.0) == pytest.approx(chance, abs=1e-12)
        for i in range(len(text) - 1):
            before, token = text[: i + 1], text[i + 1]
            scores[:, row, i] = np.log(target(before)[token]), np.log(draft(before)[token])
    weights = np.array(list(texts.values()))
    lengths = [len(text) - 1 for text in texts]
    of_starts = (by_start(values, k) for values in scores)
    chances = accept_probabilities("block", *of_starts, draft_is_argmax=False)
    replayed = replay(chances, lengths, [k])[k]
    for name in COUNTS:
        assert weights @ getattr(replayed, name) == pytest.approx(counts[name], abs=1e-12), name
    ratio = accept_probabilities("ratio", *scores, draft_is_argmax=False)
    by_ratio = replay(by_start(ratio, k), lengths, [k])[k]
    assert (replayed.rounds <= by_ratio.rounds + 1e-12).all()
    assert k == 1 or weights @ replayed.rounds < weights @ by_ratio.rounds - 1e-3


@pytest.mark.parametrize("eos", [None, 2])
@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("rule", OF_POSITIONS)
def test_replay_over_the_targets_texts_equals_the_speculative_process(rule, k, eos):
    # Long enough that a round of K = 6 can also end in a bonus.
    length = LENGTH if k <= 3 else 8
    counts, emitted = Process(rule, k, eos, length).expectations()
    texts = target_texts(eos, length)
    assert set(emitted) <= set(texts)
    for text, chance in texts.items():
        assert emitted[text] == pytest.approx(chance, abs=1e-15)
    chances, _ = factors(rule, texts)
    weights = np.array(list(texts.values()))
    replayed = replay(by_start(chances, k), [len(text) - 1 for text in texts], [k])[k]
    for name in COUNTS:
        assert weights @ getattr(replayed, name) == pytest.approx(counts[name], abs=1e-12), name


def test_chaining_the_vocabulary_sums_through_a_product_would_be_biased():
    """The trap: after an acceptance the text is not target-distributed."""
    texts = target_texts(None)
    weights = np.array(list(texts.values()))
    _, means = factors("ratio", texts)
    counts, _ = Process("ratio", 2, None).expectations()
    chained = replay(by_start(means, 2), [LENGTH - 1] * len(texts), [2])[2]
    assert abs(weights @ chained.rounds - counts["rounds"]) > 1e-3


def test_each_rule_has_its_own_chance_and_at_temperature_zero_all_are_the_match_bit():
    assert accept_probabilities("ratio", -2.0, -1.0, False) == 1.0
    assert accept_probabilities("ratio", -1.0, -2.0, False) == pytest.approx(math.exp(-1))
    assert accept_probabilities("exact_match", -1.0, -2.0, True) == pytest.approx(math.exp(-2))
    for rule in RULES:
        greedy = accept_probabilities(rule, [0, 0], [0, -np.inf], [True, False])
        assert greedy.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"ks": [4]}, UserError, r"k=4: the traces reach 3 draft positions"),
        ({"ks": [0]}, UserError, r"k=0"),
        ({"lengths": [4]}, ValueError, "lengths"),
        ({"lengths": [4, 5]}, ValueError, "text"),
        ({"lengths": [4, 0]}, ValueError, "text"),
        ({"accept_prob": np.full((2, 4, 3), 1.1)}, ValueError, "between 0 and 1"),
        ({"accept_prob": np.full((2, 4, 3), np.nan)}, ValueError, "between 0 and 1"),
        ({"proposed": [[1, 1], [1, 1]]}, ValueError, "proposed must be"),
    ],
)
def test_input_that_does_not_fit_is_refused(change, error, says):
    arguments = {"accept_prob": np.full((2, 4, 3), 0.5), "lengths": [4, 4], "ks": [1], **change}
    with pytest.raises(error, match=says):
        replay(**arguments)
