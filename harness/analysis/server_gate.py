"""Whether a server is lossless: its texts, and the rounds that they took.

At temperature 0 texts must be plain decoding's. Above it the log-probability of texts under the
target is a martingale around its expectation, and rounds are held against replay of the same texts
by the server's acceptance rule.
"""

import math
from dataclasses import replace

import numpy as np

from harness.analysis.cells import completed
from harness.analysis.served_texts import ServedTexts, Texts
from harness.records import GREEDY
from harness.stats.jackknife import Array
from harness.summary import ServedGate, TextLikelihood

# Beyond so many standard errors texts, or rounds, are not what they should be: by chance once in
# 16,000 comparisons
GATE = 4.0


def gates(run: ServedTexts) -> tuple[ServedGate, ...]:
    """By temperature and K; the plain server's texts too, where they were sampled."""
    made: list[ServedGate] = []
    for temperature in run.temperatures:
        ks = run.ks if temperature == GREEDY else (0, *run.ks)
        made += [_gate(run, temperature, k) for k in ks]
    plain_fails = {gate.temperature for gate in made if gate.k == 0 and gate.lossless is False}
    # Then it is not speculation that changes them
    return tuple(
        replace(gate, lossless=None) if gate.k and gate.temperature in plain_fails else gate
        for gate in made
    )


def _gate(run: ServedTexts, temperature: float, k: int) -> ServedGate:
    done = [t for t in completed(run.settled) if (t.k, t.temperature) == (k, temperature)]
    gate = ServedGate(temperature=temperature, k=k, texts=len(done))
    if temperature == GREEDY:
        gate = _with_equal_texts(run, gate)
    texts = run.texts(done, k, temperature)
    if texts.trials and k and run.engine.rule is not None:
        gate = _with_rounds(run, gate, texts)
    return gate if temperature == GREEDY else _with_likelihood(run, gate)


def _with_equal_texts(run: ServedTexts, gate: ServedGate) -> ServedGate:
    """How many texts are plain decoding's; one that no model has judged leaves it open."""
    results: dict[tuple[str, str], list[str]] = {}
    for check in run.checks:
        if check.k == gate.k:
            results.setdefault((check.prompt_set, check.prompt), []).append(check.result)
    if not results:
        return gate
    equal = sum({*found} <= {"PASS", "TIE"} for found in results.values())
    failed = any("FAIL" in found for found in results.values())
    lossless = False if failed else True if equal == len(results) else None
    return replace(gate, texts=len(results), equal_texts=equal, lossless=lossless)


def _with_rounds(run: ServedTexts, gate: ServedGate, texts: Texts) -> ServedGate:
    """Rounds and drafted tokens next to replay of the same texts."""
    counted = [pair for pair in texts.pairs if pair[0].rounds is not None]
    if not counted:
        return gate
    texts = Texts(tuple(t for t, _ in counted), tuple(trace for _, trace in counted))
    expected = run.replayed(texts, gate.k)
    rounds = np.array([trial.rounds for trial in texts.trials], dtype=np.float64)
    drafted = [trial.drafted for trial in texts.trials]
    gaps = rounds - expected.rounds
    return replace(
        gate,
        equal_rounds=int(np.isclose(gaps, 0.0).sum()) if _one_way(run, gate) else None,
        equal_drafted=int(np.isclose(np.array(drafted, float), expected.drafted).sum())
        if _one_way(run, gate) and None not in drafted
        else None,
        rounds=float(rounds.sum()),
        expected_rounds=float(expected.rounds.sum()),
        rounds_z=_z(gaps),
    )


def _with_likelihood(run: ServedTexts, gate: ServedGate) -> ServedGate:
    """How likely the texts are under the target, next to how likely its own would be."""
    tests = (test for test in run.setup.run.checks if isinstance(test, TextLikelihood))
    for test in tests:
        if (test.temperature, test.k) == (gate.temperature, gate.k) and test.tokens:
            gate = replace(
                gate,
                nats_per_token=test.log_probability / test.tokens,
                expected_nats_per_token=(test.log_probability - test.excess) / test.tokens,
                text_z=test.z,
            )
    scores = [score for score in (gate.text_z, gate.rounds_z) if score is not None]
    if not scores:
        return gate
    return replace(gate, lossless=all(abs(score) < GATE for score in scores))


def _one_way(run: ServedTexts, gate: ServedGate) -> bool:
    """Whether a text has one way to be decoded: no draft is sampled."""
    return gate.temperature == GREEDY or run.engine.rule == "greedy_draft"


def _z(differences: Array) -> float:
    """Their sum in standard errors, each with expectation 0; 0 where none differs."""
    scale = math.sqrt(float((differences**2).sum()))
    return float(differences.sum()) / scale if scale > 1e-9 else 0.0
