"""losses.html: where the drafts of a run lose rounds, and what a better one is worth.

A page next to report.html, in its look. The map is a table that analysis wrote, in an attribute of
the page; `page.js` reads it to move along alpha and draft time. Without script the tables say it.
"""

import json
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rich.console import Console

from harness.analysis.draft_pairs import Compared, JointRow
from harness.analysis.head_training import AccuracyRow, Checkpoint
from harness.analysis.losses import (
    ALPHAS,
    AXES,
    SCALES,
    Axis,
    CheaperDraft,
    DraftLosses,
    Losses,
    LossRow,
    Span,
    SpeedupMap,
    Worth,
)
from harness.records import Verbose, grouped, where
from harness.reporting import formatting as fmt
from harness.reporting.console import print_brief, print_table
from harness.reporting.html import LOSSES_FILE, glossary, page
from harness.reporting.sentences import losses as said
from harness.reporting.tables.specification import Column, Table, table

TITLES: dict[Axis, str] = {
    "offset": "Draft token within the round",
    "token": "Class of token",
    "category": "Category of prompt",
    "answer": "Position in the answer, tokens",
    "context": "Tokens before it, the prompt's included",
    "entropy": "Entropy of the target, nats",
}
MOST_CLASSES = 6  # rows of the classes that the console prints


def _columns(title: str) -> tuple[Column[LossRow], ...]:
    return (
        Column(title, lambda row: row.name, key=True),
        Column("share of\ntokens", lambda row: row.token_share, fmt.percent),
        Column("alpha", lambda row: row.alpha, fmt.alpha),
        Column("share of\nlost rounds", lambda row: row.lost_share, fmt.percent),
        Column("speedup if\nas the rest", lambda r: r.gain and r.gain - 1.0, fmt.signed_percent),
    )


SPANS: tuple[Column[Span], ...] = (
    Column("prompt, position", lambda s: f"{s.prompt_set}/{s.prompt}, {s.start}", key=True),
    Column("text; the token that costs most in [ ]", said.marked, flexible=True),
    Column("target's\ntoken", lambda span: said.visible(span.pieces[span.worst])),
    Column("draft's\ntoken", said.drafted),
    Column("share of\nlost rounds", lambda span: span.lost_share, fmt.percent),
)
WORTH: tuple[Column[Worth], ...] = (
    Column("points of\nacceptance", lambda row: f"+{100 * row.points:.0f}", key=True),
    Column("where", lambda r: "everywhere" if r.offset is None else f"draft token {r.offset}"),
    Column("speedup at\ntoday's K", lambda row: row.speedup, fmt.speedup),
    Column("best K\nthen", lambda row: row.k, fmt.count),
    Column("speedup at\nbest K", lambda row: row.best_speedup, fmt.speedup),
    Column("USD per\n10^6 tokens", lambda row: row.usd_per_million_tokens, fmt.dollars),
)
CHEAPER: tuple[Column[CheaperDraft], ...] = (
    Column("change", lambda row: said.CHANGES[row.change], key=True),
    Column("a draft step\ntakes", lambda row: row.step_share, fmt.percent),
    Column("speedup at\ntoday's K", lambda row: row.speedup, fmt.speedup),
    Column("best K\nthen", lambda row: row.k, fmt.count),
    Column("speedup at\nbest K", lambda row: row.best_speedup, fmt.speedup),
)
CHECKPOINTS: tuple[Column[Checkpoint], ...] = (
    Column("training\nsteps", lambda row: row.step, fmt.count, key=True),
    Column("draft", lambda row: row.draft),
    Column("K", lambda row: row.k, fmt.count),
    Column("alpha", lambda row: row.alpha, fmt.alpha),
    Column("speedup\n[lo, hi]", fmt.bounded, fmt.speedup),
    Column(
        "last one's speedup\n/ this one's [lo, hi]",
        lambda row: fmt.bounded(row, "left"),
        fmt.with_bounds,
    ),
)
COMPARED: tuple[Column[Compared], ...] = (
    Column("drafts", lambda row: f"{row.first}, {row.second}", key=True),
    Column("K", lambda row: f"{row.k}, {row.second_k}"),
    Column(
        "second's speedup\n/ first's [lo, hi]", lambda r: fmt.bounded(r, "ratio"), fmt.with_bounds
    ),
    Column("only first\naccepts", lambda row: row.rows[0].first, fmt.percent),
    Column("only second\naccepts", lambda row: row.rows[0].second, fmt.percent),
    Column(
        "difference, points\n[lo, hi]",
        lambda row: (
            100 * row.alpha_difference,
            row.alpha_difference_lo and 100 * row.alpha_difference_lo,
            row.alpha_difference_hi and 100 * row.alpha_difference_hi,
        ),
        fmt.with_bounds,
    ),
    Column("best per\nround", lambda row: row.router, fmt.speedup),
    Column("rounds of\nsecond", lambda row: row.rounds_of_second, fmt.percent),
)
JOINT: tuple[Column[JointRow], ...] = (
    Column("class", lambda row: row.name, key=True),
    Column("share of\ntokens", lambda row: row.token_share, fmt.percent),
    Column("both", lambda row: row.both, fmt.percent),
    Column("only\nfirst", lambda row: row.first, fmt.percent),
    Column("only\nsecond", lambda row: row.second, fmt.percent),
    Column("neither", lambda row: row.neither, fmt.percent),
)
ACCURACY: tuple[Column[AccuracyRow], ...] = (
    Column("draft token", lambda row: row.offset, fmt.count, key=True),
    Column("logged", lambda row: row.logged, fmt.percent),
    Column("every\nposition", lambda row: row.everywhere, fmt.percent),
    Column("given those\nbefore", lambda row: row.given, fmt.percent),
    Column("in rounds", lambda row: row.in_rounds, fmt.percent),
)


@dataclass(frozen=True)
class _Section:
    """What the page shows of one draft at one temperature."""

    id: str
    title: str
    sentences: tuple[str, ...]
    axes: tuple[Table, ...]
    tables: tuple[Table, ...]
    map: str | None  # JSON for the script
    alpha: float | None


def html_of(losses: Losses) -> str:
    """The text of losses.html."""
    sections = [_section(draft, n) for n, draft in enumerate(losses.drafts)]
    first, *answer = _answer(losses)
    further = _further(losses)
    return page(
        "losses.html.j2",
        scripts=("page.js", "chart.js", "map.js"),
        title="Where the drafts lose",
        skip_to="the answer",
        facts=said.facts(losses),
        answer=first,
        more=answer,
        notes=tuple(said.notes(losses)),
        sections=sections,
        further=further,
        scales=(SCALES[0], SCALES[-1]),
        definitions=glossary([*(t for s in sections for t in (*s.axes, *s.tables)), *further]),
    )


def show(losses: Losses, *, verbose: Verbose = False) -> None:
    """Print the answer, with the classes of the served draft; with `verbose` all tables."""
    out = Console(highlight=False)
    served = losses.drafts[0]
    if verbose:
        sections = [_section(draft, n) for n, draft in enumerate(losses.drafts)]
        for each in [*(t for s in sections for t in (*s.axes, *s.tables)), *_further(losses)]:
            print_table(each, out)
    everywhere = [row for row in served.worth if row.offset is None]
    worst = sorted(where(served.rows, axis="token"), key=lambda row: -row.lost_share)[:MOST_CLASSES]
    print_brief(
        [
            " ".join(_answer(losses)),
            table(f"{said.named(served)}: {TITLES['token'].lower()}", _columns("class"), worst),
            table("What a better draft is worth", WORTH, everywhere),
            f"page: {losses.folder}/{LOSSES_FILE}",
        ],
        out,
    )


def _answer(losses: Losses) -> list[str]:
    """Of the served draft, of training steps and of a trainer's accuracies."""
    trained = said.of_trainings(losses.trainings), said.of_accuracy(losses.accuracy)
    return [*said.of_draft(losses.drafts[0]), *chain(*trained)]


def _section(draft: DraftLosses, number: int) -> _Section:
    axes = [
        table(TITLES[axis], _columns(said.PARTS[axis]), rows, notes=[said.AXIS_NOTES.get(axis, "")])
        for axis in AXES
        if (rows := where(draft.rows, axis=axis))
    ]
    cheaper_notes = said.cheaper_notes(draft)
    tables = [
        table("The most expensive tokens in a row", SPANS, draft.spans, notes=(said.SPANS_NOTE,)),
        table("What a better draft is worth", WORTH, draft.worth, notes=(said.WORTH_NOTE,)),
        table("What a cheaper draft is worth", CHEAPER, draft.cheaper, notes=cheaper_notes),
        *([_map_table(draft.map)] if draft.map else []),
    ]
    return _Section(
        f"draft-{number}",
        said.named(draft),
        tuple(said.of_draft(draft)) if number else (),
        tuple(axes),
        tuple(each for each in tables if each.rows),
        draft.map and _json(draft.map),
        draft.alpha,
    )


def _map_table(known: SpeedupMap) -> Table:
    """The best K, and its speedup, by alpha and by how long a draft step takes."""
    scales = [0.5, 1.0, 2.0] if known.draft_cost else [1.0]
    best = {scale: (known.best_k(scale), known.speedups(scale).max(axis=0)) for scale in scales}

    def cell(column: int, scale: float) -> str:
        k, speedup = int(best[scale][0][column]), float(best[scale][1][column])
        return f"K={k}, {fmt.speedup(speedup)}" if k else "no draft"

    columns: tuple[Column[int], ...] = (
        Column("alpha", lambda column: known.alphas[column], fmt.alpha, key=True),
        *(
            Column(
                "today's draft time" if scale == 1.0 else f"{scale:g} times\nthe draft time",
                lambda column, scale=scale: cell(column, scale),
            )
            for scale in scales
        ),
    )
    rows = [n for n, alpha in enumerate(known.alphas) if alpha not in ALPHAS[1::2]]
    title = "The best K by alpha and draft time"
    return table(title, columns, rows, best=lambda column: known.alphas[column] not in ALPHAS)


def _json(known: SpeedupMap) -> str:
    """What the script needs of a map, with three digits after the point."""
    values: dict[str, Any] = {
        "ks": known.ks,
        "alphas": known.alphas,
        "tokens": [[round(value, 3) for value in row] for row in known.tokens_per_round],
        "costs": [[round(value, 4) for value in row] for row in known.round_cost],
        "draft": known.draft_cost and [round(value, 4) for value in known.draft_cost],
    }
    return json.dumps(values, separators=(",", ":"))


def _further(losses: Losses) -> list[Table]:
    """Tables of several drafts, or of a trainer's log."""
    gap, made = losses.accuracy, list[Table]()
    if gap:
        title = f"Accuracies of {gap.draft}"
        made.append(table(title, ACCURACY, gap.rows, notes=(said.ACCURACY_NOTE,)))
    for each in losses.trainings:
        made.append(
            table(
                f"Training steps of {each.head}, temperature {each.temperature:g}",
                CHECKPOINTS,
                each.checkpoints,
                best=lambda row, each=each: row.step == each.enough,
                notes=(said.TRAINING_NOTE,),
            )
        )
    for temperature, pairs in grouped(losses.compared, lambda each: each.temperature).items():
        title = f"Drafts on the same tokens, temperature {temperature:g}"
        made.append(table(title, COMPARED, pairs, notes=(said.COMPARED_NOTE,)))
        closest = min(pairs, key=lambda each: abs(each.ratio - 1.0))
        title = f"Who accepts where: {closest.first} (first), {closest.second} (second)"
        made.append(table(title, JOINT, closest.rows))
    return made
