"""What a page of losses says in words."""

from collections.abc import Iterator, Sequence

from harness.analysis.head_training import AccuracyGap, Cause, Training
from harness.analysis.losses import Axis, Cheaper, DraftLosses, Losses, LossRow
from harness.reporting import formatting as fmt
from harness.serving.engines import spec_of

NOT_STORED = "not stored"
PARTS: dict[Axis, str] = {
    "offset": "draft token",
    "token": "class",
    "category": "category",
    "answer": "position",
    "context": "context",
}
CHANGES: dict[Cheaper, str] = {
    "faster": "20 % faster",
    "half_vocabulary": "output matrix of half the vocabulary",
    "layer_less": "one layer less",
}
WORTH_NOTE = (
    "Replayed with chances a raised to a + u (1 - a), u = points / (1 - alpha), everywhere or at"
    " one draft token of every round. The price is of the best choice then, no draft included."
)
CHEAPER_NOTE = (
    "At today's acceptance. A draft step is taken to last as long as the bytes that it reads are"
    " part of today's; what a smaller vocabulary or a layer less costs in acceptance is not known."
)
TRAINING_NOTE = (
    "Each at its best K. All are priced by the last one's round times, as they are of one"
    " architecture. Intervals: 95 %, over prompts; the ratio is taken prompt by prompt."
)
COMPARED_NOTE = (
    "At the first draft token from every position. Difference: share of tokens that only the second"
    " accepts less that only the first does. Intervals: 95 %, over prompts. Best per round: were"
    " the better of the two known before each round; a bound, which no rule reaches."
)
AXIS_NOTES: dict[Axis, str] = {
    "offset": "Share of tokens: of the draft tokens that were judged.",
    "token": (
        "One class each, the first that fits: special, new line (first token after one), copied"
        " (ends three tokens that stand in the prompt), code, digits, markup, punctuation, name,"
        " rare (the least frequent ids, 10 % of the run's tokens), word."
    ),
}


def axis_notes(axis: Axis) -> tuple[str, ...]:
    """What is said under the table of an axis."""
    return (AXIS_NOTES[axis],) if axis in AXIS_NOTES else ()


def named(draft: DraftLosses) -> str:
    """As "tiny_good at K=4, temperature 0"."""
    return f"{draft.draft} at K={draft.k}, temperature {draft.temperature:g}"


def facts(losses: Losses) -> str:
    """What the page rests on."""
    engine = "the harness's loop" if losses.engine is None else spec_of(losses.engine).title
    return (
        f"{losses.folder}: {losses.prompts} prompts, rounds of {engine}, acceptance rule"
        f" {losses.rule}"
    )


def notes(losses: Losses) -> tuple[str, ...]:
    """How to read the page, and what is not known."""
    lines = [
        "A lost round: a round of K that ends at draft token j falls K + 1 - j tokens short of"
        " K + 1, which costs (K + 1 - j) / (K + 1) of a round. Shares of lost rounds of each table"
        " add up to 100 %.",
        "Speedup if as the rest: replayed with the chances of these tokens raised until they are"
        " accepted as the others are; a dash where they are accepted as well already.",
    ]
    if not losses.texts_known:
        lines.append(
            "The prompts of this run are not there any more, so that no token is known to be copied"
            " from one."
        )
    return tuple(lines)


def answer(losses: Losses) -> tuple[str, ...]:
    """Where the served draft loses most, what that costs, and what a better draft brings."""
    served = losses.drafts[0]
    return (*of_draft(served),)


def of_draft(draft: DraftLosses) -> tuple[str, ...]:
    """The sentences of one draft."""
    return tuple(_of_draft(draft))


def _of_draft(draft: DraftLosses) -> Iterator[str]:
    text = f"{named(draft)}: {fmt.speedup(draft.speedup)} on these prompts, alpha"
    yield (
        f"{text} {fmt.alpha(draft.alpha)}; {fmt.percent(draft.lost_rounds)} of its rounds are lost"
        f" to tokens that were not accepted, {fmt.percent(draft.cut_rounds)} to ends of texts."
    )
    classes = [row for row in draft.rows if row.axis == "token"]
    worst = max(classes, key=lambda row: row.gain or 0.0, default=None)
    if worst is not None and worst.gain is not None:
        yield f"The most expensive class is {_class(worst)}."
    points = {row.points: row for row in draft.worth if row.offset is None}
    if 0.05 in points:
        row = points[0.05]
        gain = fmt.signed_percent(row.best_speedup / draft.speedup - 1.0)
        yield (
            f"Five points of acceptance more are worth {gain} ({fmt.speedup(row.best_speedup)} at"
            f" K={row.k})."
        )
    if draft.ceiling <= 1.0:
        yield (
            f"Were every token accepted, it would reach {fmt.speedup(draft.ceiling)} at most:"
            " acceptance cannot make it pay, only cheaper rounds can."
        )
    else:
        yield (
            f"Were every token accepted, it would reach {fmt.speedup(draft.ceiling)}"
            f" (K={draft.ceiling_k}); beyond that rounds must cost less."
        )


def _class(row: LossRow) -> str:
    share = f"{fmt.percent(row.token_share)} of the tokens"
    assert row.gain is not None
    return (
        f"{row.name}: {share}, {fmt.percent(row.lost_share)} of the lost rounds; accepted as well"
        f" as the rest, it would bring {fmt.signed_percent(row.gain - 1.0)}"
    )


def of_trainings(trainings: Sequence[Training]) -> tuple[str, ...]:
    """From which step on training brings nothing beyond noise."""
    lines: list[str] = []
    for each in trainings:
        last = each.checkpoints[-1]
        where = f"{each.head}, temperature {each.temperature:g}"
        if each.enough is not None:
            lines.append(
                f"{where}: from {each.enough} training steps on no later checkpoint is faster"
                f" beyond noise (the last, {last.step}: {fmt.speedup(last.speedup)}); stop there."
            )
        elif last.left_lo is None:
            lines.append(f"{where}: too few prompts to tell noise from progress.")
        else:
            lines.append(
                f"{where}: speedup still grows at the last checkpoint, {last.step} steps"
                f" ({fmt.speedup(last.speedup)}); train on."
            )
    return tuple(lines)


CAUSES: dict[Cause, str] = {
    "layers": "it reads other layers of the target than in training (one or two higher or lower)",
    "template": "prompts have another chat template than in training",
    "embedding": "its embedding is not the target's: of another checkpoint",
    "norm": "the residual of its layer is taken on the wrong side of its norm",
    "rotary": "the frequencies of its positions have lost precision",
    "inputs": (
        "its first token already falls short, and none of other layers, template, embedding, norm"
        " or frequencies explains it: compare the texts, and the precision of its states"
    ),
    "own_states": (
        "accuracy drops at the second draft token: what the head is fed of its own output is not"
        " what it was trained with"
    ),
    "dependence": (
        "the drafts of a round depend on each other, which a product of accuracies ignores"
    ),
    "starts": (
        "rounds start more often where tokens are hard to draft than training's positions do"
    ),
    "none": "they agree",
}
ACCURACY_NOTE = (
    "Logged: by the trainer, on its texts. Every position: on the run's greedy texts, fed with the"
    " text's tokens. Given those before: from every position, where the drafts before it were"
    " right. In rounds: where rounds start, the drafts before it accepted."
)


def of_accuracy(gap: AccuracyGap | None) -> tuple[str, ...]:
    """What a trainer's accuracies promise, what replay gives, and why they differ."""
    if gap is None:
        return ()
    steps = (
        f"{gap.draft}, K={gap.k}: the accuracies that {gap.framework} logged promise an acceptance"
        f" length of {fmt.decimal(gap.logged_length)} were they independent; replay gives"
        f" {fmt.decimal(gap.replayed_length)}. On the run's texts they are"
        f" {fmt.decimal(gap.everywhere_length)}, with their dependence"
        f" {fmt.decimal(gap.joint_length)}."
    )
    fixed = ""
    if gap.fixed is not None:
        first = gap.rows[0]
        fixed = (
            f"; without that its first token's accuracy is {fmt.percent(gap.fixed)} in place of"
            f" {fmt.percent(first.everywhere)} ({fmt.percent(first.logged)} logged)"
        )
    return steps, f"Why: {CAUSES[gap.cause]}{fixed}."


def visible(piece: str) -> str:
    """A token's text with its spaces and line breaks visible."""
    return piece.replace("\n", "\\n").replace(" ", "\u2423") or "(special)"


def marked(pieces: Sequence[str], worst: int) -> str:
    """A span with its most expensive token in brackets."""
    parts = [piece.replace("\n", "\\n") for piece in pieces]
    parts[worst] = f"[{parts[worst]}]"
    return "".join(parts)
