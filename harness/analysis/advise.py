"""What follows from a verdict: reasons, rules of thumb, and each engine's own numbers.

From stored traces, rows and step times alone, so that `report` says the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness.analysis.advice import Case, Floors, advice
from harness.analysis.cells import acceptance_by_position, completed, latest, ratio
from harness.analysis.leaderboard import ENGINES
from harness.analysis.replayed import replay_drafts
from harness.analysis.rules_of_thumb import rules_of_thumb
from harness.records import RULES, LatencyRow, ResultRow, Rule, TextTrace, Trial, Verdict
from harness.theory.speedup import StepTimes, speedup_from_tokens_per_round

Entry = dict[str, Any]


def followed_up(
    verdict: Verdict | None,
    rows: Sequence[ResultRow],
    times: StepTimes | None,
    *,
    latency: Sequence[LatencyRow] = (),
    models: Mapping[str, Mapping[str, Any]] | None = None,
    dummy: bool = False,
) -> Entry:
    """The summary's `advice` and `rules_of_thumb`.

    Args:
        verdict: the run's main one; None gives nothing.
        rows: of results.csv, measured or replayed.
        times: step times of the verdict's draft.
        latency: rows with floors, where known.
        models: the manifest's entries of `target` and the draft, by role or name.
        dummy: whether weights were random, so that vocabularies were not compared.
    """
    if verdict is None or times is None or verdict.temperature is None:
        return {}
    cells = _cells(verdict, rows, times)
    if not cells:
        return {}
    k = verdict.k if verdict.k in cells else _best(cells, times)
    alpha = _alpha(cells[k])
    if alpha is None:
        return {}
    draft = cells[k][0].draft or ""
    case = Case(
        k=k,
        alpha=alpha,
        tokens_per_round={own: _tokens_per_round(found) for own, found in cells.items()},
        draft_s=times.draft_s,
        target_s=times.target_s,
        v={own: times.v(own) for own in cells},
        floors=_floors(latency, draft),
    )
    decided = {"speculate": verdict.k, "does_not_pay": 0}.get(verdict.decision)
    return {
        "advice": list(advice(verdict.decision, case)),
        "rules_of_thumb": [
            asdict(thumb)
            for thumb in rules_of_thumb(
                step_ratio=times.target_s / times.draft_s,
                parameter_share=_share(models or {}, draft),
                same_vocabulary=None if dummy else True,
                k=k,
                decided_k=decided,
                acceptance_rate=ratio(_sum(cells[k], "accepted"), _sum(cells[k], "drafted")),
                tokens_per_round=case.tokens_per_round[k],
                breakeven_alpha=times.break_even_alpha(k),
                alpha=alpha,
                speedup=case.speedup,
            )
        ],
    }


def engines(
    verdict: Verdict | None,
    traces: Sequence[TextTrace],
    times: StepTimes | None,
    ks: Sequence[int],
    trials: Sequence[Trial] = (),
) -> Entry:
    """The summary's `engines`: the verdict's draft under every rule, the best K of each.

    Where it names none, the only one there is: what loses by one rule may pay by another.
    And `acceptance_rates`: per position at the verdict's K, unconditional and never increasing, for
    a server's synthetic acceptance.
    """
    if verdict is None or verdict.temperature is None:
        return {}
    found: Entry = {}
    drafts = {trace.draft for trace in traces}
    draft = verdict.draft or (drafts.pop() if len(drafts) == 1 else None)
    if times is not None and draft is not None:
        own = [
            trace
            for trace in traces
            if (trace.draft, trace.temperature) == (draft, verdict.temperature)
        ]
        covered = sorted(k for k in set(ks) if k > 0 and times.covers(k))
        found["engines"] = [
            _best_of_rule(own, draft, verdict.temperature, rule, covered, times)
            for rule in (RULES if own and covered else ())
        ]
    mine = [
        trial
        for trial in completed(latest(trials))
        if trial.k > 0
        and (trial.k, trial.temperature, trial.draft)
        == (verdict.k, verdict.temperature, verdict.draft)
    ]
    if mine:
        rates = acceptance_by_position(mine)
        found["acceptance_rates"] = [min(rates[: index + 1]) for index in range(len(rates))]
    return found


def _best_of_rule(
    traces: Sequence[TextTrace],
    draft: str,
    temperature: float,
    rule: Rule,
    ks: Sequence[int],
    times: StepTimes,
) -> Entry:
    """One rule's best K, replayed on the whole workload."""
    candidates = replay_drafts({draft: traces}, rule, ks, temperature).candidates
    gains = {
        name: speedup_from_tokens_per_round(
            counts.tokens_per_round, name.k, times.c, times.v(name.k)
        )
        for name, counts in candidates.items()
    }
    best = max(gains, key=gains.__getitem__)
    counts = candidates[best]
    return {
        "rule": rule,
        "engines": ENGINES[rule],
        "draft": draft,
        "temperature": temperature,
        "k": best.k,
        "tokens_per_round": counts.tokens_per_round,
        "alpha": ratio(float(counts.accepted.sum()), float(counts.judged.sum())),
        "speedup": gains[best],
    }


def _cells(
    verdict: Verdict, rows: Sequence[ResultRow], times: StepTimes
) -> dict[int, list[ResultRow]]:
    """Rows of the verdict's draft and temperature by K; measured ones where there are any."""
    own = [
        row
        for row in rows
        if row.k > 0
        and row.temperature == verdict.temperature
        and row.rounds
        and times.covers(row.k)
        and (verdict.draft is None or row.draft == verdict.draft)
        and verdict.prompt_set in ("all", row.prompt_set)
    ]
    for source in ("measured", "replayed"):
        found: dict[int, list[ResultRow]] = {}
        for row in own:
            if row.source == source:
                found.setdefault(row.k, []).append(row)
        if found:
            return found
    return {}


def _best(cells: Mapping[int, Sequence[ResultRow]], times: StepTimes) -> int:
    return min(cells, key=lambda k: times.round_s(k) / _tokens_per_round(cells[k]))


def _sum(rows: Sequence[ResultRow], field: str) -> float:
    return float(sum(getattr(row, field) or 0 for row in rows))


def _tokens_per_round(rows: Sequence[ResultRow]) -> float:
    return _sum(rows, "new_tokens") / _sum(rows, "rounds")


def _alpha(rows: Sequence[ResultRow]) -> float | None:
    accepted = _sum(rows, "accepted")
    return ratio(accepted, accepted + _sum(rows, "rejected"))


def _floors(latency: Sequence[LatencyRow], draft: str) -> Floors | None:
    """Floors of the two steps at the context and batch that the step times are of."""
    steps = [row for row in latency if row.kind == "step" and row.batch == 1 and row.floor_ms]
    target = next((row.floor_ms for row in steps if row.role == "target"), None)
    own = next((row.floor_ms for row in steps if row.role == "draft" and row.model == draft), None)
    return Floors(own / 1e3, target / 1e3) if own and target else None


def _share(models: Mapping[str, Mapping[str, Any]], draft: str) -> float | None:
    own = next(
        (
            entry
            for role, entry in models.items()
            if role != "target" and entry.get("name") == draft
        ),
        {},
    )
    return ratio(own.get("parameters"), models.get("target", {}).get("parameters"))
