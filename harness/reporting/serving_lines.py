"""The serving lines of every engine, by the kind of draft, and how each engine accepts.

Syntax and rule of each engine, read in the named file of the release that its record names:

- vLLM: vllm/config/speculative.py and `harness.serving.kinds`. `draft_sample_method` is greedy by
  default, with the draft's distribution taken as one-hot; `probabilistic` samples and accepts by
  the ratio. `synthetic_acceptance_rates` are unconditional, K of them, never increasing.
- SGLang: srt/speculative/eagle_utils.py, `eagle_sample`: at `--speculative-eagle-topk 1` the argmax
  is proposed and accepted with the target's probability of it. STANDALONE refuses
  `--speculative-use-rejection-sampling` (srt/arg_groups/speculative_hook.py): no other rule. EAGLE
  and EAGLE3 take it. srt/models/llama_eagle3.py reads tensors `midlayer.*` only; NGRAM drafts a
  tree, whose branches share the draft tokens.
- llama.cpp: common/speculative.cpp, draft-simple: the argmax is proposed, and accepted where the
  target's sampler draws the same. Options in tools/server/README.md: `--spec-draft-p-min` is 0 by
  default, `--spec-draft-sampling` greedy (its other value came with build 11368).
  docs/speculative.md: draft-eagle3 (`-md` is the head, converted with --target-model-dir),
  draft-mtp, draft-dflash, ngram-simple (the *last* earlier match of exactly size-n tokens; its
  drafts, too, are cut to --spec-draft-n-max, 3 by default).
- mlx-lm: mlx_lm/generate.py, `speculative_generate_step`: two independent draws, accepted when
  equal. `--temp` is 0 by default.
- transformers: generation/candidate_generator.py. Settings are read from the draft's
  generation_config; the draft is sampled and accepted by the ratio. Temperature and top-p given as
  settings are applied to the draft twice, given as processors once. `prompt_lookup_num_tokens` is
  the look-up that this run has. Its `use_mtp` drafts one token for each MTP layer and knows
  DeepSeek's and GLM's only, so it has no line.

To add an engine, add an `Engine` to ENGINES with a line for each kind of draft that it has.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.records import LONGEST_NGRAM, Rule
from harness.reporting import formatting as fmt
from harness.reporting import grid
from harness.serving.drafts import DRAFTS, DraftKind
from harness.serving.kinds import drafts_alike, sglang_flags, vllm_config
from harness.summary import Answer, SamplingFacts

ROUND_TIMES = ", at this run's round times"
# Of llama.cpp, the target alone; its files are conversions that only the reader knows
LLAMA_SERVER = "llama-server -m TARGET.gguf"
# Of llama.cpp; without it the draft's argmax is proposed
PROBABILISTIC = "--spec-draft-sampling probabilistic"
# Of every engine that serves DFlash drafters
BLOCK = (
    "It fills a block of K + 1 positions; a run fills the drafter's whole block, or draft.block= of"
    " them, so give draft.block=K+1 to draft the same."
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
    # By server, what the grid says at this temperature for the whole workload.
    answers: Mapping[str, Answer]
    synthetic: bool
    # Of the draft; layers of an early exit
    kind: DraftKind = "model"
    layers: int | None = None

    @property
    def weights(self) -> str | None:
        """Where the draft's weights are; None for the target's own MTP layers."""
        return None if (self.kind, self.draft) == ("mtp", self.target) else self.draft

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
class KindLine:
    """One engine's line for one kind of draft."""

    line: Callable[[Served], str]  # the text to paste
    note: str = ""  # what to know of it, a whole sentence; "" for nothing
    more: Callable[[Served], Sequence[str]] = lambda _: ()  # notes that depend on what is served


@dataclass(frozen=True)
class Engine:
    """What is known of an engine."""

    name: str
    version: str  # whose syntax the lines have
    rule: Rule
    plain: Callable[[Served], str]  # the text to paste for the target alone
    lines: Mapping[DraftKind, KindLine]
    stops_early: bool = False  # whether it can stop drafting at a threshold, as our loop can
    sampling_in_requests: bool = True  # whether requests say how to sample, and not the line
    language: str = "sh"

    @property
    def title(self) -> str:
        """Its name and version."""
        return f"{self.name} {self.version}"

    def known(self, server: str, served: Served) -> str:
        """What is known of its speedup, as a sentence."""
        if not drafts_alike(server, served.kind, served.temperature):
            return "Its speedup is not known: it proposes other tokens than this run's look-up."
        stopped = served.sampling.stop_threshold is not None and self.rule == served.sampling.rule
        if stopped and not self.stops_early and not served.synthetic:
            return "Its speedup is not known: the run stopped drafting early, it does not."
        answer = served.answers.get(server)
        if answer is None:
            return "Its speedup is not known: this run did not replay its acceptance rule."
        gain = fmt.gain(answer)
        if served.synthetic:
            return (
                f"{gain} at the synthetic acceptance of this run; what this engine would accept is"
                " not known."
            )
        return f"{gain}, {grid.SOURCES[answer.source]} on held-out prompts{ROUND_TIMES}."


# ---- vLLM ----------------------------------------------------------------------------------------


def vllm_serve(target: str, config: Mapping[str, Any] | None = None, options: str = "") -> str:
    """`vllm serve`, with a speculative configuration where one is given, quoted for a shell."""
    line = f"vllm serve {shlex.quote(target)}"
    if config is None:
        return line
    packed = json.dumps(config, separators=(",", ":"))
    return f"{line} {options}--speculative-config {shlex.quote(packed)}"


def _vllm(served: Served) -> str:
    return vllm_serve(served.target, vllm_config(served.kind, served.weights, served.k))


def _vllm_sampled(served: Served) -> str:
    config = vllm_config(served.kind, served.weights, served.k)
    return vllm_serve(served.target, {**config, "draft_sample_method": "probabilistic"})


def _vllm_sampled_notes(served: Served) -> Sequence[str]:
    default = served.answers.get("vllm")
    if default is None or default.decision != "speculate":
        return ()
    gain = f"{fmt.speedup(default.speedup)} at K={default.k}"
    return (f"Without draft_sample_method vLLM drafts greedily: {gain}.",)


# ---- SGLang --------------------------------------------------------------------------------------


def _sglang_plain(served: Served) -> str:
    return f"python -m sglang.launch_server --model-path {shlex.quote(served.target)}"


def _sglang(served: Served) -> str:
    """A chain of K drafted tokens."""
    settings = sglang_flags(served.kind, served.weights, served.k)
    flags = [str(part) for flag in settings.items() for part in flag]
    return f"{_sglang_plain(served)} {shlex.join(flags)}"


def _sglang_ngram(served: Served) -> str:
    return (
        f"{_sglang_plain(served)} --speculative-algorithm NGRAM"
        f" --speculative-num-draft-tokens {served.k + 1}"
    )


# ---- llama.cpp -----------------------------------------------------------------------------------


def _llama_cpp(options: str) -> Callable[[Served], str]:
    return lambda served: f"{LLAMA_SERVER} {options.format(k=served.k, n=LONGEST_NGRAM)}"


def _llama_cpp_notes(served: Served) -> Sequence[str]:
    files = (
        f"TARGET.gguf and DRAFT.gguf stand for your conversions of {served.target} and"
        f" {served.draft}; quantised weights accept differently."
    )
    sampled = served.answers.get("vllm_probabilistic")
    greedy = served.temperature == 0 or served.synthetic
    if greedy or sampled is None or sampled.decision != "speculate":
        return (files,)
    gain = f"{fmt.speedup(sampled.speedup)} at K={sampled.k}"
    return (
        files,
        f"With {PROBABILISTIC} it accepts by a ratio, but draws among the draft's ten likeliest"
        f" tokens only: less than the {gain} of the whole distribution. python -m harness.server"
        " engine=llamacpp decode.rule=ratio measures it.",
    )


# ---- mlx-lm --------------------------------------------------------------------------------------


def _mlx(served: Served, draft: str = "") -> str:
    line = f"mlx_lm.generate --model {shlex.quote(served.target)}{draft}"
    line = f"{line} --temp {served.temperature:g}"
    if served.temperature == 0:
        return line
    sampling = served.sampling
    options = (("top-k", sampling.top_k), ("top-p", sampling.top_p), ("min-p", sampling.min_p))
    return line + "".join(f" --{name} {value:g}" for name, value in options if value is not None)


def _mlx_drafting(served: Served) -> str:
    draft = shlex.quote(served.draft)
    return _mlx(served, f" --draft-model {draft} --num-draft-tokens {served.k}")


# ---- transformers --------------------------------------------------------------------------------


def _generate(served: Served, settings: Sequence[str] = (), drafting: Sequence[str] = ()) -> str:
    """A call of `generate` as Python, with sampling that is applied to both models once.

    `settings` are lines before the call, `drafting` its arguments that say how to draft.
    """
    processors = _processors(served)
    imports = ["AutoModelForCausalLM"]
    arguments = [*drafting, "do_sample=False"]
    if served.temperature > 0:
        arguments = [*drafting, "do_sample=True", "temperature=1.0", "top_k=0", "top_p=1.0"]
    if processors:
        imports += ["LogitsProcessorList", *(text.partition("(")[0] for text in processors)]
        arguments.append(f"logits_processor=LogitsProcessorList([{', '.join(processors)}])")
    return "\n".join(
        [
            f"from transformers import {', '.join(imports)}",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({json.dumps(served.target)})",
            *settings,
            "output = model.generate(",
            "    **inputs,  # of your tokenizer",
            *(f"    {argument}," for argument in arguments),
            ")",
        ]
    )


def _processors(served: Served) -> list[str]:
    sampling, temperature = served.sampling, served.temperature
    penalty = sampling.repetition_penalty
    processors: list[str] = []
    if penalty is not None and penalty != 1.0:
        processors.append(f"RepetitionPenaltyLogitsProcessor({float(penalty)!r})")
    if temperature == 0:
        return processors
    if temperature != 1:
        processors.append(f"TemperatureLogitsWarper({float(temperature)!r})")
    if sampling.top_k is not None:
        processors.append(f"TopKLogitsWarper({sampling.top_k})")
    if sampling.top_p is not None:
        processors.append(f"TopPLogitsWarper({float(sampling.top_p)!r})")
    if sampling.min_p is not None:
        processors.append(f"MinPLogitsWarper({float(sampling.min_p)!r})")
    return processors


def _assisted(served: Served) -> str:
    load = f"draft = AutoModelForCausalLM.from_pretrained({json.dumps(served.draft)})"
    return _generate(served, (load, *_settings("draft", served)), ("assistant_model=draft",))


def _early_exit(served: Served) -> str:
    argument = f"assistant_early_exit={served.layers}"
    return _generate(served, _settings("model", served), (argument,))


def _prompt_lookup(served: Served) -> str:
    argument = f"prompt_lookup_num_tokens={served.k}, max_matching_ngram_size={LONGEST_NGRAM}"
    return _generate(served, drafting=(argument,))


def _settings(drafter: str, served: Served) -> tuple[str, ...]:
    """Of the model that drafts, under its name."""
    config = f"{drafter}.generation_config"
    return (
        f"{config}.num_assistant_tokens = {served.k}",
        f'{config}.num_assistant_tokens_schedule = "constant"',
        f"{config}.assistant_confidence_threshold = {served.sampling.stop_threshold or 0.0}",
    )


def _transformers_notes(served: Served) -> Sequence[str]:
    if not _processors(served):
        return ()
    return (
        "Temperature, top_k and top_p go in as processors: given as settings, transformers applies"
        " them to the draft twice and accepts less than this run did.",
    )


# ---- all of them ---------------------------------------------------------------------------------

VLLM = Engine(
    "vLLM",
    "0.33",
    "greedy_draft",
    lambda served: vllm_serve(served.target),
    {
        "model": KindLine(_vllm),
        "eagle3": KindLine(_vllm),
        "mtp": KindLine(_vllm),
        "medusa": KindLine(_vllm),
        "dflash": KindLine(_vllm, BLOCK),
        "ngram": KindLine(_vllm),
        "suffix": KindLine(
            _vllm,
            "It needs the package arctic-inference, and scores matches by its own trees.",
        ),
    },
)
# By the names of SERVERS
ENGINES: Mapping[str, Engine] = {
    "vllm": VLLM,
    "vllm_probabilistic": replace(
        VLLM,
        rule="ratio",
        lines={
            "model": KindLine(_vllm_sampled, more=_vllm_sampled_notes),
            "eagle3": KindLine(_vllm_sampled),
            "mtp": KindLine(_vllm_sampled),
            "dflash": KindLine(_vllm_sampled, BLOCK),
            # What a look-up proposes is chosen; Medusa heads' drafts are, always
            "ngram": VLLM.lines["ngram"],
            "suffix": VLLM.lines["suffix"],
        },
    ),
    "sglang": Engine(
        "SGLang",
        "0.5.23",
        "greedy_draft",
        _sglang_plain,
        {
            "model": KindLine(_sglang),
            "eagle3": KindLine(
                _sglang, "It reads heads in SpecForge's layout; convert one in another."
            ),
            "mtp": KindLine(_sglang),
            "dflash": KindLine(_sglang, BLOCK),
            "ngram": KindLine(_sglang_ngram, "It drafts a tree, from a cache of all requests."),
        },
    ),
    "llamacpp": Engine(
        "llama.cpp",
        "b11368 or later",
        "greedy_draft",
        lambda _: LLAMA_SERVER,
        {
            "model": KindLine(
                _llama_cpp("-md DRAFT.gguf --spec-type draft-simple --spec-draft-n-max {k}"),
                more=_llama_cpp_notes,
            ),
            "eagle3": KindLine(
                _llama_cpp("-md HEAD.gguf --spec-type draft-eagle3 --spec-draft-n-max {k}"),
                "TARGET.gguf and HEAD.gguf stand for your conversions; convert_hf_to_gguf.py takes"
                " the head with --target-model-dir.",
            ),
            "mtp": KindLine(
                _llama_cpp("--spec-type draft-mtp --spec-draft-n-max {k}"),
                "TARGET.gguf stands for your conversion, with its MTP layers.",
            ),
            "dflash": KindLine(
                _llama_cpp("-md DRAFT.gguf --spec-type draft-dflash --spec-draft-n-max {k}"),
                "TARGET.gguf and DRAFT.gguf stand for your conversions; the drafter's needs"
                f" --target-model-dir. {BLOCK}",
            ),
            "ngram": KindLine(
                _llama_cpp(
                    "--spec-type ngram-simple --spec-ngram-simple-size-n {n}"
                    " --spec-ngram-simple-size-m {k} --spec-draft-n-max {k}"
                ),
                "TARGET.gguf stands for your conversion. It takes the last earlier match of exactly"
                " that many tokens, this run the first of them or of one token.",
            ),
        },
    ),
    "mlx": Engine(
        "mlx-lm",
        "0.32.2",
        "exact_match",
        _mlx,
        {"model": KindLine(_mlx_drafting)},
        sampling_in_requests=False,
    ),
    "transformers": Engine(
        "transformers",
        "5.23",
        "ratio",
        _generate,
        {
            "model": KindLine(_assisted, more=_transformers_notes),
            "ngram": KindLine(_prompt_lookup),
            "early_exit": KindLine(_early_exit),
        },
        stops_early=True,
        sampling_in_requests=False,
        language="python",
    ),
}


def not_available(kind: DraftKind) -> str:
    """What is said of an engine that has no such drafting."""
    if kind == "copy":
        return (
            "Not available here: engines make no copy of the target; convert one, and serve it as"
            " a draft model."
        )
    return f"Not available here: no {DRAFTS[kind].noun}."
