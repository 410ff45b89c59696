"""Serving commands: one for each engine, with its K and the evidence for it.

A server run has the command of the engine that it measured. In a sweep and an audition no other
engine ran, so the command of an engine follows the command that measures it (`measure_command`).
The commands are for the headline's temperature; the engine that `engine=` names comes first.

Each engine's syntax is in its module of `harness.engine_facts`.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness import formatting as fmt
from harness.command_words import as_typed, command, ks_as_typed
from harness.config import CONF_DIR, OWN_DRAFT
from harness.engine_facts.draft_kinds import DRAFTS, DraftKind, kind_of
from harness.engine_facts.engines import ENGINES, drafts_alike, spec_of, with_lines
from harness.engine_facts.spec import EngineSpec, PairToServe, ranges
from harness.records import GREEDY, first, grouped, where
from harness.reporting import grid
from harness.reporting.grid import Marked
from harness.summary import Answer, Schedule, ServedSummary, Summary


@dataclass(frozen=True)
class Snippet:
    """A serving command of one engine, with its notes."""

    title: str  # the engine, and the version whose syntax it is
    code: str  # the command, line breaks included; empty where there is none
    notes: tuple[str, ...] = ()  # whole sentences: the speedup under the engine's rule, caveats
    language: str = "sh"  # of the code, as a code host names it
    measured: str = ""  # the command of the measurement, where it is known and is not the code
    # The command that measures an engine which was not measured, to be run before the code; and the
    # words between the two ("If it pays:")
    measure: str = ""
    then: str = ""
    name: str = ""  # of the engine, where the title has more words
    engine: str = ""  # without its version
    marked: bool = False  # whether it is for the engine of the marked row


@dataclass(frozen=True)
class SnippetGroup:
    """Serving commands of engines that share their first note."""

    known: str  # the shared note, on the speedup; "" for a single command
    notes: tuple[str, ...]  # other notes that several commands share, each with their names
    snippets: tuple[Snippet, ...]  # each with the notes that only it has


def snippet_groups(snippets: Sequence[Snippet]) -> tuple[SnippetGroup, ...]:
    """The serving commands, grouped by their first note."""
    pasted = [snippet for snippet in snippets if snippet.code]
    by_sentence = grouped(pasted, lambda snippet: "".join(snippet.notes[:1]))
    return tuple(_snippet_group(known, group) for known, group in by_sentence.items())


def without_line(snippets: Iterable[Snippet]) -> dict[str, list[str]]:
    """The notes on engines without a serving command, each with the names of the engines."""
    return _titles(snippet for snippet in snippets if not snippet.code)


def _titles(snippets: Iterable[Snippet]) -> dict[str, list[str]]:
    """The titles of the snippets that have each note."""
    pairs = [(note, each.name or each.title) for each in snippets for note in each.notes]
    groups = grouped(pairs, lambda pair: pair[0])
    return {note: [title for _, title in group] for note, group in groups.items()}


def _snippet_group(known: str, snippets: Sequence[Snippet]) -> SnippetGroup:
    if len(snippets) == 1:
        return SnippetGroup("", (), tuple(snippets))
    others = [replace(each, notes=each.notes[1:]) for each in snippets]
    shared = {note: titles for note, titles in _titles(others).items() if len(titles) > 1}
    notes = (
        note if len(titles) == len(snippets) else f"{', '.join(titles)}: {note}"
        for note, titles in shared.items()
    )
    left = (replace(each, notes=tuple(n for n in each.notes if n not in shared)) for each in others)
    return SnippetGroup(known, tuple(notes), tuple(left))


UNKNOWN = (
    "The kind of draft {draft} is not known: name it with drafts=[{draft}@FOLDER@kind:eagle3] or"
    " what it is."
)
UNKNOWN_SERVED = "The records do not say what the draft is, so there is no line for its server."
IF_IT_PAYS, UNTIL_THEN = "If it pays:", "Until then, without a draft:"
AS_FAST = "If it is as fast as the K by load:"
# Keys of the workload that apply to the harness's own loop and to no server
OF_THE_LOOP = ("device", "backend", "decode.acceptance")
ATTACHED = as_typed("url", ["PLAIN", "SPECULATIVE"])  # servers that run already
TOYS = "Put your own models: those of this run ship with the package or have random weights."
# Ids of models that no engine loads by their name
EMBEDDED = "embedded:"


def snippets_of(summary: Summary) -> tuple[Snippet, ...]:
    """The serving commands at the headline's temperature; the engine asked for comes first."""
    shown = grid.marked(summary)
    if shown is None:
        return ()
    if summary.served is not None:
        lines = _measured_server(summary, summary.served, shown)
        schedules = schedule_snippets(summary)
        return (*(replace(line, marked=True) for line in lines), *schedules)
    own = grid.own_answer(summary, shown.row.temperature)
    if own is None:
        return ()
    asked, made = summary.run.serve_on, list[Snippet]()
    first_line = asked or served_target(summary)  # the second: the target runs on that engine
    # Then those that have the threshold of what is to be served
    ends = {name for name, spec in with_lines().items() if spec.stops_early and own.speculates}
    ends = ends if own.p_min else set[str]()
    for server in sorted(with_lines(), key=lambda name: (name != first_line, name not in ends)):
        # At temperature 0 a variant has the same drafts as its engine
        if server == asked or shown.row.temperature or ENGINES[server].variant_of is None:
            line = _engine_snippet(summary, own, server)
            spec = ENGINES[server]
            line = replace(line, name=f"{_titled(spec)}{spec.line_title}", engine=spec.title)
            # A variant whose setting does not apply to the draft is left out. So is one whose
            # command is its engine's, as for a look-up, which does not sample its tokens.
            if not line.code and server != asked and ENGINES[server].variant_of is not None:
                continue
            if not line.code or line.code not in {other.code for other in made}:
                made.append(replace(line, marked=server == asked))
    made.sort(key=lambda line: not line.code)
    if not own.speculates and not made[0].code:
        engine = with_lines().get(first_line or "") or next(iter(with_lines().values()))
        made = [_without_draft(engine, _pair(summary, own), _titled(engine))]
    made[0] = replace(made[0], notes=(*made[0].notes, *_toys(summary)))
    if own.speculates and made[0].measure:
        made[1:] = [_named_engine(line) for line in made[1:]]
    return tuple(line for line in made if line.code or own.speculates)


def _named_engine(line: Snippet) -> Snippet:
    """A snippet after the first: its title has the keys with which that command measures it."""
    if not line.measure:
        return line
    first_of = (word for word in shlex.split(line.measure) if word.startswith(("engine=", "url=")))
    return replace(line, title=f"{line.title} ({shlex.join(first_of)})", measure="", then="")


def _toys(summary: Summary) -> tuple[str, ...]:
    return (TOYS,) if _target(summary).startswith(EMBEDDED) or summary.run.dummies else ()


def _measured_server(summary: Summary, served: ServedSummary, shown: Marked) -> tuple[Snippet, ...]:
    """The command of the server that was measured."""
    if served.commands:
        return (_measured_command(summary, served, shown),)
    engine = spec_of(served.engine)
    if not engine.lines:
        return ()
    title = f"For {shown.phrase} ({_version(served)})"
    answer = shown.answer
    pasted = replace(_pair(summary, answer), rule=served.rule)
    if not answer.speculates:
        return (_without_draft(engine, pasted, title),)
    title += _known_k(answer)
    if pasted.kind == "unknown":
        return (Snippet(title, "", (UNKNOWN_SERVED,)),)
    pasted = _with_served_kind(engine, pasted)
    known = (_measured(answer, served), _requests(pasted), *_only_here(served, answer))
    line = engine.lines[pasted.kind]
    more = (*filter(None, (line.note,)), *line.more(pasted), *_toys(summary))
    syntax = f"The line has the syntax of {_titled(engine)}."
    notes = (*known, *more, *(() if engine.version == served.version else (syntax,)))
    return (Snippet(title, line.line(pasted), notes, engine.language),)


def _measured_command(summary: Summary, served: ServedSummary, shown: Marked) -> Snippet:
    """The command of the server at the K to serve; undecided: plain decoding, and the K to try."""
    commands = {each.k: each for each in served.commands if each.slots == 1}
    answer, version = shown.answer, _timed_with(served)
    notes: list[str] = []
    title, heads = f"For {shown.phrase} ({version})", {0: ""}
    best = answer.named[1]
    changed = served.not_lossless(shown.row.temperature)
    if answer.speculates:
        pasted = _pair(summary, answer)
        notes += [_measured(answer, served), _requests(pasted), *_only_here(served, answer)]
        title, heads = f"{title}{_known_k(answer)}", {answer.k: ""}
    elif answer.decision == "undecided" and best and not changed:
        heads = {0: "# without a draft\n"}
        heads |= {best: f"# to try K={best}\n"} if best in commands else {}
    else:
        title = f"{title}, without a draft"
    flags = spec_of(served.engine).in_production
    code = "\n".join(f"{h}{commands[k].production}" for k, h in heads.items())
    measured = "\n".join(f"{head}{commands[k].line}" for k, head in heads.items())
    if flags:
        notes.append(
            f"It leaves {', '.join(flags[:-1])} and {flags[-1]} to the engine: give those that your"
            " requests need. The measurement's are those of this run's requests."
        )
    return Snippet(title, code, tuple(notes), measured=measured)


def _only_here(served: ServedSummary, answer: Answer) -> Sequence[str]:
    """A note on temperatures at which the K to serve is not lossless."""
    others = dict.fromkeys(gate.temperature for gate in served.gates)
    changed = [fmt.temperature(t) for t in others if answer.k in served.not_lossless(t)]
    note = f"At temperature {', '.join(changed)} K={answer.k} is not lossless: send it no such"
    return (f"{note} request.",) if changed else ()


def _version(served: ServedSummary) -> str:
    version = served.version if served.version != "unknown" else "of unknown version"
    return f"{spec_of(served.engine).title} {version}"


def _timed_with(served: ServedSummary) -> str:
    """The engine that was timed; its wheel, where that ran and the command is the binary's."""
    wheel = spec_of(served.engine).wheel
    if wheel and served.version.startswith(wheel):
        return f"timed: the Python wheel {served.version}, not this binary"
    return _version(served)


def _known_k(answer: Answer) -> str:
    """The K of a serving command, and the evidence for it on its engine."""
    return f", {grid.k_of(answer)}: {grid.evidence(answer)}"


def _measured(answer: Answer, served: ServedSummary) -> str:
    return f"{fmt.gain(answer)}, measured on {_version(served)}."


def _engine_snippet(summary: Summary, own: Answer, server: str) -> Snippet:
    """An engine's serving command at the temperature of the harness's answer, or only notes."""
    engine = ENGINES[server]
    at = where(summary.answers, temperature=own.temperature, prompt_set="all")
    answer = first(at, engine=server)
    if answer is not None and answer.temperature == GREEDY and engine.variant_of is not None:
        kind = _pair(summary, answer).kind
        if kind not in engine.lines:  # at temperature 0 a variant has the same drafts as its engine
            engine = ENGINES[engine.variant_of]
    title = f"{_titled(engine)}{engine.line_title}"
    if answer is None:
        return _of_another_draft(summary, own, engine, title)
    served = replace(_pair(summary, answer), rule=engine.rule)
    if answer.decision == "does_not_pay":
        return replace(_without_draft(engine, served, title), notes=(_evidence(answer),))
    without, title = _without_draft(engine, served, title), f"{title}{_known_k(answer)}"
    measure = "" if answer.timed else measure_command(summary, server, answer) or ""
    if not (answer if answer.timed else own).speculates:
        made = without
        if answer.decision == "undecided" and answer.timed and served.kind in engine.lines:
            tried = engine.lines[served.kind].line(served)
            code = f"# without a draft\n{made.code}\n# to try {grid.k_of(answer)}\n{tried}"
            made = replace(made, title=title, code=code)
        if measure:
            made = replace(made, title=title, measure=measure, then=UNTIL_THEN)
        return replace(made, notes=(_evidence(answer), *made.notes))
    if served.kind not in engine.lines:
        return Snippet(title, "", (UNKNOWN.format(draft=served.draft),))
    lacking = kind_of(own.draft, summary.run.models)
    missing = "" if lacking in (*engine.lines, "unknown") else f"{not_available(lacking)} "
    known = f"{missing}{_evidence(answer)}"
    return replace(_draft_snippet(engine, served, title, known), measure=measure, then=IF_IT_PAYS)


def _of_another_draft(summary: Summary, own: Answer, engine: EngineSpec, title: str) -> Snippet:
    """The serving command of an engine whose tokens per round are not known."""
    served = replace(_pair(summary, own), rule=engine.rule)
    if not engine.stops_early:
        served = replace(served, p_min=0.0)
    if not own.speculates:
        return Snippet(title, "")
    if served.kind not in engine.lines:
        unknown = served.kind == "unknown"
        note = UNKNOWN.format(draft=served.draft) if unknown else not_available(served.kind)
        return Snippet(title, "", (note,))
    measure = measure_command(summary, engine.name, own) or ""
    title = f"{title}, K={own.k}: not measured"
    made = _draft_snippet(engine, served, title, _why_unknown(engine, served))
    return replace(made, measure=measure, then=IF_IT_PAYS)


def _draft_snippet(engine: EngineSpec, served: PairToServe, title: str, known: str) -> Snippet:
    """The serving command of an engine that has the kind of draft."""
    entry = engine.lines[served.kind]
    requests = _requests(served) if engine.sampling_in_requests else ""
    notes = (known, *filter(None, (requests, entry.note)), *entry.more(served))
    return Snippet(title, entry.line(served), notes, engine.language)


# ---- the command that measures an engine ---------------------------------------------------------


def measure_command(summary: Summary, server: str, answer: Answer) -> str | None:
    """The command that measures an answer's draft, K and temperature on an engine.

    None where `harness.server` does not measure that engine, or not with that kind of draft.
    """
    variant = ENGINES[server]
    engine = ENGINES[variant.variant_of or server]
    draft, k = answer.named
    if engine.client is None or not k or kind_of(draft, summary.run.models) not in engine.drafts:
        return None
    pair = draft_keys(summary, str(draft))
    if pair is None:
        return None
    served_by = served_target(summary)
    keys = [as_typed("engine", engine.name)]
    keys += [ATTACHED] if served_by == engine.name or not engine.starts else []
    keys += ["score=false"] if served_by == engine.name else []
    keys += [*model_keys(summary), *pair]
    # The K of the engine that was timed, where it names the same draft and K
    own = grid.own_answer(summary, answer.temperature or 0.0)
    ks = (own if own and own.name == answer.name else answer).within_reach
    keys += [ks_as_typed(ks), as_typed("temperature", answer.temperature)]
    keys += [as_typed("decode.rule", variant.rule)] if variant.rule != engine.rule else []
    return command("server", *keys, *other_keys(summary, OF_THE_LOOP))


def served_target(summary: Summary) -> str | None:
    """The engine whose server generated an audition's completions; None where none did."""
    found = (each.values["engine"] for each in summary.caveats if each.code == "texts_from")
    return next((str(engine) for engine in found), None)


def model_keys(summary: Summary) -> tuple[str, ...]:
    """The command line keys of the target, quoted."""
    name = summary.run.model or ""
    if _ships("model", name):
        return (as_typed("model", name),)
    return "model=hf", as_typed("model.id", _target(summary))


def other_keys(summary: Summary, but: Sequence[str] = ()) -> tuple[str, ...]:
    """The other keys of the run on its texts and its machine, quoted, without those of `but`."""
    named = {word: word.partition("=")[0] for word in summary.run.made_with.workload}
    return tuple(
        shlex.quote(word)
        for word, key in named.items()
        if key not in ("model", "model.id", "decode.rule", *but)
        and not key.startswith(tuple(f"{group}." for group in but))
    )


def draft_keys(summary: Summary, draft: str) -> tuple[str, ...] | None:
    """The command line keys of a draft, quoted; None where no keys name it."""
    kind, facts = kind_of(draft, summary.run.models), summary.run.facts_of(draft)
    spec = DRAFTS.get(kind)
    if facts is not None and facts.layers is not None and kind == "early_exit":
        return "draft=early_exit", as_typed("draft.layers", facts.layers)
    if draft != OWN_DRAFT and _ships("draft", draft):
        return (as_typed("draft", draft),)
    if spec is not None and spec.looks_up:
        named = as_typed("draft.id", kind), as_typed("draft.kind", kind)
        return as_typed("draft", OWN_DRAFT), *named
    if facts is None or facts.id is None or kind == "copy":
        return None
    group = OWN_DRAFT if facts.kind == "model" else facts.kind
    return as_typed("draft", group), as_typed("draft.id", facts.id)


def _ships(group: str, name: str) -> bool:
    """True where a configuration of that name ships, and names its weights."""
    shipped = CONF_DIR / group / f"{name}.yaml"
    return bool(name) and shipped.is_file() and "???" not in shipped.read_text("utf-8")


# ---- the pair ------------------------------------------------------------------------------------


def _target(summary: Summary) -> str:
    target = first(summary.run.models, role="target")
    return (target and target.id) or summary.run.model or "TARGET"


def _pair(summary: Summary, answer: Answer) -> PairToServe:
    """The pair with the draft and K that an answer names."""
    p_min = answer.named_p_min or summary.run.sampling.p_min or 0.0
    return _pair_with(summary, *answer.named, answer.temperature or 0.0, p_min)


def _pair_with(
    summary: Summary, draft: str | None, k: int, temperature: float, p_min: float = 0.0
) -> PairToServe:
    facts = summary.run.facts_of(draft)
    target, draft_id = _target(summary), (facts and facts.id) or draft or "DRAFT"
    return PairToServe(
        target="TARGET" if target.startswith(EMBEDDED) else target,
        draft="DRAFT" if draft_id.startswith(EMBEDDED) else draft_id,
        k=k,
        temperature=temperature,
        sampling=summary.run.sampling,
        synthetic=summary.run.synthetic,
        kind=kind_of(draft, summary.run.models),
        layers=facts and facts.layers,
        p_min=p_min,
    )


def _with_served_kind(engine: EngineSpec, served: PairToServe) -> PairToServe:
    """The pair; with a draft model where the engine has no command for the kind of draft."""
    return served if served.kind in engine.lines else replace(served, kind="model")


def _without_draft(engine: EngineSpec, served: PairToServe, title: str) -> Snippet:
    """The command that serves the target without a draft."""
    code = engine.plain(served)
    file = f"TARGET.gguf stands for your conversion of {served.target}."
    notes = (file,) if engine.reads_gguf and not served.of_files else ()
    return Snippet(f"{title}, without a draft", code, notes, engine.language)


# ---- K by load -----------------------------------------------------------------------------------


def schedule_snippets(summary: Summary) -> tuple[Snippet, ...]:
    """K by load at each temperature, in the syntax of the measured engine.

    A temperature with a single load, or at whose loads no K pays, has none.
    """
    served = summary.served
    if served is None or not spec_of(served.engine).lines:
        return ()
    return tuple(
        _schedule_snippet(summary, schedule, served)
        for schedule in served.schedules
        if len(schedule.entries) > 1 and any(entry.k for entry in schedule.entries)
    )


def _schedule_snippet(summary: Summary, schedule: Schedule, measured: ServedSummary) -> Snippet:
    engine = ENGINES[measured.engine]
    k_by_load = {entry.low: entry.k for entry in schedule.entries}
    largest_k = max(k_by_load.values())
    # The commands of the servers with most slots; none where the run attached to servers
    slots = max((each.slots for each in measured.commands), default=0)
    started = {each.k: each for each in measured.commands if each.slots == slots}
    commands = {k: command.production for k, command in started.items()}
    version = _timed_with(measured)
    title = f"K by concurrency at temperature {fmt.temperature(schedule.temperature)} ({version})"
    ties = [
        f"At concurrency {entry.concurrency} the lead of K={entry.k} over"
        f" {fmt.with_ratios(entry.tied, measured.ratios(schedule.temperature, entry.concurrency))}"
        " is within the spread of visits."
        for entry in schedule.entries
        if entry.tied
    ]
    facts = summary.run.facts_of(summary.run.draft)
    pasted = _pair_with(summary, summary.run.draft, largest_k, schedule.temperature)
    pasted = _with_served_kind(engine, replace(pasted, draft=(facts and facts.id) or "DRAFT"))
    largest = max(entry.concurrency for entry in schedule.entries)
    notes = [*ties, *engine.schedule_notes(k_by_load, largest)]
    if engine.schedule is not None:
        code = engine.schedule(pasted, commands, k_by_load, largest)
        measure = _measure_schedule(summary, schedule, measured)
        then = AS_FAST if measure else ""
        return Snippet(title, code, tuple(notes), measure=measure, then=then)
    one_k = f"{engine.title} has one K per server: take that of the expected concurrency."
    last, lines = schedule.entries[-1], list[str]()
    k_ranges = ranges(k_by_load, last.high or last.low)
    for low, high, k in k_ranges:
        load = f"{low}" if high == low else f"{low} to {high}"
        if last.high is None and low == k_ranges[-1][0]:
            load = f"{low} and more"
        line = engine.lines[pasted.kind].line(replace(pasted, k=k)) if k else "# without a draft"
        lines += [f"# concurrency {load}", commands.get(k, line)]
    return Snippet(title, "\n".join(lines), (one_k, *notes), engine.language)


def _measure_schedule(summary: Summary, schedule: Schedule, measured: ServedSummary) -> str:
    """The command that measures a server with this schedule; "" if measured, or not possible."""
    engine, draft = ENGINES[measured.engine], str(summary.run.draft)
    kind, pair = kind_of(draft, summary.run.models), draft_keys(summary, draft)
    loads = [entry.concurrency for entry in schedule.entries]
    k_ranges = ranges({entry.low: entry.k for entry in schedule.entries}, max(loads))
    if not engine.has_k_by_load(kind) or pair is None or len(k_ranges) == 1:
        return ""
    if first(measured.varying, varying="schedule", temperature=schedule.temperature) is not None:
        return ""
    largest_k = max(k for *_, k in k_ranges)
    keys = (
        *(as_typed("engine", engine.name), *model_keys(summary), *pair),
        *(as_typed("k", largest_k), as_typed("temperature", schedule.temperature)),
        *(as_typed("schedule", k_ranges), as_typed("concurrency", loads)),
    )
    return command("server", *keys, *other_keys(summary, OF_THE_LOOP))


def _titled(engine: EngineSpec) -> str:
    return " ".join(filter(None, (engine.title, engine.version)))


def _evidence(answer: Answer) -> str:
    """The speedup of an engine, or the cost of a round below which K pays, as a sentence."""
    emitted = answer.round
    if answer.timed:
        return f"{fmt.gain(answer)}, {grid.evidence(answer)}."
    if answer.decision == "does_not_pay":
        return "No drafted token was ever accepted, so that no K can pay."
    if emitted is None:
        return "Not measured, and what its rounds emit is not known."
    return f"It {grid.cost_that_pays(emitted)}."


def _why_unknown(engine: EngineSpec, served: PairToServe) -> str:
    """The reason why the tokens per round of an engine are not known."""
    if served.synthetic:
        return "Not measured: acceptance was set here; what this engine would accept is not known."
    if not drafts_alike(engine.name, served.kind, served.temperature):
        return "Not measured: it proposes other tokens than this run's look-up."
    return "Not measured: this run did not replay its acceptance rule."


def _requests(served: PairToServe) -> str:
    """The sampling parameters of the requests that the speedup holds for, as a sentence."""
    sampling, at = served.sampling, fmt.temperature(served.temperature)
    penalty = sampling.repetition_penalty
    penalised = "" if penalty is None else f" and repetition_penalty {penalty:g}"
    if served.temperature == 0:
        return f"For requests that set temperature 0{penalised}."
    min_p = "" if sampling.min_p is None else f", min_p {sampling.min_p:g}"
    top_k = "no top_k" if sampling.top_k is None else f"top_k {sampling.top_k:g}"
    top_p = "no top_p" if sampling.top_p is None else f"top_p {sampling.top_p:g}"
    return f"For requests that set temperature {at}, {top_k} and {top_p}{min_p}{penalised}."


def not_available(kind: DraftKind) -> str:
    """The note on an engine that does not have this kind of draft."""
    lacking = f"no {DRAFTS[kind].noun}"
    if kind == "copy":
        lacking = "engines make no copy of the target; convert one, and serve it as a draft model"
    return f"Not available here: {lacking}."
