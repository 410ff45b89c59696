"""Stored runs of one target compared cell by cell, the first being the reference.

A run's speedup moves with its prompts far more than with what changed between two runs, so runs are
compared on the prompts that both have: a prompt's four generations (plain and speculative, in
either run) are left out together, and what the prompts have in common cancels. Each speedup is
taken against its own run's baseline, so a machine that is 10 % slower today cancels as well; the
times per token show it.

Runs of servers are compared in the same way: a greedy request at the time that its visits settle.
Two engines differ more than most drafts do: with one pair, one machine and hard prompts K = 4 was
1.05x on vLLM and 0.70x on llama.cpp (docs/validation.md).

With 40 cells two differ by chance alone, so p-values are adjusted by Holm's method.

A comparison has many cells and a build has one exit status. The cell that decides is the one that
would be served: the whole workload at the temperature and K of the reference's verdict. Where the
reference serves without speculation, or the other run lacks that K, it is the shared K at which the
reference was fastest. A threshold on the ratio alone would fail one build in two where the truth
lies on it. So a comparison fails only when the *upper* bound of the ratio's interval is below
`fail_below`; a ratio below it whose interval reaches over it is unclear, and passes. Where there is
no interval (fewer than 8 shared prompts) the ratio itself decides.

A run that timed no generation (an audition, mode=replay) cannot be paired, and is refused.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from harness.analysis.caveats.comparisons import (
    incomplete_run,
    other_prompts,
    speedups_not_compared,
)
from harness.analysis.cells import (
    Count,
    accepted,
    completed,
    decode_s,
    judged,
    latest,
    new_tokens,
    per_prompt,
    ratio,
    timed,
)
from harness.analysis.lossless import distrust, text_checks
from harness.analysis.server_lossless import gates
from harness.analysis.server_run import analyse_served
from harness.analysis.server_texts import served_texts
from harness.analysis.setup import Setup
from harness.analysis.sweep_and_audition import analyse_pair
from harness.command_words import as_typed
from harness.records import Trial, UserError, grouped
from harness.stats.jackknife import Estimate, Weights, exponential, holm, workload_ratio
from harness.storage import StoredRun
from harness.storage.contents import flattened
from harness.storage.manifest import SERVER
from harness.storage.resume import FREE_KEYS
from harness.summary import (
    Answer,
    Caveat,
    ComparedRun,
    Comparison,
    ComparisonRow,
    Difference,
    Value,
    Values,
)

ALL_SETS = "all"
# Commands whose runs time generations
COMMANDS = ("sweep", SERVER)
SIGNIFICANT = 0.05
SHOWN_HASH = 12
# Differences shown first, in this order: the ends of dotted names in manifest.json and config.yaml.
FIRST = (
    *("device", "device_name", "driver", "cuda", "threads", "backend", "engine", "model.id"),
    *("draft.id", "revision", "commit", "dtype", "weights", "rule", "prompts_sha256"),
    *("new_tokens", "seed", "dirty"),
)
# What differs between any two runs, or stands in another entry.
PASSED_OVER = ("created_utc", "environment.command", "status", "memory_bytes")

Outcome = Literal["pass", "fail", "unclear"]


def compare(runs: Sequence[StoredRun], fail_below: float | None = None) -> Comparison:
    """Compare every run with the first; ratios of speedups below `fail_below` do not pass."""
    first, *others = map(_run, _names(runs), runs)
    reference = (analyse_served if first.setup.command == SERVER else analyse_pair)(first.setup)
    rows: list[ComparisonRow] = []
    caveats: list[Caveat] = []
    compared: list[ComparedRun] = []
    for other in others:
        pair_rows, pair_caveats = _compare_two(_Pair(first, other))
        if not pair_rows:
            raise UserError(f"runs: {first.name} and {other.name} have no cell in common")
        rows += pair_rows
        caveats += [caveat for caveat in pair_caveats if caveat not in caveats]
        compared.append(_compared(other.name, pair_rows, reference.headline, fail_below))
    return Comparison(
        reference=first.name,
        runs=tuple(compared),
        rows=tuple(rows),
        caveats=tuple(caveats),
        differences=_differences(runs),
    )


class _Run(NamedTuple):
    """A run with the name it goes by."""

    name: str
    setup: Setup
    trials: Sequence[Trial]  # each generation once; a server's at the time that its visits settle
    lossy: Sequence[tuple[float, int]]  # (temperature, K) at which a server changes texts


def _run(name: str, run: StoredRun) -> _Run:
    setup = Setup(run)
    if setup.engine is None:
        return _Run(name, setup, latest(timed(run.trials)), ())
    texts = served_texts(setup)
    lossy = sorted((g.temperature, g.k) for g in gates(texts) if g.lossless is False)
    return _Run(name, setup, texts.settled, lossy)


class _Pair(NamedTuple):
    """Two runs, of which the second is compared with the first."""

    reference: _Run
    other: _Run


def _names(runs: Sequence[StoredRun]) -> tuple[str, ...]:
    """Folder names, whole paths where those are the same."""
    if len(runs) < 2:
        raise UserError("runs: give at least two run folders, runs=[results/A,results/B]")
    paths = [run.folder.resolve() for run in runs]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise UserError(f"runs: {runs[index].folder} is given twice; list each once")
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else [str(run.folder) for run in runs]
    for name, run in zip(names, runs, strict=True):
        if run.door not in COMMANDS or run.config.get("mode") == "replay":
            how = "replayed" if run.door in COMMANDS else f"made by {run.door}"
            raise UserError(
                f"runs: {name} was {how} and timed no generation that could be paired; compare runs"
                f" of {' and '.join(COMMANDS)}, mode=measure"
            )
        if not run.trials and run.results.empty:
            raise UserError(
                f"runs: {name} holds no results yet; {as_typed('resume', run.folder)} continues it"
            )
    return tuple(names)


def _compare_two(pair: _Pair) -> tuple[list[ComparisonRow], list[Caveat]]:
    _check_target(pair)
    one, two = pair
    drafts = (one.setup.draft or None, two.setup.draft or None)
    blank = ComparisonRow(one.name, two.name, *drafts, prompt_set=None, temperature=None, k=0)
    unlike = [*_unlike(pair)]
    shared = _shared_generations(pair)
    caveats = [c for each in pair for c in incomplete_run.of(each.setup.run, each.name)]
    caveats += [*unlike, *_shared_prompts(pair)]
    rows = _measured_rows(pair, shared, blank)
    cells = {cell for each in pair for cell in each.lossy}
    for each in pair:
        for temperature, k in each.lossy:
            place: Values = {"temperature": temperature, "k": k}
            caveats += speedups_not_compared.of(each.name, "not_lossless", **place)
    return [
        _times_only(row) if unlike or (row.temperature, row.k) in cells else row for row in rows
    ], caveats


def _check_target(pair: _Pair) -> None:
    """Refuse two targets; one model in two folders, as in two checkouts, is one target."""
    models = [each.setup.conf("model") for each in pair]
    sizes = [each.setup.target.parameters for each in pair]
    alike = models[0].get("name") == models[1].get("name") and sizes[0] == sizes[1]
    if models[0].get("id") != models[1].get("id") and not alike:
        both = " and ".join(
            f"{each.name} has {model.get('name')} ({model.get('id')})"
            for each, model in zip(pair, models, strict=True)
        )
        raise UserError(
            f"runs: different targets, {both}; a speedup belongs to its target, so compare runs of"
            " one"
        )


# ---- rows of measured runs, paired by prompt -----------------------------------------------------


Both = tuple[Trial, Trial]  # one generation in the reference and in the run
Shared = Mapping[tuple[float, int], Mapping[tuple[object, ...], Both]]


def _shared_generations(pair: _Pair) -> Shared:
    """By temperature and K, ascending, and by what was asked; another length is another prompt."""
    one, two = map(_generations, pair)
    cells = grouped((name for name in one if name in two), lambda name: name[:2])
    return {at: {n[2:]: (one[n], two[n]) for n in of_cell} for at, of_cell in sorted(cells.items())}


def _generations(run: _Run) -> dict[tuple[float, int, str, str, int, int | None], Trial]:
    trials = completed(run.trials)
    # A sweep that ends with its verdicts times no repetition 0, whose texts are for replay
    start = min((t.repetition for t in trials), default=0)
    return {
        (t.temperature, t.k, t.prompt_set, t.prompt, t.repetition - start, t.prompt_tokens): t
        for t in trials
    }


def _measured_rows(pair: _Pair, shared: Shared, blank: ComparisonRow) -> list[ComparisonRow]:
    """By temperature, K and prompt set, the whole workload ("all") last in its group."""
    failed = {
        (t.prompt_set, t.temperature, t.k)
        for each in pair
        for t in latest(each.setup.run.trials)
        if t.status == "failed"
    }
    # A server may not tell how its rounds ended
    uncounted = {
        (t.temperature, t.k)
        for each in pair
        for t in completed(each.trials)
        if t.accepted is None or t.rejected is None
    }
    rows: list[ComparisonRow] = []
    p_values: list[float | None] = []
    for (temperature, k), cell in shared.items():
        plain = shared.get((temperature, 0), {})
        baselines = k > 0 and _sets(cell.values()) <= _sets(plain.values())
        kept = {asked: both for asked, both in cell.items() if not baselines or asked in plain}
        sets = sorted(_sets(kept.values()))
        for name in [*sets, ALL_SETS] if len(sets) > 1 else sets:
            members = sets if name == ALL_SETS else [name]
            row = replace(blank, prompt_set=name, temperature=temperature, k=k)
            if any((member, temperature, k) in failed for member in members):
                row = replace(row, status="partial")
            weights = pair.reference.setup.weights if name == ALL_SETS else None
            asked = [asked for asked, (one, _) in kept.items() if one.prompt_set in members]
            before = [plain[each] for each in asked] if baselines else ()
            row, p_value = _measured_row(row, [kept[each] for each in asked], before, weights)
            if (temperature, k) in uncounted:
                row = replace(row, reference_alpha=None, alpha=None, alpha_difference=None)
            rows.append(row)
            p_values.append(p_value)
    return [replace(r, p_value_holm=p) for r, p in zip(rows, holm(p_values), strict=True)]


def _sets(shared: Iterable[Both]) -> set[str]:
    return {one.prompt_set for one, _ in shared}


def _per_token(trials: Sequence[Trial], quantity: Count, weights: Weights = None) -> Estimate:
    """A quantity per token of the workload, by its sums over prompts."""
    sums = per_prompt(trials, [quantity, new_tokens])
    of, tokens = np.array([*sums.values()]).T
    return workload_ratio(of, tokens, [prompt_set for prompt_set, _ in sums], weights)


def _measured_row(
    row: ComparisonRow, cell: Sequence[Both], plain: Sequence[Both], weights: Weights
) -> tuple[ComparisonRow, float | None]:
    """The row and the p-value of its speedup ratio, not yet adjusted."""
    per_token = partial(_per_token, weights=weights)
    sides = [*zip(*cell, strict=True)]
    times = [per_token(side, decode_s) for side in sides]
    row = replace(
        row,
        prompts=len({(trial.prompt_set, trial.conversation) for trial in sides[0]}),
        reference_ms_per_token=1e3 * float(times[0].value),
        ms_per_token=1e3 * float(times[1].value),
    )
    if not row.k:
        return row, None
    before, after = (
        ratio(*(float(per_token(side, counted).value) for counted in (accepted, judged)))
        for side in sides
    )
    difference = None if before is None or after is None else after - before
    row = replace(row, reference_alpha=before, alpha=after, alpha_difference=difference)
    if not plain:
        return row, None
    reference, run = (
        per_token(side, decode_s).log() - time.log()
        for side, time in zip(zip(*plain, strict=True), times, strict=True)
    )
    gain = run - reference
    lo, hi = exponential(gain.interval()) or (None, None)
    row = replace(
        row,
        reference_speedup=math.exp(reference.value),
        speedup=math.exp(run.value),
        speedup_ratio=math.exp(gain.value),
        speedup_ratio_lo=lo,
        speedup_ratio_hi=hi,
    )
    return row, gain.p_value


def _times_only(row: ComparisonRow) -> ComparisonRow:
    """The row without what rests on acceptance."""
    names = [
        n for n in asdict(row) if n.removeprefix("reference_").startswith(("speedup", "alpha"))
    ]
    return replace(row, p_value_holm=None, **dict.fromkeys(names))


# ---- the cell that decides -----------------------------------------------------------------------


def _compared(
    run: str, rows: Sequence[ComparisonRow], headline: Answer | None, fail_below: float | None
) -> ComparedRun:
    row = deciding(rows, headline and headline.temperature, headline.k if headline else 0)
    p_values = [entry.p_value_holm for entry in rows if entry.p_value_holm is not None]
    compared = ComparedRun(run, row, len(p_values), sum(each < SIGNIFICANT for each in p_values))
    if fail_below is None:
        return compared
    if row is None or row.speedup_ratio is None:
        raise UserError(
            f"fail_below={fail_below:g}: no speedup of {run} can be compared: acceptance of another"
            " kind, or greedy texts are not plain decoding's; leave fail_below out to compare times"
        )
    outcome = judge(row.speedup_ratio, row.speedup_ratio_hi, fail_below)
    return replace(compared, threshold=fail_below, outcome=outcome)


def judge(speedup_ratio: float, upper: float | None, fail_below: float) -> Outcome:
    """Fail only where the ratio is below the threshold by more than its interval."""
    if speedup_ratio >= fail_below:
        return "pass"
    return "fail" if (speedup_ratio if upper is None else upper) < fail_below else "unclear"


def deciding(
    rows: Sequence[ComparisonRow], temperature: float | None, k: int
) -> ComparisonRow | None:
    """The cell of the verdict at this temperature and K, or the next best (see above)."""
    known = [row for row in rows if row.speedup_ratio is not None]
    workload = [row for row in known if row.prompt_set == ALL_SETS] or known
    at_temperature = [row for row in workload if row.temperature == temperature] or [
        row for row in workload if row.temperature == workload[0].temperature
    ]
    pool = [row for row in at_temperature if row.k == k] or at_temperature
    return max(pool, key=lambda row: row.reference_speedup or 0.0, default=None)


# ---- what a reader must know ---------------------------------------------------------------------


def _unlike(pair: _Pair) -> Iterator[Caveat]:
    """Why acceptance, and with it speedups, cannot be compared; none where they can."""
    kinds: list[str] = []
    for name, setup, *_ in pair:
        checks = text_checks(setup.run.trials, setup.run.checks)
        doubt = None if setup.synthetic else distrust(checks)
        if doubt:
            yield from speedups_not_compared.of(name, doubt[0])
            return
        dummy = any(entry.weights == "dummy" for entry in setup.described.values())
        measured = f"measured on {'dummy' if dummy else 'real'} weights"
        kinds.append("synthetic" if setup.synthetic else measured)
    if kinds[0] != kinds[1]:
        one, two = (run.name for run in pair)
        values = {"reference_run": one, "reference_kind": kinds[0], "kind": kinds[1]}
        yield from speedups_not_compared.of(two, "other_acceptance", **values)


def _shared_prompts(pair: _Pair) -> Iterator[Caveat]:
    """The caveat that not every prompt is shared. A name with two lengths is two prompts."""
    runs = [each.setup.run for each in pair]
    lengths = [
        {(trial.prompt_set, trial.prompt): trial.prompt_tokens for trial in completed(run.trials)}
        for run in runs
    ]
    names = lengths[0].keys() & lengths[1].keys()
    same = sum(lengths[0][name] == lengths[1][name] for name in names)
    if not same:
        raise UserError(
            f"runs: {pair.reference.name} and {pair.other.name} have no prompt in common; compare"
            " runs of the same prompts"
        )
    before, after = (len({(t.prompt_set, t.prompt) for t in run.trials}) for run in runs)
    equal_hashes = len({run.manifest.prompts_sha256 for run in runs}) == 1
    both = (pair.reference.name, pair.other.name)
    lacking = len(names) - same
    yield from other_prompts.of(both, same, (before, after), lacking, equal_hashes=equal_hashes)


def _differences(runs: Sequence[StoredRun]) -> tuple[Difference, ...]:
    entries = [dict(_entries(run)) for run in runs]
    names = dict.fromkeys(name for entry in entries for name in entry)
    every = [Difference(name, tuple(entry.get(name) for entry in entries)) for name in names]
    differing = [entry for entry in every if len(set(entry.values)) > 1]

    def place(entry: Difference) -> tuple[int, str]:
        ends = (index for index, end in enumerate(FIRST) if f".{entry.name}".endswith(f".{end}"))
        return next(ends, len(FIRST)), entry.name

    return tuple(sorted(differing, key=place))


def _entries(run: StoredRun) -> Iterator[tuple[str, Value]]:
    for name, value in (*_named_values(run.config), *_named_values(run.manifest.entries)):
        free = name.split(".")[0] in FREE_KEYS and not name.startswith("engine.")
        if not free and not name.endswith(PASSED_OVER):
            shown = str(value)[:SHOWN_HASH] if name == "prompts_sha256" else value
            yield name.removeprefix("environment."), shown


def _named_values(entries: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    """Dotted names and values, without lists of records."""
    for name, value in flattened(entries).items():
        if isinstance(value, list):
            items = cast("list[Any]", value)
            if not any(isinstance(item, dict | list) for item in items):
                yield name, ", ".join(map(str, items))
        elif not isinstance(value, dict):
            yield name, value
