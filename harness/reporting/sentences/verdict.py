"""The sentences of a verdict: which draft and K to serve, the reason, and what to do next.

Functions named `of_...` return the verdicts of a command's page, functions named `after_...` its
next step; `reporting.pages` names them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath

from harness import formatting as fmt
from harness.analysis.caveats import Quoted
from harness.analysis.caveats.servers import scores
from harness.analysis.verdict import MOST_TIMES
from harness.command_words import as_typed, command, ks_as_typed
from harness.engine_facts.draft_kinds import kind_of
from harness.engine_facts.engines import OWN, spec_of
from harness.records import GREEDY, first
from harness.reporting import grid, serving_commands
from harness.reporting.sentences import comparison, plan, running, served
from harness.summary import Answer, Caveat, CheckResult, ServedSummary, Summary, VerdictReason
from harness.theory.acceptance_rules import ACCEPTANCE_RULES

NO_ADVICE = "Not a recommendation (dummy weights): "
# Reasons that all cells of a run share
OF_THE_RUN: frozenset[VerdictReason] = frozenset(
    {
        *("too_few_prompts", "no_complete_prompt"),
        *("greedy_texts_differ", "greedy_texts_unjudged"),
    }
)
NOT_PLAIN_TEXTS = frozenset[VerdictReason](("greedy_texts_differ", "server_not_lossless"))
ALONE = "one request at a time"  # the load of the harness's own loop
FEW = 2  # engines that a sentence names
# Times as many prompts that are worth naming where timing is most of the doubt
MORE = 1.5
# Nearer to the alpha that is needed, alpha alone explains no loss
CLOSE = 0.03
# Levels above it have a decimal
NEARLY_ONE = 0.99
# Below it a chance of a gain is as good as even
UNSURE = 0.15
SYNTHETIC_ONLY = "It holds at the synthetic acceptance only."


def of_answers(summary: Summary) -> tuple[str, ...]:
    """The answer, what it rests on and where else it holds, then the refusals of other rows."""
    shown = grid.marked(summary)
    if shown is None:
        return (_no_verdict(summary),)
    synthetic = summary.run.synthetic
    prefix = NO_ADVICE if summary.run.dummies and not synthetic else ""
    more = [_evidence(summary, shown)]
    if summary.served is not None:
        more += [served.not_tried(summary.served), served.under_load(summary.served, shown.answer)]
    else:
        more += [SYNTHETIC_ONLY] if synthetic else []
        more += [_no_engine(summary, shown), _other_engine(summary, shown)]
    answered = f"{prefix}{answer_sentence(shown.answer, grid.larger_to_try(summary))}"
    return (answered, " ".join(filter(None, more)), *_other_refusals(summary, shown))


def _other_engine(summary: Summary, shown: grid.Marked) -> str:
    """The answer of the first engine that was not timed, next to the headline of a timed one.

    Where the headline is of an engine that was not timed, it is the answer of the timed one.
    """
    at = [row for row in grid.rows(summary) if row.temperature == shown.row.temperature]
    other = next((row for row in at if row.answer.timed != shown.answer.timed), None)
    if other is None:
        return ""
    if other.answer.timed:
        answered = answer_sentence(other.answer)
        return f"{_capital(_place(summary, other.answer))}: {answered}"
    if other.answer.round is None:
        return ""
    engines = "another engine" if other.every or len(other.servers) > FEW else other.engines
    it = "it" if other.answer.named == shown.answer.named else other.answer.named[0]
    return f"On {engines} {it} {grid.cost_that_pays(other.answer.round)}."


def _no_engine(summary: Summary, shown: grid.Marked) -> str:
    """The sentence that no engine has the headline's draft, with the best draft that one has."""
    temperature = shown.row.temperature
    if not shown.row.no_engine or not shown.answer.speculates:
        return ""
    board = first(summary.leaderboards, rule=summary.run.sampling.rule, temperature=temperature)
    rows = board.rows if board else ()
    available = (
        row for row in rows if row.draft and grid.engines_with(summary, row.draft, temperature)
    )
    best = next(available, None)
    if best is None:
        return f"No engine here has {shown.answer.draft}."
    return (
        f"No engine here has {shown.answer.draft}; of the drafts that one has, {best.draft} with"
        f" K={best.k} looks fastest, {fmt.gain(best)} predicted."
    )


def _other_refusals(summary: Summary, shown: grid.Marked) -> Iterator[str]:
    """The reasons why other rows have no draft to serve; a reason of the whole run is given once.

    Engines that were not timed have no sentence here: their row in the grid is enough.
    """
    given = {shown.answer.reason}
    for row in grid.rows(summary):
        answer, reason = row.answer, row.answer.reason
        known = shown.row == row or answer.speculates or not answer.timed
        if known or (not shown.answer.timed and row.temperature == shown.row.temperature):
            continue
        if reason not in given & OF_THE_RUN:
            given.add(reason)
            where = f"temperature {fmt.temperature(row.temperature)}, {row.engines}"
            why = _reason(answer)
            apart = "." if why[0].isupper() else ":"
            yield f"{_capital(where)}: {grid.words(answer)}{apart} {why}."


def answer_sentence(answer: Answer, at_edge: Caveat | None = None) -> str:
    """The answer of one engine in one sentence or two: what to do, and how sure that is.

    "Use tiny_good with K=2: 1.33 times as fast (95 %: 1.23 to 1.43). K=4 is as good within error."

    Args:
        at_edge: the caveat that its K is the largest tried.
    """
    if answer.speculates:
        verb = "Use" if answer.source == "measured" else "Try"  # what is predicted is measured next
        use = f"{verb} {pair(*answer.named, answer.p_min)}: {times_as_fast(answer)}"
        larger = " K={k} is the largest tried; try k=[{ks}]."
        return f"{use}.{larger.format(**at_edge.values) if at_edge else _ties(answer)}"
    reason = _reason(answer)
    if answer.chance is not None and answer.gain is not None and answer.decision == "undecided":
        return f"{_odds(answer)} {reason}."
    start = {"does_not_pay": "Do not speculate", "not_measured": "Not measured"}
    return f"{start.get(answer.decision, 'Undecided')}: {reason}."


def so_far(answer: Answer) -> str:
    """The answer while its run goes on: without what would decide it, which may follow."""
    if answer.decision != "undecided":
        return answer_sentence(answer)
    if answer.chance is not None and answer.gain is not None:
        return _odds(answer)
    known = "" if answer.speedup is None else f" ({fmt.speedup(answer.speedup)})"
    return f"Undecided: {pair(*answer.named, answer.p_min)}{known}."


def pair(draft: str | None, k: int, threshold: float | None = None) -> str:
    """A draft with its K, as "tiny_good with K=2" or "B.gguf with K=16 and p_min=0.75"."""
    how = f"K={k}" if threshold is None else f"K={k} and p_min={threshold:g}"
    return how if draft is None else f"{draft} with {how}"


def times_as_fast(answer: Answer) -> str:
    """A speedup with its interval, as "1.33 times as fast (95 %: 1.23 to 1.43)"."""
    value, lo, hi = fmt.bounded(answer)
    if value is None:
        return fmt.EMPTY
    level = answer.reason_values.get("level")
    interval = " (no interval)"
    if lo is not None and hi is not None:
        percent = ""
        if isinstance(level, float):
            percent = f"{100.0 * level:.{int(level > NEARLY_ONE)}f} %: "
        interval = f" ({percent}{lo:.2f} to {hi:.2f})"
    return f"{value:.2f} times as fast{interval}"


def _ties(answer: Answer) -> str:
    """The sentence on what is as fast within the error; "" where nothing is."""
    draft, k = answer.named
    tied = [each for each in answer.candidates if each.tied]
    alike = sorted({(each.k, each.p_min or 0.0) for each in tied if each.draft == draft})
    ks = [each for each, p_min in alike if p_min == (answer.p_min or 0.0)]
    names = [f"K={k}" for k in ks]
    if len(ks) > 2 and ks[-1] - ks[0] == len(ks) - 1:
        names = [f"K={ks[0]} to {ks[-1]}"]
    thresholds = [p_min for each, p_min in alike if each == k and p_min != (answer.p_min or 0.0)]
    names += [f"p_min={p_min:g}" for p_min in thresholds]
    names += dict.fromkeys(str(each.draft) for each in tied if each.draft != draft)
    if not names:
        return ""
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    several = len(names) > 1 or " to " in listed
    return f" {_capital(listed)} {'are' if several else 'is'} as good within error."


def _odds(answer: Answer) -> str:
    """How likely a gain or a loss is, and how large: "Probably not: 95 % likely slower, ..."."""
    chance, gain = answer.chance or 0.0, (answer.speedup or 1.0) - 1.0
    of_pair = pair(*answer.named, answer.p_min)
    if abs(chance - 0.5) < UNSURE:
        return f"Undecided: {of_pair} is as likely slower as faster."
    start, likely, word = "Probably", chance, "faster"
    if chance < 0.5:
        start, likely, word = "Probably not", 1.0 - chance, "slower"
    percent, size = 100.0 * min(likely, 0.99), 100.0 * abs(gain)
    return f"{start}: {of_pair} is {percent:.0f} % likely {word}, by about {size:.0f} %."


def _evidence(summary: Summary, shown: grid.Marked) -> str:
    """What the answer rests on: the engine that was timed, or replay at its round times."""
    answer = shown.answer
    if not answer.timed:
        return ""
    at = f"temperature {fmt.temperature(shown.row.temperature)}"
    load = served.load(summary.served) if summary.served else ALONE
    where = ", ".join((_place(summary, answer), load, at))
    if answer.visits is not None:
        where += f" (in {answer.visits.timed} of {answer.visits.asked} visits)"
    if any(caveat.code == "embedded_models" for caveat in summary.caveats):
        where = f"with toy models {where}"
    if answer.source != "measured":
        rule = "" if answer.temperature == GREEDY else _rule(answer)
        return f"Predicted{rule} {where}."
    timed = f"Timed {where}."
    named = next((each for each in answer.by_k if each.k == answer.named[1]), None)
    if answer.pairs is None or named is None or named.predicted is None:
        return timed
    leads = max(answer.by_k, key=lambda each: each.predicted or 0.0)
    changed = f" By now K={leads.k} is predicted faster."
    part = answer.pairs
    of_all = f"{part.measured} of " if part.measured < part.prompts else ""
    return (
        f"{timed} Predicted {fmt.speedup(named.predicted)}, measured on {of_all}"
        f"{fmt.number_of(part.prompts, 'prompt', 'prompts')}."
        f"{'' if leads == named or leads.tied else changed}"
    )


def _rule(answer: Answer) -> str:
    return f" (where {ACCEPTANCE_RULES[answer.rule].phrase})" if answer.rule else ""


def _place(summary: Summary, answer: Answer) -> str:
    """The engine of an answer, as "on your server (llama.cpp)"."""
    if answer.engine is None:
        return f"at {grid.GIVEN}"
    spec = spec_of(answer.engine)
    if summary.served is not None:
        if spec != OWN and not summary.served.commands:
            return f"on your server ({spec.title})"
        from_wheel = spec.wheel and summary.served.version.startswith(spec.wheel)
        return f"on {spec.title}{f' (the Python wheel {spec.wheel})' if from_wheel else ''}"
    if answer.run is not None:
        return f"on {spec.title}, predicted by the round times of {PurePath(answer.run).name}"
    return f"on {spec.title if spec == OWN else spec.in_headlines}"


def _not_timed(entry: Answer, values: Quoted) -> str:
    if entry.round is None:
        return "nor is it known what its rounds would emit"
    return f"{_candidate(values)} {grid.cost_that_pays(entry.round)}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def verdict(entry: Answer, source: str = "the numbers given") -> str:
    """The verdict of a break-even in one sentence: the decision, its reason and its source."""
    answer = {"speculate": "Serve the draft at K={k}", "undecided": "Undecided"}
    start = answer.get(entry.decision, "Do not speculate").format(k=entry.k)
    interval = "no interval" if entry.speedup_lo is None else "interval by the number of requests"
    return f"{start}: {_reason(entry)} (from {source}, {interval})."


def gain(summary: Summary) -> str | None:
    """The alpha that speculation needs and the largest possible speedup; None without times."""
    if not summary.ceilings:
        return None
    typed = any(times.source == "typed" for times in summary.round_times)
    speculation = "With these step times speculation" if typed else f"Speculation on {OWN.title}"
    most = max(summary.ceilings, key=lambda ceiling: ceiling.ideal_speedup)
    possible = [entry for entry in summary.ceilings if entry.breakeven_alpha is not None]
    if not possible:
        return (
            f"{speculation} cannot pay: even if every draft token were accepted,"
            f" K={most.k} would give {fmt.speedup(most.ideal_speedup)}."
        )
    easiest = min(possible, key=lambda ceiling: (ceiling.breakeven_alpha or 0.0, ceiling.k))
    return (
        f"{speculation} needs an alpha above {easiest.breakeven_alpha:.2f} (K={easiest.k}) and"
        f" gives at most {fmt.speedup(most.ideal_speedup)} (K={most.k}, every draft token"
        " accepted)."
    )


def _reason(entry: Answer) -> str:
    return VERDICT_REASONS[entry.reason](entry, entry.reason_values)


def _candidate(values: Quoted) -> str:
    return pair(values["draft"], values["k"], values.get("p_min"))


def _held_out_loss(entry: Answer, values: Quoted) -> str:
    loss = f"{_candidate(values)}, the best tried, is {times_as_fast(entry)}"
    alpha, needed = values["alpha"], values["breakeven_alpha"]
    if alpha is None:
        return loss
    if needed is None:
        return f"{loss}; alpha is {alpha:.2f}"
    if alpha < needed - CLOSE:
        return f"{loss}; alpha {alpha:.2f} is below the {needed:.2f} it needs"
    return (
        f"{loss}; alpha {alpha:.2f} would do on evenly hard text, which needs {needed:.2f}: uneven"
        " text, cut rounds or slower rounds than predicted cost the rest"
    )


def _undecided(why: str, _: Answer, values: Quoted) -> str:
    return _capital(why.format(**values))


def _interval_spans_one(entry: Answer, values: Quoted) -> str:
    why = f"{{prompts}} prompts do not decide it, nor would {MOST_TIMES} times as many"
    if values["prompts_needed"] is not None:
        why = f"{{prompts}} prompts are too few; try {_prompts_needed(values)} or more"
    return _undecided(why, entry, values)


def _prompts_needed(values: Quoted) -> str:
    """The prompts that would decide, as "300, 150 of them measured,"."""
    needed, pairs = values["prompts_needed"], values.get("pairs_needed")
    return f"{needed:,}" if pairs in (None, needed) else f"{needed:,}, {pairs:,} of them measured,"


def _timing_noise(entry: Answer, values: Quoted) -> str:
    more = ""
    needed = values.get("prompts_needed")
    if needed and needed >= MORE * values["prompts"]:
        more = f", or with about {_prompts_needed(values)} prompts"
    why = "most of the doubt is timing noise; repeat on a quiet machine" + more
    return _undecided(why, entry, values)


def _too_few(entry: Answer, values: Quoted) -> str:
    prompts = fmt.number_of(values["prompts"], "prompt is", "prompts are")
    return (
        f"{prompts} too few; try {values['needed']} or more"
        f" ({_candidate(values)}: {fmt.speedup(entry.speedup)} so far)"
    )


def _first_difference(values: Quoted) -> str:
    return "{prompt_set}/{prompt} K={k} from position {position} on".format(**values)


def _given_numbers(entry: Answer, values: Quoted) -> str:
    k, alpha, needed = values["k"], values["alpha"], values["breakeven_alpha"]
    origin = "measured by the server" if values["measured"] else "by arithmetic"
    reason = f"{fmt.gain(entry)} {origin}"
    if entry.decision != "speculate":
        reason = f"K={k}, the best, gives {reason}"
    if entry.decision != "speculate" and alpha is not None:
        needs = "" if needed is None else f"it needs alpha >= {needed:.2f} and has {alpha:.2f}"
        reason += f"; {needs or 'even alpha = 1 loses'}"
    requests, least = values.get("requests"), values.get("needed")
    if requests is not None:
        floor = "" if least is None else f", and below {least} there is no interval"
        reason += f"; {requests} requests do not decide it{floor}"
    elif entry.decision == "undecided":
        near = f"within {values['near']:.0%} of 1"
        reason += f"; {near}, which numbers without an interval cannot distinguish from it"
    return reason


def _impossible_speedup(_: Answer, values: Quoted) -> str:
    return (
        f"{fmt.speedup(values['speedup'])} at K={values['k']} on {values['prompt_set']}"
        " prompts is more than its rounds emit, so timings here cannot be right; measure again on a"
        " quiet machine"
    )


VERDICT_REASONS: Mapping[str, Callable[[Answer, Quoted], str]] = {
    "held_out_gain": lambda entry, _: times_as_fast(entry),
    "held_out_loss": _held_out_loss,
    "interval_spans_one": _interval_spans_one,
    "timing_noise": _timing_noise,
    "near_one": partial(
        _undecided, "within {near:.0%} of 1 either way, so more prompts would not change what to do"
    ),
    "too_few_prompts": _too_few,
    "no_complete_prompt": lambda _, values: (
        "no prompt was measured at every K"
        if values["prompt_set"] is None
        else f"prompt set {values['prompt_set']!r} has no prompt that was measured at every K"
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
    "server_not_lossless": lambda _, values: (
        f"the server's texts at K={values['k']} are not those of lossless sampling"
        f" ({scores(values)}), so its speed does not count"
    ),
    "drafts_not_compared": lambda _, values: (
        f"plain decoding took {fmt.in_ms(values['slow_s'])} ms a token next to {values['slow']} and"
        f" {fmt.in_ms(values['fast_s'])} ms next to {values['fast']}, so the machine's pace may"
        " have ranked the drafts; repeat on a quiet machine"
    ),
    "impossible_speedup": _impossible_speedup,
    "given_numbers": _given_numbers,
    "not_timed": _not_timed,
    "nothing_accepted": lambda *_: (
        "no drafted token was ever accepted, and a round costs a plain token at least"
    ),
}


def _no_verdict(summary: Summary) -> str:
    """The reason why there is no answer for the engine that was asked for."""
    if summary.answers and summary.run.serve_on:
        server, own = spec_of(summary.run.serve_on).in_headlines, summary.answers[0]
        return (
            f"Not known for {server}: this run has no tokens per round by its acceptance rule, of"
            f" a draft that it has. {_capital(_place(summary, own))}: {answer_sentence(own)}"
        )
    if summary.served is not None and summary.run.status == "complete":
        lacking = "the records do not say what decoding took"
        if all(row.k for row in summary.results):
            lacking = "no file decodes plainly; add the plain server's records to records="
        return f"No verdict: {lacking}."
    return "No verdict: the run stopped before there was enough to decide on."


def of_times(summary: Summary) -> tuple[str, ...]:
    """The verdict on a given acceptance, then what speculation needs and could give at most."""
    decided = () if summary.headline is None else (verdict(summary.headline),)
    possible = gain(summary)
    return decided if possible is None else (*decided, possible)


def of_checks(summary: Summary) -> tuple[str, ...]:
    """The outcome of a snapshot; empty where nothing was checked."""
    checks = snapshot_checks(summary)
    if not checks:
        return ()
    return (snapshot(checks, _checked(summary), bool(summary.distribution_tests)),)


def of_counters(summary: Summary) -> tuple[str, ...]:
    """The counters of a running server, and which K pays where times of rounds are known."""
    if summary.running is None:
        return ()
    source = "the counters and the times given"
    decision = None if summary.headline is None else verdict(summary.headline, source)
    return running.verdicts(summary, summary.running, decision)


def of_a_plan(summary: Summary) -> tuple[str, ...]:
    """The choice that meets the goal, and its number of cards."""
    if summary.plan is None:
        return ()
    return plan.verdicts(summary.plan, disturbed=plan.banner(summary) is not None)


def of_a_comparison(summary: Summary) -> tuple[str, ...]:
    """A sentence for each compared run."""
    return () if summary.comparison is None else comparison.verdicts(summary.comparison)


def snapshot_checks(summary: Summary) -> list[CheckResult]:
    """The results of all checks of texts and distributions."""
    return [check.result for check in (*summary.text_checks, *summary.distribution_tests)]


def snapshot_result(results: Sequence[CheckResult]) -> CheckResult:
    """FAIL if any check fails, else OPEN, else UNJUDGED, else TIE if any ties, else PASS."""
    if set(results) == {"UNTESTED"}:
        return "UNTESTED"
    worst_first: tuple[CheckResult, ...] = ("FAIL", "OPEN", "UNJUDGED", "TIE", "PASS")
    return next(result for result in worst_first if result in {*results, "PASS"})


def _checked(summary: Summary) -> str:
    """The cells that a snapshot checked, as "on the harness's loop, K=4, temperature 0"."""
    tests = summary.distribution_tests
    ks = sorted({check.k for check in (*summary.text_checks, *tests)})
    temperatures = {test.temperature for test in tests} | {GREEDY for _ in summary.text_checks[:1]}
    at = " and ".join(map(fmt.temperature, sorted(temperatures)))
    return f"on {OWN.title}, K={', '.join(map(str, ks))}, temperature {at}"


def snapshot(results: Sequence[CheckResult], where: str, sampled: bool) -> str:
    """The outcome of a snapshot, the cells that it checked, and the number of checks by result.

    `sampled` is whether distributions were tested: such a test may miss a difference.
    """
    outcome = snapshot_result(results)
    rare = (word for word in ("OPEN", "UNJUDGED", "UNTESTED") if word in results)
    counts = ", ".join(f"{results.count(word)} {word}" for word in ("PASS", "TIE", "FAIL", *rare))
    meaning = {
        "PASS": (
            "the tests that were possible found no difference from the target's output"
            if "UNTESTED" in results
            else "no difference from the target's output was found"
            if sampled
            else "speculation left the output unchanged"
        ),
        "TIE": "the output differs only where two tokens tie within rounding",
        "FAIL": "speculation changed the output",
        "OPEN": "the output differs, and the run stopped before it was known whether that is a tie",
        "UNJUDGED": (
            "the output differs, in a mixture of experts whose routing ties in 16 bits may do that"
            " as well as a fault"
        ),
        "UNTESTED": (
            "the target is nearly certain of every token, so no distribution could be tested"
        ),
    }[outcome]
    checks = fmt.number_of(len(results), "check", "checks")
    return f"{outcome}: {meaning} ({where}; {checks}: {counts})."


@dataclass(frozen=True)
class NextStep:
    """The next step of a report, with the command that does it where there is one."""

    text: str
    command: str = ""  # quoted for a shell


AUDITION = "an audition looks for a draft that pays"
OTHER_DRAFTS = NextStep("name other drafts (drafts=[...])")
OTHER_DRAFT = NextStep("measure another draft on this server (draft=...)")


def nothing_next(_: Summary) -> None:
    """No next step."""


def after_arithmetic(summary: Summary) -> NextStep | None:
    """A sweep, which measures alpha; None where no alpha would pay."""
    if not any(ceiling.breakeven_alpha is not None for ceiling in summary.ceilings):
        return None
    pair = command("sweep", "model=ORG/TARGET", "draft=ORG/DRAFT")
    return NextStep("a sweep measures alpha for a pair", pair)


def after_counters(summary: Summary) -> NextStep | None:
    """The times of rounds, which say which K pays; None where they are known."""
    if summary.running is None or summary.round_times or not summary.from_acceptance:
        return None
    asked = command("report", "metrics=URL", "latency_from=SERVER_RUN")
    return NextStep("the round times of a run say which K pays", asked)


def after_a_profile(summary: Summary) -> NextStep:
    """A sweep of the pair, which measures its alpha."""
    draft = summary.run.draft
    pair = None if draft is None else serving_commands.draft_keys(summary, draft)
    sweep = "" if pair is None else _sweep(summary, *pair)
    return NextStep("a sweep measures whether alpha is that high", sweep)


def after_answers(summary: Summary) -> NextStep | None:
    """The next step after the headline's answer; None where it is open or needs none."""
    answer = _decided(summary)
    if answer is None:
        return None
    if answer.decision == "does_not_pay":
        return _other_draft(summary)
    if summary.served is not None:
        again = "serve your own requests so (prompts.files=[...] measures with them)"
        return None if summary.run.own_prompts else NextStep(again)
    timed_elsewhere = answer.run is not None or serving_commands.served_target(summary) is not None
    if answer.source != "measured" and timed_elsewhere:
        return _measured_there(summary, answer)
    if any(each.measure for each in serving_commands.snippets_of(summary)):
        return None
    if answer.source != "measured":
        return NextStep("the same sweep with mode=measure measures what is predicted")
    if summary.run.own_prompts:
        return None
    return NextStep("run your own requests with this draft and without it, and compare")


def after_an_audition(summary: Summary) -> NextStep | None:
    """The measurement of what an audition predicts, or other drafts where none pays."""
    answer = _decided(summary)
    if answer is None:
        return None
    if answer.decision == "does_not_pay":
        return OTHER_DRAFTS
    if answer.source == "measured":
        return None
    if answer.run is not None or serving_commands.served_target(summary) is not None:
        return _measured_there(summary, answer)
    pair = serving_commands.draft_keys(summary, str(answer.draft))
    if pair is None:
        return None
    rule = "" if answer.temperature == GREEDY else as_typed("decode.rule", answer.rule)
    keys = (*pair, *_drafting(answer), as_typed("p_min", [answer.p_min]) if answer.p_min else "")
    return NextStep("measure it", _sweep(summary, *keys, rule))


def _decided(summary: Summary) -> Answer | None:
    """The headline's answer; None where it is open or the weights are random."""
    shown = grid.marked(summary)
    if shown is None or summary.run.dummies:
        return None
    open_ = shown.answer.decision in ("undecided", "not_measured")
    return None if open_ else shown.answer


def _other_draft(summary: Summary) -> NextStep:
    """An audition of other drafts, at the measured server's costs where these hold for them."""
    keys = (
        *serving_commands.model_keys(summary),
        "drafts=auto",
        *serving_commands.other_keys(summary),
    )
    measured = summary.served
    if any(model.weights == "gguf" for model in summary.run.models):
        return OTHER_DRAFT  # an audition takes checkpoints
    if measured is not None and measured.costs and measured.engine != OWN.name:
        # The costs of rounds with a look-up or a head do not hold for another kind of draft
        if kind_of(summary.run.draft, summary.run.models) not in ("model", "copy"):
            return OTHER_DRAFT
        keys = (*keys, *_at_its_costs(summary, measured))
    return NextStep(AUDITION, command("audition", *keys))


def _measured_there(summary: Summary, answer: Answer) -> NextStep | None:
    """The measurement on the server whose round times or texts a prediction is from, if any."""
    if answer.run is not None:
        measure = serving_commands.measure_command(summary, str(answer.engine), answer)
        return None if measure is None else NextStep("measure what is predicted", measure)
    served_by = serving_commands.served_target(summary)
    if served_by is None:
        return None
    keys = (as_typed("engine", served_by), *_drafting(answer), serving_commands.ATTACHED)
    others = serving_commands.other_keys(summary, serving_commands.OF_THE_LOOP)
    measure = command("server", *keys, "score=false", *others)
    return NextStep("start its server with this draft too, and measure both", measure)


def _drafting(answer: Answer) -> tuple[str, str]:
    """The keys of an answer's K, those within reach, and its temperature."""
    return ks_as_typed(answer.within_reach), as_typed("temperature", answer.temperature)


def _at_its_costs(summary: Summary, measured: ServedSummary) -> tuple[str, ...]:
    """The keys of an audition at a server run's costs: the K and temperatures that it timed."""
    lossy = {
        answer.temperature
        for answer in summary.answers
        if answer.engine == measured.engine and answer.reason in NOT_PLAIN_TEXTS
    }
    costs = [each for each in measured.costs if each.temperature not in lossy] or measured.costs
    # The K that were timed at every temperature
    ks = sorted(set.intersection(*({k for k in each.round_s if k} for each in costs)))
    return (
        as_typed("k", ks),
        as_typed("temperature", [each.temperature for each in costs]),
        as_typed("latency_from", summary.run.folder),
    )


def _sweep(summary: Summary, *keys: str) -> str:
    target, others = serving_commands.model_keys(summary), serving_commands.other_keys(summary)
    return command("sweep", *target, *keys, *others)
