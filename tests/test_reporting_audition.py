import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from harness import reporting
from harness.records import LatencyRow, ResultRow, Rule
from harness.reporting.tables import Table, tables_of
from harness.storage import StoredRun
from tests import reporting_fixtures as made

GPUS = ("a100_40", "a100_80", "a10g", "b200", "h100", "h200", "l4", "l40s")
AUDITION_PLOTS = {
    "leaderboard.svg",
    "speedup_by_k.svg",
    "acceptance_by_category.svg",
    "acceptance_by_position.svg",
    "verify_cost.svg",
}
KS = (1, 2, 3, 4, 5, 6, 8, 10)
ENGINES: dict[Rule, list[str]] = {
    "ratio": ["transformers", "vLLM with draft_sample_method=probabilistic"],
    "greedy_draft": ["vLLM (default)", "SGLang STANDALONE at topk 1", "llama.cpp"],
    "exact_match": ["mlx-lm"],
}
STEP_MS = {"tiny_good": 1.24, "tiny_small": 0.93, "tiny_unrelated": 1.22, "ngram": 0.031}
# draft: best K, speedup lo hi, alpha lo hi, break-even, wins above, chance to be best.
Found = tuple[int, tuple[float, float, float], tuple[float, float, float], float | None,
              float | None, float]  # fmt: skip
GREEDY: dict[str, Found] = {
    "tiny_good": (5, (1.71, 1.58, 1.86), (0.861, 0.83, 0.89), 0.512, 0.548, 0.952),
    "ngram": (6, (1.44, 1.21, 1.69), (0.702, 0.61, 0.79), 0.031, 0.187, 0.047),
    "tiny_small": (3, (1.38, 1.29, 1.48), (0.724, 0.68, 0.77), 0.398, 0.431, 0.001),
    "tiny_unrelated": (1, (0.79, 0.78, 0.81), (0.042, 0.03, 0.06), 0.291, 0.302, 0.0),
}
SAMPLED: dict[Rule, dict[str, Found]] = {
    "ratio": {
        "tiny_good": (4, (1.43, 1.33, 1.54), (0.752, 0.71, 0.79), 0.481, 0.502, 0.998),
        "tiny_small": (2, (1.19, 1.12, 1.26), (0.611, 0.57, 0.65), 0.352, 0.371, 0.002),
        "ngram": (2, (0.94, 0.89, 1.02), (0.221, 0.16, 0.29), 0.028, 0.294, 0.0),
        "tiny_unrelated": (1, (0.81, 0.79, 0.83), (0.061, 0.05, 0.08), 0.291, 0.305, 0.0),
    },
    "greedy_draft": {
        "tiny_good": (4, (1.36, 1.26, 1.47), (0.713, 0.67, 0.75), 0.481, 0.503, 0.996),
        "tiny_small": (2, (1.13, 1.06, 1.20), (0.562, 0.52, 0.61), 0.352, 0.373, 0.004),
        "ngram": (2, (0.94, 0.89, 1.02), (0.221, 0.16, 0.29), 0.028, 0.294, 0.0),
        "tiny_unrelated": (1, (0.80, 0.78, 0.82), (0.052, 0.04, 0.07), 0.291, 0.305, 0.0),
    },
    "exact_match": {
        "tiny_good": (3, (1.17, 1.10, 1.25), (0.588, 0.54, 0.63), 0.431, 0.455, 0.989),
        "tiny_small": (1, (1.02, 0.97, 1.07), (0.442, 0.40, 0.48), None, None, 0.011),
        "ngram": (2, (0.94, 0.89, 1.02), (0.221, 0.16, 0.29), 0.028, 0.294, 0.0),
        "tiny_unrelated": (1, (0.79, 0.77, 0.81), (0.038, 0.03, 0.05), 0.291, 0.305, 0.0),
    },
}
POSITIONS = {
    "tiny_good": [0.861, 0.752, 0.661, 0.583, 0.511],
    "ngram": [0.412, 0.371, 0.342, 0.318, 0.297, 0.281],
    "tiny_small": [0.724, 0.531, 0.392],
    "tiny_unrelated": [0.042],
}
CATEGORIES = ("alphabet", "counting", "days", "facts", "stories")


def leaderboard(rule: Rule, temperature: float, found: Mapping[str, Found]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for draft, (k, speedup, alpha, needed, wins, best) in found.items():
        rows.append(
            {
                "draft": draft, "k": k,
                **dict(zip(("speedup", "speedup_lo", "speedup_hi"), speedup, strict=True)),
                **dict(zip(("alpha", "alpha_lo", "alpha_hi"), alpha, strict=True)),
                "breakeven_alpha": needed, "wins_above_alpha": wins,
                "margin_alpha": None if wins is None else alpha[0] - wins,
                "draft_step_ms": STEP_MS[draft],
                "extra_memory_bytes": 0 if draft == "ngram" else 788_000,
                "cost_per_million_tokens": 4.60 / speedup[0],
                "probability_best": best,
            }
        )  # fmt: skip
    rows.append({"draft": None, "k": 0, "speedup": 1.0, "probability_best": 0.0,
                 "cost_per_million_tokens": 4.60, "extra_memory_bytes": 0,
                 "breakeven_alpha": None, "wins_above_alpha": None})  # fmt: skip
    rows.sort(key=lambda row: -row["speedup"])
    ranked = [{"rank": rank, **row} for rank, row in enumerate(rows, start=1)]
    return {"rule": rule, "engines": ENGINES[rule], "temperature": temperature, "rows": ranked}


def extras() -> dict[str, Any]:
    """Everything an audition's summary.json holds beside the contract's keys."""
    pairs = [
        ("tiny_good", "tiny_small", 0.999, True, None),
        ("tiny_good", "ngram", 0.952, False, 31),
        ("ngram", "tiny_small", 0.71, False, 412),
    ]
    return {
        "leaderboards": [
            *(leaderboard(rule, 0.0, GREEDY) for rule in ENGINES),
            *(leaderboard(rule, 1.0, SAMPLED[rule]) for rule in ENGINES),
        ],
        "pairwise": [
            {"rule": "ratio", "temperature": temperature, "better": better, "worse": worse,
             "probability": chance, "separated": apart, "prompts_needed": needed,
             "limited_by": None if apart else "prompts"}
            for temperature in (0.0, 1.0) for better, worse, chance, apart, needed in pairs
        ],
        "rules_gap": [
            {
                "draft": draft, "temperature": temperature, "at_k": 4,
                "alpha": {rule: found[rule][draft][2][0] for rule in ENGINES},
                "speedup": {rule: found[rule][draft][1][0] for rule in ENGINES},
                "k": {rule: found[rule][draft][0] for rule in ENGINES},
            }
            for temperature, found in ((0.0, dict.fromkeys(ENGINES, GREEDY)), (1.0, SAMPLED))
            for draft in STEP_MS
        ],
        "draft_temperatures": [
            {"draft": "tiny_good", "temperature": 1.0, "best_draft_temperature": 0.8, "k": 4,
             "speedup": 1.47, "default_speedup": 1.43, "gain": 0.04, "gain_lo": -0.01,
             "gain_hi": 0.09, "note": "held out"},
            {"draft": "tiny_small", "temperature": 1.0, "best_draft_temperature": 1.0, "k": 2,
             "speedup": 1.19, "default_speedup": 1.19, "gain": 0.0, "gain_lo": 0.0,
             "gain_hi": 0.0, "note": "chosen on the same prompts"},
        ],
        "category_alpha": [
            {"draft": draft, "temperature": temperature, "category": category, "k": 4,
             "alpha": alpha, "alpha_lo": alpha - 0.04 if category == "facts" else None,
             "alpha_hi": alpha + 0.04 if category == "facts" else None, "prompts": 8 - row}
            for temperature in (0.0, 1.0)
            for row, category in enumerate(CATEGORIES)
            for draft, top in (("tiny_good", 0.97), ("tiny_small", 0.86),
                               ("tiny_unrelated", 0.17), ("ngram", 0.91))
            for alpha in (max(0.02, top - 0.11 * row - 0.1 * temperature),)
        ],
        "acceptance_by_position": [
            {"draft": draft, "temperature": temperature, "k": len(shares),
             "positions": [share * (1 - 0.15 * temperature) for share in shares]}
            for temperature in (0.0, 1.0) for draft, shares in POSITIONS.items()
        ],
        "request_view": {
            "draft": "tiny_good", "k": 5, "temperature": 0.0,
            "rows": [{"prompt_tokens": prompt, "new_tokens": new,
                      "request_speedup": 1.71 - 0.0001 * prompt - 2.0 / new}
                     for prompt in (128, 512, 2048, 8192) for new in (16, 64, 256, 1024)],
            "p95_baseline_s": 0.211, "p95_speculative_s": 0.139, "share_slower": 0.0625,
        },
        "least_regret": [{"temperature": 0.0, "draft": "tiny_good", "k": 4},
                         {"temperature": 1.0, "draft": None, "k": 0}],
        "memory_view": [
            {"draft": "tiny_good", "weights_bytes": 788_000, "kv_bytes_per_token": 1024,
             "context_tokens_lost": 1803, "sequences_lost": 1, "gpu": "l4"},
            {"draft": "ngram", "weights_bytes": 0, "kv_bytes_per_token": 0,
             "context_tokens_lost": 0, "sequences_lost": 0, "gpu": "l4"},
        ],
        "not_eligible": [{"draft": "gpt2", "reason": "another tokenizer than the target's: it"
                          " encodes 'twenty-one' as 4 tokens, the target as 6"}],
        "sequential": {"scorings_done": 104, "scorings_all": 128, "dropped": [
            {"draft": "tiny_unrelated", "after_prompts": 8,
             "reason": "at least 0.6x behind tiny_good"}]},
        "costs": {"generation_s": 21.4, "scoring_s": 5.13, "replay_s": 0.82},
    }  # fmt: skip


def audition_rows() -> list[ResultRow]:
    """Replayed rows of four drafts on two sets, and the baseline that the steps predict."""
    rows: list[ResultRow] = []
    for temperature in (0.0, 1.0):
        found = GREEDY if temperature == 0.0 else SAMPLED["ratio"]
        for prompt_set, ease in (("easy", 1.08), ("hard", 0.9)):
            where: dict[str, Any] = {"model": "tiny", "prompt_set": prompt_set,
                                     "status": "complete", "temperature": temperature}  # fmt: skip
            rows.append(ResultRow(draft=None, k=0, source="theory", ms_per_token=4.2,
                                  tokens_per_second=238.1, speedup=1.0, **where))  # fmt: skip
            for draft, (best, speedup, alpha, needed, _, _) in found.items():
                for k in KS:
                    gain = ease * speedup[0] * (1 - 0.012 * (k - best) ** 2)
                    rows.append(
                        ResultRow(draft=draft, k=k, source="replayed", rule="ratio", prompts=8,
                                  new_tokens=384, rounds=384 / (1 + k * alpha[0] ** k),
                                  alpha=alpha[0], alpha_lo=alpha[1], alpha_hi=alpha[2],
                                  acceptance_rate=alpha[0] ** (0.5 + k / 2),
                                  tokens_per_round=1 + k * alpha[0] ** k, speedup=gain,
                                  speedup_lo=0.95 * gain, speedup_hi=1.05 * gain,
                                  ms_per_token=4.2 / gain, tokens_per_second=1e3 * gain / 4.2,
                                  breakeven_alpha=needed, **where)
                    )  # fmt: skip
    return rows


def audition_latency() -> list[LatencyRow]:
    target = [row for row in made.latency_rows() if row.role == "target"]
    drafts = [
        LatencyRow("draft", name, "step", 1, 64, 1, ms, 0.95 * ms, 1.1 * ms, 20)
        for name, ms in STEP_MS.items()
    ]
    return [*target, *drafts]


def audition_run(root: Path, **changes: Any) -> StoredRun:
    config = {key: value for key, value in made.PAIR.items() if key != "draft"}
    values: dict[str, Any] = {
        "config": config,
        "results": audition_rows(),
        "latency": audition_latency(),
        "summary": made.sweep_summary(headline={"target_step_ms": 4.2, "drafts": 4, "prompts": 16}),
        "extra": extras(),
    }
    return made.stored(root, "audition", **{**values, **changes})


def replayed_sweep_rows() -> list[ResultRow]:
    """The default sweep's cells as mode=replay stores them: replayed, on a predicted baseline."""
    needed = made.BREAK_EVEN
    return [
        replace(row, source="theory", draft=None, prompts=None)
        if row.k == 0
        else replace(row, source="replayed", breakeven_alpha=needed[row.k])
        for row in made.sweep_rows()
        if row.source == "measured"
    ]


def both_sweep_rows() -> list[ResultRow]:
    """A sweep that measured every cell and replayed it as well, with other numbers."""
    replayed = [
        replace(row, tokens_per_second=999.9, speedup=9.99, alpha=0.123)
        for row in replayed_sweep_rows()
        if row.k
    ]
    return [*made.sweep_rows(), *replayed]


GAPS = [
    {"prompt_set": "easy", "temperature": 0.0, "k": 4, "measured_tokens_per_round": 3.81,
     "replayed_tokens_per_round": 3.81, "gap_standard_errors": 0.0},
    {"prompt_set": "hard", "temperature": 1.0, "k": 8, "measured_tokens_per_round": 1.92,
     "replayed_tokens_per_round": 1.971, "gap_standard_errors": -1.24},
]  # fmt: skip


def replayed_sweep(root: Path) -> StoredRun:
    return made.sweep_run(root, results=replayed_sweep_rows(), trials=())


def both_sweep(root: Path) -> StoredRun:
    return made.sweep_run(root, results=both_sweep_rows(), extra={"replay_gaps": GAPS})


RUNS: dict[str, Callable[[Path], StoredRun]] = {
    "audition": audition_run,
    "replayed": replayed_sweep,
    "both": both_sweep,
}


@pytest.fixture(params=RUNS)
def any_run(request: pytest.FixtureRequest, tmp_path: Path) -> StoredRun:
    return RUNS[request.param](tmp_path)


def printed(run: StoredRun, width: int = 80) -> str:
    out = io.StringIO()
    reporting.show(run, Console(file=out, width=width))
    return out.getvalue()


def table(run: StoredRun, title: str) -> Table:
    return next(entry for entry in tables_of(run) if entry.title.startswith(title))


def titles(run: StoredRun) -> list[str]:
    return [entry.title for entry in tables_of(run)]


def plots(run: StoredRun) -> dict[str, str]:
    reporting.render(run)
    return {file.name: file.read_text("utf-8") for file in (run.folder / "plots").glob("*")}


def words(svg: str) -> str:
    return " | ".join("".join(node.itertext()) for node in ElementTree.fromstring(svg).iter()
                      if node.tag.endswith("}text"))  # fmt: skip
