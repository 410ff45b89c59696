"""Serving lines of drafts that are no model of their own: heads, the target's layers, look-ups.

One entry per engine and kind; an engine without an entry for a kind has nothing to paste. Read in:

- vLLM and SGLang: `harness.serving.kinds`. SGLang's srt/models/llama_eagle3.py reads tensors
  `midlayer.*` only; its NGRAM (srt/arg_groups/speculative_hook.py) drafts a tree, whose branches
  share the draft tokens; EAGLE and EAGLE3 take `--speculative-use-rejection-sampling`, which
  accepts by the ratio.
- llama.cpp: docs/speculative.md: draft-eagle3 (`-md` is the head, converted with
  --target-model-dir), draft-mtp, draft-dflash, ngram-simple (the *last* earlier match of exactly
  size-n tokens; its drafts, too, are cut to --spec-draft-n-max, 3 by default).
- transformers: generation/candidate_generator.py: `prompt_lookup_num_tokens`, the look-up that this
  run has; `assistant_early_exit`. Settings are applied to its draft twice, processors once. Its
  `use_mtp` drafts one token for each MTP layer and knows DeepSeek's and GLM's only, so it has no
  line.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.records import LONGEST_NGRAM
from harness.serving.kinds import NAMES, DraftKind, sglang_flags, vllm_config

# Of llama.cpp, the target alone; its files are conversions that only the reader knows
LLAMA_SERVER = "llama-server -m TARGET.gguf"
# Of every engine that serves DFlash drafters
BLOCK = (
    "It fills a block of K + 1 positions; a run fills the drafter's whole block, or draft.block= of"
    " them, so give draft.block=K+1 to draft the same."
)


@dataclass(frozen=True)
class Drafting:
    """What is to be drafted with.

    Attributes:
        target, draft: ids or folders.
        k: num_draft_tokens.
        layers: of an early exit.
        threshold: below this probability of a token, no more are drafted.
        imports, sampling: of transformers, and its arguments that say how to sample, as Python.
    """

    target: str
    draft: str
    k: int
    layers: int | None
    threshold: float
    imports: tuple[str, ...]
    sampling: tuple[str, ...]


@dataclass(frozen=True)
class KindLine:
    """One engine's line for one kind.

    Attributes:
        line: the text to paste.
        note: what to know of it, a whole sentence; "" for nothing.
        same: whether it proposes what this run's draft does, so that the run's speedup holds.
    """

    line: Callable[[Drafting], str]
    note: str = ""
    same: bool = True


def vllm_serve(target: str, config: Mapping[str, Any] | None = None, options: str = "") -> str:
    """`vllm serve`, with a speculative configuration where one is given, quoted for a shell."""
    line = f"vllm serve {shlex.quote(target)}"
    if config is None:
        return line
    packed = json.dumps(config, separators=(",", ":"))
    return f"{line} {options}--speculative-config {shlex.quote(packed)}"


def sglang_serve(target: str) -> str:
    """SGLang's server of a target alone."""
    return f"python -m sglang.launch_server --model-path {shlex.quote(target)}"


def generate(
    target: str,
    settings: Sequence[str],
    arguments: Sequence[str],
    imports: Sequence[str] = (),
) -> str:
    """A call of transformers' `generate`, as Python.

    Args:
        target: id or folder.
        settings: lines before the call.
        arguments: of the call, besides the inputs.
        imports: names of transformers that they need.
    """
    return "\n".join(
        [
            f"from transformers import {', '.join(['AutoModelForCausalLM', *imports])}",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({json.dumps(target)})",
            *settings,
            "output = model.generate(",
            "    **inputs,  # of your tokenizer",
            *(f"    {argument}," for argument in arguments),
            ")",
        ]
    )


def _vllm(kind: DraftKind, **more: str) -> Callable[[Drafting], str]:
    def line(drafting: Drafting) -> str:
        config = vllm_config(kind, drafting.draft, drafting.k)
        return vllm_serve(drafting.target, {**config, **more})

    return line


def _sglang(kind: DraftKind) -> Callable[[Drafting], str]:
    return lambda drafting: sglang_drafting(kind, drafting.target, drafting.draft, drafting.k)


def sglang_drafting(kind: DraftKind, target: str, draft: str, k: int) -> str:
    """SGLang's server with a chain of k drafted tokens."""
    flags = [str(part) for flag in sglang_flags(kind, draft, k).items() for part in flag]
    return f"{sglang_serve(target)} {shlex.join(flags)}"


def _sglang_ngram(drafting: Drafting) -> str:
    return (
        f"{sglang_serve(drafting.target)} --speculative-algorithm NGRAM"
        f" --speculative-num-draft-tokens {drafting.k + 1}"
    )


def _llama_cpp(options: str) -> Callable[[Drafting], str]:
    def line(drafting: Drafting) -> str:
        return f"{LLAMA_SERVER} {options.format(k=drafting.k, n=LONGEST_NGRAM)}"

    return line


def _transformers(argument: str, setting: str = "") -> Callable[[Drafting], str]:
    def line(drafting: Drafting) -> str:
        values = {
            "k": drafting.k,
            "n": LONGEST_NGRAM,
            "layers": drafting.layers,
            "threshold": drafting.threshold,
        }
        arguments = (argument.format(**values), *drafting.sampling)
        settings = setting.format(**values).splitlines()
        return generate(drafting.target, settings, arguments, drafting.imports)

    return line


_VLLM: Mapping[DraftKind, KindLine] = {
    "eagle3": KindLine(_vllm("eagle3")),
    "mtp": KindLine(_vllm("mtp")),
    "medusa": KindLine(_vllm("medusa")),
    "dflash": KindLine(_vllm("dflash"), BLOCK),
    "ngram": KindLine(_vllm("ngram")),
    "suffix": KindLine(
        _vllm("suffix"),
        "It needs the package arctic-inference, and scores matches by its own trees.",
        same=False,
    ),
}
# By the names of SERVERS, then by kind
LINES: Mapping[str, Mapping[DraftKind, KindLine]] = {
    "vllm": _VLLM,
    # What a look-up proposes is chosen, so its line is the same; Medusa heads' drafts are, always
    "vllm_probabilistic": {
        **{kind: line for kind, line in _VLLM.items() if kind != "medusa"},
        "eagle3": KindLine(_vllm("eagle3", draft_sample_method="probabilistic")),
        "mtp": KindLine(_vllm("mtp", draft_sample_method="probabilistic")),
        "dflash": KindLine(_vllm("dflash", draft_sample_method="probabilistic"), BLOCK),
    },
    "sglang": {
        "eagle3": KindLine(
            _sglang("eagle3"),
            "It reads heads in SpecForge's layout; convert one in another.",
        ),
        "mtp": KindLine(_sglang("mtp")),
        "dflash": KindLine(_sglang("dflash"), BLOCK),
        "ngram": KindLine(
            _sglang_ngram, "It drafts a tree, from a cache of all requests.", same=False
        ),
    },
    "llamacpp": {
        "eagle3": KindLine(
            _llama_cpp("-md HEAD.gguf --spec-type draft-eagle3 --spec-draft-n-max {k}"),
            "TARGET.gguf and HEAD.gguf stand for your conversions; convert_hf_to_gguf.py takes the"
            " head with --target-model-dir.",
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
            same=False,
        ),
    },
    "mlx": {},
    "transformers": {
        "ngram": KindLine(
            _transformers("prompt_lookup_num_tokens={k}, max_matching_ngram_size={n}")
        ),
        "early_exit": KindLine(
            _transformers(
                "assistant_early_exit={layers}",
                "model.generation_config.num_assistant_tokens = {k}\n"
                'model.generation_config.num_assistant_tokens_schedule = "constant"\n'
                "model.generation_config.assistant_confidence_threshold = {threshold}",
            )
        ),
    },
}


def not_available(kind: DraftKind) -> str:
    """What is said of an engine that has no such drafting."""
    if kind == "copy":
        return (
            "Not available here: engines make no copy of the target; convert one, and serve it as"
            " a draft model."
        )
    return f"Not available here: no {NAMES[kind].removeprefix('an ').removeprefix('a ')}."
