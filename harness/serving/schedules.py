"""K by load, as engines take it: read in the named release.

- vLLM 0.32, vllm/config/speculative.py and v1/spec_decode/dynamic: `speculative_config` has
  `num_speculative_tokens_per_batch_size`, [low, high, K] with both ends included, from 1; a gap and
  everything above the last range keep the last K. The batch is the requests scheduled in a step. K
  is at most `num_speculative_tokens`. At K = 0 the draft still runs once in each step, so a
  plain server is faster. Off under data parallelism.
- SGLang 0.5.23, `--speculative-adaptive`: a file of {"batch size": {"candidate_steps": [K]}}, each
  tier from its batch size on; one candidate is that K. EAGLE and EAGLE3 drafts at topk 1 alone:
  a STANDALONE draft keeps the K it was started with.
- llama.cpp, mlx-lm: one K for a server's whole life.
"""

from collections.abc import Mapping
from typing import Any


def merged(k_by_load: Mapping[int, int]) -> dict[int, int]:
    """K by the least load from which it holds, each change of K once; ascending."""
    changes: dict[int, int] = {}
    for load, k in sorted(k_by_load.items()):
        if not changes or [*changes.values()][-1] != k:
            changes[load] = k
    return changes


def vllm_ranges(k_by_load: Mapping[int, int], largest: int) -> list[list[int]]:
    """`num_speculative_tokens_per_batch_size`, up to the largest load that was measured."""
    changes = merged(k_by_load)
    ends = [*(low - 1 for low in [*changes][1:]), max(largest, *changes)]
    return [[low, high, k] for (low, k), high in zip(changes.items(), ends, strict=True)]


def sglang_tiers(k_by_load: Mapping[int, int]) -> dict[str, Any]:
    """The content of the file of `--speculative-adaptive-config`."""
    return {str(low): {"candidate_steps": [k]} for low, k in merged(k_by_load).items()}
