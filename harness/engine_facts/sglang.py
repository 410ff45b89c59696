"""SGLang: acceptance rules, drafts and serving commands, from the sources of release 0.5.23.

- srt/speculative/eagle_utils.py, `eagle_sample`: at `--speculative-eagle-topk 1` the argmax is
  proposed and, on CUDA, accepted with the target's probability of it. On ROCm EAGLE samples drafts
  and accepts by the ratio (srt/arg_groups/speculative_hook.py,
  `_should_auto_enable_hip_rejection_sampling`). Other drafts on ROCm, including EAGLE3, and all
  drafts on a CPU and XPU are accepted where they are the argmax, at every temperature
  (`_verify_uses_greedy`), which is not lossless.
- `--speculative-use-rejection-sampling`: the ratio, for EAGLE and EAGLE3 at topk 1; STANDALONE,
  NGRAM and DFLASH refuse it (srt/arg_groups/speculative_hook.py).
- `--speculative-use-block-verification`: block verification, for EAGLE, EAGLE3 and DFLASH at topk 1
  on CUDA and ROCm.
- SGLANG_SIMULATE_ACC_LEN (srt/environ.py) sets the mean tokens per round, with the target's own: 1
  rejects every draft. _METHOD match-expected draws one of the two whole lengths next to it, for all
  requests of a step at once; _TOKEN_MODE real-draft-token keeps the tokens, and needs topk 1.
- docs/advanced_features/speculative_decoding.md: at topk 1 a chain of as many tokens as steps is
  drafted, and one position more verified: `--speculative-num-draft-tokens` is K + 1. MTP layers are
  served by the algorithm EAGLE, as EAGLE heads are (srt/models/llama_eagle.py); the target's own
  layers without a draft path, others with one. DFLASH (srt/speculative/dflash_worker_v2.py) takes
  the block's positions as number of draft tokens. DSPARK (srt/arg_groups/speculative_hook.py,
  `_handle_dspark`) takes them as `--speculative-dspark-block-size`, and samples and accepts its
  drafts in another way (srt/speculative/dspark_components/dspark_verify.py).
  srt/models/llama_eagle3.py reads tensors `midlayer.*` and `layers.0.*` alike. NGRAM drafts a tree,
  whose branches share the draft tokens.
- `--speculative-adaptive` (srt/speculative/adaptive_spec_params.py): tiers with several K, by the
  number of requests. A K of the tier is chosen by the moving average of accepted lengths; by
  default the tiers are 1:[1,3,5,7], 8:[0,1,3], 32:[0,1], 64:[0]. `--speculative-adaptive-config`
  names a file of other tiers, {"requests": {"candidate_steps": [K]}}, each from its number of
  requests on. `--speculative-num-steps` must be one of all K; by default it is the middle one. Only
  EAGLE and EAGLE3 drafts at topk 1 have it: a STANDALONE draft keeps its K.
"""

import json
import shlex
from collections.abc import Mapping, Sequence

from harness.engine_facts.draft_kinds import DRAFTS, DraftKind
from harness.engine_facts.spec import (
    ANCHORED_BLOCK,
    BLOCK,
    Counting,
    EngineSpec,
    PairToServe,
    ServingLine,
    VaryingK,
    changes,
)
from harness.records import Rule

# The flag of each acceptance rule; "" for the default
RULE_FLAGS: Mapping[Rule, str] = {
    "greedy_draft": "",
    "ratio": "--speculative-use-rejection-sampling",
    "block": "--speculative-use-block-verification",
}
# The kinds of draft that are sampled for the ratio, and for block verification
_DRAWN_KINDS = ("eagle", "eagle3", "mtp")
_BLOCK_KINDS = (*_DRAWN_KINDS, "dflash")
# `--speculative-algorithm`
ALGORITHMS: Mapping[DraftKind, str] = {
    "model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "EAGLE",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
    "ngram": "NGRAM",
}
ADAPTIVE, TIERS = "--speculative-adaptive", "--speculative-adaptive-config"


def speculative_flags(
    kind: DraftKind, draft: str | None, k: int | None, rule: Rule | None = None
) -> list[str]:
    """The flags of a server with a draft; `k` is None where K varies.

    The arguments are those of `vllm.speculative_config`.
    """
    flags: dict[str, str | int] = {"--speculative-algorithm": ALGORITHMS[kind]}
    if draft is not None and DRAFTS[kind].has_checkpoint:
        flags["--speculative-draft-model-path"] = draft
    if kind == "dspark" and k is not None:
        flags["--speculative-dspark-block-size"] = k
    elif kind not in ("dspark", "dflash", "ngram"):  # these draft a block or a tree, without steps
        flags |= {} if k is None else {"--speculative-num-steps": k}
        flags["--speculative-eagle-topk"] = 1
    if k is not None:
        flags["--speculative-num-draft-tokens"] = k + 1
    accepting = "" if rule is None else RULE_FLAGS[rule]
    return [
        *(str(part) for flag in flags.items() for part in flag),
        *([ADAPTIVE] if k is None else []),
        *([accepting] if accepting else []),
    ]


def tiers(k_by_load: Mapping[int, int]) -> str:
    """The content of the file of tiers, from K by the least load."""
    return json.dumps({str(low): {"candidate_steps": [k]} for low, k in changes(k_by_load).items()})


def _launch(pair: PairToServe) -> str:
    return f"python -m sglang.launch_server --model-path {shlex.quote(pair.target)}"


def _drafting(pair: PairToServe) -> str:
    flags = speculative_flags(pair.kind, pair.weights, pair.k, pair.rule)
    return f"{_launch(pair)} {shlex.join(flags)}"


def _platform_notes(pair: PairToServe) -> Sequence[str]:
    """A note on the acceptance rule on other platforms than CUDA."""
    if pair.temperature == 0 or pair.rule != SPEC.rule:
        return ()
    drawn = ALGORITHMS[pair.kind] == "EAGLE"
    rocm = "by the ratio of drafts that are drawn" if drawn else "argmaxes, which is not lossless"
    return (
        f"That is on CUDA: on ROCm it accepts {rocm}; on a CPU and XPU argmaxes, at any"
        " temperature.",
    )


def _schedule_notes(k_by_load: Mapping[int, int], _: int) -> Sequence[str]:
    return (
        f"With an EAGLE draft instead, one server changes K: {ADAPTIVE}"
        f" --speculative-num-steps {max(k_by_load.values())} (one of the K)"
        f" {TIERS} FILE, and in it {tiers(k_by_load)}",
    )


_EAGLE_DRAFTS = "EAGLE-3 heads and MTP layers"
SPEC = EngineSpec(
    name="sglang",
    title="SGLang",
    rules=("greedy_draft", "ratio", "block"),
    unknown_above_zero="SGLang for ROCm, CPUs and XPU (another acceptance rule)",
    counting=Counting(first_position=1, shortens_last_draft=False),
    draft_by_temperature=True,
    # Without the look-up, which drafts a tree, and DSpark, whose tokens have another rule
    alike=frozenset(("model", "eagle", "eagle3", "mtp", "dflash")),
    version="0.5.23",
    plain=_launch,
    lines={
        **dict.fromkeys(("model", *_DRAWN_KINDS), ServingLine(_drafting, more=_platform_notes)),
        "dflash": ServingLine(_drafting, BLOCK),
        "dspark": ServingLine(
            _drafting,
            "On CUDA, NPU and XPU. Above temperature 0 it draws its drafts and accepts them by its"
            f" own rejection sampling of blocks. {ANCHORED_BLOCK}",
        ),
        "ngram": ServingLine(_drafting, "It drafts a tree, from a cache of all requests."),
    },
    schedule_notes=_schedule_notes,
    varying={
        "schedule": VaryingK(TIERS, frozenset(_DRAWN_KINDS), _EAGLE_DRAFTS),
        "adaptive": VaryingK(ADAPTIVE, frozenset(_DRAWN_KINDS), _EAGLE_DRAFTS, largest_k=7),
    },
    in_production=("--context-length", "--max-running-requests", "--mem-fraction-static"),
    slots_flag="--max-running-requests",
    client="harness.engines.sglang",
    lists_logprobs=True,
    drafts=("model", "eagle", "eagle3", "mtp"),
    synthetic="on CUDA",
    one_dtype=True,
    alone=True,
    memory_flag="--mem-fraction-static",
    rented="sglang==0.5.23",
)
REJECTION_SAMPLING = SPEC.variant(
    name="sglang_rejection",
    row_name="SGLang with rejection sampling",
    setting=RULE_FLAGS["ratio"],
    kinds=_DRAWN_KINDS,
    rule="ratio",
)
BLOCK_VERIFICATION = SPEC.variant(
    name="sglang_block",
    row_name="SGLang with block verification",
    setting=RULE_FLAGS["block"],
    kinds=_BLOCK_KINDS,
    rule="block",
)
