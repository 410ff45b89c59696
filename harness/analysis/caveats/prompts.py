"""Caveats on the prompts, the K and the budget: what a run was asked on, and what it was not."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Literal

from harness import formatting as fmt
from harness.analysis.caveats.record import Quoted, caveat
from harness.analysis.setup import Setup
from harness.records import ResultRow, grouped
from harness.stats.jackknife import MIN_PROMPTS
from harness.summary import Answer, Values


def _say_prompts_left_out(values: Quoted) -> str:
    all_of_them = ": prompts.limit=null takes all of them" if values["limited"] else ""
    return "{used} of {available} prompts were used ({sets})".format(**values) + all_of_them


@caveat("note", _say_prompts_left_out)
def prompts_left_out(setup: Setup) -> Iterator[Values]:
    """That a limit leaves some of the user's own out; sets: "mine 8 of 30, other 8 of 12"."""
    conf, prompts = setup.conf("prompts"), setup.run.manifest.prompts
    counts = {
        name: (used, max(used, setup.run.manifest.prompts_available.get(name, used)))
        for name, used in prompts.items()
    }
    used, available = (sum(count[at] for count in counts.values()) for at in (0, 1))
    if used < available and (conf.get("files") or conf.get("hub")):
        sets = ", ".join(f"{name} {used} of {there}" for name, (used, there) in counts.items())
        limited = conf.get("limit") is not None
        yield {"used": used, "available": available, "sets": sets, "limited": limited}


def log_covered(values: Quoted) -> str:
    """How much of a log of requests the sample is, and how alike: a `SampledLog` and `strata`."""
    left_out = values["unusable"]
    lines = fmt.number_of(left_out, "line", "lines")
    unusable = f", {lines} left out that cannot be generated from" if left_out else ""
    return (
        "{sampled:,} of {requests:,} requests{unusable}, drawn at random in"
        f" {fmt.number_of(values['strata'], 'stratum', 'strata')}; a prompt has"
        " {mean_bytes:,.0f} bytes on average in the log and {sampled_bytes:,.0f} by the sample"
    ).format(**{**values, "unusable": unusable})


@caveat("note", log_covered)
def sampled_log(setup: Setup) -> Iterator[Values]:
    """That a sample stands for a log; strata: of the sample."""
    log = setup.run.manifest.prompts_log
    if log is not None:
        yield {**asdict(log), "strata": len(setup.run.manifest.prompts_available)}


def _say_few_prompts(values: Quoted) -> str:
    in_cell = values["in_cell"]
    return (
        f"{fmt.number_of(values['prompts'], 'prompt', 'prompts')}{' in a cell' if in_cell else ''}:"
        f" below {values['needed']} there is no interval"
        f"{' of its own; a verdict pools the prompt sets' if in_cell else ''}"
    )


@caveat("note", _say_few_prompts)
def few_prompts(
    setup: Setup, results: Sequence[ResultRow], prompts: int | None
) -> Iterator[Values]:
    """That there is no interval; in_cell: whether of one prompt set (a sweep) or of all."""
    if setup.command == "snapshot":
        return
    counted = [row for row in results if row.prompts is not None]
    cells = grouped(counted, lambda row: (row.temperature, row.prompt_set))
    # A sweep in looks measures some K of a cell on few of its prompts
    counts = [max(row.prompts or 0 for row in rows) for rows in cells.values()]
    fewest = min(counts, default=MIN_PROMPTS) if prompts is None else prompts
    if fewest < MIN_PROMPTS:
        yield {"prompts": fewest, "needed": MIN_PROMPTS, "in_cell": prompts is None}


def _say_k_at_edge(values: Quoted) -> str:
    return (
        "the best K at temperature {temperature:g}, {k}, is the largest that was asked for, so a"
        " larger one may be faster ({} measures it)"
    ).format(values["command"] or "k=[{ks}]".format(**values), **values)


@caveat("note", _say_k_at_edge)
def k_at_edge(setup: Setup, answers: Sequence[Answer]) -> Iterator[Values]:
    """That the best K is the largest of several: a larger one may be faster.

    Of answers for the whole workload on what was timed; a head that drafts no more has no larger.
    ks: to try next ("10,15,20"); command: that tries them (None: unknown).
    """
    largest = max(setup.ks, default=0)
    for answer in answers if len(setup.ks) > 1 else ():
        draft, k = answer.named
        most = setup.described_draft(draft or "").drafts_at_most
        open_end = k == largest and (most is None or most > largest)
        if open_end and answer.timed and answer.prompt_set == "all" and answer.speedup is not None:
            next_ks = ",".join(map(str, sorted({k, -(-3 * k // 2), 2 * k})))
            command = setup.command_line(f"k=[{next_ks}]")
            values: Values = {"draft": draft, "k": k, "temperature": answer.temperature}
            yield {**values, "ks": next_ks, "command": command}
            return  # the same command for every temperature


WhyLeftOut = Literal["not_timed", "latency_from", "positions", "not_lossless", "draft_limit"]
_LEFT_OUT: dict[WhyLeftOut, str] = {
    "not_timed": "is beyond the times of some draft, so nothing is predicted there",
    "latency_from": "is left out: latency_from= times no rounds there",
    "positions": "is left out: acceptance_by_position is too short for it",
    "not_lossless": "is no choice here: it changed what is generated in the server run",
    "draft_limit": "is shown at {tokens} tokens, the most that {draft} drafts a round",
}


@caveat("note", lambda values: f"K = {values['ks']} " + _LEFT_OUT[values["why"]].format(**values))
def k_left_out(
    ks: Iterable[int], why: WhyLeftOut, draft: str | None = None, tokens: int | None = None
) -> Iterator[Values]:
    """K that have no numbers of their own; draft, tokens: of one that drafts no more."""
    listed = ", ".join(map(str, ks))
    if listed:
        values: Values = {"ks": listed, "why": why}
        yield values if draft is None else {**values, "draft": draft, "tokens": tokens}


@caveat("note", "{ignored} had no effect: the texts of traces_from were generated with {made_with}")
def other_budget(setup: Setup) -> Iterator[Values]:
    """What another run's texts were not generated with: ignored, made_with as "k=v k=v"."""
    if setup.run.manifest.texts_made_with is None:
        return
    made_with = asdict(setup.run.manifest.texts_made_with)
    config = setup.run.config
    differing = [key for key, value in made_with.items() if value != config.get(key)]
    if differing:
        ignored = " and ".join(f"{key}={config.get(key)}" for key in differing)
        yield {"ignored": ignored, "made_with": " ".join(f"{k}={made_with[k]}" for k in differing)}
