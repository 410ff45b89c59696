import io
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from harness import reporting
from harness.cli import compose
from harness.config import CONF_DIR, GpuConf
from harness.records import LatencyRow, ResultRow, Rule
from harness.reporting import formatting, markdown, wording
from harness.reporting.content import content_of
from harness.reporting.plots import style
from harness.reporting.tables import Table, tables_of
from harness.reporting.tables.sweep import gap_table
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
# draft: best K, speedup lo hi, alpha lo hi, break-even, chance to be best.
Found = tuple[int, tuple[float, float, float], tuple[float, float, float], float | None, float]
GREEDY: dict[str, Found] = {
    "tiny_good": (5, (1.71, 1.58, 1.86), (0.861, 0.83, 0.89), 0.512, 0.952),
    "ngram": (6, (1.44, 1.21, 1.69), (0.702, 0.61, 0.79), 0.031, 0.047),
    "tiny_small": (3, (1.38, 1.29, 1.48), (0.724, 0.68, 0.77), 0.398, 0.001),
    "tiny_unrelated": (1, (0.79, 0.78, 0.81), (0.042, 0.03, 0.06), 0.291, 0.0),
}
SAMPLED: dict[Rule, dict[str, Found]] = {
    "ratio": {
        "tiny_good": (4, (1.43, 1.33, 1.54), (0.752, 0.71, 0.79), 0.481, 0.998),
        "tiny_small": (2, (1.19, 1.12, 1.26), (0.611, 0.57, 0.65), 0.352, 0.002),
        "ngram": (2, (0.94, 0.89, 1.02), (0.221, 0.16, 0.29), 0.028, 0.0),
        "tiny_unrelated": (1, (0.81, 0.79, 0.83), (0.061, 0.05, 0.08), 0.291, 0.0),
    },
    "greedy_draft": {
        "tiny_good": (4, (1.36, 1.26, 1.47), (0.713, 0.67, 0.75), 0.481, 0.996),
        "tiny_small": (2, (1.13, 1.06, 1.20), (0.562, 0.52, 0.61), 0.352, 0.004),
        "ngram": (2, (0.94, 0.89, 1.02), (0.221, 0.16, 0.29), 0.028, 0.0),
        "tiny_unrelated": (1, (0.80, 0.78, 0.82), (0.052, 0.04, 0.07), 0.291, 0.0),
    },
    "exact_match": {
        "tiny_good": (3, (1.17, 1.10, 1.25), (0.588, 0.54, 0.63), 0.431, 0.989),
        "tiny_small": (1, (1.02, 0.97, 1.07), (0.442, 0.40, 0.48), None, 0.011),
        "ngram": (2, (0.94, 0.89, 1.02), (0.221, 0.16, 0.29), 0.028, 0.0),
        "tiny_unrelated": (1, (0.79, 0.77, 0.81), (0.038, 0.03, 0.05), 0.291, 0.0),
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
    for draft, (k, speedup, alpha, needed, best) in found.items():
        rows.append(
            {
                "draft": draft, "k": k,
                **dict(zip(("speedup", "speedup_lo", "speedup_hi"), speedup, strict=True)),
                **dict(zip(("alpha", "alpha_lo", "alpha_hi"), alpha, strict=True)),
                "breakeven_alpha": needed,
                "draft_step_ms": STEP_MS[draft],
                "extra_memory_bytes": 0 if draft == "ngram" else 788_000,
                "cost_per_million_tokens": 4.60 / speedup[0],
                "probability_best": best,
            }
        )  # fmt: skip
    rows.append({"draft": None, "k": 0, "speedup": 1.0, "probability_best": 0.0,
                 "cost_per_million_tokens": 4.60, "extra_memory_bytes": 0,
                 "breakeven_alpha": None})  # fmt: skip
    rows.sort(key=lambda row: -row["speedup"])
    ranked = [{"rank": rank, **row} for rank, row in enumerate(rows, start=1)]
    return {"rule": rule, "engines": ENGINES[rule], "temperature": temperature, "rows": ranked}


def extras() -> dict[str, Any]:
    """Everything an audition's summary.json holds beside the contract's keys."""
    return {
        "leaderboards": [
            *(leaderboard(rule, 0.0, GREEDY) for rule in ENGINES),
            *(leaderboard(rule, 1.0, SAMPLED[rule]) for rule in ENGINES),
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
            "draft": "tiny_good", "k": 5, "temperature": 0.0, "request_speedup": 1.57,
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
        "costs": {"generation_s": 21.4, "scoring_s": 5.13},
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
            for draft, (best, speedup, alpha, needed, _) in found.items():
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


# The leaderboards


def test_a_leaderboard_puts_each_stored_number_under_its_own_name(tmp_path: Path) -> None:
    shown = table(audition_run(tmp_path), "Temperature 1, rule ratio")
    assert [column.one_line for column in shown.columns] == [
        "rank", "draft", "best K", "speedup [lo, hi]", "chance to be best",
        "cost per 10^6 tokens", "alpha [lo, hi]", "break-even alpha"
    ]  # fmt: skip
    assert [row.cells for row in shown.rows[:4]] == [
        ("1 best", "tiny_good", "4", "1.43x [1.33, 1.54]", "> 99 %", "$3.22",
         "0.752 [0.71, 0.79]", "0.481"),
        ("2", "tiny_small", "2", "1.19x [1.12, 1.26]", "< 1 %", "$3.87",
         "0.611 [0.57, 0.65]", "0.352"),
        ("3", "do not speculate", "0", "1.00x", "< 1 %", "$4.60", "-", "-"),
        ("4", "ngram", "2", "0.94x [0.89, 1.02]", "< 1 %", "$4.89",
         "0.221 [0.16, 0.29]", "0.028"),
    ]  # fmt: skip


def test_leaderboards_name_their_engines_and_equal_ones_are_shown_once(tmp_path: Path) -> None:
    run = audition_run(tmp_path)
    assert titles(run)[:4] == [
        "Temperature 0, every rule",
        "Temperature 1, rule ratio: transformers, vLLM with draft_sample_method=probabilistic",
        "Temperature 1, rule greedy_draft: vLLM (default), SGLang STANDALONE at topk 1, llama.cpp",
        "Temperature 1, rule exact_match: mlx-lm",
    ]
    held = next(note for note in table(run, "Temperature 0").notes if note.startswith("Holds for"))
    assert all(engine in held for engines in ENGINES.values() for engine in engines)


def test_the_verdicts_rule_comes_first_whatever_it_is(tmp_path: Path) -> None:
    order: tuple[Rule, ...] = ("exact_match", "ratio")
    boards = [leaderboard(rule, 1.0, SAMPLED[rule]) for rule in order]
    run = audition_run(tmp_path, extra={"leaderboards": boards})
    assert [title.split(":")[0] for title in titles(run)[:2]] == [
        "Temperature 1, rule exact_match",
        "Temperature 1, rule ratio",
    ]


def test_not_speculating_can_be_the_best_row(tmp_path: Path) -> None:
    losing = {"tiny_unrelated": GREEDY["tiny_unrelated"]}
    run = audition_run(tmp_path, extra={"leaderboards": [leaderboard("ratio", 0.0, losing)]})
    shown = table(run, "Temperature 0, rule ratio")
    assert [(row.cells[:3], row.best) for row in shown.rows] == [
        (("1 best", "do not speculate", "0"), True),
        (("2", "tiny_unrelated", "1"), False),
    ]


def test_an_alpha_that_no_draft_could_reach_is_none_and_an_unknown_one_a_dash(
    tmp_path: Path,
) -> None:
    shown = table(audition_run(tmp_path), "Temperature 1, rule exact_match")
    assert dict(zip(shown.column("draft"), shown.column("break-even alpha"), strict=True)) == {
        "tiny_good": "0.431", "tiny_small": "none", "do not speculate": "-", "ngram": "0.028",
        "tiny_unrelated": "0.291",
    }  # fmt: skip
    bare = [{"rank": 1, "draft": "a", "k": 2, "speedup": 1.2}]
    boards = [{"rule": "ratio", "temperature": 0.0, "rows": bare}]
    shown = table(audition_run(tmp_path, extra={"leaderboards": boards}), "Temperature 0")
    assert [column.one_line for column in shown.columns] == [
        "rank", "draft", "best K", "speedup [lo, hi]",
    ]  # fmt: skip
    assert [row.cells for row in shown.rows] == [("1 best", "a", "2", "1.20x")]


# The other tables


def test_what_a_draft_takes_is_said_once_for_all_rules(tmp_path: Path) -> None:
    shown = table(audition_run(tmp_path), "What each draft takes")
    found = {row.cells[0]: row.cells[1:] for row in shown.rows}
    assert set(found) == set(STEP_MS)
    assert found["tiny_good"] == ("1.24", "770 KiB", "1 KiB", "1,803", "1", "l4")
    assert found["ngram"] == ("0.031", "0 MiB", "0 MiB", "0", "0", "l4")
    known = {key: value for key, value in extras().items() if key != "memory_view"}
    shown = table(audition_run(tmp_path, extra=known), "What each draft takes")
    assert [column.one_line for column in shown.columns] == ["draft", "step ms", "extra memory"]


def test_the_category_matrix_has_a_row_per_category_and_a_column_per_draft(
    tmp_path: Path,
) -> None:
    shown = table(audition_run(tmp_path), "Alpha by category, temperature 0, K=4")
    assert shown.column("category") == CATEGORIES
    assert shown.column("tiny_good") == (
        "0.970", "0.860", "0.750", "0.640 [0.60, 0.68]", "0.530",
    )  # fmt: skip
    assert shown.column("prompts") == ("8", "7", "6", "5", "4")


def test_a_draft_that_missed_a_category_has_a_dash_there(tmp_path: Path) -> None:
    entries = [entry for entry in extras()["category_alpha"]
               if (entry["draft"], entry["category"]) != ("ngram", "days")]  # fmt: skip
    run = audition_run(tmp_path, extra={"category_alpha": entries})
    shown = table(run, "Alpha by category, temperature 0")
    assert shown.column("ngram") == ("0.910", "0.800", "-", "0.580 [0.54, 0.62]", "0.470")
    assert "acceptance_by_category.svg" in plots(run)


def test_acceptance_by_position_ends_at_each_drafts_own_k(tmp_path: Path) -> None:
    shown = table(audition_run(tmp_path), "acceptance_by_position, temperature 0")
    assert [row.cells for row in shown.rows[2:]] == [
        ("tiny_small", "3", "72.4 %", "53.1 %", "39.2 %", "-", "-", "-"),
        ("tiny_unrelated", "1", "4.2 %", "-", "-", "-", "-", "-"),
    ]


def test_whole_requests_have_their_speedup_and_their_95th_percentile(tmp_path: Path) -> None:
    shown = table(audition_run(tmp_path), "Whole requests")
    assert [row.cells for row in shown.rows] == [
        ("tiny_good", "5", "0", "1.57x", "211 ms", "139 ms", "6.2 %"),
    ]


def test_the_robust_choice_may_be_not_to_speculate(tmp_path: Path) -> None:
    shown = table(audition_run(tmp_path), "If traffic shifts")
    assert [row.cells for row in shown.rows] == [
        ("0", "tiny_good", "4"),
        ("1", "do not speculate", "0"),
    ]


def test_who_could_not_take_part_and_what_it_took_is_said(tmp_path: Path) -> None:
    run = audition_run(tmp_path)
    assert table(run, "Not eligible").rows[0].cells[0] == "gpt2"
    assert table(run, "What this audition took").column("time") == ("21.4 s", "5.1 s")


@pytest.mark.parametrize("missing", extras())
def test_a_missing_key_drops_its_table_and_nothing_else(tmp_path: Path, missing: str) -> None:
    whole = set(titles(audition_run(tmp_path)))
    known = {key: value for key, value in extras().items() if key != missing}
    run = audition_run(tmp_path, extra=known)
    left = set(titles(run))
    # What each draft takes is said by two keys, and stands while either is there.
    assert left < whole or (missing == "memory_view" and left == whole)
    assert plots(run)
    assert printed(run)


def test_an_audition_without_any_extra_still_shows_its_verdict(tmp_path: Path) -> None:
    run = audition_run(tmp_path, extra=None, results=(), latency=())
    assert titles(run) == ["Each prompt set alone", "In numbers"]
    assert plots(run) == {}
    assert printed(run).count("Serve tiny_good at K=2: 1.35x [1.27, 1.42] on held-out prompts") == 2


def test_the_paragraph_on_acceptance_names_the_draft_where_there_are_several(
    tmp_path: Path,
) -> None:
    said = content_of(audition_run(tmp_path)).acceptance or ""
    assert "Here, with tiny_good at K=10 on easy prompts at temperature 0" in said


# A sweep that was replayed


def test_a_replayed_sweep_has_the_tables_of_a_measured_one_and_says_so(tmp_path: Path) -> None:
    run = replayed_sweep(tmp_path)
    shown = table(run, "Temperature 1, hard prompts")
    assert shown.title == "Temperature 1, hard prompts (replayed)"
    assert any(note.startswith("Replayed: ") for entry in tables_of(run) for note in entry.notes)
    assert [row.cells for row in shown.rows[:2]] == [
        ("", "0", "229.4", "4.36", "-", "-", "-", "-", "-"),
        ("best", "1", "243.9", "4.10", "48.8 %", "0.493 [0.45, 0.54]", "1.06x [1.02, 1.11]",
         "1.48", "0.344"),
    ]  # fmt: skip
    assert shown.column("break-even alpha")[-1] == "none"
    assert "predicted speedup" not in [column.one_line for column in shown.columns]


def test_replayed_rows_beside_measured_ones_change_no_table(tmp_path: Path) -> None:
    plain = tables_of(made.sweep_run(tmp_path))
    both = tables_of(both_sweep(tmp_path))
    gaps = gap_table(GAPS)
    assert gaps is not None
    assert [entry for entry in both if entry.title != gaps.title] == list(plain)


def test_replayed_rows_beside_measured_ones_change_no_plot(tmp_path: Path) -> None:
    assert plots(both_sweep(tmp_path)) == plots(made.sweep_run(tmp_path))


def test_the_gap_between_loop_and_replay_is_shown_cell_by_cell(tmp_path: Path) -> None:
    shown = table(both_sweep(tmp_path), "Replayed beside measured")
    assert [row.cells for row in shown.rows] == [
        ("easy", "0", "4", "3.81", "3.81", "0.0"),
        ("hard", "1", "8", "1.92", "1.97", "-1.2"),
    ]


def test_cells_are_counted_once_where_they_were_measured_and_replayed(tmp_path: Path) -> None:
    rows = [
        replace(row, status="failed") if (row.source, row.k) == ("measured", 8) else row
        for row in both_sweep_rows()
    ]
    run = made.sweep_run(tmp_path, results=rows, status="failed")
    assert "Cells: 4 failed of 20." in (wording.status(run) or "")


def test_the_plots_of_a_replayed_sweep_do_not_say_measured(tmp_path: Path) -> None:
    drawn = plots(replayed_sweep(tmp_path))
    assert set(drawn) == {
        "speedup_vs_k.svg",
        "breakeven_vs_measured.svg",
        "acceptance_vs_temperature.svg",
        "verify_cost.svg",
    }
    for name in ("speedup_vs_k.svg", "breakeven_vs_measured.svg"):
        assert "replayed" in words(drawn[name])
        assert "measured" not in words(drawn[name])


# The plots of an audition


def test_an_audition_draws_and_links_every_plot(tmp_path: Path) -> None:
    run = audition_run(tmp_path)
    assert set(plots(run)) == AUDITION_PLOTS
    text = (run.folder / "report.md").read_text("utf-8")
    assert set(re.findall(r"\(plots/(.+?)\)", text)) == AUDITION_PLOTS


def test_the_leaderboard_plot_names_every_row_and_the_best_in_words(tmp_path: Path) -> None:
    drawn = words(plots(audition_run(tmp_path))["leaderboard.svg"])
    assert drawn.count("do not speculate") == 4
    assert drawn.count(" best |") == 4
    for said in ("tiny_good, K=5", "ngram, K=6", "1.71x best", "0.79x", "mlx-lm",
                 "temperature 1, rule greedy_draft", "every engine"):  # fmt: skip
        assert said in drawn


def test_the_other_plots_name_every_draft(tmp_path: Path) -> None:
    drawn = {name: words(svg) for name, svg in plots(audition_run(tmp_path)).items()}
    for name in ("speedup_by_k.svg", "acceptance_by_position.svg", "verify_cost.svg"):
        assert all(draft in drawn[name] for draft in STEP_MS)
    assert "temperature 1, hard prompts" in drawn["speedup_by_k.svg"]
    assert "no speculation" in drawn["speedup_by_k.svg"]
    assert "tiny_small, K=3" in drawn["acceptance_by_position.svg"]
    assert "ngram step 0.031 ms" in drawn["verify_cost.svg"]
    assert all(category in drawn["acceptance_by_category.svg"] for category in CATEGORIES)
    assert "0.97" in drawn["acceptance_by_category.svg"]


def test_a_draft_has_one_colour_in_every_plot(tmp_path: Path) -> None:
    rows = sorted(audition_rows(), key=lambda row: str(row.draft))  # not in the order of rank
    drawn = plots(audition_run(tmp_path, results=rows))
    for name in ("speedup_by_k.svg", "acceptance_by_position.svg"):
        for draft, colour in zip(GREEDY, style.COLOURS, strict=False):
            styles = re.findall(rf'<text style="([^"]*)"[^>]*>{draft}[,<]', drawn[name])
            assert styles, (name, draft)
            assert all(colour in found for found in styles)
    values = re.findall(r'<text style="([^"]*)"[^>]*>1\.71x best<', drawn["leaderboard.svg"])
    assert style.COLOURS[0] in values[0]


def test_two_renderings_of_one_audition_are_the_same_bytes(tmp_path: Path) -> None:
    run = audition_run(tmp_path)
    assert plots(run) == plots(run)


# The layout


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_console(any_run: StoredRun, width: int) -> None:
    pasted = {line for entry in content_of(any_run).snippets for line in entry.code.splitlines()}
    lines = [line for line in printed(any_run, width).splitlines() if line not in pasted]
    assert max(map(len, lines)) <= width


def test_a_leaderboard_takes_two_parts_at_80_columns(tmp_path: Path) -> None:
    assert printed(audition_run(tmp_path)).count("Temperature 0, every rule") == 2


def test_markdown_tables_have_as_many_cells_in_every_line(any_run: StoredRun) -> None:
    for entry in tables_of(any_run):
        lines = markdown.table(entry).splitlines()
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(entry.columns) + 1}


def test_small_numbers_keep_digits_that_count() -> None:
    assert [formatting.dollars(value) for value in (12.345, 0.1, 0.0312, 0.0)] == [
        "$12.35", "$0.10", "$0.031", "$0.00",
    ]  # fmt: skip
    assert [formatting.seconds(value) for value in (0.0042, 0.41, 5.13, 123.4)] == [
        "4.20 ms", "410 ms", "5.1 s", "123 s",
    ]  # fmt: skip
    assert [formatting.chance(value) for value in (1.0, 0.952, 0.004)] == [
        "> 99 %",
        "95 %",
        "< 1 %",
    ]
    assert [formatting.signed(value) for value in (0.126, -0.126, -0.001)] == [
        "+0.13", "-0.13", "0.00",
    ]  # fmt: skip
    assert [formatting.memory(value) for value in (512, 114_688, 770e6)] == [
        "512 B", "112 KiB", "734 MiB",
    ]  # fmt: skip


# conf/gpu


def test_the_shipped_cards_are_the_known_ones() -> None:
    assert sorted(path.stem for path in (CONF_DIR / "gpu").glob("*.yaml")) == list(GPUS)


@pytest.mark.parametrize("name", GPUS)
def test_every_card_has_its_figures_and_says_where_they_come_from(name: str) -> None:
    card = compose("audition", [f"gpu={name}"]).gpu
    assert isinstance(card, GpuConf)
    assert card.name == name
    figures = (card.bandwidth_gb_s, card.bf16_tflops, card.memory_gb, card.price_per_hour_usd)
    assert all(figure > 0 for figure in figures)
    assert "price: " in card.source
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", card.date)


def test_the_cards_agree_with_their_data_sheets() -> None:
    cards = {name: compose("audition", [f"gpu={name}"]).gpu for name in GPUS}
    bandwidth = {name: card.bandwidth_gb_s for name, card in cards.items()}
    assert bandwidth == {"a100_40": 1555, "a100_80": 2039, "a10g": 600, "b200": 8000,
                         "h100": 3350, "h200": 4800, "l4": 300, "l40s": 864}  # fmt: skip
    memory = {name: card.memory_gb for name, card in cards.items()}
    assert memory == {"a100_40": 40, "a100_80": 80, "a10g": 24, "b200": 180, "h100": 80,
                      "h200": 141, "l4": 24, "l40s": 48}  # fmt: skip
