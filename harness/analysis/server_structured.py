"""Whether speculation lowers the validity of answers that are checked, by the same requests.

Plain and speculating servers answered each prompt with a JSON schema, tools or a tag that ends
reasoning, at each temperature and visit with one seed. Their answers are paired, and where one of a
pair is valid and the other is not, either is as likely to be the valid one if speculation changes
nothing: McNemar's exact test (McNemar 1947, Note on the sampling error of the difference between
correlated proportions), one-sided. Each K at each temperature and check is one test of several, so
the level is divided by their number (Bonferroni).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from scipy.stats import binomtest

from harness.records import GREEDY, StructuredAnswer, grouped
from harness.summary import Caveat, StructuredGate

# Of a run in which speculation changes nothing, so many find at most that it lowers validity
LEVEL = 0.05


def latest_answers(answers: Iterable[StructuredAnswer]) -> list[StructuredAnswer]:
    """The last answer to each request: one that failed may have been asked again."""
    last = {answer.request: answer for answer in answers}
    return list(last.values())


def structured_gates(answers: Sequence[StructuredAnswer]) -> tuple[StructuredGate, ...]:
    """By check, temperature and K, the plain server's share first."""
    last = latest_answers(answers)
    cells = grouped(last, lambda answer: (answer.check, answer.temperature, answer.k))
    gates: list[StructuredGate] = []
    for (check, temperature, k), cell in sorted(cells.items()):
        plain = {each.paired: each for each in cells.get((check, temperature, 0), ())}
        gates.append(replace(_gate(temperature, k, cell, plain), check=check))
    tests = max(1, sum(gate.p_value is not None for gate in gates))
    return tuple(replace(gate, lowered=_lowered(gate, LEVEL / tests)) for gate in gates)


def structured_caveats(gates: Sequence[StructuredGate]) -> Iterator[Caveat]:
    """Of each check, the worst K of those that lower validity; and answers that are missing."""
    lowered = grouped((gate for gate in gates if gate.lowered), lambda gate: gate.check)
    for check, of_check in lowered.items():
        worst = min(of_check, key=lambda gate: gate.p_value or 0.0)
        yield Caveat(
            "structured_output_invalid",
            {
                "check": check,
                "temperature": worst.temperature,
                "k": worst.k,
                "valid": worst.pairs_valid,
                "plain_valid": worst.plain_valid,
                "pairs": worst.pairs,
                "p_value": worst.p_value,
            },
        )
    failed = sum(gate.failed for gate in gates)
    if failed:
        asked = failed + sum(gate.answers for gate in gates)
        yield Caveat("structured_output_unanswered", {"failed": failed, "asked": asked})


def _gate(
    temperature: float,
    k: int,
    cell: Sequence[StructuredAnswer],
    plain: dict[tuple[str, str, int], StructuredAnswer],
) -> StructuredGate:
    """One K at one temperature, without the verdict."""
    done = [answer for answer in cell if answer.status == "ok"]
    gate = StructuredGate(
        temperature=temperature,
        k=k,
        answers=len(done),
        failed=len(cell) - len(done),
        valid=sum(answer.valid for answer in done),
        complete=sum(answer.complete for answer in done),
    )
    paired = [(each, plain[each.paired]) for each in done if each.paired in plain]
    pairs = [(answer, other) for answer, other in paired if other.status == "ok"]
    if not k or not pairs:
        return gate
    lost = sum(other.valid and not answer.valid for answer, other in pairs)
    gained = sum(answer.valid and not other.valid for answer, other in pairs)
    p_value = 1.0
    if lost + gained:
        p_value = float(binomtest(lost, lost + gained, alternative="greater").pvalue)
    equal = sum(answer.tokens == other.tokens for answer, other in pairs)
    return replace(
        gate,
        pairs=len(pairs),
        pairs_valid=sum(answer.valid for answer, _ in pairs),
        plain_valid=sum(other.valid for _, other in pairs),
        lost=lost,
        gained=gained,
        equal=equal if temperature == GREEDY else None,
        p_value=p_value,
    )


def _lowered(gate: StructuredGate, level: float) -> bool | None:
    """Whether K lowers validity; None where there are too few valid plain answers to tell."""
    if gate.p_value is None:
        return None
    if gate.p_value < level:
        return True
    # The smallest p-value that these pairs could have had
    return False if 0.5 ** (gate.plain_valid or 0) < level else None
