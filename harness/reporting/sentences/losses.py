"""What a page of losses says in words."""

from collections.abc import Iterator, Sequence

from harness.analysis.head_training import WORTH, AccuracyGap, Cause, Training
from harness.analysis.losses import (
    NOT_STORED,
    Axis,
    Cheaper,
    DraftLosses,
    Losses,
    LossRow,
    Span,
    Unknown,
)
from harness.records import where
from harness.reporting import formatting as fmt
from harness.serving.engines import spec_of
from harness.storage.training_log import Split

PARTS: dict[Axis, str] = {
    "offset": "draft token",
    "token": "class",
    "category": "category",
    "answer": "position",
    "context": "context",
    "entropy": "entropy",
}
CHANGES: dict[Cheaper, str] = {
    "faster": "20 % faster",
    "half_vocabulary": "output matrix of half the vocabulary",
    "layer_less": "one layer less",
}
WORTH_NOTE = (
    "Replayed with chances a raised to a + u (1 - a): everywhere, with the u at which alpha of the"
    " rounds is so many points higher; or at one draft token of every round. A price per 10^6"
    " tokens is given where the run was timed on a card whose price is known; it is of the best"
    " choice then, no draft included."
)
CHEAPER_NOTE = (
    "At today's acceptance. A draft step is taken to last as long as the bytes that it reads are"
    " part of today's; what a smaller vocabulary or a layer less costs in acceptance is not known."
)
UNKNOWN: dict[Unknown, str] = {
    "no_step": "no draft step was timed, as rounds are those of a server",
    "no_sizes": "the run does not say what a draft step reads",
    "one_layer": "the draft has one layer",
}
SPANS_NOTE = (
    "The draft's token: its most likely one, in the round that loses most there. Above temperature"
    " 0 it may be the target's, and was rejected by chance."
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
    "entropy": (
        "Of the target's distribution at each token, before temperature, top-k and top-p apply."
    ),
    "token": (
        "One class each, the first that fits: special, new line (first token after one), copied"
        " (ends three tokens that stand in the prompt), code, digits, markup, punctuation, name,"
        " rare (the least frequent ids, 10 % of the run's tokens), word."
    ),
}


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


def notes(losses: Losses) -> Iterator[str]:
    """How to read the page, and what is not known."""
    yield (
        "A lost round: a round of K that ends at draft token j falls K + 1 - j tokens short of"
        " K + 1, which costs (K + 1 - j) / (K + 1) of a round. Shares of lost rounds of each table"
        " add up to 100 %."
    )
    yield (
        "Speedup if as the rest: replayed with the chances of these tokens raised until they are"
        " accepted as the others are; a dash where they are accepted as well already."
    )
    if not losses.texts_known:
        yield (
            "The prompts of this run are not there any more, so that no token is known to be copied"
            " from one."
        )
    if not losses.entropies_known:
        yield (
            "The target's entropy is not stored in this run: an audition stores it with the texts"
            " that it generates; servers, timed generations and earlier versions do not."
        )


def cheaper_notes(draft: DraftLosses) -> tuple[str, ...]:
    """How a cheaper draft is reckoned, and why a change is not, with what would measure it."""
    unknown: dict[Unknown, list[str]] = {}
    for each in draft.cheaper:
        if each.unknown is not None:
            unknown.setdefault(each.unknown, []).append(CHANGES[each.change])
    lines = [
        f"Not known of {', '.join(changes)}: {UNKNOWN[reason]}."
        for reason, changes in unknown.items()
    ]
    if unknown.keys() - {"one_layer"}:
        lines.append(
            "To measure it, make such a draft and time it next to this one: python -m"
            f" harness.audition drafts=[{draft.draft},NAME@FOLDER]."
        )
    return (CHEAPER_NOTE, *lines)


def drafted(span: Span) -> str:
    """The draft's token of a span."""
    return NOT_STORED if span.drafted is None else visible(span.drafted)


def of_draft(draft: DraftLosses) -> Iterator[str]:
    """Where a draft loses most, what that costs, and what a better one brings."""
    text = f"{named(draft)}: {fmt.speedup(draft.speedup)} predicted on these prompts, alpha"
    yield (
        f"{text} {fmt.alpha(draft.alpha)}; {fmt.percent(draft.lost_rounds)} of its rounds are lost"
        f" to tokens that were not accepted, {fmt.percent(draft.cut_rounds)} to ends of texts."
    )
    worst = max(where(draft.rows, axis="token"), key=lambda row: row.gain or 0.0, default=None)
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


def of_trainings(trainings: Sequence[Training]) -> Iterator[str]:
    """From which step on training brings nothing beyond noise."""
    for each in trainings:
        last = each.checkpoints[-1]
        where = f"{each.head}, temperature {each.temperature:g}"
        if each.enough is not None:
            yield (
                f"{where}: from {each.enough} training steps on no later checkpoint is more than"
                f" {WORTH:.0%} faster (the last, {last.step}: {fmt.speedup(last.speedup)}); stop"
                " there."
            )
        elif last.left_lo is None:
            yield f"{where}: too few prompts to tell noise from progress."
        elif (before := each.checkpoints[-2]).left_lo is not None and before.left_lo > 1.0:
            yield (
                f"{where}: speedup still grows at the last checkpoint, {last.step} steps"
                f" ({fmt.speedup(last.speedup)}); train on."
            )
        else:
            yield (
                f"{where}: too few prompts to tell whether the last checkpoint, {last.step} steps"
                f" ({fmt.speedup(last.speedup)}), is {WORTH:.0%} faster than the one before it"
                f" ({fmt.signed_percent(before.left - 1.0)})."
            )


SPLITS: dict[Split, str] = {"eval": "evaluation", "train": "training"}
CAUSES: dict[Cause, str] = {
    "layers": "it reads other layers of the target than in training (one or two higher or lower)",
    "template": "prompts have another chat template than in training",
    "embedding": "its embedding is not the target's: of another checkpoint",
    "norm": "the residual of its layer is taken on the wrong side of its norm",
    "rotary": "the frequencies of its positions have another precision than in training",
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
    log = gap.log
    logged = f"the accuracies that {log.framework} logged in {SPLITS[log.of]}"
    promised = "promise" if log.given else "promise, were they independent,"
    lengths = (
        f"{gap.draft}, K={gap.k}: {logged} {promised} an acceptance length of"
        f" {fmt.decimal(gap.logged_length)}; replay gives {fmt.decimal(gap.replayed_length)}. On"
        f" the run's texts they promise {fmt.decimal(gap.everywhere_length)}, with the dependence"
        f" of a round's drafts {fmt.decimal(gap.joint_length)}."
    )
    why = CAUSES[gap.cause]
    if gap.fixed is not None:
        why += (
            f"; without that its first draft token is right in {fmt.percent(gap.fixed)} of places"
            f" in place of {fmt.percent(gap.now)}"
        )
    elif gap.unchecked is not None:
        why += f". What it reads was not tried: {gap.unchecked}"
    return lengths, f"Why: {why.rstrip('.')}."


def visible(piece: str) -> str:
    """A token's text with its spaces and line breaks visible."""
    return piece.replace("\n", "\\n").replace(" ", "\u2423") or "(special)"


def marked(span: Span) -> str:
    """A span with its most expensive token in brackets."""
    parts = [piece.replace("\n", "\\n") for piece in span.pieces]
    parts[span.worst] = f"[{parts[span.worst]}]"
    return "".join(parts)
