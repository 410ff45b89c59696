"""The arithmetic half of an audition: stored traces and step times in, results and summary out.

No model and no torch: with traces of one run and step times of another (another card, another
engine), the same arithmetic ranks again.
"""

from collections.abc import Sequence
from typing import Any

from harness.analysis.advise import followed_up
from harness.analysis.leaderboard import Ranking, rank
from harness.analysis.predicted import evidence_of, replayed_rows
from harness.analysis.replayed import replay_drafts
from harness.analysis.told import in_words
from harness.analysis.verdict import decide
from harness.analysis.views import Bench, Rankings, views
from harness.records import Failure, ResultRow, Rule, Summary, Verdict


def judge(
    bench: Bench, failures: Sequence[Failure], caveats: Sequence[str]
) -> tuple[list[ResultRow], Summary, dict[str, Any]]:
    """Rank the drafts under every rule and temperature.

    Returns:
        The rows of results.csv (the verdict's rule only), the summary, and what goes into
        summary.json beside it.

    Raises:
        UserError: traces and step times that do not fit together.
    """
    rankings: Rankings = {
        (rule, temperature): _ranking(bench, rule, temperature)
        for temperature in bench.temperatures
        for rule in bench.rules
    }
    own = [rankings[bench.rule, temperature] for temperature in bench.temperatures]
    rows = [
        row
        for ranking in own
        for row in replayed_rows(ranking.replays, bench.latency, model=bench.model, seed=bench.seed)
    ]
    verdicts = [_verdicts(bench, ranking) for ranking in own]
    summary = Summary(
        verdict=verdicts[0][0],
        per_temperature=tuple(whole for whole, _ in verdicts),
        per_prompt_set=tuple(verdict for _, sets in verdicts for verdict in sets),
        failures=tuple(failures),
        caveats=tuple(caveats),
        headline=_headline(bench),
    )
    return rows, summary, {**views(bench, rankings, own), **_advised(bench, own[0], summary, rows)}


def _advised(
    bench: Bench, ranking: Ranking, summary: Summary, rows: Sequence[ResultRow]
) -> dict[str, Any]:
    """Reasons and rules of thumb for the verdict's draft, or the best-looking one.

    A look-up has no draft step, so that none of them speaks of it.
    """
    verdict = summary.verdict
    best = next(iter(ranking.best), (None, 0))[0]
    draft = best if verdict is None or verdict.draft is None else verdict.draft
    if draft is None or draft in ranking.replays.lookups:
        return {}
    return followed_up(
        verdict,
        [row for row in rows if row.draft == draft],
        bench.latency[draft].times,
        models=bench.described,
        dummy=any(entry.get("weights") == "dummy" for entry in bench.described.values()),
    )


def _ranking(bench: Bench, rule: Rule, temperature: float) -> Ranking:
    replays = replay_drafts(bench.traces, rule, bench.ks, temperature)
    return rank(replays, bench.latency, bench.weights, seed=bench.seed)


def _verdicts(bench: Bench, ranking: Ranking) -> tuple[Verdict, list[Verdict]]:
    evidence = evidence_of(ranking.replays, bench.latency, seed=bench.seed)
    whole = in_words(decide(evidence, weights=bench.weights, seed=bench.seed))
    sets = sorted(set(evidence.prompt_sets))
    each = [decide(evidence, prompt_set=name, seed=bench.seed) for name in sets]
    return whole, [in_words(verdict) for verdict in each]


def _headline(bench: Bench) -> dict[str, float | int | str | None]:
    first = next(iter(bench.latency.values()))
    return {
        "target_step_ms": first.times.target_s * 1e3,
        "prompts": len({(t.prompt_set, t.conversation) for t in next(iter(bench.traces.values()))}),
        "drafts": len(bench.traces),
    }
