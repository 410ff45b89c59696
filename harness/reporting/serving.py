"""What to paste into a server: one line per engine for the draft and K of its cell of the grid.

The first line is that of the marked cell (`harness.reporting.grid`); the others are those of the
other engines at the same temperature. An engine without a cell in the grid was not replayed: it
gets the marked cell's draft and K, and its speedup is not known. Round times are always this run's.

Syntax and rule of each engine, read in the named file of the release that its record names:

- vLLM: vllm/config/speculative.py. `draft_sample_method` is greedy by default, with the draft's
  distribution taken as one-hot; `probabilistic` samples and accepts by the ratio.
  `synthetic_acceptance_rates` are unconditional, K of them, never increasing.
- SGLang: srt/speculative/eagle_utils.py, `eagle_sample`: at `--speculative-eagle-topk 1` the argmax
  is proposed and accepted with the target's probability of it. STANDALONE refuses
  `--speculative-use-rejection-sampling` (srt/arg_groups/speculative_hook.py): no other rule.
- llama.cpp: common/speculative.cpp, draft-simple: the argmax is proposed, and accepted where the
  target's sampler draws the same. Options in tools/server/README.md: `--spec-draft-p-min` is 0 by
  default, `--spec-draft-sampling` greedy (its other value came with build 11368).
- mlx-lm: mlx_lm/generate.py, `speculative_generate_step`: two independent draws, accepted when
  equal. `--temp` is 0 by default.
- transformers: generation/candidate_generator.py. Settings are read from the draft's
  generation_config; the draft is sampled and accepted by the ratio. Temperature and top-p given as
  settings are applied to the draft twice, given as processors once.

`serving_kinds` has the lines of drafts that are no model. To add an engine, add an `Engine` to
ENGINES with a function that writes its line.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from harness.records import LOOKUPS, SERVERS, Rule
from harness.reporting import formatting as fmt
from harness.reporting import grid
from harness.reporting.grid import Marked
from harness.reporting.serving_kinds import (
    LINES,
    LLAMA_SERVER,
    Drafting,
    generate,
    not_available,
    sglang_drafting,
    sglang_serve,
    vllm_serve,
)
from harness.serving.kinds import DraftKind, vllm_config
from harness.serving.schedules import merged, sglang_tiers, vllm_ranges
from harness.summary import Answer, ModelFacts, SamplingFacts, Schedule, ServedSummary, Summary

SERVING_COMMANDS = frozenset({"sweep", "audition", "server"})
ROUND_TIMES = ", at this run's round times"
# Of vLLM's --speculative-config: K by the size of a batch
RANGES = "num_speculative_tokens_per_batch_size"
# Of llama.cpp; without it the draft's argmax is proposed
PROBABILISTIC = "--spec-draft-sampling probabilistic"
# Of a measured command, what production may have otherwise
IN_PRODUCTION: Mapping[str, str] = {
    "llamacpp": "give --ctx-size and --parallel what you need, and leave --metrics out",
    "vllm": "give --max-model-len and --max-num-seqs what you need, and leave the flags for"
    " metrics and --no-enable-prefix-caching out",
    "sglang": "give --context-length and --max-running-requests what you need, and leave"
    " --disable-radix-cache out",
}


@dataclass(frozen=True)
class Snippet:
    """What to paste, and what to know of it."""

    title: str  # for whom: the engine, and the version whose syntax it is
    code: str  # the text to paste, line breaks included; empty where there is nothing to paste
    # Whole sentences on it: the speedup under the engine's own rule, caveats.
    notes: tuple[str, ...] = ()
    language: str = "sh"  # of the code, as a code host names it


@dataclass(frozen=True)
class Card:
    """Lines of engines of which the same is said."""

    known: str  # what is known of the speedup: one sentence for all of them; "" for a single one
    notes: tuple[str, ...]  # what several of them share beyond it, each with their names
    snippets: tuple[Snippet, ...]  # each with the notes that it has alone


def cards_of(snippets: Sequence[Snippet]) -> tuple[Card, ...]:
    """The lines to paste, those that share their first sentence together."""
    by_sentence: dict[str, list[Snippet]] = {}
    for snippet in snippets:
        if snippet.code:
            by_sentence.setdefault("".join(snippet.notes[:1]), []).append(snippet)
    return tuple(_card(known, group) for known, group in by_sentence.items())


def without_line(snippets: Sequence[Snippet]) -> dict[str, list[str]]:
    """What is said of engines that have nothing to paste, each sentence with their names."""
    said: dict[str, list[str]] = {}
    for snippet in snippets:
        for note in () if snippet.code else snippet.notes:
            said.setdefault(note, []).append(snippet.title)
    return said


def _card(known: str, snippets: Sequence[Snippet]) -> Card:
    if len(snippets) == 1:
        return Card("", (), tuple(snippets))
    who: dict[str, list[str]] = {}
    for snippet in snippets:
        for note in snippet.notes[1:]:
            who.setdefault(note, []).append(snippet.title)
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


@dataclass(frozen=True)
class Served:
    """What one engine is to serve, and what the run knows of other acceptance rules."""

    # target, draft: ids or folders.
    target: str
    draft: str
    k: int
    temperature: float
    sampling: SamplingFacts
    # By rule, what the grid says at this temperature for the whole workload.
    answers: Mapping[Rule, Answer]
    synthetic: bool
    # Of the draft; layers of an early exit
    kind: DraftKind = "model"
    layers: int | None = None

    def known(self, engine: "Engine") -> str:
        """What is known of an engine's speedup, as a sentence."""
        answer = self.answers.get(engine.rule)
        if answer is None:
            return "Its speedup is not known: this run did not replay its acceptance rule."
        gain = fmt.speedup(answer.speedup, answer.speedup_lo, answer.speedup_hi)
        if self.synthetic:
            return (
                f"{gain} at the synthetic acceptance of this run; what this engine would accept is"
                " not known."
            )
        stopped = self.sampling.stop_threshold is not None and engine.rule == self.sampling.rule
        if stopped and not engine.stops_early:
            return "Its speedup is not known: the run stopped drafting early, it does not."
        return f"{gain}, {grid.SOURCES[answer.source]} on held-out prompts{ROUND_TIMES}."

    @property
    def requests(self) -> str:
        """Which requests the speedup is of, for an engine whose requests say how to sample."""
        sampling = self.sampling
        penalty = sampling.repetition_penalty
        penalised = "" if penalty is None else f" and repetition_penalty {penalty:g}"
        if self.temperature == 0:
            return f"For requests that set temperature 0{penalised}."
        min_p = "" if sampling.min_p is None else f", min_p {sampling.min_p:g}"
        top_k, top_p = (
            f"no {name}" if value is None else f"{name} {value:g}"
            for name, value in (("top_k", sampling.top_k), ("top_p", sampling.top_p))
        )
        return (
            f"For requests that set temperature {fmt.temperature(self.temperature)}, {top_k} and"
            f" {top_p}{min_p}{penalised}."
        )


@dataclass(frozen=True)
class Engine:
    """What is known of an engine."""

    name: str
    version: str  # whose syntax `line` writes
    rule: Rule
    line: Callable[[Served, int], str]  # the text to paste, for a draft and a K
    plain: Callable[[Served], str]  # the same for the target alone
    stops_early: bool = False  # whether it can stop drafting at a threshold, as our loop can
    sampling_in_requests: bool = True  # whether requests say how to sample, and not the line
    notes: Callable[[Served], Sequence[str]] = lambda _: ()  # more on this line
    language: str = "sh"

    @property
    def title(self) -> str:
        """Its name and version."""
        return f"{self.name} {self.version}"

    def snippet(self, served: Served, title: str) -> Snippet:
        """Its line for a draft and K of the grid."""
        requests = (served.requests,) if self.sampling_in_requests else ()
        notes = (served.known(self), *requests, *self.notes(served))
        return Snippet(title, self.line(served, served.k), notes, self.language)


def _vllm_plain(served: Served) -> str:
    return vllm_serve(served.target)


def _vllm(served: Served, k: int) -> str:
    return vllm_serve(served.target, vllm_config("model", served.draft, k))


def _vllm_sampled(served: Served, k: int) -> str:
    config = vllm_config("model", served.draft, k)
    return vllm_serve(served.target, {**config, "draft_sample_method": "probabilistic"})


def _vllm_sampled_notes(served: Served) -> Sequence[str]:
    default = served.answers.get("greedy_draft")
    if default is None or default.decision != "speculate":
        return ()
    gain = f"{fmt.speedup(default.speedup)} at K={default.k}"
    return (f"Without draft_sample_method vLLM drafts greedily: {gain}.",)


def _sglang(served: Served, k: int) -> str:
    return sglang_drafting("model", served.target, served.draft, k)


def _sglang_plain(served: Served) -> str:
    return sglang_serve(served.target)


def _llama_cpp(_served: Served, k: int) -> str:
    return f"{LLAMA_SERVER} -md DRAFT.gguf --spec-type draft-simple --spec-draft-n-max {k}"


def _llama_cpp_notes(served: Served) -> Sequence[str]:
    files = (
        f"TARGET.gguf and DRAFT.gguf stand for your conversions of {served.target} and"
        f" {served.draft}; quantised weights accept differently."
    )
    sampled = served.answers.get("ratio")
    if served.temperature == 0 or served.synthetic:
        return (files,)
    if sampled is None or sampled.decision != "speculate":
        return (files,)
    gain = f"{fmt.speedup(sampled.speedup)} at K={sampled.k}"
    return (
        files,
        f"With {PROBABILISTIC} it accepts by a ratio, but draws among the draft's ten likeliest"
        f" tokens only: less than the {gain} of the whole distribution. python -m harness.server"
        " engine=llamacpp decode.rule=ratio measures it.",
    )


def _mlx(served: Served, k: int) -> str:
    draft = f" --draft-model {shlex.quote(served.draft)} --num-draft-tokens {k}"
    return _mlx_generate(served, draft)


def _mlx_generate(served: Served, draft: str = "") -> str:
    model = f"mlx_lm.generate --model {shlex.quote(served.target)}"
    line = f"{model}{draft} --temp {served.temperature:g}"
    if served.temperature == 0:
        return line
    sampling = served.sampling
    options = (("top-k", sampling.top_k), ("top-p", sampling.top_p), ("min-p", sampling.min_p))
    return line + "".join(f" --{name} {value:g}" for name, value in options if value is not None)


def _transformers(served: Served, k: int) -> str:
    """Three settings on the draft, and sampling that is applied to both models once."""
    settings = (
        f"draft = AutoModelForCausalLM.from_pretrained({json.dumps(served.draft)})",
        f"draft.generation_config.num_assistant_tokens = {k}",
        'draft.generation_config.num_assistant_tokens_schedule = "constant"',
        f"draft.generation_config.assistant_confidence_threshold = {_threshold(served)}",
    )
    imports, sampling = _sampling(served)
    return generate(served.target, settings, ("assistant_model=draft", *sampling), imports)


def _transformers_plain(served: Served) -> str:
    imports, sampling = _sampling(served)
    return generate(served.target, (), sampling, imports)


def _threshold(served: Served) -> float:
    return served.sampling.stop_threshold or 0.0


def _sampling(served: Served) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What transformers' `generate` needs to sample draft and target alike: imports, arguments."""
    processors = _processors(served)
    classes = (processor.partition("(")[0] for processor in processors)
    imports = ("LogitsProcessorList", *classes) if processors else ()
    arguments = ["do_sample=False"]
    if served.temperature > 0:
        arguments = ["do_sample=True", "temperature=1.0", "top_k=0", "top_p=1.0"]
    if processors:
        arguments.append(f"logits_processor=LogitsProcessorList([{', '.join(processors)}])")
    return imports, tuple(arguments)


def _transformers_notes(served: Served) -> Sequence[str]:
    if not _processors(served):
        return ()
    return (
        "Temperature, top_k and top_p go in as processors: given as settings, transformers applies"
        " them to the draft twice and accepts less than this run did.",
    )


def _processors(served: Served) -> list[str]:
    sampling = served.sampling
    penalty = sampling.repetition_penalty
    processors: list[str] = []
    if penalty is not None and penalty != 1.0:
        processors.append(f"RepetitionPenaltyLogitsProcessor({float(penalty)!r})")
    if served.temperature == 0:
        return processors
    if served.temperature != 1:
        processors.append(f"TemperatureLogitsWarper({float(served.temperature)!r})")
    if sampling.top_k is not None:
        processors.append(f"TopKLogitsWarper({sampling.top_k})")
    if sampling.top_p is not None:
        processors.append(f"TopPLogitsWarper({float(sampling.top_p)!r})")
    if sampling.min_p is not None:
        processors.append(f"MinPLogitsWarper({float(sampling.min_p)!r})")
    return processors


VLLM = Engine("vLLM", "0.33", "greedy_draft", _vllm, _vllm_plain)
# By the names of SERVERS
ENGINES = {
    "vllm": VLLM,
    "vllm_probabilistic": replace(
        VLLM, rule="ratio", line=_vllm_sampled, notes=_vllm_sampled_notes
    ),
    "sglang": Engine("SGLang", "0.5.23", "greedy_draft", _sglang, _sglang_plain),
    "llamacpp": Engine(
        "llama.cpp",
        "b11368 or later",
        "greedy_draft",
        _llama_cpp,
        lambda _: LLAMA_SERVER,
        notes=_llama_cpp_notes,
    ),
    "mlx": Engine(
        "mlx-lm", "0.32.2", "exact_match", _mlx, _mlx_generate, sampling_in_requests=False
    ),
    "transformers": Engine(
        "transformers",
        "5.23",
        "ratio",
        _transformers,
        _transformers_plain,
        stops_early=True,
        sampling_in_requests=False,
        notes=_transformers_notes,
        language="python",
    ),
}
REMOVED = Snippet(
    "mistral.rs",
    "",
    ("draft models were removed after v0.8.0; the old setting was [speculative] gamma = K.",),
)
TOYS = "These names are of models that ship with this package or have random weights: put your own."


def snippets_of(summary: Summary) -> tuple[Snippet, ...]:
    """What to serve: the marked cell's line, then the other engines' at the same temperature."""
    shown = grid.marked(summary)
    if summary.run.command not in SERVING_COMMANDS or shown is None:
        return ()
    run = summary.run
    target = next((model.id for model in run.models if model.role == "target"), None)
    target = target or run.model or "TARGET"
    if summary.served is not None:
        line = _measured_server(summary, summary.served, target, shown)
        return (*line, *schedule_snippets(summary, target))
    first = _line(summary, target, shown, shown.server)
    if target.startswith("embedded:") or run.dummies:
        first = replace(first, notes=(*first.notes, TOYS))
    servers = [server for server in SERVERS if server != shown.server and _apart(server, shown)]
    others: list[Snippet] = []
    for server in servers:
        line = _line(summary, target, shown, server)
        # vLLM has one line for a look-up, whose tokens are chosen, however it samples drafts
        if not line.code or all(line.code != other.code for other in (first, *others)):
            others.append(line)
    if not shown.row.speculates:
        others = [line for line in others if line.code]
        return (first, *others)
    marked = _served(summary, target, {}, shown.row.answer)
    removed = (REMOVED,) if marked.kind == "model" else ()
    return (first, *others, *_validation(summary, target, shown), *removed)


def _measured_server(
    summary: Summary, served: ServedSummary, target: str, shown: Marked
) -> tuple[Snippet, ...]:
    """The server that was measured; other engines' speed is not known from it."""
    if served.commands:
        return (_measured_command(summary, served, shown),)
    key = "vllm_probabilistic" if (served.engine, served.rule) == ("vllm", "ratio") else None
    engine = ENGINES.get(key or served.engine)
    if engine is None:
        return ()
    title = f"For {shown.phrase} ({engine.title})"
    answer = shown.row.answer
    pasted = _served(summary, target, {}, answer)
    if not shown.row.speculates:
        return (_without_draft(engine, pasted, title),)
    code = _code(key or served.engine, pasted, pasted.k)
    if (served.engine, served.rule) == ("llamacpp", "ratio"):
        code = f"{code} {PROBABILISTIC}"
    gain = fmt.speedup(answer.speedup, answer.speedup_lo, answer.speedup_hi)
    version = f"{grid.SERVED[served.engine]} {served.version}"
    notes = [f"{gain}, measured on held-out prompts on {version}.", pasted.requests]
    notes += engine.notes(pasted)
    if target.startswith("embedded:") or summary.run.dummies:
        notes.append(TOYS)
    return (Snippet(title, code, tuple(notes), engine.language),)


def _measured_command(summary: Summary, served: ServedSummary, shown: Marked) -> Snippet:
    """What started the server; where nothing is decided the plain one, and the K to try."""
    commands = {each.k: each.line for each in served.commands if each.slots == 1}
    answer, version = shown.row.answer, f"{grid.SERVED[served.engine]} {served.version}"
    title, notes = f"For {shown.phrase} ({version})", list[str]()
    best = answer.reason_values.get("k")
    if shown.row.speculates:
        code = commands[answer.k]
        gain = fmt.speedup(answer.speedup, answer.speedup_lo, answer.speedup_hi)
        requests = _served(summary, "", {}, answer).requests
        notes += [f"{gain}, measured on held-out prompts on {version}.", requests]
    elif answer.decision == "undecided" and isinstance(best, int) and best in commands:
        code = f"# until it is decided\n{commands[0]}\n# to try K={best}\n{commands[best]}"
    else:
        code, title = commands[0], f"{title}, without a draft"
    notes.append(f"It was measured as it stands; in production {IN_PRODUCTION[served.engine]}.")
    return Snippet(title, code, tuple(notes))


def _apart(server: str, shown: Marked) -> bool:
    """Whether a server has a line of its own: at temperature 0 both of vLLM's are one."""
    return server != "vllm_probabilistic" or shown.row.temperature > 0


def _line(summary: Summary, target: str, shown: Marked, server: str) -> Snippet:
    """A server's line at the marked temperature."""
    engine, answers = ENGINES[server], _answers(summary, shown)
    answer = answers.get(engine.rule)
    first = server == shown.server
    title = f"For {shown.phrase} ({engine.title})" if first else engine.title
    if server == "vllm_probabilistic" and not first:
        title = f"{engine.title}, draft_sample_method=probabilistic"
    if answer is not None and answer.decision != "speculate":
        if not first:
            return Snippet(title, "", ("Without a draft: none is known to pay on it.",))
        return _without_draft(engine, _served(summary, target, answers, answer), title)
    chosen = answer or shown.row.answer
    if chosen.decision != "speculate":
        return Snippet(title, "")
    served = _served(summary, target, answers, chosen)
    if served.kind == "model" or served.kind in LINES[server]:
        return _of_kind(engine, served, server, title)
    return _next_best(summary, engine, served, chosen, server, title)


def _next_best(
    summary: Summary, engine: Engine, lacking: Served, chosen: Answer, server: str, title: str
) -> Snippet:
    """For an engine that lacks the kind to serve, the fastest of the drafts that it has."""
    said = not_available(lacking.kind)
    where = (engine.rule, chosen.temperature)
    ranked = [
        board.rows for board in summary.leaderboards if (board.rule, board.temperature) == where
    ]
    for row in ranked[0] if ranked else ():
        if row.draft is None:  # the drafts after it lose
            break
        answer = replace(chosen, draft=row.draft, k=row.k)
        served = _served(summary, lacking.target, {}, answer)
        line = LINES[server].get(served.kind)
        if served.kind == "model" or (line is not None and line.same):
            gain = fmt.speedup(row.speedup, row.speedup_lo, row.speedup_hi)
            known = (
                f"{said} Of the drafts that it has, {row.draft} at K={row.k} is the fastest:"
                f" {gain}, predicted on the prompts that it was chosen on{ROUND_TIMES}."
            )
            snippet = _of_kind(engine, served, server, title)
            return replace(snippet, notes=(known, *snippet.notes[1:]))
    return Snippet(title, "", (said,))


def _answers(summary: Summary, shown: Marked) -> dict[Rule, Answer]:
    """The workload's answer under every rule at the marked temperature."""
    return {
        answer.rule: answer
        for answer in summary.answers
        if answer.rule is not None
        and (answer.temperature, answer.prompt_set) == (shown.row.temperature, "all")
    }


def _served(
    summary: Summary, target: str, answers: Mapping[Rule, Answer], chosen: Answer
) -> Served:
    facts = _facts_of(summary, chosen.draft)
    return Served(
        kind=_kind_of(chosen.draft, facts, target),
        layers=facts.layers if facts is not None else None,
        target=target,
        draft=(facts.id if facts is not None else None) or chosen.draft or "DRAFT",
        k=chosen.k,
        temperature=chosen.temperature,
        sampling=summary.run.sampling,
        answers=answers,
        synthetic=summary.run.synthetic,
    )


def _facts_of(summary: Summary, draft: str | None) -> ModelFacts | None:
    """What is known of a draft; None for a look-up."""
    drafts = [model for model in summary.run.models if model.role != "target"]
    return next((model for model in drafts if model.name == draft), None)


def _kind_of(draft: str | None, facts: ModelFacts | None, target: str) -> DraftKind:
    if draft in LOOKUPS:
        return cast("DraftKind", draft)
    if facts is None:
        return "model"
    return "copy" if facts.kind == "model" and facts.id == target else facts.kind


def _without_draft(engine: Engine, served: Served, title: str) -> Snippet:
    """The target alone, where the headline says so."""
    code = engine.plain(served)
    file = f"TARGET.gguf stands for your conversion of {served.target}."
    notes = (file,) if "TARGET.gguf" in code else ()
    return Snippet(f"{title}, without a draft", code, notes, engine.language)


def _validation(summary: Summary, target: str, shown: Marked) -> Sequence[Snippet]:
    """VLLM with random weights and the acceptance of the run, for its latency alone."""
    answers, rule = _answers(summary, shown), summary.run.sampling.rule
    chosen = answers.get(rule)
    if chosen is None or chosen.decision != "speculate":
        return ()
    rates = _acceptance(summary, chosen)
    served = _served(summary, target, answers, chosen)
    if len(rates) < chosen.k or served.kind != "model":
        return ()
    config = {
        **vllm_config("model", served.draft, served.k),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [round(rate, 4) for rate in rates[: served.k]],
    }
    origin = "that was set for this run" if served.synthetic else "of this run"
    snippet = Snippet(
        f"{VLLM.title}, to check the speedup on your server without the weights",
        vllm_serve(served.target, config, "--load-format dummy "),
        (
            f"Random weights with the acceptance {origin}, position by position: its latency is"
            " real, its text is not.",
        ),
    )
    return (snippet,)


def _acceptance(summary: Summary, chosen: Answer) -> tuple[float, ...]:
    """Unconditional acceptance by position at an answer's K; measured before replayed."""
    entries = [
        entry
        for entry in summary.acceptance_by_position
        if entry.prompt_set == "all"
        and (entry.draft, entry.temperature, entry.k)
        == (chosen.draft, chosen.temperature, chosen.k)
    ]
    entries.sort(key=lambda entry: entry.source != "measured")
    return entries[0].non_increasing if entries else ()


def _of_kind(engine: Engine, served: Served, server: str, title: str) -> Snippet:
    """The engine's line for a draft of a kind that it has."""
    if served.kind == "model":
        return engine.snippet(served, title)
    entry = LINES[server][served.kind]
    known = served.known(engine)
    if not entry.same:
        known = "Its speedup is not known: it proposes other tokens than this run's look-up."
    requests = (served.requests,) if engine.sampling_in_requests else ()
    notes = (known, *requests, *((entry.note,) if entry.note else ()))
    return Snippet(title, entry.line(_drafting(served, served.k)), notes, engine.language)


def _drafting(served: Served, k: int) -> Drafting:
    threshold, (imports, sampling) = _threshold(served), _sampling(served)
    return Drafting(served.target, served.draft, k, served.layers, threshold, imports, sampling)


def _code(server: str, served: Served, k: int) -> str:
    """A server's line, whatever drafts."""
    entry = LINES[server].get(served.kind)
    return ENGINES[server].line(served, k) if entry is None else entry.line(_drafting(served, k))


# ---- K by load -----------------------------------------------------------------------------------


def schedule_snippets(summary: Summary, target: str) -> tuple[Snippet, ...]:
    """The schedule of each temperature as the measured engine takes it; of one load there is none.

    Args:
        summary: of a server run.
        target: id of the target.
    """
    served = summary.served
    if served is None or served.engine not in ENGINES:
        return ()
    return tuple(
        _schedule_snippet(summary, schedule, served.engine, target)
        for schedule in served.schedules
        if len(schedule.entries) > 1
    )


def _schedule_snippet(summary: Summary, schedule: Schedule, server: str, target: str) -> Snippet:
    engine = ENGINES[server]
    k_by_load = {entry.low: entry.k for entry in schedule.entries}
    largest = max(entry.concurrency for entry in schedule.entries)
    largest_k = max(k_by_load.values())
    facts = _facts_of(summary, summary.run.draft)
    served = Served(
        kind=_kind_of(summary.run.draft, facts, target),
        target=target,
        draft=(facts.id if facts is not None else None) or "DRAFT",
        k=largest_k,
        temperature=schedule.temperature,
        sampling=summary.run.sampling,
        answers={},
        synthetic=False,
    )
    # Of the servers that had room for the load; none of servers that the run attached to
    measured = summary.served.commands if summary.served is not None else ()
    slots = max((each.slots for each in measured), default=0)
    commands = {each.k: each.line for each in measured if each.slots == slots}
    version = engine.title
    if summary.served is not None and commands:
        version = f"{engine.name} {summary.served.version}"
    title = f"K by concurrency at temperature {fmt.temperature(schedule.temperature)} ({version})"
    ties = [entry for entry in schedule.entries if entry.tied]
    notes = [
        f"At concurrency {entry.concurrency} K={entry.k} is a tie with"
        f" {', '.join(f'K={k}' for k in entry.tied)}."
        for entry in ties
    ]
    if largest_k == 0:
        unpaid = "Serve the target without a draft at every load."
        return Snippet(title, commands.get(0, ""), (unpaid, *notes))
    if engine.name == VLLM.name:
        kind = served.kind if served.kind in LINES["vllm"] else "model"
        config = {
            **vllm_config(kind, served.draft, largest_k),
            RANGES: vllm_ranges(k_by_load, largest),
        }
        notes.append(f"Above concurrency {largest}, not measured, vLLM keeps the last K.")
        if 0 in k_by_load.values():
            notes.append(
                "At K=0 it still runs the draft in each step; what was measured at K=0 is a server"
                " without one, so its throughput and loss are not this line's."
            )
        code = vllm_serve(target, config)
        if commands:
            code = _with_ranges(commands[largest_k], config[RANGES])
        return Snippet(title, code, tuple(notes))
    changes = [*merged(k_by_load).items()]
    lines: list[str] = []
    for (low, k), (after, _) in zip(changes, [*changes[1:], (None, 0)], strict=True):
        load = f"{low} and more" if after is None else f"{low}" if after == low + 1 else ""
        lines.append(f"# concurrency {load or f'{low} to {(after or 0) - 1}'}")
        unmeasured = _code(server, served, k) if k else "# without a draft"
        lines.append(commands.get(k, unmeasured))
    if engine.name == ENGINES["sglang"].name:
        tiers = json.dumps(sglang_tiers(k_by_load))
        notes.append(
            "With an EAGLE draft instead, one server changes K: --speculative-adaptive"
            f" --speculative-adaptive-config FILE, and in it {tiers}"
        )
    notes.insert(0, f"{engine.name} has one K per server: take that of the expected concurrency.")
    return Snippet(title, "\n".join(lines), tuple(notes), engine.language)


def _with_ranges(command: str, ranges: Sequence[Sequence[int]]) -> str:
    """A command of vLLM with K by the size of a batch."""
    words = shlex.split(command)
    place = words.index("--speculative-config") + 1
    words[place] = json.dumps({**json.loads(words[place]), RANGES: ranges})
    return shlex.join(words)
