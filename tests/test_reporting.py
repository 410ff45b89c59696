import io
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from harness import reporting
from harness.records import Failure, ResultRow, Summary
from harness.reporting import formatting, markdown, wording
from harness.reporting.console import fold
from harness.reporting.content import content_of
from harness.reporting.plots import style
from harness.reporting.tables import Table, tables_of
from harness.storage import StoredRun, load
from tests import reporting_fixtures as made

RUNS: dict[str, Callable[[Path], StoredRun]] = {
    "sweep": made.sweep_run,
    "partial": made.partial_sweep_run,
    "profile": made.profile_run,
    "breakeven": made.breakeven_run,
    "snapshot": made.snapshot_run,
}
SWEEP_PLOTS = {
    "speedup_vs_k.svg",
    "breakeven_vs_measured.svg",
    "acceptance_by_position.svg",
    "acceptance_vs_temperature.svg",
    "verify_cost.svg",
}


@pytest.fixture(params=RUNS)
def any_run(request: pytest.FixtureRequest, tmp_path: Path) -> StoredRun:
    return RUNS[request.param](tmp_path)


def printed(run: StoredRun, width: int = 80) -> str:
    out = io.StringIO()
    reporting.show(run, Console(file=out, width=width))
    return out.getvalue()


def written(run: StoredRun) -> str:
    reporting.render(run)
    return (run.folder / "report.md").read_text(encoding="utf-8")


def unwrapped(text: str) -> str:
    """The words without the lines they were wrapped into."""
    return " ".join(text.split())


def table(run: StoredRun, title: str) -> Table:
    return next(entry for entry in tables_of(run) if entry.title.startswith(title))


def plots(run: StoredRun) -> dict[str, str]:
    return {file.name: file.read_text("utf-8") for file in (run.folder / "plots").glob("*")}


def words(svg: str) -> str:
    return " | ".join("".join(node.itertext()) for node in ElementTree.fromstring(svg).iter()
                      if node.tag.endswith("}text"))  # fmt: skip


# The tables


def test_the_sweep_table_puts_each_stored_number_under_its_own_name(tmp_path: Path) -> None:
    shown = table(made.sweep_run(tmp_path), "Temperature 1, hard prompts")
    assert [column.one_line for column in shown.columns] == [
        "", "K", "tok/s", "ms/tok", "acceptance_rate", "alpha [lo, hi]", "speedup [lo, hi]",
        "predicted speedup", "tokens/round", "break-even alpha",
    ]  # fmt: skip
    assert [row.cells for row in shown.rows] == [
        ("", "0", "229.4", "4.36", "-", "-", "-", "-", "-", "-"),
        ("best", "1", "243.9", "4.10", "48.8 %", "0.493 [0.45, 0.54]", "1.06x [1.02, 1.11]",
         "1.11x", "1.48", "0.344"),
        ("", "2", "219.8", "4.55", "36.6 %", "0.487 [0.44, 0.53]", "0.96x [0.90, 1.01]", "1.02x",
         "1.70", "0.481"),
        ("", "4", "167.5", "5.97", "23.1 %", "0.481 [0.44, 0.53]", "0.73x [0.67, 0.79]", "0.78x",
         "1.87", "0.668"),
        ("", "8", "101.6", "9.84", "11.7 %", "0.478 [0.43, 0.52]", "0.44x [0.40, 0.49]", "0.49x",
         "1.92", "none"),
    ]  # fmt: skip


def test_a_sweep_has_a_table_per_temperature_and_prompt_set(tmp_path: Path) -> None:
    titles = [entry.title for entry in tables_of(made.sweep_run(tmp_path))]
    assert titles[:4] == [
        "Temperature 0, easy prompts",
        "Temperature 0, hard prompts",
        "Temperature 1, easy prompts",
        "Temperature 1, hard prompts",
    ]


def test_the_baseline_is_the_best_row_where_every_k_is_slower(tmp_path: Path) -> None:
    rows = [
        replace(row, speedup=0.9) if row.source == "measured" and row.k else row
        for row in made.sweep_rows()
    ]
    shown = table(made.sweep_run(tmp_path, results=rows), "Temperature 0, easy prompts")
    assert [row.cells[1] for row in shown.rows if row.best] == ["0"]


def test_break_even_is_a_dash_and_not_none_where_nothing_was_predicted(tmp_path: Path) -> None:
    rows = [row for row in made.sweep_rows() if row.source == "measured"]
    shown = table(made.sweep_run(tmp_path, results=rows), "Temperature 0, easy prompts")
    assert set(shown.column("break-even alpha")) == {"-"}
    assert set(shown.column("predicted speedup")) == {"-"}


def test_several_drafts_get_tables_of_their_own_with_the_shared_baseline(tmp_path: Path) -> None:
    rows = [replace(row, draft=None if row.k == 0 else row.draft) for row in made.sweep_rows()]
    rows += [replace(row, draft="tiny_small") for row in made.sweep_rows() if row.k]
    run = made.sweep_run(tmp_path, results=rows)
    assert table(run, "tiny_small, temperature 1, easy").column("K") == ("0", "1", "2", "4", "8")
    assert table(run, "tiny_good, temperature 1, easy").column("K") == ("0", "1", "2", "4", "8")


def test_the_profile_table_shows_each_model_alone(tmp_path: Path) -> None:
    shown = table(made.profile_run(tmp_path), "How fast")
    assert [row.cells for row in shown.rows] == [
        ("qwen3_4b", "33.4", "29.92", "29.88", "30.40", "31.80", "2,000", "8.30 GiB"),
        ("qwen3_0_6b", "45.3", "22.09", "22.09", "22.40", "25.00", "-", "-"),
    ]
    ideal = table(made.profile_run(tmp_path), "What each K could gain")
    assert ideal.column("ideal speedup") == ("1.15x", "1.21x", "1.26x")
    assert ideal.column("break-even alpha") == ("0.738", "0.814", "0.882")


def test_the_summarys_prompt_rate_comes_before_that_of_a_timed_prefill(tmp_path: Path) -> None:
    run = made.sweep_run(tmp_path)
    headline = {"target_prompt_tokens_per_second": 788.0}
    summary = {**(run.summary or {}), "headline": headline}
    profile = replace(run, summary=summary, manifest={**run.manifest, "door": "profile"})
    assert set(table(profile, "How fast").column("prompt tok/s")) == {"788.0"}


def test_the_verify_table_shows_v_of_every_n(tmp_path: Path) -> None:
    shown = table(made.profile_run(tmp_path), "What verifying costs")
    assert shown.column("n") == ("1", "2", "5")
    assert shown.column("v(n)") == ("1.00", "1.04", "1.12")


def test_break_even_without_a_root_says_that_even_alpha_1_loses(tmp_path: Path) -> None:
    shown = table(made.breakeven_run(tmp_path), "What each K could gain")
    assert shown.column("break-even alpha") == ("0.774", "0.834", "none: even alpha = 1 loses")


def test_both_rules_stand_beside_each_other_under_their_names(tmp_path: Path) -> None:
    shown = table(made.breakeven_run(tmp_path), "Speedup by alpha")
    assert [row.cells for row in shown.rows[:4]] == [
        ("0.6", "geometric", "0", "0.90x", "0.77x", "0.39x"),
        ("0.6", "linear", "0", "0.90x", "0.87x", "0.57x"),
        ("0.9", "geometric", "2", "1.07x", "1.07x", "0.69x"),
        ("0.9", "linear", "2", "1.07x", "1.11x", "0.77x"),
    ]


def test_an_acceptance_measured_elsewhere_has_a_table_of_its_own(tmp_path: Path) -> None:
    asked = ResultRow(None, None, None, None, 2, "theory", "complete", alpha=0.6, speedup=0.98)
    rate = replace(asked, alpha=0.618034, acceptance_rate=0.5, tokens_per_round=2.0, speedup=1.25,
                   ms_per_token=16.0, breakeven_alpha=0.366)  # fmt: skip
    config = {"draft_ms": 6.0, "target_ms": 20.0, "alpha": [0.6]}
    run = made.stored(tmp_path, "breakeven", config=config, results=[asked, rate])
    measured = table(run, "From the acceptance")
    assert [row.cells for row in measured.rows] == [
        ("2", "50.0 %", "0.618", "2.00", "16.00", "1.25x", "0.366")
    ]
    assert table(run, "Speedup by alpha").column("alpha") == ("0.6", "0.6")
    chance = [asked, replace(rate, alpha=0.6)]  # the measured alpha happens to be one asked for
    run = made.stored(tmp_path, "breakeven", config=config, results=chance)
    assert table(run, "From the acceptance").column("speedup") == ("1.25x",)
    assert table(run, "Speedup by alpha").column("K=2")[0] == "0.98x"


def test_the_ideal_table_reads_the_summarys_list_where_alpha_1_was_not_asked(
    tmp_path: Path,
) -> None:
    by_k = [{"k": 1, "v": 1.0, "ideal_speedup": 1.151, "ideal_ms_per_token": 26.005,
             "breakeven_alpha": 0.7383}]  # fmt: skip
    run = made.stored(tmp_path, "breakeven", summary=Summary(verdict=None), extra={"by_k": by_k})
    assert table(run, "What each K").rows[0].cells == ("1", "26.00", "1.15x", "0.738")


def test_many_failures_are_cut_short_and_counted(tmp_path: Path) -> None:
    failures = tuple(Failure(f"easy/p{index} k=8", "out of memory") for index in range(20))
    run = made.sweep_run(tmp_path, summary=made.sweep_summary(failures=failures))
    assert len(wording.failures(run)) == 9
    assert wording.failures(run)[-1] == "and 12 more, all listed in summary.json"


def test_the_snapshot_shows_where_a_prompt_differs(tmp_path: Path) -> None:
    shown = table(made.snapshot_run(tmp_path), "Greedy")
    assert shown.rows[0].cells == ("PASS", "4", "easy", "capital", "39.2 %", "-", "-", "-")
    assert shown.rows[1].cells[4:] == ("39.6 %", "17", "0.0021", "0.0013")
    sampled = table(made.snapshot_run(tmp_path), "Sampled")
    assert sampled.rows[0].cells == ("PASS", "4", "1", "2", "5,000", "31", "27.43", "0.601")


# The words


def test_a_verdict_says_what_to_do_first() -> None:
    gain = {"speedup": 1.42, "speedup_lo": 1.36, "speedup_hi": 1.48}
    where = {"prompt_set": "all", "temperature": 1.0}
    choice = {"decision": "speculate", "draft": "tiny_good", "k": 3, **where, **gain}
    assert wording.verdict(choice) == (
        "Serve tiny_good at K=3: 1.42x [1.36, 1.48] on held-out prompts"
        " (whole workload, temperature 1)."
    )
    refusal = {**choice, "decision": "does_not_pay", "reason": "needs more.", "prompt_set": "hard"}
    assert wording.verdict(refusal) == (
        "Do not speculate: needs more (hard prompts, temperature 1)."
    )
    unsure = {**choice, "decision": "undecided", "reason": "needs about 40 prompts"}
    assert wording.verdict(unsure).startswith("Undecided: needs about 40 prompts (")
    few = {**choice, "speedup_lo": None, "speedup_hi": None}
    assert "1.42x, no interval on" in wording.verdict(few)


def test_the_console_gives_the_verdict_first_and_last(tmp_path: Path) -> None:
    lines = [line for line in printed(made.sweep_run(tmp_path), 160).splitlines() if line.strip()]
    verdict = "Serve tiny_good at K=2: 1.35x [1.27, 1.42] on held-out prompts (whole workload"
    refusal = "Do not speculate: needs alpha >= 0.344 at K=1; measured 0.331"
    assert lines[1].startswith(verdict)
    assert lines[2].startswith(refusal)
    assert lines[-2].startswith(verdict)
    assert lines[-1].startswith(refusal)


def test_the_report_explains_why_acceptance_rate_is_not_alpha(tmp_path: Path) -> None:
    said = content_of(made.sweep_run(tmp_path)).acceptance or ""
    assert "never with acceptance_rate" in said
    assert "K=8 on easy prompts at temperature 0, an acceptance_rate of 51.9 % goes" in said
    assert content_of(made.profile_run(tmp_path)).acceptance is None


def test_a_snapshot_is_as_good_as_its_worst_prompt() -> None:
    assert wording.snapshot(["PASS", "TIE", "FAIL"]).startswith("FAIL: ")
    assert wording.snapshot(["PASS", "TIE"]).startswith("TIE: ")
    assert wording.snapshot(["PASS"]).startswith("PASS: ")


def test_numbers_that_do_not_apply_are_a_dash_and_never_zero() -> None:
    names = ("count", "milliseconds", "rate", "percent", "alpha", "speedup", "memory", "text")
    writers = [getattr(formatting, name) for name in names]
    assert {write(None) for write in writers} == {"-"}
    assert "-" not in {write(0.0) for write in writers}


# The console's layout


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_console(any_run: StoredRun, width: int) -> None:
    pasted = {line for entry in content_of(any_run).snippets for line in entry.code.splitlines()}
    lines = [line for line in printed(any_run, width).splitlines() if line not in pasted]
    assert max(map(len, lines)) <= width


def test_a_narrow_console_still_shows_every_column_whole(any_run: StoredRun) -> None:
    narrow = unwrapped(printed(any_run, 80))
    for entry in tables_of(any_run):
        rigid = [index for index, column in enumerate(entry.columns) if not column.flexible]
        assert all(row.cells[index] in narrow for row in entry.rows for index in rigid)


def test_a_folded_table_repeats_what_names_its_rows(tmp_path: Path) -> None:
    shown = table(made.sweep_run(tmp_path), "Temperature 0, easy prompts")
    parts = fold(shown, 80)
    assert len(parts) == 2
    assert all(part.column("K") == shown.column("K") for part in parts)
    assert all(
        [row.best for row in part.rows] == [row.best for row in shown.rows] for part in parts
    )
    assert fold(shown, 200) == (shown,)


def test_the_best_row_is_marked_in_words_without_any_colour(tmp_path: Path) -> None:
    text = printed(made.sweep_run(tmp_path), 160)
    assert "\x1b" not in text
    assert re.search(r"^best +4 +401\.6 ", text, re.MULTILINE)


# report.md


def test_the_report_is_in_the_order_a_person_decides_in(tmp_path: Path) -> None:
    text = written(made.partial_sweep_run(tmp_path))
    landmarks = ["FAILED RUN", "Serve tiny_good", "Before acting", "What did not complete", "![",
                 "## What to serve", "## Temperature 0, easy", "## acceptance_rate is not alpha",
                 "## More plots", "## How it was measured",
                 "harness/reporting/metrics.md"]  # fmt: skip
    places = [text.index(landmark) for landmark in landmarks]
    assert places == sorted(places)


def test_the_markdown_table_has_the_numbers_of_the_stored_run(tmp_path: Path) -> None:
    text = written(made.sweep_run(tmp_path))
    rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in text.splitlines()
            if line.startswith("|")]  # fmt: skip
    assert ["best", "4", "401.6", "2.49", "72.7 %", "0.889 [0.86, 0.92]", "1.74x [1.61, 1.85]",
            "1.82x", "3.81", "0.668"] in rows  # fmt: skip


def test_markdown_tables_have_as_many_cells_in_every_line(any_run: StoredRun) -> None:
    for entry in tables_of(any_run):
        lines = markdown.table(entry).splitlines()
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(entry.columns) + 1}


def test_an_error_with_markdown_in_it_is_shown_as_it_is(tmp_path: Path) -> None:
    rows = [replace(row, status="failed", error="a|b <c> *d*") for row in made.sweep_rows()[:2]]
    assert r"a\|b \<c> \*d\*" in written(made.sweep_run(tmp_path, results=rows))


def test_the_report_says_how_it_was_measured(tmp_path: Path) -> None:
    measured = dict(content_of(made.sweep_run(tmp_path)).measured)
    assert measured["command line"] == "python -m harness.sweep k=[1,2,4,8]"
    assert measured["device"] == "AMD EPYC 7R13"
    assert measured["threads"] == "1"
    assert measured["seed"] == "0"
    assert measured["prompts, sha256"] == "9f2c41d0"
    assert (measured["target dtype"], measured["draft dtype"]) == ("float32", "bfloat16")
    assert measured["draft revision"] == "c1a55e7"
    assert "target revision" not in measured
    assert measured["torch"] == "2.13.0+cpu"
    assert measured["uncommitted changes"] == "no"


def test_the_definitions_are_a_link_only_where_the_file_can_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made.sweep_run(tmp_path / "results")
    assert "](" not in markdown._definitions(run.folder)
    monkeypatch.setattr(markdown, "METRICS", tmp_path / "harness" / "reporting" / "metrics.md")
    name = "harness/reporting/metrics.md"
    assert markdown._definitions(run.folder) == f"[{name}](../../{name})"


# Runs that are not whole


def test_a_failed_cell_is_marked_in_the_status_the_table_and_the_failures(tmp_path: Path) -> None:
    run = made.partial_sweep_run(tmp_path)
    text = printed(run, 160)
    assert "FAILED RUN: what follows is what was stored. Cells: 1 failed, 1 partial of 20." in text
    assert "Did not complete: hard, temperature 1, K=8: out of memory" in text
    assert "K=8 is failed: 8 of 8 generations failed, first: out of memory" in text
    assert table(run, "Temperature 1, hard").rows[4].cells[:7] == ("", "8", *"-----")


@pytest.mark.parametrize(
    ("status", "marked"),
    [("running", "UNFINISHED RUN"), ("failed", "FAILED RUN"), (None, "UNKNOWN STATUS")],
)
@pytest.mark.parametrize("door", ["sweep", "profile", "breakeven", "snapshot", "audition"])
def test_a_run_with_nothing_but_its_manifest_is_rendered_and_marked(
    tmp_path: Path, door: str, status: str | None, marked: str
) -> None:
    run = made.stored(tmp_path, door)
    run = replace(run, manifest={**run.manifest, "status": status})
    assert printed(run).splitlines()[1].startswith(marked)
    assert f"> **{marked}" in written(run)
    assert plots(run) == {}
    assert "## Plots" not in (run.folder / "report.md").read_text("utf-8")


def test_a_whole_run_carries_no_mark(tmp_path: Path) -> None:
    assert wording.status(made.sweep_run(tmp_path)) is None


def test_a_sweep_that_stopped_early_says_that_there_is_no_verdict(tmp_path: Path) -> None:
    run = made.sweep_run(tmp_path, summary=None, status="running")
    assert printed(run).count("No verdict: the run stopped before") == 2
    assert "**No verdict: the run stopped before" in written(run)


# The plots


def test_a_sweep_draws_and_links_every_plot(tmp_path: Path) -> None:
    run = made.sweep_run(tmp_path)
    text = written(run)
    assert set(plots(run)) == SWEEP_PLOTS
    assert set(re.findall(r"\(plots/(.+?)\)", text)) == SWEEP_PLOTS


def test_the_plots_name_their_series_and_lines(tmp_path: Path) -> None:
    run = made.sweep_run(tmp_path)
    reporting.render(run)
    drawn = {name: words(svg) for name, svg in plots(run).items()}
    assert "no speculation" in drawn["speedup_vs_k.svg"]
    for name in ("speedup_vs_k.svg", "breakeven_vs_measured.svg", "acceptance_by_position.svg"):
        assert all(label in drawn[name] for label in ("easy", "hard", "temperature 1"))
    assert "none" in drawn["breakeven_vs_measured.svg"]
    assert "temperature 0, K=4" in drawn["acceptance_by_position.svg"]
    assert all(f"K={k}" in drawn["acceptance_vs_temperature.svg"] for k in (1, 2, 4, 8))
    assert "draft step 1.24 ms" in drawn["verify_cost.svg"]
    assert "1.41" in drawn["verify_cost.svg"]


def test_labels_that_would_overlap_are_pushed_apart_around_their_middle() -> None:
    assert style.spread([0.0, 2.0, 2.0, 5.0], 1.0) == [0.0, 1.5, 2.5, 5.0]
    assert style.spread([1.0, 1.0], 1.0) == [0.5, 1.5]


def test_two_renderings_of_one_run_are_the_same_bytes(tmp_path: Path) -> None:
    run = made.sweep_run(tmp_path)
    first = (written(run), plots(run))
    assert (written(load(run.folder)), plots(run)) == first


@pytest.mark.parametrize(
    ("missing", "left_out"),
    [
        ({"latency": ()}, {"verify_cost.svg"}),
        ({"trials": ()}, {"acceptance_by_position.svg"}),
        ({"results": ()}, {"speedup_vs_k.svg", "breakeven_vs_measured.svg",
                           "acceptance_vs_temperature.svg"}),
    ],
)  # fmt: skip
def test_a_plot_without_its_data_is_neither_drawn_nor_linked(
    tmp_path: Path, missing: dict[str, Sequence[object]], left_out: set[str]
) -> None:
    run = made.sweep_run(tmp_path, **missing)
    text = written(run)
    assert set(plots(run)) == SWEEP_PLOTS - left_out
    assert set(re.findall(r"\(plots/(.+?)\)", text)) == SWEEP_PLOTS - left_out


def test_rendering_again_removes_a_plot_whose_data_is_gone(tmp_path: Path) -> None:
    run = made.sweep_run(tmp_path)
    reporting.render(run)
    reporting.render(replace(run, trials=()))
    assert set(plots(run)) == SWEEP_PLOTS - {"acceptance_by_position.svg"}


def test_many_temperatures_and_one_k_still_draw(tmp_path: Path) -> None:
    rows = [
        replace(row, temperature=temperature)
        for temperature in (0.0, 0.3, 0.7, 1.0, 1.5)
        for row in made.sweep_rows()
        if row.temperature == 1.0 and row.k in (0, 1)
    ]
    run = made.sweep_run(tmp_path, results=rows, summary=Summary(verdict=None))
    reporting.render(run)
    assert "temperature 1.5" in words(plots(run)["speedup_vs_k.svg"])


def test_nothing_is_left_beside_the_written_files(any_run: StoredRun) -> None:
    reporting.render(any_run)
    assert not list(any_run.folder.rglob("*.new"))


def test_reporting_needs_no_torch_and_showing_needs_no_matplotlib() -> None:
    code = (
        "import sys, harness.reporting; print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    code = "import sys, harness.reporting.plots; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
