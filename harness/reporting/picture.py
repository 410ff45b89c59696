"""The first picture of a report: a bar for each K, or for each draft, and what a gain is worth."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness import formatting as fmt
from harness.records import first
from harness.reporting import grid
from harness.reporting.tables.leaderboard import boards
from harness.summary import Answer, Summary

MOST_BARS, MOST_BAR = 4, 40  # characters of the longest
# A measured bar, a predicted one, and plain decoding; where a stream has no such characters
FANCY, PLAIN = "█░│", "#=|"


@dataclass(frozen=True)
class Bar:
    """One speedup over plain decoding."""

    label: str
    speedup: float
    measured: bool  # else it is predicted
    best: bool


def bars(summary: Summary) -> tuple[Bar, ...]:
    """The speedups that the headline was chosen from; empty where nothing was timed.

    Of an audition each draft at its fastest K, else the draft at every K.
    """
    shown = grid.marked(summary)
    answer = shown and (
        shown.answer if shown.answer.timed else grid.own_answer(summary, shown.row.temperature)
    )
    if answer is None:
        return ()
    drafts = summary.run.command == "audition"
    made = tuple(_of_drafts(summary, answer) if drafts else _of_ks(answer))
    fastest = sorted(made, key=lambda bar: (not bar.best, -bar.speedup))[:MOST_BARS]
    return tuple(fastest) if drafts else tuple(bar for bar in made if bar in fastest)


def _of_ks(answer: Answer) -> Iterator[Bar]:
    for each in answer.by_k:
        named = each.k == answer.named[1]
        # One draft and K has one speedup in a report: the answer's, less the optimism of choosing
        speedup = answer.speedup if named and answer.speedup is not None else each.speedup
        yield Bar(f"K={each.k}", speedup, each.source == "measured", named)


def _of_drafts(summary: Summary, answer: Answer) -> Iterator[Bar]:
    at = (board for board in boards(summary) if board.own)
    board = next((each for each in at if each.temperature == answer.temperature), None)
    for row in board.rows if board else ():
        if row.draft is None or board is None:  # plain decoding is the line at 1
            continue
        label, mark = f"{row.draft}, K={row.k}", board.marks.get(row.draft)
        if row.p_min:
            label = f"{label}, p_min={row.p_min:g}"
        name = row.draft, row.k, row.p_min
        named, same = row.draft == answer.named[0], first(answer.candidates, name=name)
        measured = same is not None and same.source == "measured"
        if same and (measured or answer.source == "measured"):
            row = replace(row, speedup=same.speedup)  # at what was measured of the one
        speedup = answer.speedup if named and answer.speedup is not None else row.speedup
        yield Bar(f"{label} ({mark})" if mark else label, speedup, measured, named)


def scale(bars: Sequence[Bar]) -> float:
    """The speedup at the end of the picture."""
    return max(1.25, *(bar.speedup for bar in bars))


def drawn(bars: Sequence[Bar], width: int, symbols: str = FANCY) -> list[str]:
    """A line for each bar, filled where it was measured, with a mark at 1.0; then what they mean.

    Args:
        bars: one or more.
        width: characters of a line at most.
        symbols: of a measured bar, of a predicted one, and of plain decoding.
    """
    filled, hollow, line = symbols
    label = max(len(bar.label) for bar in bars)
    length = max(10, min(MOST_BAR, width - label - len("  00.00x")))
    unit = length / scale(bars)
    lines: list[str] = []
    for bar in bars:
        cells = [*((filled if bar.measured else hollow) * round(unit * bar.speedup)).ljust(length)]
        cells[round(unit)] = line
        lines.append(f"{bar.label:{label}} {''.join(cells)} {fmt.speedup(bar.speedup)}")
    kinds = [f"{filled} measured"] if any(bar.measured for bar in bars) else []
    kinds += [f"{hollow} predicted"] if not all(bar.measured for bar in bars) else []
    return [*lines, f"{', '.join(kinds)}, {line} plain decoding"]


def worth(summary: Summary) -> str:
    """The time of a token before and after, and what a workload saves; "" without a gain.

    Nor where a plain token took very unlike times, so that neither is known.

    "ms per token: 3.39 before, 1.87 after; 46 s less per thousand requests."
    """
    shown = grid.marked(summary)
    answer = shown and shown.answer
    if answer is None or not answer.speculates or not answer.speedup or answer.plain_s is None:
        return ""
    if first(summary.caveats, code="plain_tokens_unlike"):
        return ""
    after_s, saved_s = answer.plain_s / answer.speedup, answer.saved_s_per_request
    parts = [f"ms per token: {fmt.in_ms(answer.plain_s)} before, {fmt.in_ms(after_s)} after"]
    if saved_s is not None:
        parts.append(f"{fmt.duration(1e3 * saved_s)} less per thousand requests")
    plain_usd, usd = summary.plain_usd_per_million_tokens, summary.usd_per_million_tokens
    if plain_usd is not None and usd is not None:
        parts.append(f"10^6 tokens: {fmt.dollars(plain_usd)} before, {fmt.dollars(usd)} after")
    return f"{'; '.join(parts)}."


def sets_apart(summary: Summary) -> tuple[str, ...]:
    """The answers of prompt sets that are not the workload's, where some set is decided."""
    shown = grid.marked(summary)
    sets = () if shown is None else shown.row.sets
    if shown is None or len(sets) < 2 or all(each.decision == "undecided" for each in sets):
        return ()
    return tuple(
        f"On {answer.prompt_set} prompts alone: {grid.words(answer)}."
        for answer in sets
        if answer.decision != shown.answer.decision
    )


def other_temperatures(summary: Summary) -> tuple[str, ...]:
    """The answer of the headline's engine at each further temperature, in a few words."""
    first, *others = (*summary.per_temperature, None)[:-1] or (None,)
    return tuple(
        f"Temperature {fmt.temperature(answer.temperature)}:"
        f" {'the same K' if _same(answer, first) else grid.words(answer)}"
        f"{'' if known is None else f', {fmt.speedup(known)}'}."
        for answer in others
        if answer is not None
        for known in [None if answer.decision == "undecided" else answer.speedup]
    )


def _same(one: Answer, other: Answer | None) -> bool:
    return other is not None and one.speculates and other.speculates and one.named == other.named
