"""What vLLM and SGLang are started with to draft, by the kind of draft.

One place for the servers that are started and for the lines that a report prints. Read in:

- vLLM: vllm/config/speculative.py, `SpeculativeMethod`: draft_model, eagle3, mtp, medusa, dflash,
  ngram, suffix. `mtp` takes the target's own layers, or those of the checkpoint that is its
  `model`; `medusa` needs a hidden_size in the config.json of FasterDecoding's layout, too; `suffix`
  needs the package arctic-inference, and its num_speculative_tokens is the most it proposes. eagle3
  was run (0.32) with a head in SpecForge's layout and in speculators', and so was ngram:
  v1/spec_decode/ngram_proposer.py proposes what followed the first occurrence of the longest match,
  as `harness.decoding.lookups` does, but does not stop before an end of text in the prompt.
  v1/spec_decode/llm_base_proposer.py: heads sample with `draft_sample_method: probabilistic`;
  v1/spec_decode/medusa.py: Medusa heads do not.
- SGLang: docs/advanced_features/speculative_decoding.md. At `--speculative-eagle-topk 1` a chain of
  as many tokens as steps is drafted, and one position more verified. MTP layers are served by the
  algorithm EAGLE, the target's own without a draft path, others with one. DFLASH
  (srt/speculative/dflash_worker.py) takes the block's positions as number of draft tokens.
"""

from collections.abc import Mapping
from typing import Any

from harness.records import GREEDY, LONGEST_NGRAM
from harness.serving.drafts import DRAFTS, UNKNOWN, DraftKind

# What each of SERVERS proposes token for token as a run here does, so that the run's speedup holds.
# A look-up of llama.cpp or SGLang, and vLLM's suffix, finds other tokens; no engine makes a copy of
# its target. vLLM samples no Medusa heads.
ALIKE: Mapping[str, frozenset[DraftKind]] = {
    "vllm": frozenset(("model", "eagle3", "mtp", "medusa", "dflash", "ngram")),
    "vllm_probabilistic": frozenset(("model", "eagle3", "mtp", "dflash", "ngram")),
    "sglang": frozenset(("model", "eagle3", "mtp", "dflash")),
    "llamacpp": frozenset(("model", "eagle3", "mtp", "dflash")),
    "mlx": frozenset(("model",)),
    "transformers": frozenset(("model", "ngram", "early_exit")),
}


def drafts_alike(server: str, kind: DraftKind, temperature: float) -> bool:
    """Whether a server's drafts of a kind are a run's; of an unknown kind they may be.

    At temperature 0 vLLM drafts alike whether it samples drafts or not.
    """
    if server == "vllm_probabilistic" and temperature == GREEDY:
        server = "vllm"
    return kind == UNKNOWN or kind in ALIKE[server]


def vllm_config(kind: DraftKind, draft: str | None, k: int) -> dict[str, Any]:
    """`--speculative-config` of vLLM.

    Args:
        kind: of the draft, one that vLLM serves.
        draft: hub id or folder of its weights; None for look-ups and the target's own MTP layers.
        k: num_draft_tokens.
    """
    config: dict[str, Any] = {"method": "draft_model" if kind == "model" else kind}
    if draft is not None and DRAFTS[kind].has_checkpoint:
        config["model"] = draft
    config["num_speculative_tokens"] = k
    if kind == "ngram":
        config |= {"prompt_lookup_max": LONGEST_NGRAM, "prompt_lookup_min": 1}
    return config


# `--speculative-algorithm` of SGLang, for a chain or a block of drafted tokens
SGLANG_ALGORITHMS: Mapping[DraftKind, str] = {
    "model": "STANDALONE",
    "eagle3": "EAGLE3",
    "mtp": "EAGLE",
    "dflash": "DFLASH",
}


def sglang_flags(kind: DraftKind, draft: str | None, k: int) -> dict[str, str | int]:
    """The flags of SGLang's server by name; arguments as of `vllm_config`."""
    flags: dict[str, str | int] = {"--speculative-algorithm": SGLANG_ALGORITHMS[kind]}
    if draft is not None and DRAFTS[kind].has_checkpoint:
        flags["--speculative-draft-model-path"] = draft
    if kind != "dflash":  # which has no steps
        flags |= {"--speculative-num-steps": k, "--speculative-eagle-topk": 1}
    return {**flags, "--speculative-num-draft-tokens": k + 1}
