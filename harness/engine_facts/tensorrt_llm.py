"""TensorRT-LLM: acceptance rule, drafts and serving commands, from its main branch of late 2026.

- docs/source/features/speculative-decoding.md: `trtllm-serve --config FILE`, whose
  `speculative_config` has the decoding type, `max_draft_len` and `speculative_model`. DraftTarget
  and NGram need `disable_overlap_scheduler`; PARD, DFlash and Eagle3 do not.
- tensorrt_llm/llmapi/llm_args.py, 1.3 and 1.4.0rc1: each subclass of `DecodingBaseConfig` has its
  `decoding_type`, in this spelling (`Draft_Target`; 1.0 and 1.1 had `DraftTarget`). Drafts are
  greedy; a drafted token is accepted where the target's sample is the same, unless
  `use_rejection_sampling`, a prototype, is set. `draft_len_schedule` has draft lengths by the
  largest batch of each; larger batches have no draft. `acceptance_rate_threshold` is compared with
  accepted / drafted of the last `acceptance_rate_window_size` iterations; below it a server stops
  speculation until it is restarted.
- tensorrt_llm/_torch/speculative/ngram.py keeps one continuation of each n-gram, the longest.
- Its server has OpenAI's paths and no counter of rounds, so only times are compared.
"""

import shlex
from collections.abc import Mapping, Sequence

from harness.engine_facts.draft_kinds import DraftKind
from harness.engine_facts.spec import BLOCK, EngineSpec, PairToServe, ServingLine
from harness.records import LONGEST_NGRAM

# `decoding_type`
TYPES: Mapping[DraftKind, str] = {
    "model": "Draft_Target",
    "eagle3": "Eagle3",
    "mtp": "MTP",
    "dflash": "DFlash",
    "pard": "PARD",
    "ngram": "NGram",
}
# The kinds of draft that need disable_overlap_scheduler
NOT_OVERLAPPED = ("model", "ngram")
ENDS_FOR_GOOD = (
    "acceptance_rate_threshold, with acceptance_rate_window_size, ends speculation for good where"
    " accepted / drafted falls below it."
)
FILE = "speculation.yaml"


def _plain(pair: PairToServe) -> str:
    return f"trtllm-serve {shlex.quote(pair.target)}"


def _drafting(pair: PairToServe) -> str:
    settings: dict[str, object] = {"decoding_type": TYPES[pair.kind], "max_draft_len": pair.k}
    if pair.weights is not None:
        settings["speculative_model"] = pair.weights
    if pair.kind == "ngram":
        settings["max_matching_ngram_size"] = LONGEST_NGRAM
    lines = ["speculative_config:", *(f"  {name}: {value}" for name, value in settings.items())]
    if pair.kind in NOT_OVERLAPPED:
        lines.append("disable_overlap_scheduler: true")
    config = "\n".join(lines)
    return f"cat > {FILE} <<'END'\n{config}\nEND\n{_plain(pair)} --config {FILE}"


def _schedule_notes(k_by_load: Mapping[int, int], most: int) -> Sequence[str]:
    loads = sorted(k_by_load)
    ends = [*(load - 1 for load in loads[1:]), most]
    lengths = {end: k_by_load[load] for load, end in zip(loads, ends, strict=True)}
    return (
        f"K by the largest batch that has it, in speculative_config: draft_len_schedule: {lengths}",
        ENDS_FOR_GOOD,
    )


SPEC = EngineSpec(
    name="tensorrt_llm",
    title="TensorRT-LLM",
    rules=("greedy_draft",),
    draft_by_temperature=True,
    # Without the look-up, which keeps other continuations
    alike=frozenset(TYPES) - {"ngram"},
    version="1.3",
    plain=_plain,
    lines={
        **dict.fromkeys(TYPES, ServingLine(_drafting)),
        "mtp": ServingLine(_drafting, "It reads DeepSeek's MTP layers."),
        "dflash": ServingLine(_drafting, BLOCK),
        "ngram": ServingLine(
            _drafting, "It keeps one continuation of each n-gram, so it drafts other tokens."
        ),
    },
    schedule_notes=_schedule_notes,
    client="harness.engines.openai",
    starts=False,
    drafts=tuple(TYPES),
)
