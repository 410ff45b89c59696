"""SGLang: what it accepts and drafts, and what it is started with. Read in release 0.5.23.

- srt/speculative/eagle_utils.py, `eagle_sample`: at `--speculative-eagle-topk 1` the argmax is
  proposed and accepted with the target's probability of it. STANDALONE refuses
  `--speculative-use-rejection-sampling` (srt/arg_groups/speculative_hook.py): no other rule. EAGLE
  and EAGLE3 take it.
- docs/advanced_features/speculative_decoding.md: at topk 1 a chain of as many tokens as steps is
  drafted, and one position more verified: `--speculative-num-draft-tokens` is K + 1. MTP layers are
  served by the algorithm EAGLE, the target's own without a draft path, others with one. DFLASH
  (srt/speculative/dflash_worker.py) takes the block's positions as number of draft tokens.
  srt/models/llama_eagle3.py reads tensors `midlayer.*` only; NGRAM drafts a tree, whose branches
  share the draft tokens.
- `--speculative-adaptive`: a file of {"batch size": {"candidate_steps": [K]}}, each tier from its
  batch size on; one candidate is that K. EAGLE and EAGLE3 drafts at topk 1 alone: a STANDALONE
  draft keeps the K it was started with.
"""

import json
import shlex
from collections.abc import Mapping, Sequence

from harness.serving.drafts import DRAFTS, DraftKind
from harness.serving.round_counting import Counting
from harness.serving.spec import BLOCK, EngineSpec, PairToServe, ServingLine, changes

# `--speculative-algorithm`, for a chain or a block of drafted tokens
ALGORITHMS: Mapping[DraftKind, str] = {
    "model": "STANDALONE",
    "eagle3": "EAGLE3",
    "mtp": "EAGLE",
    "dflash": "DFLASH",
}


def speculative_flags(kind: DraftKind, draft: str | None, k: int) -> dict[str, str | int]:
    """The flags of a server by name; arguments as of `vllm.speculative_config`."""
    flags: dict[str, str | int] = {"--speculative-algorithm": ALGORITHMS[kind]}
    if draft is not None and DRAFTS[kind].has_checkpoint:
        flags["--speculative-draft-model-path"] = draft
    if kind != "dflash":  # which has no steps
        flags |= {"--speculative-num-steps": k, "--speculative-eagle-topk": 1}
    return {**flags, "--speculative-num-draft-tokens": k + 1}


def _launch(pair: PairToServe) -> str:
    return f"python -m sglang.launch_server --model-path {shlex.quote(pair.target)}"


def _drafting(pair: PairToServe) -> str:
    settings = speculative_flags(pair.kind, pair.weights, pair.k)
    flags = [str(part) for flag in settings.items() for part in flag]
    return f"{_launch(pair)} {shlex.join(flags)}"


def _ngram(pair: PairToServe) -> str:
    return (
        f"{_launch(pair)} --speculative-algorithm NGRAM --speculative-num-draft-tokens {pair.k + 1}"
    )


def _schedule_notes(k_by_load: Mapping[int, int], _: int) -> Sequence[str]:
    tiers = {str(low): {"candidate_steps": [k]} for low, k in changes(k_by_load).items()}
    return (
        "With an EAGLE draft instead, one server changes K: --speculative-adaptive"
        f" --speculative-adaptive-config FILE, and in it {json.dumps(tiers)}",
    )


SPEC = EngineSpec(
    name="sglang",
    title="SGLang",
    rules=("greedy_draft",),
    ranked_as="SGLang at topk 1",
    counting=Counting(first_position=1, shortens_last_draft=False),
    draft_by_temperature=True,
    # Its look-up drafts a tree
    alike=frozenset(("model", "eagle3", "mtp", "dflash")),
    version="0.5.23",
    plain=_launch,
    lines={
        "model": ServingLine(_drafting),
        "eagle3": ServingLine(
            _drafting, "It reads heads in SpecForge's layout; convert one in another."
        ),
        "mtp": ServingLine(_drafting),
        "dflash": ServingLine(_drafting, BLOCK),
        "ngram": ServingLine(_ngram, "It drafts a tree, from a cache of all requests."),
    },
    schedule_notes=_schedule_notes,
    in_production="--context-length, --max-running-requests and --mem-fraction-static",
    slots_flag="--max-running-requests",
    client="harness.engines.sglang",
    drafts=("model", "eagle3", "mtp"),
    one_dtype=True,
    alone=True,
    memory_flag="--mem-fraction-static",
    rented="sglang==0.5.23",
)
