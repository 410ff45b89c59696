"""What to paste into a server: one line per engine for the draft and K of its cell of the grid.

The first line is that of the marked cell (`harness.reporting.grid`); the others are those of the
other engines at the same temperature. An engine without a cell in the grid was not replayed: it
gets the marked cell's draft and K, and its speedup is not known. Round times are always this run's.

Each engine's syntax is in its module of `harness.serving`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.records import first, grouped, where
from harness.reporting import formatting as fmt
from harness.reporting import grid
from harness.reporting.grid import Marked
from harness.serving.drafts import DRAFTS, DraftKind, kind_of
from harness.serving.engines import ENGINES, OWN, drafts_alike, spec_of, with_lines
from harness.serving.spec import EngineSpec, PairToServe, changes
from harness.summary import Answer, Schedule, ServedSummary, Summary

ROUND_TIMES = ", at this run's round times"


@dataclass(frozen=True)
class Snippet:
    """What to paste, and what to know of it."""

    title: str  # for whom: the engine, and the version whose syntax it is
    code: str  # the text to paste, line breaks included; empty where there is nothing to paste
    # Whole sentences on it: the speedup under the engine's own rule, caveats.
    notes: tuple[str, ...] = ()
    language: str = "sh"  # of the code, as a code host names it
    measured: str = ""  # what the measurement used, where that is known and is not the code


@dataclass(frozen=True)
class Card:
    """Lines of engines of which the same is said."""

    known: str  # what is known of the speedup: one sentence for all of them; "" for a single one
    notes: tuple[str, ...]  # what several of them share beyond it, each with their names
    snippets: tuple[Snippet, ...]  # each with the notes that it has alone


def cards_of(snippets: Sequence[Snippet]) -> tuple[Card, ...]:
    """The lines to paste, those that share their first sentence together."""
    pasted = [snippet for snippet in snippets if snippet.code]
    by_sentence = grouped(pasted, lambda snippet: "".join(snippet.notes[:1]))
    return tuple(_card(known, group) for known, group in by_sentence.items())


def without_line(snippets: Sequence[Snippet]) -> dict[str, list[str]]:
    """What is said of engines that have nothing to paste, each sentence with their names."""
    return _titles((snippet, snippet.notes) for snippet in snippets if not snippet.code)


def _titles(noted: Iterable[tuple[Snippet, Sequence[str]]]) -> dict[str, list[str]]:
    """Of each note, the titles of the snippets that it is of."""
    pairs = [(note, snippet.title) for snippet, notes in noted for note in notes]
    groups = grouped(pairs, lambda pair: pair[0])
    return {note: [title for _, title in group] for note, group in groups.items()}


def _card(known: str, snippets: Sequence[Snippet]) -> Card:
    if len(snippets) == 1:
        return Card("", (), tuple(snippets))
    who = _titles((snippet, snippet.notes[1:]) for snippet in snippets)
    shared = {note: titles for note, titles in who.items() if len(titles) > 1}
    return Card(
        known,
        tuple(
            note if len(titles) == len(snippets) else f"{', '.join(titles)}: {note}"
            for note, titles in shared.items()
        ),
        tuple(
            replace(entry, notes=tuple(note for note in entry.notes[1:] if note not in shared))
            for entry in snippets
        ),
    )


REMOVED = Snippet(
    "mistral.rs",
    "",
    ("draft models were removed after v0.8.0; the old setting was [speculative] gamma = K.",),
)
UNKNOWN = (
    "The kind of draft {draft} is not known: name it with drafts=[{draft}@FOLDER@kind:eagle3] or"
    " what it is (docs/scores.md)."
)
UNKNOWN_SERVED = "The records do not say what the draft is, so there is no line for its server."
NO_ENGINE = "No engine here has this draft and proposes the same tokens with it."
TOYS = "These names are of models that ship with this package or have random weights: put your own."


def snippets_of(summary: Summary) -> tuple[Snippet, ...]:
    """What to serve: the marked cell's line, then the other engines' at the same temperature."""
    shown = grid.marked(summary)
    if summary.run.command not in grid.DECIDING_COMMANDS or shown is None:
        return ()
    if summary.served is not None:
        return (*_measured_server(summary, summary.served, shown), *schedule_snippets(summary))
    marked = _line(summary, shown, shown.server)
    marked = replace(marked, notes=(*marked.notes, *_toys(summary)))
    # At temperature 0 a variant drafts as its engine does
    greedy = shown.row.temperature == 0
    others: list[Snippet] = []
    for server, spec in with_lines().items():
        if server == shown.server or (greedy and spec.variant_of is not None):
            continue
        line = _line(summary, shown, server)
        # A variant has its engine's line for a look-up, whose tokens are chosen
        if not line.code or line.code not in {other.code for other in (marked, *others)}:
            others.append(line)
    if not shown.row.speculates:
        return (marked, *(line for line in others if line.code))
    kind = kind_of(shown.row.answer.draft, summary.run.models)
    removed = (REMOVED,) if kind == "model" else ()
    return (marked, *others, *_validation(summary, shown), *removed)


def _toys(summary: Summary) -> tuple[str, ...]:
    toys = _target(summary).startswith("embedded:") or summary.run.dummies
    return (TOYS,) if toys else ()


def _measured_server(summary: Summary, served: ServedSummary, shown: Marked) -> tuple[Snippet, ...]:
    """The server that was measured; other engines' speed is not known from it."""
    if served.commands:
        return (_measured_command(summary, served, shown),)
    engine = spec_of(served.engine)
    if not engine.lines:
        return ()
    title = f"For {shown.phrase} ({_version(served)})"
    answer = shown.row.answer
    pasted = _served(summary, answer.draft, answer.k, answer.temperature)
    pasted = replace(pasted, rule=served.rule)
    if not shown.row.speculates:
        return (_without_draft(engine, pasted, title),)
    if pasted.kind == "unknown":
        return (Snippet(title, "", (UNKNOWN_SERVED,)),)
    pasted = _on(engine, pasted)
    known = (_measured(answer, served), _requests(pasted), *_only_here(served, answer))
    line = engine.lines[pasted.kind]
    more = (*filter(None, (line.note,)), *line.more(pasted), *_toys(summary))
    syntax = f"The line has the syntax of {_titled(engine)}."
    notes = (*known, *more, *(() if engine.version == served.version else (syntax,)))
    return (Snippet(title, line.line(pasted), notes, engine.language),)


def _measured_command(summary: Summary, served: ServedSummary, shown: Marked) -> Snippet:
    """What to serve; where nothing is decided the plain server, and the K to try."""
    commands = {each.k: each for each in served.commands if each.slots == 1}
    answer, version = shown.row.answer, _version(served)
    notes: list[str] = []
    title, heads = f"For {shown.phrase} ({version})", {0: ""}
    best = answer.reason_values.get("k")
    changed = served.not_lossless(answer.temperature)
    if shown.row.speculates:
        pasted = _served(summary, answer.draft, answer.k, answer.temperature)
        notes += [_measured(answer, served), _requests(pasted), *_only_here(served, answer)]
        heads = {answer.k: ""}
    elif answer.decision == "undecided" and isinstance(best, int) and not changed:
        heads = {0: "# until it is decided\n"}
        heads |= {best: f"# to try K={best}\n"} if best in commands else {}
    else:
        title = f"{title}, without a draft"
    flags = spec_of(served.engine).in_production
    code = "\n".join(f"{h}{commands[k].production or commands[k].line}" for k, h in heads.items())
    measured = "\n".join(f"{head}{commands[k].line}" for k, head in heads.items())
    as_measured = code == measured  # of an earlier version
    if flags and as_measured:
        notes.append(f"It was measured as it stands; in production give {flags} what you need.")
    elif flags:
        notes.append(
            f"It leaves {flags} to the engine: give those that your requests need. The"
            " measurement's are those of this run's requests."
        )
    return Snippet(title, code, tuple(notes), measured="" if as_measured else measured)


def _only_here(served: ServedSummary, answer: Answer) -> Sequence[str]:
    """That a K is not lossless at another temperature than it is served for."""
    others = dict.fromkeys(gate.temperature for gate in served.gates)
    changed = [t for t in others if answer.k in served.not_lossless(t)]
    if not changed:
        return ()
    temperatures = ", ".join(map(fmt.temperature, changed))
    return (
        f"At temperature {temperatures} K={answer.k} is not lossless: send it no such request.",
    )


def _version(served: ServedSummary) -> str:
    """The engine and its version, as it answered."""
    told = served.version if served.version != "unknown" else "of unknown version"
    return f"{spec_of(served.engine).title} {told}"


def _measured(answer: Answer, served: ServedSummary) -> str:
    return f"{fmt.gain(answer)}, measured on held-out prompts on {_version(served)}."


def _line(summary: Summary, shown: Marked, server: str) -> Snippet:
    """A server's line at the marked temperature."""
    if server == OWN.name:
        return Snippet(f"For {shown.phrase}", "", (NO_ENGINE,))
    engine = ENGINES[server]
    at_temperature = where(summary.answers, temperature=shown.row.temperature, prompt_set="all")
    answers = {name: answer for answer in at_temperature for name in answer.servers}
    answer = answers.get(server)
    is_marked = server == shown.server
    title = f"{_titled(engine)}{engine.line_title}"
    if is_marked:
        title = f"For {shown.phrase} ({_titled(engine)})"
    chosen = answer or shown.row.answer
    served = _served(summary, chosen.draft, chosen.k, chosen.temperature, answers)
    served = replace(served, rule=engine.rule)
    if chosen.decision == "speculate":
        lacking = kind_of(shown.row.answer.draft, summary.run.models)
        said = "" if lacking in (*engine.lines, "unknown") else not_available(lacking)
        if served.kind not in engine.lines:
            unknown = UNKNOWN.format(draft=served.draft)
            return Snippet(title, "", (unknown if served.kind == "unknown" else said,))
        snippet = _snippet(engine, served, title, answers)
        if not said:
            return snippet
        known, *notes = snippet.notes
        return replace(snippet, notes=(f"{said} Of what it has: {known}", *notes))
    if answer is None:
        return Snippet(title, "")
    if is_marked:
        return _without_draft(engine, served, title)
    return Snippet(title, "", ("Without a draft: none is known to pay on it.",))


def _snippet(
    engine: EngineSpec, served: PairToServe, title: str, answers: Mapping[str, Answer]
) -> Snippet:
    """A server's line for a draft of a kind that it has."""
    entry = engine.lines[served.kind]
    requests = _requests(served) if engine.sampling_in_requests else ""
    notes = (
        _known(engine, served, answers.get(engine.name)),
        *filter(None, (requests, entry.note)),
        *entry.more(served),
    )
    return Snippet(title, entry.line(served), notes, engine.language)


def _target(summary: Summary) -> str:
    target = first(summary.run.models, role="target")
    return (target and target.id) or summary.run.model or "TARGET"


def _served(
    summary: Summary,
    draft: str | None,
    k: int,
    temperature: float,
    answers: Mapping[str, Answer] | None = None,
) -> PairToServe:
    target, facts = _target(summary), summary.run.facts_of(draft)
    return PairToServe(
        target=target,
        draft=(facts and facts.id) or draft or "DRAFT",
        k=k,
        temperature=temperature,
        sampling=summary.run.sampling,
        synthetic=summary.run.synthetic,
        kind=kind_of(draft, summary.run.models),
        layers=facts and facts.layers,
        gains={
            server: f"{fmt.speedup(answer.speedup)} at K={answer.k}"
            for server, answer in (answers or {}).items()
            if answer.decision == "speculate"
        },
    )


def _on(engine: EngineSpec, served: PairToServe) -> PairToServe:
    """As a draft model where the engine has no line for the kind."""
    return served if served.kind in engine.lines else replace(served, kind="model")


def _without_draft(engine: EngineSpec, served: PairToServe, title: str) -> Snippet:
    """The target alone, where the headline says so."""
    code = engine.plain(served)
    file = f"TARGET.gguf stands for your conversion of {served.target}."
    notes = (file,) if engine.reads_gguf else ()
    return Snippet(f"{title}, without a draft", code, notes, engine.language)


def _validation(summary: Summary, shown: Marked) -> Sequence[Snippet]:
    """Engines with random weights and the run's acceptance, for their latency alone."""
    rule = summary.run.sampling.rule
    answers = where(summary.answers, temperature=shown.row.temperature, prompt_set="all")
    chosen = first(answers, rule=rule)
    if chosen is None or chosen.decision != "speculate":
        return ()
    rates = _acceptance(summary, chosen)
    served = _served(summary, chosen.draft, chosen.k, chosen.temperature)
    if len(rates) < chosen.k or served.kind != "model":
        return ()
    rounded = [round(rate, 4) for rate in rates[: served.k]]
    origin = "that was set for this run" if served.synthetic else "of this run"
    note = (
        f"Random weights with the acceptance {origin}, position by position: its latency is real,"
        " its text is not."
    )
    return tuple(
        Snippet(
            f"{_titled(engine)}, to check the speedup on your server without the weights",
            engine.check_line(served, rounded),
            (note,),
        )
        for engine in with_lines().values()
        if engine.check_line is not None
    )


def _acceptance(summary: Summary, chosen: Answer) -> tuple[float, ...]:
    """Unconditional acceptance by position at an answer's K; measured before replayed."""
    cell = {"draft": chosen.draft, "temperature": chosen.temperature, "k": chosen.k}
    entries = where(summary.acceptance_by_position, prompt_set="all", **cell)
    entries.sort(key=lambda entry: entry.source != "measured")
    return entries[0].non_increasing if entries else ()


# ---- K by load -----------------------------------------------------------------------------------


def schedule_snippets(summary: Summary) -> tuple[Snippet, ...]:
    """K by load at each temperature, as the measured engine takes it; of one load there is none."""
    served = summary.served
    if served is None or not spec_of(served.engine).lines:
        return ()
    return tuple(
        _schedule_snippet(summary, schedule, served)
        for schedule in served.schedules
        if len(schedule.entries) > 1
    )


def _schedule_snippet(summary: Summary, schedule: Schedule, measured: ServedSummary) -> Snippet:
    engine = ENGINES[measured.engine]
    k_by_load = {entry.low: entry.k for entry in schedule.entries}
    largest_k = max(k_by_load.values())
    # Of the servers that had room for the load; none of servers that the run attached to
    slots = max((each.slots for each in measured.commands), default=0)
    started = {each.k: each for each in measured.commands if each.slots == slots}
    commands = {k: command.production or command.line for k, command in started.items()}
    chosen = (largest_k,) if engine.schedule is not None else sorted({*k_by_load.values()})
    used = "\n".join(started[k].line for k in chosen if k in started)
    version = _version(measured)
    title = f"K by concurrency at temperature {fmt.temperature(schedule.temperature)} ({version})"
    ties = [
        f"At concurrency {entry.concurrency} K={entry.k} is a tie with"
        f" {', '.join(f'K={k}' for k in entry.tied)}."
        for entry in schedule.entries
        if entry.tied
    ]
    if largest_k == 0:
        unpaid = "Serve the target without a draft at every load."
        return Snippet(title, commands.get(0, ""), (unpaid, *ties), measured=used)
    facts = summary.run.facts_of(summary.run.draft)
    pasted = _served(summary, summary.run.draft, largest_k, schedule.temperature)
    pasted = _on(engine, replace(pasted, draft=(facts and facts.id) or "DRAFT"))
    largest = max(entry.concurrency for entry in schedule.entries)
    notes = [*ties, *engine.schedule_notes(k_by_load, largest)]
    if engine.schedule is not None:
        code = engine.schedule(pasted, commands, k_by_load, largest)
        return Snippet(title, code, tuple(notes), measured=used)
    one_k = f"{engine.title} has one K per server: take that of the expected concurrency."
    code = _server_per_k(engine, pasted, commands, changes(k_by_load), schedule.entries[-1].high)
    return Snippet(title, code, (one_k, *notes), engine.language, used)


def _server_per_k(
    engine: EngineSpec,
    served: PairToServe,
    commands: Mapping[int, str],
    k_by_load: Mapping[int, int],
    largest: int | None,
) -> str:
    """A server for each K, below the loads that it is for, up to the largest that has one."""
    lines: list[str] = []
    ends = [*[*k_by_load][1:], None if largest is None else largest + 1]
    for (low, k), after in zip(k_by_load.items(), ends, strict=True):
        load = f"{low} and more"
        if after is not None:
            load = f"{low}" if after == low + 1 else f"{low} to {after - 1}"
        unmeasured = "# without a draft"
        if k:
            unmeasured = engine.lines[served.kind].line(replace(served, k=k))
        lines += [f"# concurrency {load}", commands.get(k, unmeasured)]
    return "\n".join(lines)


def _titled(engine: EngineSpec) -> str:
    return " ".join(filter(None, (engine.title, engine.version)))


def _known(engine: EngineSpec, served: PairToServe, answer: Answer | None) -> str:
    """What is known of an engine's speedup, as a sentence."""
    if not drafts_alike(engine.name, served.kind, served.temperature):
        return "Its speedup is not known: it proposes other tokens than this run's look-up."
    stopped = served.sampling.stop_threshold is not None and engine.rule == served.sampling.rule
    if stopped and not engine.stops_early and not served.synthetic:
        return "Its speedup is not known: the run stopped drafting early, it does not."
    if answer is None:
        return "Its speedup is not known: this run did not replay its acceptance rule."
    if served.synthetic:
        return (
            f"{fmt.gain(answer)} at the synthetic acceptance of this run; what this engine would"
            " accept is not known."
        )
    source = grid.SOURCES[answer.source]
    return f"{fmt.gain(answer)}, {source} on held-out prompts{ROUND_TIMES}."


def _requests(served: PairToServe) -> str:
    """Which requests the speedup is of, for an engine whose requests say how to sample."""
    sampling = served.sampling
    penalty = sampling.repetition_penalty
    penalised = "" if penalty is None else f" and repetition_penalty {penalty:g}"
    if served.temperature == 0:
        return f"For requests that set temperature 0{penalised}."
    min_p = "" if sampling.min_p is None else f", min_p {sampling.min_p:g}"
    top_k, top_p = (
        f"no {name}" if value is None else f"{name} {value:g}"
        for name, value in (("top_k", sampling.top_k), ("top_p", sampling.top_p))
    )
    return (
        f"For requests that set temperature {fmt.temperature(served.temperature)}, {top_k} and"
        f" {top_p}{min_p}{penalised}."
    )


def not_available(kind: DraftKind) -> str:
    """What is said of an engine that has no such drafting."""
    if kind == "copy":
        return (
            "Not available here: engines make no copy of the target; convert one, and serve it as"
            " a draft model."
        )
    return f"Not available here: no {DRAFTS[kind].noun}."
