"""What an audition's report shows beside the verdict: leaderboards, comparisons, costs.

Plain containers, as they go into summary.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from harness.analysis.latency import Latency
from harness.analysis.leaderboard import ENGINES, Ranking
from harness.analysis.predicted import category_alpha, evidence_of, request_summary
from harness.analysis.verdict import least_regret
from harness.records import Rule, TextTrace
from harness.theory.architecture import Architecture
from harness.theory.cost import usd_per_million_tokens
from harness.theory.planning import memory_view

Traces = Mapping[str, Sequence[TextTrace]]
Rankings = Mapping[tuple[Rule, float], Ranking]


@dataclass(frozen=True)
class LeaderboardRow:
    """A leaderboard's row as summary.json holds it."""

    rank: int
    draft: str | None
    k: int
    rule: Rule
    temperature: float
    speedup: float
    speedup_lo: float | None = None
    speedup_hi: float | None = None
    alpha: float | None = None
    alpha_lo: float | None = None
    alpha_hi: float | None = None
    breakeven_alpha: float | None = None
    draft_step_ms: float | None = None
    probability_best: float | None = None


@dataclass(frozen=True)
class Bench:
    """What an audition is ranked from.

    Attributes:
        model: the target's name.
        traces, latency: by draft.
        ks, temperatures, rule, weights, seed: of the configuration; `rule` is the verdict's.
        described: the manifest's entries of the models, `target` and each draft's name.
        context_tokens: of a typical step, for the memory view.
        memory_bytes: of the device; None if unknown.
        gpu: name of the card that memory and price are of.
        price_per_hour: of the device; None if unknown.
    """

    model: str
    traces: Traces
    latency: Mapping[str, Latency]
    ks: Sequence[int]
    temperatures: Sequence[float]
    rule: Rule
    weights: Mapping[str, float] | None
    seed: int
    described: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    context_tokens: int = 2048
    memory_bytes: float | None = None
    gpu: str | None = None
    price_per_hour: float | None = None

    @property
    def rules(self) -> list[Rule]:
        """Every acceptance rule, the verdict's first."""
        return [self.rule, *(rule for rule in ENGINES if rule != self.rule)]


def views(bench: Bench, rankings: Rankings, own: Sequence[Ranking]) -> dict[str, Any]:
    """Everything that summary.json says of an audition beside the verdicts.

    Args:
        bench: what it was ranked from.
        rankings: by rule and temperature.
        own: those of the verdict's rule, by temperature.
    """
    return {
        "leaderboards": [_leaderboard(bench, *key, rankings[key]) for key in rankings],
        "category_alpha": [
            {**asdict(row), "rule": bench.rule}
            for ranking in own
            for row in category_alpha(ranking.replays, _common_k(bench.ks), seed=bench.seed)
        ],
        "acceptance_by_position": [
            {
                "draft": name.draft,
                "temperature": ranking.replays.temperature,
                "k": name.k,
                "positions": list(ranking.replays.candidates[name].acceptance_by_position),
            }
            for ranking in own
            for name in ranking.best
        ],
        "request_view": _request_view(bench, own[0]),
        "least_regret": [
            dict(
                zip(
                    ("draft", "k"),
                    least_regret(evidence_of(ranking.replays, bench.latency).by_set()),
                    strict=True,
                ),
                temperature=ranking.replays.temperature,
            )
            for ranking in own
        ],
        "memory_view": _memory(bench),
    }


def _leaderboard(bench: Bench, rule: Rule, temperature: float, ranking: Ranking) -> dict[str, Any]:
    return {
        "rule": rule,
        "engines": list(ENGINES[rule]),
        "temperature": temperature,
        "rows": [
            _priced(
                bench,
                LeaderboardRow(
                    rule=rule,
                    temperature=temperature,
                    draft_step_ms=None if row.draft_step_s is None else row.draft_step_s * 1e3,
                    **{
                        field.name: getattr(row, field.name)
                        for field in fields(LeaderboardRow)
                        if field.name not in ("rule", "temperature", "draft_step_ms")
                    },
                ),
            )
            for row in ranking.leaderboard.rows
        ],
    }


def _priced(bench: Bench, row: LeaderboardRow) -> dict[str, Any]:
    """A leaderboard row with what the draft costs in memory and the tokens in money."""
    described = bench.described.get(row.draft or "", {})
    weights = 0 if row.draft is None else described.get("weights_bytes")
    target_s = next(iter(bench.latency.values())).times.target_s
    price = bench.price_per_hour
    return {
        **asdict(row),
        "extra_memory_bytes": weights,
        "cost_per_million_tokens": (
            None if price is None else usd_per_million_tokens(target_s / row.speedup, price)
        ),
    }


def _common_k(ks: Sequence[int]) -> int:
    """The K at which categories are compared: 4, or the nearest there is."""
    return min((k for k in ks if k > 0), key=lambda k: (abs(k - 4), k))


def _request_view(bench: Bench, ranking: Ranking) -> dict[str, Any] | None:
    """Whole requests with the best draft, where its prefill was timed."""
    name = next(iter(ranking.best), None)
    if name is None:
        return None
    view = request_summary(ranking.replays, name, bench.latency[name.draft])
    if view is None:
        return None
    return {
        "draft": view.draft,
        "k": view.k,
        "temperature": view.temperature,
        "request_speedup": view.speedup,
        "p95_baseline_s": view.plain_p95_s,
        "p95_speculative_s": view.speculative_p95_s,
        "share_slower": view.slower_share,
    }


def _memory(bench: Bench) -> list[dict[str, Any]]:
    """What each draft leaves of the device's memory, where the sizes are known."""
    target = architecture(bench.described.get("target", {}))
    if target is None or bench.memory_bytes is None:
        return []
    drafts: dict[str, Architecture | None] = {}
    for draft, traces in bench.traces.items():
        lookup = traces[0].matches is not None
        sizes = None if lookup else architecture(bench.described.get(draft, {}))
        if lookup or sizes is not None:
            drafts[draft] = sizes
    width = int(bench.described["target"].get("bytes_per_parameter", 2))
    rows = memory_view(
        target,
        drafts,
        bench.memory_bytes,
        context_tokens=bench.context_tokens,
        bytes_per_parameter=width,
    )
    return [
        {
            **asdict(row),
            "weights_bytes": row.draft_weight_bytes,
            "kv_bytes_per_token": row.draft_kv_bytes_per_token,
            "gpu": bench.gpu,
        }
        for row in rows
        if row.draft is not None
    ]


def architecture(described: Mapping[str, Any]) -> Architecture | None:
    """A model's sizes from the manifest's entry; None where it does not say them all."""
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied")
    if any(described.get(name) is None for name in names):
        return None
    return Architecture(
        **{name: described[name] for name in names},
        experts=described.get("experts") or 0,
        experts_per_token=described.get("experts_per_token") or 0,
        moe_ffn=described.get("moe_ffn") or 0,
    )
