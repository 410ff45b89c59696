"""Does speculation leave the output unchanged? Texts at T = 0, laws at T > 0."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from harness import prompts as prompt_sets
from harness.analysis import told
from harness.analysis.cells import measured_rows
from harness.commands import execute
from harness.commands.outcome import Outcome
from harness.commands.pair import Pair, open_configured
from harness.commands.plan import print_snapshot_plan
from harness.commands.progress import progress
from harness.commands.requests import plan, sampling_of
from harness.commands.running import concluded, running
from harness.commands.texts import compare_greedy, with_pair_turns
from harness.config import SnapshotConfig
from harness.measurement.lossless import DistributionTest, distribution_tests, most_open
from harness.records import (
    DUMMY_CAVEAT,
    BrokenLogitsError,
    Failure,
    Summary,
    Trial,
    UserError,
)
from harness.reporting.reading import dummies_of
from harness.reporting.tokens import MarkedText, Piece, show_tokens
from harness.storage import RunFolder, load

# Holm's method over all tests of a run; below this a law differs.
SIGNIFICANCE = 1e-3
GREEDY = 0.0


def run(config: SnapshotConfig) -> Outcome:
    """Compare texts and laws over the grid and store, render and show what came out.

    Returns:
        The run folder; status 1 where anything is FAIL or did not complete.

    Raises:
        UserError: a value, a model, a prompt or a folder that cannot be used.
    """
    if not any(config.k):
        raise UserError(f"k={config.k}: a snapshot needs a K of at least 1")
    if config.dry_run:
        print_snapshot_plan(config, prompt_sets.load(config.prompts))
        return Outcome(None)
    resumed = execute.resumed(config, "snapshot")
    pair = open_configured(config)
    folder = resumed or execute.create(config, "snapshot")
    execute.note_or_check(folder, pair.describe(), config.seed)
    with running(folder):
        pair = with_pair_turns(folder, pair, config)
        trials = _texts(folder, pair, config) if GREEDY in config.temperature else []
        compared = _compare(trials, pair, config)
        sampled, broken = _laws(pair, config)

    def derive() -> Summary:
        folder.write_results(_rows(trials, config))
        stored = load(folder.path)
        dummy = DUMMY_CAVEAT if dummies_of(stored) else None
        notes = (dummy, told.generation_caveat(stored), *told.fallbacks(stored))
        caveats = tuple(note for note in notes if note)
        summary = _summary(compared, sampled, trials)
        summary = replace(summary, failures=(*summary.failures, *broken), caveats=caveats)
        folder.write_summary(summary, {"prompts": compared, "sampled": sampled})
        return summary

    outcome = concluded(folder, derive)
    if config.show == "tokens":
        show_tokens(_marked(trials, pair))
    return outcome


def _texts(folder: RunFolder, pair: Pair, config: SnapshotConfig) -> list[Trial]:
    requests = plan(pair, config, config.k, [GREEDY])
    models = (pair.target_model, pair.draft_model)
    return execute.run_requests(folder, requests, lambda _: models, "generating")


def _compare(trials: Sequence[Trial], pair: Pair, config: SnapshotConfig) -> list[dict[str, Any]]:
    """One entry per prompt and K: PASS, TIE or FAIL with what shows it."""
    cells = {(t.prompt_set, t.prompt, t.repetition, t.k): t for t in trials}
    entries: list[dict[str, Any]] = []
    for text in compare_greedy(trials, pair, config.decode.repetition_penalty):
        trial = cells[text.prompt_set, text.prompt, text.repetition, text.k]
        rate = (trial.accepted or 0) / trial.drafted if trial.drafted else None
        entries.append({**asdict(text), "temperature": GREEDY, "acceptance_rate": rate})
    return entries


def _laws(pair: Pair, config: SnapshotConfig) -> tuple[list[dict[str, Any]], list[Failure]]:
    """One entry per temperature, K and offset, with Holm's verdict over all of them.

    And the cells that met logits that are not finite.
    """
    cells = [(k, value) for value in config.temperature if value != GREEDY for k in config.k if k]
    entries: list[dict[str, Any]] = []
    broken: list[Failure] = []
    with progress("drawing", len(cells)) as tick:
        for k, temperature in cells:
            try:
                tests = _distribution_tests(pair, config, k, temperature)
            except BrokenLogitsError as error:
                broken.append(Failure(f"K={k} temperature={temperature:g}", str(error)))
                tests = []
            entries += [{"k": k, "temperature": temperature, **test._asdict()} for test in tests]
            tick()
    _mark_holm(entries)
    return entries, broken


def _distribution_tests(
    pair: Pair, config: SnapshotConfig, k: int, temperature: float
) -> list[DistributionTest]:
    """One test per offset, after the prompt that tests most."""
    sampling = sampling_of(config.decode, temperature)
    prompt = most_open(
        pair.target_model,
        [entry.tokens for entry in pair.prompts],
        num_draft_tokens=k,
        sampling=sampling,
        seed=config.seed,
    )
    return distribution_tests(
        pair.target_model,
        pair.draft_model,
        prompt,
        num_draft_tokens=k,
        sampling=sampling,
        rule=config.decode.rule,  # type: ignore[arg-type]  # validated
        draws=config.draws,
        seed=config.seed,
    )


def _mark_holm(entries: list[dict[str, Any]]) -> None:
    """Write PASS or FAIL into each entry; Holm (1979) keeps the chance of any false FAIL small."""
    ordered = sorted(entries, key=lambda entry: entry["p_value"])
    failing = True
    for rank, entry in enumerate(ordered):
        failing = failing and entry["p_value"] < SIGNIFICANCE / (len(ordered) - rank)
        # One cell of draws can show a token outside the support, and nothing else
        passed = "PASS" if entry["bins"] > 1 else "UNTESTED"
        entry["result"] = "FAIL" if failing else passed


def _rows(trials: Sequence[Trial], config: SnapshotConfig) -> list[Any]:
    if not trials:
        return []
    return measured_rows(trials, model=config.model.name, draft=config.draft.name, times=None)


def _summary(
    compared: Sequence[dict[str, Any]], sampled: Sequence[dict[str, Any]], trials: Sequence[Trial]
) -> Summary:
    failures = [
        Failure(
            f"{entry['prompt_set']}/{entry['prompt']} K={entry['k']}",
            f"texts differ from position {entry['first_difference']} on; top-2 margins "
            f"{entry['target_margin']:.3g} (target) and {entry['spec_margin']:.3g} (verify)",
        )
        for entry in compared
        if entry["result"] == "FAIL"
    ]
    failures += [
        Failure(
            f"K={entry['k']} temperature={entry['temperature']:g} offset {entry['offset']}",
            f"drawn tokens do not follow the target's law (p = {entry['p_value']:.2g})",
        )
        for entry in sampled
        if entry["result"] == "FAIL"
    ]
    results = [entry["result"] for entry in [*compared, *sampled]]
    if results and set(results) == {"UNTESTED"}:
        failures.append(
            Failure("temperature > 0", "every law is nearly certain: nothing could be tested")
        )
    return Summary(
        verdict=None,
        failures=(*failures, *told.failures(trials)),
        headline={name: results.count(name) for name in ("PASS", "TIE", "FAIL", "UNTESTED")},
    )


def _marked(trials: Sequence[Trial], pair: Pair) -> list[MarkedText]:
    """The speculative texts in pieces, each token with whether the draft wrote it."""
    decode = pair.target.tokenizer.decode
    return [
        MarkedText(
            f"{trial.prompt_set}/{trial.prompt} K={trial.k}",
            tuple(
                Piece(decode([token]), bool(drafted))
                for token, drafted in zip(trial.tokens or (), trial.from_draft or (), strict=True)
            ),
        )
        for trial in trials
        if trial.k and trial.status == "ok"
    ]
