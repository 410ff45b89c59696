"""Caveats on texts: where they came from, and greedy ones that are not plain decoding's."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from harness import formatting as fmt
from harness.analysis.caveats.record import Quoted, caveat
from harness.analysis.lossless import place
from harness.analysis.setup import Setup
from harness.summary import TextCheck, Values


@caveat(
    "note",
    "the target is on a server: {engine} {version} at {url} completed the prompts, and nothing was"
    " timed there",
)
def texts_from(setup: Setup) -> Iterator[Values]:
    """The server that completed the prompts: engine, version, url."""
    if completed_by := setup.run.manifest.texts_from:
        yield asdict(completed_by)


def _say_greedy_texts_differ(values: Quoted) -> str:
    not_judged = ", {not_judged} not judged" if values["not_judged"] else ""
    apart = differences(values["tie"], values["different"], values["noise"])
    return (
        f"{{equal}} of {{texts}} greedy texts equal plain decoding's{apart}{not_judged}; the"
        " first difference is in {prompt_set}/{prompt} K={k} at position {position}"
    ).format(**values)


@caveat("caution", _say_greedy_texts_differ)
def greedy_texts_differ(checks: Sequence[TextCheck]) -> Iterator[Values]:
    """Counts of greedy texts where not all are plain decoding's; noise: of the engine, nats."""
    first = next((check for check in checks if check.result != "PASS"), None)
    if first is None:
        return
    results = Counter(check.result for check in checks)
    noise = [each.noise for each in checks if each.noise is not None]
    yield {
        "texts": len(checks),
        "equal": results["PASS"],
        "tie": results["TIE"],
        "different": results["FAIL"],
        "not_judged": results["OPEN"] + results["UNJUDGED"],
        "noise": max(noise, default=None),
        **place(first),
    }


def differences(tied: int, differing: int, noise: float | None) -> str:
    """The number of ties, within rounding or the engine's noise (nats), and of real differences."""
    within = "rounding" if noise is None else f"the engine's noise of {noise:.2g} nats"
    ties = f"{fmt.number_of(tied, 'tie', 'ties')}{f' (within {within})' if tied else ''}"
    return f", {ties}, {fmt.number_of(differing, 'real difference', 'real differences')}"


def _say_routing_ties(values: Quoted) -> str:
    parts = [
        f"{fmt.number_of(values['tie'], 'text differs', 'texts differ')} by that alone"
        if values["tie"]
        else "",
        f"in {fmt.number_of(values['unjudged'], 'text', 'texts')} it may change as much as a wrong"
        " cache would, so that these cannot be judged (a run in float32 can)"
        if values["unjudged"]
        else "",
    ]
    return (
        "a mixture of experts in 16 bits: rounding decides between experts that nearly tie;"
        f" {', and '.join(filter(None, parts))}"
    )


@caveat("note", _say_routing_ties)
def routing_ties(checks: Sequence[TextCheck]) -> Iterator[Values]:
    """Texts of a mixture that its routers' near ties change (tie), or hide what else does."""
    tie = sum(check.result == "TIE" and check.routing is not None for check in checks)
    unjudged = sum(check.result == "UNJUDGED" for check in checks)
    if tie or unjudged:
        yield {"tie": tie, "unjudged": unjudged}
