"""One engine, one line: what to paste for a draft and K, and what that engine makes of them.

Syntax and rule of each, read in the named file of the release in VERSIONS:

- vLLM: vllm/config/speculative.py. `draft_sample_method` is greedy by default, with the draft's law
  taken as one-hot; `probabilistic` samples and accepts by the ratio. `synthetic_acceptance_rates`
  are unconditional, K of them, never increasing.
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
  settings warp the draft twice, given as processors once.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from harness.records import Rule
from harness.reporting import formatting as fmt
from harness.reporting.served import Served
from harness.reporting.snippets import Snippet

VERSIONS = {
    "vLLM": "0.33",
    "SGLang": "0.5.23",
    "llama.cpp": "b11368",
    "mlx-lm": "0.32.2",
    "transformers": "5.23",
}
RULE_OF: Mapping[str, Rule] = {
    "SGLang": "greedy_draft",
    "llama.cpp": "greedy_draft",
    "mlx-lm": "exact_match",
    "transformers": "ratio",
}


def titled(engine: str, more: str = "") -> str:
    """The engine and the version whose syntax the line is in."""
    return f"{engine} {VERSIONS[engine]}{more}"


def vllm(served: Served) -> Snippet:
    """A draft that is sampled where that is the faster of the two, else vLLM's default."""
    sampled, greedy = served.cells.get("ratio"), served.cells.get("greedy_draft")
    by_ratio = served.temperature > 0 and served.rule == "ratio"
    if served.temperature > 0 and sampled is not None and greedy is not None:
        by_ratio = sampled["speedup"] > greedy["speedup"]
    k, told = served.under("ratio" if by_ratio else "greedy_draft")
    config: dict[str, Any] = {
        "method": "draft_model",
        "model": served.draft,
        "num_speculative_tokens": k,
    }
    notes = [told]
    if by_ratio:
        config["draft_sample_method"] = "probabilistic"
        if greedy is not None:
            plain = f"{fmt.speedup(float(greedy['speedup']))} at K={greedy['k']}"
            notes.append(f"Without draft_sample_method vLLM drafts greedily: {plain}.")
    notes.append(served.requests)
    return Snippet(titled("vLLM"), vllm_line(served.target, config), tuple(notes))


def vllm_plain(target: str) -> str:
    """`vllm serve` without a draft."""
    return f"vllm serve {shlex.quote(target)}"


def vllm_line(target: str, config: Mapping[str, Any], more: str = "") -> str:
    """`vllm serve` with a speculative configuration, quoted for a shell."""
    packed = json.dumps(config, separators=(",", ":"))
    return f"{vllm_plain(target)} {more}--speculative-config {shlex.quote(packed)}"


def vllm_validation(served: Served, rates: Sequence[float]) -> Snippet:
    """Run vLLM with random weights and the acceptance of the run, for its latency alone.

    Args:
        served: the verdict's K is used.
        rates: at least K, unconditional per position, never increasing.
    """
    config = {
        "method": "draft_model",
        "model": served.draft,
        "num_speculative_tokens": served.k,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [round(rate, 4) for rate in rates[: served.k]],
    }
    under = f" under the rule {served.rule}" if served.temperature > 0 else ""
    whose = "that was set for this run" if served.imposed else f"measured here{under}"
    return Snippet(
        titled("vLLM", ", to check the speedup on your server without the weights"),
        vllm_line(served.target, config, "--load-format dummy "),
        (
            f"Random weights with the acceptance {whose}, position by position: its latency is"
            " real, its text is not.",
        ),
    )


def sglang(served: Served) -> Snippet:
    """STANDALONE with a chain: topk 1, and one position more than steps to verify."""
    k, told = served.under(RULE_OF["SGLang"])
    line = (
        f"python -m sglang.launch_server --model-path {shlex.quote(served.target)}"
        " --speculative-algorithm STANDALONE"
        f" --speculative-draft-model-path {shlex.quote(served.draft)}"
        f" --speculative-num-steps {k} --speculative-eagle-topk 1"
        f" --speculative-num-draft-tokens {k + 1}"
    )
    return Snippet(titled("SGLang"), line, (told, served.requests))


def llama_cpp(served: Served) -> Snippet:
    """A greedy draft, its default; files in its own format stand for the two models."""
    k, told = served.under(RULE_OF["llama.cpp"])
    line = (
        "llama-server -m TARGET.gguf -md DRAFT.gguf "
        f"--spec-type draft-simple --spec-draft-n-max {k}"
    )
    files = (
        f"TARGET.gguf and DRAFT.gguf stand for your conversions of {served.target} and"
        f" {served.draft}; quantised weights accept differently."
    )
    notes = [told, served.requests, files]
    sampled = served.cells.get("ratio")
    if served.temperature > 0 and sampled is not None and not served.imposed:
        other = f"{fmt.speedup(float(sampled['speedup']))} at K={sampled['k']}"
        notes.append(
            "With --spec-draft-sampling probabilistic it samples the draft and accepts by a ratio:"
            f" {other} by replay, if it warps the draft as this run did (not checked)."
        )
    return Snippet(titled("llama.cpp", " or later"), line, tuple(notes))


def mlx(served: Served) -> Snippet:
    """Sampling is given on the line, since its default temperature is 0."""
    k, told = served.under(RULE_OF["mlx-lm"])
    line = (
        f"mlx_lm.generate --model {shlex.quote(served.target)}"
        f" --draft-model {shlex.quote(served.draft)} --num-draft-tokens {k}"
        f" --temp {served.temperature:g}"
    )
    if served.temperature > 0 and served.top_k is not None:
        line += f" --top-k {served.top_k}"
    if served.temperature > 0 and served.top_p is not None:
        line += f" --top-p {served.top_p:g}"
    if served.temperature > 0 and served.min_p is not None:
        line += f" --min-p {served.min_p:g}"
    return Snippet(titled("mlx-lm"), line, (told,))


def transformers(served: Served) -> Snippet:
    """Three settings on the draft, and sampling that warps both models once."""
    k, told = served.under(RULE_OF["transformers"], adaptive=True)
    warpers = _warpers(served)
    imported = ["AutoModelForCausalLM"]
    if warpers:
        imported += ["LogitsProcessorList", *(warper.partition("(")[0] for warper in warpers)]
    sampling = ["do_sample=False"]
    if served.temperature > 0:
        sampling = ["do_sample=True", "temperature=1.0", "top_k=0", "top_p=1.0"]
    if warpers:
        sampling.append(f"logits_processor=LogitsProcessorList([{', '.join(warpers)}])")
    code = "\n".join(
        [
            f"from transformers import {', '.join(imported)}",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({served.target!r})",
            f"draft = AutoModelForCausalLM.from_pretrained({served.draft!r})",
            f"draft.generation_config.num_assistant_tokens = {k}",
            'draft.generation_config.num_assistant_tokens_schedule = "constant"',
            f"draft.generation_config.assistant_confidence_threshold = {served.stop or 0.0}",
            "output = model.generate(",
            "    **inputs,  # of your tokenizer",
            "    assistant_model=draft,",
            *(f"    {argument}," for argument in sampling),
            ")",
        ]
    )
    notes = (told, _TWICE) if warpers else (told,)
    return Snippet(titled("transformers"), code, notes, "python")


_TWICE = (
    "Temperature, top_k and top_p go in as processors: given as settings, transformers warps the"
    " draft twice and accepts less than this run did."
)


def _warpers(served: Served) -> list[str]:
    warpers: list[str] = []
    if served.repetition_penalty is not None and served.repetition_penalty != 1.0:
        warpers.append(f"RepetitionPenaltyLogitsProcessor({float(served.repetition_penalty)!r})")
    if served.temperature == 0:
        return warpers
    if served.temperature != 1:
        warpers.append(f"TemperatureLogitsWarper({float(served.temperature)!r})")
    if served.top_k is not None:
        warpers.append(f"TopKLogitsWarper({served.top_k})")
    if served.top_p is not None:
        warpers.append(f"TopPLogitsWarper({float(served.top_p)!r})")
    if served.min_p is not None:
        warpers.append(f"MinPLogitsWarper({float(served.min_p)!r})")
    return warpers
