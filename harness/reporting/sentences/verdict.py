"""What to do, and the reason for it."""

from collections.abc import Callable, Mapping, Sequence

from harness.reporting import formatting as fmt
from harness.reporting.sentences import comparison
from harness.summary import CheckResult, Summary, Values, Verdict

DECIDING_COMMANDS = frozenset({"sweep", "audition"})
NO_ADVICE = "Not a recommendation (dummy weights): "
SYNTHETIC_ONLY = " It holds at the synthetic acceptance only."


def verdicts(summary: Summary) -> tuple[str, ...]:
    """What the run decides: the whole workload at each temperature, the main verdict first."""
    main = summary.verdict
    if main is None:
        return _without_verdict(summary)
    others = [entry for entry in summary.per_temperature if entry.temperature != main.temperature]
    synthetic = summary.run.synthetic
    prefix = NO_ADVICE if summary.run.dummies and not synthetic else ""
    suffix = SYNTHETIC_ONLY if synthetic else ""
    return tuple(f"{prefix}{verdict(entry)}{suffix}" for entry in (main, *others))


def verdict(entry: Verdict) -> str:
    """A verdict as a sentence that starts with what to do.

    "Serve tiny_good at K=3: 1.42x [1.36, 1.48] on held-out prompts (whole workload, temperature
    1).", "Do not speculate: <reason> (...)." or "Undecided: <reason> (...)."
    """
    answer = {"speculate": "Serve", "undecided": "Undecided", "does_not_pay": "Do not speculate"}
    start = answer[entry.decision]
    if entry.temperature is None:
        served = f"Serve the draft at K={entry.k}" if entry.decision == "speculate" else start
        return f"{served}: {_reason(entry)} (from the numbers given, no interval)."
    workload = "whole workload" if entry.prompt_set == "all" else f"{entry.prompt_set} prompts"
    scope = f"({workload}, temperature {fmt.temperature(entry.temperature)})"
    if entry.decision != "speculate":
        return f"{start}: {_reason(entry)} {scope}."
    gain = fmt.speedup(entry.speedup, entry.speedup_lo, entry.speedup_hi)
    unsure = "" if entry.speedup_lo is not None else ", no interval"
    return f"Serve {entry.draft} at K={entry.k}: {gain}{unsure} on held-out prompts {scope}."


def _reason(entry: Verdict) -> str:
    return VERDICT_REASONS[entry.reason](entry, entry.reason_values)


def _candidate(values: Values) -> str:
    draft = values["draft"]
    return f"K={values['k']}" if draft is None else f"{draft} with K={values['k']}"


def _gain(entry: Verdict) -> str:
    return fmt.speedup(entry.speedup, entry.speedup_lo, entry.speedup_hi)


def _held_out_loss(entry: Verdict, values: Values) -> str:
    loss = f"the best is {_candidate(values)} at {_gain(entry)} on held-out prompts"
    alpha, needed = _number(values["alpha"]), _number(values["breakeven_alpha"])
    if alpha is None:
        return loss
    if needed is None:
        return f"{loss}; alpha is {alpha:.2f}"
    if alpha < needed:
        return f"{loss}; alpha {alpha:.2f} is below the {needed:.2f} it needs"
    return (
        f"{loss}; alpha {alpha:.2f} is not below the {needed:.2f} that the steps need, so the loss"
        " is time outside the steps or stretches of low acceptance"
    )


def _undecided(why: str, entry: Verdict, values: Values) -> str:
    best = f"the best is {_candidate(values)} at {_gain(entry)} on held-out prompts"
    return f"{best}; {why.format(**values)}"


def _interval_spans_one(entry: Verdict, values: Values) -> str:
    needed = "{prompts} prompts; about {prompts_needed:,} would decide it"
    if values["prompts_needed"] is None:
        needed = "{prompts} prompts do not decide it, nor say how many would"
    return _undecided(needed, entry, values)


def _timing_noise(entry: Verdict, values: Values) -> str:
    advice = "a quieter machine" + (" or more repetitions=" if values["measured"] else "")
    why = "timing noise makes {timing_share:.0%} of the variance: " + advice + " would help"
    return _undecided(why, entry, values)


def _best_so_far(why: str, entry: Verdict, values: Values) -> str:
    best = f"the best so far is {_candidate(values)} at {fmt.speedup(entry.speedup)}"
    return f"{why.format(**values)}; {best}, not held out"


def _first_difference(values: Values) -> str:
    return "{prompt_set}/{prompt} K={k} from position {position} on".format(**values)


def _given_numbers(entry: Verdict, values: Values) -> str:
    k, alpha, needed = values["k"], _number(values["alpha"]), _number(values["breakeven_alpha"])
    origin = "measured by the server" if values["measured"] else "by arithmetic"
    reason = f"the best is K={k} at {fmt.speedup(entry.speedup)} {origin}"
    if entry.decision != "speculate" and alpha is not None:
        loses = f"at K={k} even alpha = 1 loses"
        needs = loses if needed is None else f"K={k} needs alpha >= {needed:.2f}"
        reason += f"; {needs}" if needed is None else f"; {needs} and has {alpha:.2f}"
    if entry.decision == "undecided":
        near = f"within {values['near']:.0%} of 1"
        reason += f"; {near}, which numbers without an interval cannot distinguish from it"
    return reason


# Of decisions not to serve a draft, and of given numbers; a gain speaks for itself
VERDICT_REASONS: Mapping[str, Callable[[Verdict, Values], str]] = {
    "held_out_loss": _held_out_loss,
    "interval_spans_one": _interval_spans_one,
    "timing_noise": _timing_noise,
    "near_one": lambda entry, values: _undecided(
        "within {near:.0%} of 1 either way, so more prompts would not change what to do",
        entry,
        values,
    ),
    "too_few_prompts": lambda entry, values: _best_so_far(
        "{prompts} prompts, and below {needed} there is no interval", entry, values
    ),
    "too_few_in_set": lambda entry, values: _best_so_far(
        "prompt set {prompt_set!r} needs at least {needed} prompts that differ", entry, values
    ),
    "no_complete_prompt": lambda _, values: (
        "no prompt is complete in every cell"
        if values["prompt_set"] is None
        else f"prompt set {values['prompt_set']!r} has no prompt complete in every cell"
    ),
    "greedy_texts_differ": lambda _, values: (
        f"{values['differing']} of {values['texts']} greedy texts are not plain decoding's (first:"
        f" {_first_difference(values)}), so the target's cache or a forward is wrong, and no"
        " speedup of this pair is valid"
    ),
    "greedy_texts_unjudged": lambda _, values: (
        f"{values['differing']} of {values['texts']} greedy texts differ from plain decoding's"
        f" (first: {_first_difference(values)}), and the run stopped before it was known whether"
        " these are ties; resume= judges them"
    ),
    "given_numbers": _given_numbers,
}


def _without_verdict(summary: Summary) -> tuple[str, ...]:
    command = summary.run.command
    checks = snapshot_checks(summary)
    if command == "snapshot" and checks:
        return (snapshot(checks),)
    if summary.comparison is not None:
        return comparison.verdicts(summary.comparison)
    if command in DECIDING_COMMANDS:
        return ("No verdict: the run stopped before there was enough to decide on.",)
    return ()


def snapshot_checks(summary: Summary) -> list[CheckResult]:
    """The results of all checks of texts and distributions."""
    return [check.result for check in (*summary.text_checks, *summary.distribution_tests)]


def snapshot_result(results: Sequence[CheckResult]) -> CheckResult:
    """FAIL if any check fails, else OPEN, else TIE if any ties, else PASS."""
    if set(results) == {"UNTESTED"}:
        return "UNTESTED"
    worst_first: tuple[CheckResult, ...] = ("FAIL", "OPEN", "TIE", "PASS")
    return next(result for result in worst_first if result in {*results, "PASS"})


def snapshot(results: Sequence[CheckResult]) -> str:
    """The snapshot's outcome and the number of checks that had each result."""
    outcome = snapshot_result(results)
    rare = (word for word in ("OPEN", "UNTESTED") if word in results)
    counts = ", ".join(f"{results.count(word)} {word}" for word in ("PASS", "TIE", "FAIL", *rare))
    meaning = {
        "PASS": "speculation left the output unchanged",
        "TIE": "the output differs only where two tokens tie within rounding",
        "FAIL": "speculation changed the output",
        "OPEN": "the output differs, and the run stopped before it was known whether that is a tie",
        "UNTESTED": (
            "the target is nearly certain of every token, so no distribution could be tested"
        ),
    }[outcome]
    return f"{outcome}: {meaning} ({len(results)} checks: {counts})."


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None
