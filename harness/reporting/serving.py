"""What to paste into a server: one line per engine for the draft and K that the verdict names.

Engines accept by different rules, so one pair has up to three acceptances above temperature 0. An
engine's K and speedup are the verdict's where it accepts as the run did, the leaderboard's of its
rule where the run replayed that rule, and otherwise not known. Step times are always this run's.

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

To add an engine, add an `Engine` to ENGINES with a function that writes its line.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.records import LONGEST_NGRAM, NGRAM, Rule
from harness.reporting import formatting as fmt
from harness.summary import LeaderboardRow, SamplingFacts, Summary, Verdict

SERVING_COMMANDS = frozenset({"sweep", "audition"})
STEP_TIMES = ", at this run's step times"


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
    """What the verdict says to serve, and what the run knows of other acceptance rules."""

    # target, draft: ids or folders.
    target: str
    draft: str
    k: int
    temperature: float
    gain: str  # the verdict's speedup in words, interval included
    sampling: SamplingFacts
    best: Mapping[Rule, LeaderboardRow]  # by rule, the draft at its best K by replay
    synthetic: bool

    def under(self, engine: "Engine") -> tuple[int, str]:
        """An engine's K, and what is known of its speedup, as a sentence."""
        if self.synthetic:
            return self.k, (
                f"{self.gain} at the synthetic acceptance of this run; what this engine would"
                " accept is not known."
            )
        rule, row = engine.rule, self.best.get(engine.rule)
        if self.sampling.stop_threshold is None or engine.stops_early:
            if self.temperature == 0:
                return self.k, (
                    f"{self.gain} on held-out prompts{STEP_TIMES}."
                    " At temperature 0 all acceptance rules coincide."
                )
            if rule == self.sampling.rule:
                under = f"under its acceptance rule ({rule})"
                return self.k, f"{self.gain} on held-out prompts, {under}{STEP_TIMES}."
        elif row is None:
            return self.k, "Its speedup is not known: the run stopped drafting early, it does not."
        if row is None:
            return self.k, (
                f"Its speedup is not known: it accepts by the rule {rule}, which was not replayed."
            )
        known = (
            f"{fmt.speedup(row.speedup)} by replay under its rule, {rule}, at K={row.k}, picked on"
            f" these prompts{STEP_TIMES}"
        )
        return row.k, f"{known}{'' if row.speedup > 1 else ': it does not pay by this rule'}."

    @property
    def requests(self) -> str:
        """Which requests the speedup is of, for an engine whose requests say how to sample."""
        sampling = self.sampling
        penalty = sampling.repetition_penalty
        penalised = "" if penalty is None else f" and repetition_penalty {penalty:g}"
        if self.temperature == 0:
            return (
                f"Its speedup is for requests with temperature 0{penalised}; a server's default is"
                " another."
            )
        min_p = "" if sampling.min_p is None else f", min_p {sampling.min_p:g}"
        top_k, top_p = (
            f"no {name}" if value is None else f"{name} {value:g}"
            for name, value in (("top_k", sampling.top_k), ("top_p", sampling.top_p))
        )
        return (
            f"Its speedup is for requests with temperature {fmt.temperature(self.temperature)},"
            f" {top_k} and {top_p}{min_p}{penalised}; a server's defaults are others."
        )


@dataclass(frozen=True)
class Engine:
    """What is known of an engine."""

    name: str
    version: str  # whose syntax `line` writes
    rule: Rule
    line: Callable[[Served, int], str]  # the text to paste, for a draft and a K
    stops_early: bool = False  # whether it can stop drafting at a threshold, as our loop can
    sampling_in_requests: bool = True  # whether requests say how to sample, and not the line
    notes: Callable[[Served], Sequence[str]] = lambda _: ()  # more on this line
    language: str = "sh"

    @property
    def title(self) -> str:
        """Its name and version."""
        return f"{self.name} {self.version}"

    def snippet(self, served: Served) -> Snippet:
        """Its line, at the K that is best under its rule."""
        k, known = served.under(self)
        requests = (served.requests,) if self.sampling_in_requests else ()
        notes = (known, *requests, *self.notes(served))
        return Snippet(self.title, self.line(served, k), notes, self.language)


def vllm_serve(target: str, config: Mapping[str, Any] | None = None, options: str = "") -> str:
    """`vllm serve`, with a speculative configuration where one is given, quoted for a shell."""
    line = f"vllm serve {shlex.quote(target)}"
    if config is None:
        return line
    packed = json.dumps(config, separators=(",", ":"))
    return f"{line} {options}--speculative-config {shlex.quote(packed)}"


def _draft_model(served: Served, k: int) -> dict[str, Any]:
    return {"method": "draft_model", "model": served.draft, "num_speculative_tokens": k}


def _vllm(served: Served, k: int) -> str:
    return vllm_serve(served.target, _draft_model(served, k))


def _vllm_sampled(served: Served, k: int) -> str:
    config = {**_draft_model(served, k), "draft_sample_method": "probabilistic"}
    return vllm_serve(served.target, config)


def _vllm_sampled_notes(served: Served) -> Sequence[str]:
    default = served.best.get("greedy_draft")
    if default is None:
        return ()
    gain = f"{fmt.speedup(default.speedup)} at K={default.k}"
    return (f"Without draft_sample_method vLLM drafts greedily: {gain}.",)


def _sglang(served: Served, k: int) -> str:
    """STANDALONE with a chain: topk 1, and one position more than steps to verify."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(served.target)}"
        " --speculative-algorithm STANDALONE"
        f" --speculative-draft-model-path {shlex.quote(served.draft)}"
        f" --speculative-num-steps {k} --speculative-eagle-topk 1"
        f" --speculative-num-draft-tokens {k + 1}"
    )


def _llama_cpp(_served: Served, k: int) -> str:
    return (
        "llama-server -m TARGET.gguf -md DRAFT.gguf"
        f" --spec-type draft-simple --spec-draft-n-max {k}"
    )


def _llama_cpp_notes(served: Served) -> Sequence[str]:
    files = (
        f"TARGET.gguf and DRAFT.gguf stand for your conversions of {served.target} and"
        f" {served.draft}; quantised weights accept differently."
    )
    sampled = served.best.get("ratio")
    if served.temperature == 0 or sampled is None or served.synthetic:
        return (files,)
    gain = f"{fmt.speedup(sampled.speedup)} at K={sampled.k}"
    return (
        files,
        "With --spec-draft-sampling probabilistic it samples the draft and accepts by a ratio:"
        f" {gain} by replay, if it samples the draft as this run did (not checked).",
    )


def _mlx(served: Served, k: int) -> str:
    line = (
        f"mlx_lm.generate --model {shlex.quote(served.target)}"
        f" --draft-model {shlex.quote(served.draft)} --num-draft-tokens {k}"
        f" --temp {served.temperature:g}"
    )
    if served.temperature == 0:
        return line
    sampling = served.sampling
    options = (("top-k", sampling.top_k), ("top-p", sampling.top_p), ("min-p", sampling.min_p))
    return line + "".join(f" --{name} {value:g}" for name, value in options if value is not None)


def _transformers(served: Served, k: int) -> str:
    """Three settings on the draft, and sampling that is applied to both models once."""
    processors = _processors(served)
    classes = (processor.partition("(")[0] for processor in processors)
    imports = ["AutoModelForCausalLM", *(["LogitsProcessorList", *classes] if processors else ())]
    sampling = ["do_sample=False"]
    if served.temperature > 0:
        sampling = ["do_sample=True", "temperature=1.0", "top_k=0", "top_p=1.0"]
    if processors:
        sampling.append(f"logits_processor=LogitsProcessorList([{', '.join(processors)}])")
    threshold = served.sampling.stop_threshold or 0.0
    return "\n".join(
        [
            f"from transformers import {', '.join(imports)}",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({json.dumps(served.target)})",
            f"draft = AutoModelForCausalLM.from_pretrained({json.dumps(served.draft)})",
            f"draft.generation_config.num_assistant_tokens = {k}",
            'draft.generation_config.num_assistant_tokens_schedule = "constant"',
            f"draft.generation_config.assistant_confidence_threshold = {threshold}",
            "output = model.generate(",
            "    **inputs,  # of your tokenizer",
            "    assistant_model=draft,",
            *(f"    {argument}," for argument in sampling),
            ")",
        ]
    )


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


VLLM = Engine("vLLM", "0.33", "greedy_draft", _vllm)
VLLM_SAMPLED = replace(VLLM, rule="ratio", line=_vllm_sampled, notes=_vllm_sampled_notes)
# vLLM comes first: `snippets` adds it with the way of drafting that is faster
ENGINES = (
    Engine("SGLang", "0.5.23", "greedy_draft", _sglang),
    Engine("llama.cpp", "b11368 or later", "greedy_draft", _llama_cpp, notes=_llama_cpp_notes),
    Engine("mlx-lm", "0.32.2", "exact_match", _mlx, sampling_in_requests=False),
    Engine(
        "transformers",
        "5.23",
        "ratio",
        _transformers,
        stops_early=True,
        sampling_in_requests=False,
        notes=_transformers_notes,
        language="python",
    ),
)
REMOVED = Snippet(
    "mistral.rs",
    "",
    ("draft models were removed after v0.8.0; the old setting was [speculative] gamma = K.",),
)
TOYS = "These names are of models that ship with this package or have random weights: put your own."
NO_DRAFT = "No draft: serve the target as it is."


def snippets_of(summary: Summary) -> tuple[Snippet, ...]:
    """What to serve by this run's verdict; empty where it decides nothing."""
    verdict, run = summary.verdict, summary.run
    if run.command not in SERVING_COMMANDS or verdict is None or verdict.temperature is None:
        return ()
    target = next((model.id for model in run.models if model.role == "target"), None)
    target = target or run.model or "TARGET"
    if verdict.decision != "speculate":
        first, *others = [_without_draft(summary, target, verdict)]
    elif verdict.draft == NGRAM:
        first, *others = [_look_up(target, verdict)]
    else:
        first, *others = _with_draft(summary, target, verdict)
    if target.startswith("embedded:") or run.dummies:
        first = replace(first, notes=(*first.notes, TOYS))
    return (first, *others)


def _with_draft(summary: Summary, target: str, verdict: Verdict) -> list[Snippet]:
    assert verdict.temperature is not None
    names = [model for model in summary.run.models if model.role != "target"]
    draft = next((model.id for model in names if model.name == verdict.draft), None)
    served = Served(
        target=target,
        draft=draft or verdict.draft or "DRAFT",
        k=verdict.k,
        temperature=verdict.temperature,
        gain=fmt.speedup(verdict.speedup, verdict.speedup_lo, verdict.speedup_hi),
        sampling=summary.run.sampling,
        best=_best_by_rule(summary, verdict),
        synthetic=summary.run.synthetic,
    )
    lines = [engine.snippet(served) for engine in (_faster_vllm(served), *ENGINES)]
    rates = _acceptance(summary, verdict)
    if len(rates) >= served.k:
        lines.append(_validation(served, rates[: served.k]))
    return [*lines, REMOVED]


def _faster_vllm(served: Served) -> Engine:
    """VLLM with a draft that is sampled where that is the faster way, else its default."""
    sampled, greedy = served.best.get("ratio"), served.best.get("greedy_draft")
    if served.temperature == 0:
        return VLLM
    if sampled is not None and greedy is not None:
        return VLLM_SAMPLED if sampled.speedup > greedy.speedup else VLLM
    return VLLM_SAMPLED if served.sampling.rule == "ratio" else VLLM


def _validation(served: Served, rates: Sequence[float]) -> Snippet:
    """VLLM with random weights and the acceptance of the run, for its latency alone."""
    config = {
        **_draft_model(served, served.k),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [round(rate, 4) for rate in rates],
    }
    under = f" under the rule {served.sampling.rule}" if served.temperature > 0 else ""
    origin = "that was set for this run" if served.synthetic else f"measured here{under}"
    return Snippet(
        f"{VLLM.title}, to check the speedup on your server without the weights",
        vllm_serve(served.target, config, "--load-format dummy "),
        (
            f"Random weights with the acceptance {origin}, position by position: its latency is"
            " real, its text is not.",
        ),
    )


def _best_by_rule(summary: Summary, verdict: Verdict) -> dict[Rule, LeaderboardRow]:
    """The verdict's draft at its best K under every rule; the only draft where it names none."""
    boards = [board for board in summary.leaderboards if board.temperature == verdict.temperature]
    drafts = {row.draft for board in boards for row in board.rows if row.draft is not None}
    draft = verdict.draft or (next(iter(drafts)) if len(drafts) == 1 else None)
    return {
        board.rule: row
        for board in boards
        for row in board.rows
        if row.draft is not None and row.draft == draft
    }


def _acceptance(summary: Summary, verdict: Verdict) -> tuple[float, ...]:
    """Unconditional acceptance by position at the verdict's K; measured before replayed."""
    entries = [
        entry
        for entry in summary.acceptance_by_position
        if entry.prompt_set == "all"
        and (entry.draft, entry.temperature, entry.k)
        == (verdict.draft, verdict.temperature, verdict.k)
    ]
    entries.sort(key=lambda entry: entry.source != "measured")
    return entries[0].non_increasing if entries else ()


def _without_draft(summary: Summary, target: str, verdict: Verdict) -> Snippet:
    """The target alone; and which other acceptance rule might pay, where replay says so."""
    notes = [NO_DRAFT]
    if verdict.temperature and not summary.run.synthetic:
        used_by = {board.rule: ", ".join(board.engines) for board in summary.leaderboards}
        notes += [
            f"Under the rule {rule} ({used_by[rule]}) replay gives {fmt.speedup(row.speedup)} at"
            f" K={row.k}, picked on these prompts; decode.rule={rule} judges it."
            for rule, row in _best_by_rule(summary, verdict).items()
            if rule != summary.run.sampling.rule and row.speedup > 1
        ]
    return Snippet(VLLM.title, vllm_serve(target), tuple(notes))


def _look_up(target: str, verdict: Verdict) -> Snippet:
    config = {
        "method": "ngram",
        "num_speculative_tokens": verdict.k,
        "prompt_lookup_max": LONGEST_NGRAM,
        "prompt_lookup_min": 1,
    }
    gain = fmt.speedup(verdict.speedup, verdict.speedup_lo, verdict.speedup_hi)
    note = (
        f"{gain} on held-out prompts; an n-gram's proposals are not sampled, so all acceptance"
        " rules coincide."
    )
    return Snippet(VLLM.title, vllm_serve(target, config), (note,))
