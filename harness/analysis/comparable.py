"""Whether two runs can be compared, and what a reader of the comparison must be told."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.analysis.compare import shared_prompts
from harness.analysis.compare_texts import TextCheck, compare_texts
from harness.commands.greedy import distrusted
from harness.records import UserError
from harness.reporting.reading import dummies_of, synthetic
from harness.storage import StoredRun

# Doors whose runs hold speedups of cells.
DOORS = ("sweep", "audition")


@dataclass(frozen=True)
class Comparability:
    """How two runs may be compared.

    Attributes:
        measured: whether both have generations that can be paired by prompt.
        unlike: why speedups and acceptance cannot be held against each other; None where they can.
        times: whether times can: both ran on one kind of device.
        warnings: what a reader must know, most important first.
    """

    measured: bool
    unlike: str | None
    times: bool
    warnings: tuple[str, ...]


def comparability(names: Sequence[str], runs: Sequence[StoredRun]) -> Comparability:
    """What may be compared between the reference, first, and another run.

    Raises:
        UserError: a run without cells, other targets, or no prompt in common.
    """
    reference, other = runs
    _check_target(names, runs)
    measured = all(run.door == "sweep" and run.config.get("mode") == "measure" for run in runs)
    warnings = [*_unfinished(names, runs)]
    one, two = (_device(run) for run in runs)
    if one != two:
        warnings.append(
            f"DIFFERENT DEVICES: {names[0]} ran on {one}, {names[1]} on {two}; ratios of ms per"
            " token say how the devices differ, not how the code does. Speedups are each against"
            " their own baseline"
        )
    unreal = _unlike(names, runs)
    if unreal:
        warnings.append(unreal)
    if not measured:
        warnings.append("not measured in both: cells are compared as they stand, unpaired")
    else:
        warnings += _prompts(names, runs)
        warnings += _texts(names, runs, compare_texts(reference.trials, other.trials))
    return Comparability(measured, unreal, one == two, tuple(warnings))


def check_doors(names: Sequence[str], runs: Sequence[StoredRun]) -> None:
    """Refuse runs that hold no cells to compare.

    Raises:
        UserError: a run of another door than sweep or audition.
    """
    for name, run in zip(names, runs, strict=True):
        if run.door not in DOORS:
            what = "arithmetic" if run.door == "breakeven" else "no speedups of cells"
            raise UserError(
                f"runs: {name} was made by {run.door} and holds {what}; compare runs of"
                f" {' or '.join(DOORS)}"
            )
        if not run.trials and run.results.empty:
            raise UserError(
                f"runs: {name} holds no results yet; resume={run.folder} goes on with it"
            )


def _check_target(names: Sequence[str], runs: Sequence[StoredRun]) -> None:
    """Refuse two targets; one model in two folders, as in two checkouts, is one target."""
    models = [run.config.get("model") or {} for run in runs]
    described = [(run.manifest.get("models") or {}).get("target") or {} for run in runs]
    sizes = [entry.get("parameters") for entry in described]
    alike = models[0].get("name") == models[1].get("name") and sizes[0] == sizes[1]
    if models[0].get("id") != models[1].get("id") and not alike:
        said = [
            f"{n} has {m.get('name')} ({m.get('id')})" for n, m in zip(names, models, strict=True)
        ]
        raise UserError(
            f"runs: different targets, {' and '.join(said)}; a speedup belongs to its target, so"
            " compare runs of one"
        )


def _unfinished(names: Sequence[str], runs: Sequence[StoredRun]) -> Iterator[str]:
    for name, run in zip(names, runs, strict=True):
        status = run.manifest.get("status")
        if status == "failed":
            yield f"FAILED RUN: {name}; what it stored is compared"
        elif status != "complete":
            yield f"UNFINISHED RUN: {name}; what it stored is compared"


def _device(run: StoredRun) -> str:
    environment = run.manifest.get("environment") or {}
    name = environment.get("device_name") or environment.get("cpu")
    return (
        f"{environment.get('device', 'an unknown device')} ({name})"
        if name
        else "an unknown device"
    )


def _unlike(names: Sequence[str], runs: Sequence[StoredRun]) -> str | None:
    """Why acceptance, and with it speedups, cannot be compared; None where they can."""
    for name, run in zip(names, runs, strict=True):
        reason = distrusted(run)
        if reason:
            return f"NO SPEEDUPS COMPARED: of {name}, {reason}; only times are"
    kinds = [_acceptance(run) for run in runs]
    if kinds[0] == kinds[1]:
        return None
    return (
        f"NO SPEEDUPS COMPARED: the acceptance of {names[0]} is {kinds[0]}, that of {names[1]}"
        f" {kinds[1]}; only times are"
    )


def _acceptance(run: StoredRun) -> str:
    if synthetic(run):
        return "synthetic"
    return "that of dummy weights" if dummies_of(run) else "measured on real weights"


def _prompts(names: Sequence[str], runs: Sequence[StoredRun]) -> Iterator[str]:
    """Say how many prompts are shared where not all are.

    Raises:
        UserError: none is.
    """
    same, other_length = shared_prompts(runs[0].trials, runs[1].trials)
    if not same:
        raise UserError(
            f"runs: {names[0]} and {names[1]} have no prompt in common; nothing to pair"
        )
    totals = [len({(t.prompt_set, t.prompt) for t in run.trials}) for run in runs]
    if other_length:
        yield (
            f"{other_length} prompts have one name and two lengths (an edited file, or another chat"
            " template): left out"
        )
    if totals != [same, same]:
        yield (
            f"only the {same} prompts that both have are compared, of {totals[0]} in {names[0]} and"
            f" {totals[1]} in {names[1]}"
        )
    elif runs[0].manifest.get("prompts_sha256") != runs[1].manifest.get("prompts_sha256"):
        yield "the prompts' hashes differ: paired by name and length, their words may differ"


def _texts(names: Sequence[str], runs: Sequence[StoredRun], check: TextCheck) -> Iterator[str]:
    """Greedy texts and counts that ought to agree and do not."""
    dtypes = {
        str(((run.manifest.get("models") or {}).get("target") or {}).get("dtype")) for run in runs
    }
    if check.differing:
        exact = dtypes == {"float32"} and not _other_model(runs)
        apart = _other_texts(runs)
        what = (
            f"decode.{apart} differs, which changes texts"
            if apart
            else "in float32 they must agree: ONE RUN CHANGED ITS OUTPUT, the snapshot door tells"
            " which"
            if exact
            else "rounding below float32 or another revision may do that; the snapshot door tells"
            " a tie from a fault"
        )
        yield (
            f"{check.differing} of {check.compared} greedy texts differ between {names[0]} and"
            f" {names[1]} (first: {check.first}): {what}"
        )
    if check.recounted and _same_drafting(runs):
        yield (
            f"SAME TEXTS, OTHER COUNTS: {check.recounted} of {check.counted} greedy generations of"
            f" equal text had other rounds or acceptances (first: {check.first_recounted}) with the"
            " same draft, K and rule: the draft or the loop changed"
        )


def _other_model(runs: Sequence[StoredRun]) -> bool:
    keys = ("revision", "weights", "quantization", "dtype")
    models = [run.config.get("model") or {} for run in runs]
    return any(models[0].get(key) != models[1].get(key) for key in keys)


def _same_drafting(runs: Sequence[StoredRun]) -> bool:
    keys = [
        ((run.config.get("draft") or {}).get("id"), (run.config.get("decode") or {}).get("rule"))
        for run in runs
    ]
    return keys[0] == keys[1] and _other_texts(runs) is None


def _other_texts(runs: Sequence[StoredRun]) -> str | None:
    """The setting that makes the greedy texts of two runs differ, if any."""
    decodes = [run.config.get("decode") or {} for run in runs]
    keys = ("repetition_penalty", "stop_strings")
    return next((key for key in keys if decodes[0].get(key) != decodes[1].get(key)), None)
