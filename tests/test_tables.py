"""Tables and plots show what real runs write, and each number under its own name."""

from dataclasses import replace
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest
from runs import FROZEN, analysed

from harness import formatting as fmt
from harness.analysis import analyse
from harness.records import MachineLoad
from harness.reporting import plots
from harness.reporting.pages import tables_of
from harness.reporting.tables import leaderboard
from harness.reporting.tables.specification import Cell, Column, Table, table
from harness.reporting.tables.sweep import cells_of, cells_table
from harness.storage import load
from harness.summary import Summary

RUNS = ("sweep", "sweep_replay", "audition", "profile", "breakeven", "snapshot", "server")


def by_title(made: Summary, start: str) -> Table:
    return next(entry for entry in tables_of(made) if entry.title.startswith(start))


def texts(made: Summary, start: str, column: str) -> list[str]:
    return [cell.text for cell in by_title(made, start).column(column)]


def words(svg: str) -> str:
    return " | ".join("".join(node.itertext()) for node in ElementTree.fromstring(svg).iter()
                      if node.tag.endswith("}text"))  # fmt: skip


# A table's specification


def test_a_cell_carries_its_value_and_its_text() -> None:
    rows = [("a", 1536.0), ("b", None)]
    column: Column[tuple[str, float | None]] = Column("size", lambda r: r[1], lambda v: f"{v:g} B")
    name: Column[tuple[str, float | None]] = Column("name", lambda row: row[0], key=True)
    made = table("Sizes", (name, column), rows, best=lambda row: row[0] == "a")
    assert made.column("size") == (Cell("1536 B", 1536.0), Cell("-"))
    assert made.column("name") == (Cell("best a", "a"), Cell("b", "b"))
    assert [row.best for row in made.rows] == [True, False]
    assert [c.align for c in made.columns] == ["left", "right"]


def test_a_column_without_any_value_is_left_out() -> None:
    empty: Column[int] = Column("nothing", lambda _: None)
    number: Column[int] = Column("n", lambda n: (float(n), None, None), fmt.speedup)
    made = table("Numbers", (number, empty), [1, 2])
    assert made.columns == (number,)
    assert [cell.text for cell in made.column("n")] == ["1.00x", "2.00x"]


# What the tables of a run say


def test_a_sweep_has_one_table_of_cells_by_temperature_and_prompt_set() -> None:
    made = analysed("sweep")
    cells = tables_of(made)[0]
    assert cells.title == "Cells on the harness's loop"
    names = [cells.column(title) for title in ("T", "prompt set", "K")]
    assert [tuple(cell.text for cell in row) for row in zip(*names, strict=True)] == [
        (temperature, prompt_set, k)
        for temperature in "01"
        for prompt_set in ("easy", "hard")
        for k in "0124"
    ]
    assert tables_of(analysed("sweep_replay"))[0].title.endswith("(predicted)")


def test_break_even_is_none_where_even_alpha_1_loses_and_unknown_without_a_prediction() -> None:
    made = analysed("sweep")
    lost = replace(made, results=tuple(replace(r, breakeven_alpha=None) for r in made.results))
    assert texts(lost, "Cells", "break-even alpha")[:4] == ["-", "none", "none", "none"]
    measured = tuple(row for row in lost.results if row.source == "measured")
    unknown = by_title(replace(made, results=measured), "Cells")
    assert not {"break-even alpha", "predicted speedup"} & {c.one_line for c in unknown.columns}


def test_a_cell_that_did_not_complete_is_named_with_its_error() -> None:
    made = analysed("sweep")
    rows = tuple(
        replace(row, status="failed", error="out of memory") if row.k == 2 else row
        for row in made.results
    )
    notes = [note for entry in tables_of(replace(made, results=rows)) for note in entry.notes]
    assert "easy, temperature 0, K=2 is failed: out of memory" in notes


def test_drafts_are_ranked_by_the_rule_of_the_loop_and_of_the_engine_that_was_named() -> None:
    made = analysed("audition")
    own = [
        "on the harness's loop at temperature 0, accepted by any rule",
        "on the harness's loop at temperature 1, accepted as on transformers",
    ]
    mlx = "on the harness's loop at temperature 1, if accepted as on mlx-lm"
    for engine, names in ((None, own), ("transformers", own), ("mlx", [*own, mlx])):
        boards = leaderboard.boards(replace(made, run=replace(made.run, serve_on=engine)))
        assert [board.name for board in boards] == names
    for temperature in (0, 1):
        title = f"Predicted on the harness's loop at temperature {temperature}"
        assert leaderboard.PLAIN in texts(analysed("audition"), title, "draft")


# Plots


@cache
def drawn_of(name: str) -> dict[str, str]:
    """The words of every plot of a stored run, by the plot's name."""
    return {plot.name: words(plot.svg) for plot in plots.drawn(analysed(name))}


def test_the_plots_name_their_series_and_lines() -> None:
    drawn = drawn_of("sweep")
    assert "no speculation" in drawn["speedup_vs_k.svg"]
    assert all(label in drawn["speedup_vs_k.svg"] for label in ("easy", "hard", "temperature 1"))
    board = drawn_of("audition")["leaderboard.svg"]
    assert all(name in board for name in ("tiny_small, K=2", "ngram", leaderboard.PLAIN))


def test_the_points_of_a_plot_are_the_speedups_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Any] = []

    def points(_: Any, __: Any, values: list[Any], **___: Any) -> None:
        drawn.extend(values)

    monkeypatch.setattr("harness.reporting.plots.style.points", points)
    made = analysed("sweep_decided")
    plots.drawn(made)
    assert drawn == [cell.speedup for cell in cells_of(made) if cell.row.k]


def test_a_snapshot_has_no_picture_of_speed_and_no_caution_about_timing() -> None:
    run = load(FROZEN / "snapshot")
    busy = {"other_load": MachineLoad(1.1, 2)}
    made = analyse(replace(run, manifest=run.manifest.updated(**busy)))
    assert "speedup_vs_k.svg" not in {plot.name for plot in plots.drawn(made)}
    assert "busy_machine" not in {caveat.code for caveat in made.caveats}


def test_a_plot_without_its_data_is_not_drawn() -> None:
    assert plots.drawn(replace(analysed("sweep"), results=())) == ()
    assert drawn_of("sweep").keys() == {"speedup_vs_k.svg"}


def test_a_run_that_stored_nothing_has_no_table_and_no_plot() -> None:
    for name in RUNS:
        empty = Summary(run=analysed(name).run)
        assert (tables_of(empty), plots.drawn(empty)) == ((), ())


def test_a_cell_of_a_part_of_the_prompts_has_the_speedup_of_all_of_them() -> None:
    """A sweep in looks measures the K that it chose on some prompts, and others on fewer."""
    made = analysed("sweep_decided")
    cells = [cell for cell in cells_of(made) if cell.row.k]
    answered = [cell for cell in cells if cell.answer is not None]
    assert {cell.row.prompt_set for cell in answered} == {"easy", "hard"}
    for cell in answered:
        assert cell.answer is not None
        assert cell.speedup == fmt.bounded(cell.answer), "one estimate, as the verdict of its set"
    for cell in cells:
        assert cell.predicted is not None
        assert cell.prompts == f"{cell.row.prompts} of 6"
        assert abs(cell.error or 1.0) < 0.15
        if cell.answer is None and cell.row.speedup:  # replay has easier texts, and harder ones
            carried = (cell.speedup or (0.0,))[0] or 0.0
            more = (cell.predicted.tokens_per_round or 0.0) / (cell.row.tokens_per_round or 1.0)
            assert carried / cell.row.speedup == pytest.approx(more)
    shown = cells_table(made)
    assert any(note.startswith("prompts: ") for note in shown.notes)
    assert "prompts" not in [column.one_line for column in cells_table(analysed("sweep")).columns]
