"""Serving lines of drafts that are no model of their own: heads, the target's layers, look-ups.

One entry per engine and kind; an engine without an entry for a kind has nothing to paste. Read in:

- vLLM: vllm/config/speculative.py, `SpeculativeMethod`: eagle3, mtp, ngram, suffix. `mtp` takes the
  target's own layers, without a `model`; `suffix` needs the package arctic-inference, and its
  num_speculative_tokens is the most it proposes.
- SGLang: docs/advanced_features/speculative_decoding.md. At `--speculative-eagle-topk 1` a chain of
  as many tokens as steps is drafted, and one position more verified. MTP layers are served by the
  algorithm EAGLE without a draft path. NGRAM matches in a cache of all requests, on CUDA only.
- llama.cpp: docs/speculative.md: draft-eagle3 (`-md` is the converted head), draft-mtp,
  ngram-simple (the *last* earlier match of exactly size-n tokens).
- transformers: generation/candidate_generator.py: `prompt_lookup_num_tokens`, the look-up that this
  run has; `assistant_early_exit`.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.records import LONGEST_NGRAM

DraftKind = Literal["model", "eagle3", "mtp", "ngram", "suffix", "early_exit", "copy"]
# What a sentence calls a draft of that kind
NAMES: Mapping[DraftKind, str] = {
    "model": "a draft model",
    "eagle3": "an EAGLE-3 head",
    "mtp": "MTP layers",
    "ngram": "an n-gram look-up",
    "suffix": "a suffix look-up",
    "early_exit": "early exit of the target's layers",
    "copy": "a copy of the target",
}


@dataclass(frozen=True)
class Drafting:
    """What is to be drafted with.

    Attributes:
        target, draft: ids or folders.
        k: num_draft_tokens.
        layers: of an early exit.
        sampling: transformers' arguments that say how to sample, as Python.
    """

    target: str
    draft: str
    k: int
    layers: int | None = None
    sampling: tuple[str, ...] = ()


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


def _vllm(config: Callable[[Drafting], dict[str, Any]]) -> Callable[[Drafting], str]:
    def line(drafting: Drafting) -> str:
        packed = json.dumps(config(drafting), separators=(",", ":"))
        target = shlex.quote(drafting.target)
        return f"vllm serve {target} --speculative-config {shlex.quote(packed)}"

    return line


def _sglang(algorithm: str, *, draft: bool) -> Callable[[Drafting], str]:
    def line(drafting: Drafting) -> str:
        path = f" --speculative-draft-model-path {shlex.quote(drafting.draft)}" if draft else ""
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(drafting.target)}"
            f" --speculative-algorithm {algorithm}{path} --speculative-num-steps {drafting.k}"
            f" --speculative-eagle-topk 1 --speculative-num-draft-tokens {drafting.k + 1}"
        )

    return line


def _sglang_ngram(drafting: Drafting) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(drafting.target)}"
        f" --speculative-algorithm NGRAM --speculative-num-draft-tokens {drafting.k + 1}"
    )


def _llama_cpp(options: str) -> Callable[[Drafting], str]:
    def line(drafting: Drafting) -> str:
        return f"llama-server -m TARGET.gguf {options.format(k=drafting.k, n=LONGEST_NGRAM)}"

    return line


def _transformers(argument: str, setting: str = "") -> Callable[[Drafting], str]:
    def line(drafting: Drafting) -> str:
        values = {"k": drafting.k, "n": LONGEST_NGRAM, "layers": drafting.layers}
        return "\n".join(
            [
                "from transformers import AutoModelForCausalLM",
                "",
                f"model = AutoModelForCausalLM.from_pretrained({json.dumps(drafting.target)})",
                *setting.format(**values).splitlines(),
                "output = model.generate(",
                "    **inputs,  # of your tokenizer",
                f"    {argument.format(**values)},",
                *(f"    {entry}," for entry in drafting.sampling),
                ")",
            ]
        )

    return line


_VLLM: Mapping[DraftKind, KindLine] = {
    "eagle3": KindLine(
        _vllm(
            lambda d: {"method": "eagle3", "model": d.draft, "num_speculative_tokens": d.k},
        )
    ),
    "mtp": KindLine(_vllm(lambda d: {"method": "mtp", "num_speculative_tokens": d.k})),
    "ngram": KindLine(
        _vllm(
            lambda d: {
                "method": "ngram",
                "num_speculative_tokens": d.k,
                "prompt_lookup_max": LONGEST_NGRAM,
                "prompt_lookup_min": 1,
            }
        )
    ),
    "suffix": KindLine(
        _vllm(lambda d: {"method": "suffix", "num_speculative_tokens": d.k}),
        "It needs the package arctic-inference, and scores matches by its own trees.",
        same=False,
    ),
}
# By the names of SERVERS, then by kind
LINES: Mapping[str, Mapping[DraftKind, KindLine]] = {
    "vllm": _VLLM,
    "vllm_probabilistic": {kind: _VLLM[kind] for kind in ("ngram", "suffix")},
    "sglang": {
        "eagle3": KindLine(_sglang("EAGLE3", draft=True)),
        "mtp": KindLine(_sglang("EAGLE", draft=False)),
        "ngram": KindLine(
            _sglang_ngram, "It matches in a cache of all requests, on CUDA only.", same=False
        ),
    },
    "llamacpp": {
        "eagle3": KindLine(
            _llama_cpp("-md HEAD.gguf --spec-type draft-eagle3 --spec-draft-n-max {k}"),
            "TARGET.gguf and HEAD.gguf stand for your conversions; the head's needs"
            " --target-model-dir.",
        ),
        "mtp": KindLine(
            _llama_cpp("--spec-type draft-mtp --spec-draft-n-max {k}"),
            "TARGET.gguf stands for your conversion, with its MTP layers.",
        ),
        "ngram": KindLine(
            _llama_cpp(
                "--spec-type ngram-simple --spec-ngram-simple-size-n {n}"
                " --spec-ngram-simple-size-m {k}"
            ),
            "It takes the last earlier match of exactly that many tokens, this run the first of"
            " them or of one token.",
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
                "model.generation_config.assistant_confidence_threshold = 0.0",
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
