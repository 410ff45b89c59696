"""The gates of a server: is it lossless, by its texts, and are its rounds those of replay?

At temperature 0 texts must be plain decoding's, but for ties and for as few as the error rate of
that rule explains (`lossless.voiding`). Above it the log-probability of texts under the
target is a martingale around its expectation, and a server that ignores temperature or seeds
returns the same text in every visit. The plain server's texts are held against the target
that is loaded here; those of each K against the plain server's, because a target that is served in
fewer bits shifts both.

Rounds test something else. A draft that is served in fewer bits than it is scored in, or another
rule, takes other rounds, and the texts stay the target's: then predictions are off, no more.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from harness.analysis.caveats.servers import server_not_lossless, server_rounds_unlike_replay
from harness.analysis.cells import completed
from harness.analysis.lossless import by_text, voiding
from harness.analysis.server_texts import ServedTexts, Texts
from harness.engine_facts.engines import spec_of
from harness.records import GREEDY, Rule, Trial, grouped, where
from harness.summary import Caveat, ServedGate, TextLikelihood

# Beyond so many standard deviations texts, or rounds, are not what they should be
GATE = 4.0
# The logarithm of the probability of that: 2 * (1 - Phi(4))
LEAST_LOG_CHANCE = -9.7
# Within so many, rounds fit another rule's replay
FITS = 3.0
# Share of texts whose rounds may differ from replay's by near ties of two kernels
NEAR_TIES = 0.02
# By rounds alone these can be told apart, and servers offer them (decode.rule)
SERVED_RULES: tuple[Rule, ...] = ("greedy_draft", "ratio", "block")


def gates(run: ServedTexts) -> tuple[ServedGate, ...]:
    """By temperature and K; the plain server's texts too, where they were sampled."""
    made: list[ServedGate] = []
    for temperature in run.temperatures:
        # A K whose every greedy text is another has no completed request
        greedy = sorted({*run.ks_at(temperature), *(check.k for check in run.checks)})
        ks = greedy if temperature == GREEDY else (0, *run.ks_at(temperature))
        made += [_gate(run, temperature, k) for k in ks]
    plain = {gate.temperature: gate for gate in made if gate.k == 0}
    return tuple(_beside_plain(g, plain.get(g.temperature)) if g.k else g for g in made)


def failed_gates(made: Iterable[ServedGate]) -> tuple[ServedGate, ...]:
    """The gates of the K that change what is generated."""
    return tuple(gate for gate in made if gate.k and gate.lossless is False)


def replay_holds(made: Iterable[ServedGate], temperature: float) -> bool:
    """True where the server is lossless at a temperature; greedy texts are left out one by one."""
    failed = {gate.temperature for gate in failed_gates(made)}
    return temperature == GREEDY or temperature not in failed


def _beside_plain(gate: ServedGate, plain: ServedGate | None) -> ServedGate:
    """A gate of some K, given the plain server's: faults of both are not due to speculation."""
    if plain is None or plain.lossless is not False:
        return gate
    differs = gate.plain_z is not None and abs(gate.plain_z) >= GATE
    same = gate.temperature != GREEDY and not differs and (plain.repeats or not gate.repeats)
    # Texts like plain decoding's are not the target's either
    return replace(gate, lossless=None) if gate.lossless or same else gate


def gate_caveats(made: Sequence[ServedGate], rule: Rule | None) -> Iterator[Caveat]:
    """The caveats of the gates of an engine with this rule; the most serious first."""
    yield from server_not_lossless.of(made)
    # The rounds of texts that are not the target's are not to be expected
    failed = {gate.temperature for gate in made if gate.lossless is False}
    unlike = [gate for gate in made if gate.temperature not in failed and _rounds_differ(gate)]
    yield from server_rounds_unlike_replay.of(unlike, rule)


def _gate(run: ServedTexts, temperature: float, k: int) -> ServedGate:
    done = where(completed(run.settled), k=k, temperature=temperature)
    gate = ServedGate(temperature=temperature, k=k, texts=len(done))
    if temperature == GREEDY:
        gate = _with_equal_texts(run, gate)
    texts = run.texts(done, k, temperature)
    if texts.trials and k and run.engine.rule is not None:
        gate = _with_rounds(run, gate, texts, run.engine.rule)
    return gate if temperature == GREEDY else _with_likelihood(run, gate, done)


def _with_equal_texts(run: ServedTexts, gate: ServedGate) -> ServedGate:
    """The gate with the number of texts that are plain decoding's, tie or differ, in any visit.

    One that is not judged leaves it open, as do differences that are too few for a K to be void.
    """
    checks = where(run.checks, k=gate.k)
    if not checks:
        return gate
    results = Counter(check.result for check in by_text(checks))
    texts, equal, tied = results.total(), results["PASS"], results["TIE"]
    return replace(
        gate,
        texts=texts,
        equal_texts=equal,
        tied_texts=tied,
        differing_texts=results["FAIL"],
        noise=max((check.noise for check in checks if check.noise is not None), default=None),
        lossless=False if voiding(checks) else True if equal + tied == texts else None,
    )


# ---- rounds --------------------------------------------------------------------------------------


def _with_rounds(run: ServedTexts, gate: ServedGate, texts: Texts, rule: Rule) -> ServedGate:
    """Rounds and drafted tokens next to replay of the same texts."""
    texts = Texts(tuple(pair for pair in texts.pairs if pair[0].rounds is not None))
    if not texts.pairs:
        return gate
    gate = _replayed(run, gate, texts, rule)
    drafted = [trial.drafted for trial in texts.trials]
    if gate.rounds_z is None and None not in drafted:
        equal = np.isclose(np.array(drafted, float), run.replayed(texts, gate.k).drafted)
        gate = replace(gate, equal_drafted=int(equal.sum()))
    # Other rules compare the draft's probabilities with the target's, which files are not asked for
    scored = not any(np.isnan(trace.target_logprob).any() for trace in texts.traces)
    if _rounds_differ(gate) and gate.temperature != GREEDY and scored:
        for other in SERVED_RULES:
            if other != rule and other in spec_of(run.engine.name).rules:
                found = _replayed(run, gate, texts, other)
                equal = found.equal_rounds == found.replayed_texts
                if equal if found.rounds_z is None else abs(found.rounds_z) < FITS:
                    gate = replace(gate, other_rule=other)
    return gate


def _replayed(run: ServedTexts, gate: ServedGate, texts: Texts, rule: Rule) -> ServedGate:
    """The gate with the rounds of texts next to a rule's replay, which may be certain of them."""
    rounds = np.array([trial.rounds for trial in texts.trials], dtype=np.float64)
    expected, variance = run.rounds_expected(texts, gate.k, rule)
    gaps, certain = rounds - expected, not variance.any()
    return replace(
        gate,
        replayed_texts=len(texts.pairs),
        rounds=float(rounds.sum()),
        expected_rounds=float(expected.sum()),
        rounds_z=None if certain else float(gaps.sum() / math.sqrt(variance.sum())),
        equal_rounds=int(np.isclose(gaps, 0.0).sum()) if certain else None,
    )


def _rounds_differ(gate: ServedGate) -> bool:
    """True where its rounds are not those of replay; False where nothing was compared."""
    if gate.rounds_z is not None:
        return abs(gate.rounds_z) >= GATE
    # Kernels for a batch and for a token decide near ties apart
    compared = (1.0 - NEAR_TIES) * (gate.replayed_texts or 0)
    return gate.equal_rounds is not None and gate.equal_rounds < compared


# ---- sampled texts -------------------------------------------------------------------------------


def _with_likelihood(run: ServedTexts, gate: ServedGate, texts: Sequence[Trial]) -> ServedGate:
    """The gate with the texts' likelihood under the target, next to that of its own texts."""
    tests = {
        test.k: test
        for test in run.setup.run.checks
        if isinstance(test, TextLikelihood) and test.temperature == gate.temperature and test.tokens
    }
    test, plain = tests.get(gate.k), tests.get(0)
    if test is None:
        return gate
    gate = replace(
        gate,
        nats_per_token=test.log_probability / test.tokens,
        expected_nats_per_token=(test.log_probability - test.excess) / test.tokens,
        text_z=text_z(test),
        repeats=_repeats(texts, test.log_probability / test.tokens),
    )
    if gate.k and plain is not None:
        gate = replace(gate, plain_z=_difference_z(test, plain))
    score = gate.text_z if gate.plain_z is None else gate.plain_z
    fails = gate.repeats or score is None or abs(score) >= GATE
    return replace(gate, lossless=not fails)


def normal_z(total: float, variance: float, third_cumulant: float) -> float:
    """The normal number with the tail probability of a sum of few independent terms.

    Such a sum is not normal: its tail on the side of its skew is heavier, the other lighter. By its
    first three cumulants (those of the terms, added) it is taken for a Pearson type III variable, a
    shifted gamma, and the cube root of a gamma variable is nearly normal (Wilson and Hilferty 1931,
    The distribution of chi-square; Kite 1977, Frequency and risk analyses in hydrology).

    `total` is the sum, of expectation 0. A variance of 0 gives 0, a third cumulant of 0 the sum in
    standard deviations.
    """
    if variance <= 0.0:
        return 0.0
    z, skewness = total / math.sqrt(variance), third_cumulant / variance**1.5
    if abs(skewness) < 1e-6:
        return z
    sixth = skewness / 6.0
    # Beyond the end of a gamma variable's range the cube root goes on, far out
    return (math.cbrt(1.0 + 3.0 * sixth * z) - 1.0 + sixth**2) / sixth


def text_z(test: TextLikelihood) -> float:
    """The distance of texts from the target's, as a normal number; 0 where it has no choice."""
    return normal_z(test.excess, test.variance, test.third_cumulant)


def _difference_z(test: TextLikelihood, plain: TextLikelihood) -> float:
    """The difference in excess per token to the plain server's texts, as a normal number."""
    difference = test.excess / test.tokens - plain.excess / plain.tokens
    variance = test.variance / test.tokens**2 + plain.variance / plain.tokens**2
    third = test.third_cumulant / test.tokens**3 - plain.third_cumulant / plain.tokens**3
    return normal_z(difference, variance, third)


def _repeats(trials: Sequence[Trial], nats_per_token: float) -> bool:
    """True where all visits returned one text, which another draw is by the text's probability."""
    by_prompt = grouped(trials, lambda trial: (trial.prompt_set, trial.prompt))
    texts = [[trial.tokens or () for trial in visits] for visits in by_prompt.values()]
    repeated = sum(len(text) for visits in texts for text in visits[1:])
    same = all(len(set(visits)) == 1 for visits in texts)
    return same and nats_per_token * repeated < LEAST_LOG_CHANCE
