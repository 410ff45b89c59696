"""Caveats on runs that are compared: what differs besides what is compared."""

from collections.abc import Iterator, Mapping

from harness import formatting as fmt
from harness.analysis.caveats.record import Quoted, caveat
from harness.storage import StoredRun
from harness.summary import Value, Values

Names = tuple[str, str]  # the reference's first


@caveat(
    "caution",
    lambda values: (
        f"{'FAILED' if values['failed'] else 'UNFINISHED'} RUN: {values['run']}; what it stored is"
        " compared"
    ),
)
def incomplete_run(run: StoredRun, name: str) -> Iterator[Values]:
    """That a run failed, or has not ended."""
    if run.manifest.status != "complete":
        yield {"run": name, "failed": run.manifest.status == "failed"}


# By the reason that a run has no verdict, or what differs between the runs
_NOT_COMPARED: Mapping[str, str] = {
    "greedy_texts_differ": "{run}'s greedy texts are not plain decoding's",
    "greedy_texts_unjudged": (
        "{run}'s greedy texts are not plain decoding's (rerun with resume= to check for a tie)"
    ),
    "not_lossless": "{run} is NOT LOSSLESS at temperature {temperature:g}, K={k}",
    "other_acceptance": (
        "the acceptance of {reference_run} is {reference_kind}, that of {run} {kind}"
    ),
}


@caveat(
    "caution",
    lambda values: (
        f"NO SPEEDUPS COMPARED{' there' if values['why'] == 'not_lossless' else ''}:"
        f" {_NOT_COMPARED[values['why']].format(**values)}"
    ),
)
def speedups_not_compared(run: str, why: str, **values: Value) -> Iterator[Values]:
    """Why speedups are of other texts, or of other acceptances.

    values: temperature and k of a cell that is not lossless; reference_run, reference_kind and kind
    of acceptances.
    """
    yield {"run": run, "why": why, **values}


def _say_other_prompts(values: Quoted) -> str:
    prompts, lengths = values["prompts"], values["other_lengths"]
    if values["reference_total"] == values["total"] == prompts:
        return "the prompts' hashes differ: paired by name and length, their words may differ"
    edited = (
        f" ({lengths} of the same name have different lengths: an edited file, or another chat"
        " template)"
        if lengths
        else ""
    )
    shared = fmt.number_of(prompts, "prompt", "prompts")
    return (
        "compared are only the {shared} that both have, of {reference_total} in {reference_run}"
        " and {total} in {run}"
    ).format(**{**values, "shared": shared}) + edited


@caveat("note", _say_other_prompts)
def other_prompts(
    names: Names, same: int, totals: tuple[int, int], lengths: int, *, equal_hashes: bool
) -> Iterator[Values]:
    """Where the runs' prompts differ: `same` have the same name and length, of so many in each.

    lengths: how many have the same name and another length; equal_hashes: whether the words of
    all are known to be the same.
    """
    if totals != (same, same) or not equal_hashes:
        yield {
            "prompts": same,
            "reference_run": names[0],
            "reference_total": totals[0],
            "run": names[1],
            "total": totals[1],
            "other_lengths": lengths,
        }
