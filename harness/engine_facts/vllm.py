"""vLLM: acceptance rules, drafts and serving commands, from release 0.33, also run.

- vllm/config/speculative.py, `SpeculativeMethod`: draft_model, eagle, eagle3, mtp, medusa, dflash,
  dspark, ngram, and suffix, which the harness does not have. `eagle` names the layer's class by
  `architectures` (LlamaForCausalLM becomes EagleLlamaForCausalLM), whose fc has no bias
  (model_executor/models/llama_eagle.py). P-EAGLE is eagle3 with `parallel_drafting`, and PARD a
  draft_model with it (`pard_token` in its config.json: v1/spec_decode/llm_base_proposer.py), both
  on the V1 runner (config/vllm.py). `mtp` takes the target's own layers, or those of the checkpoint
  that is its `model`, and refuses a K above their number that is no multiple of it (`n_predict`:
  num_nextn_predict_layers). `medusa` needs a hidden_size in the config.json, also of a checkpoint
  in FasterDecoding's layout. eagle3 was run (0.32) with a head in SpecForge's layout and in
  speculators', and ngram was run: v1/spec_decode/ngram_proposer.py proposes the tokens after the
  first occurrence of the longest match, as `harness.decoding.lookups` does, but does not stop
  before an end of text in the prompt.
- `draft_sample_method` is greedy by default, with the draft's distribution taken as one-hot;
  `probabilistic` samples at the request's temperature, without its other sampling parameters
  (vllm#56724), and accepts by the ratio. v1/spec_decode/llm_base_proposer.py: heads take it;
  v1/spec_decode/medusa.py: Medusa heads do not.
- vllm/utils/cpu_triton_utils.py, `_expand_kernel_impl` (0.32; vllm#55005): in builds for CPUs the
  kernel writes into a copy of the tensor from which the temperatures of drafting requests are read.
  So above temperature 0 they draw other tokens than the target's, and take other rounds than replay
  (docs/validation.md). With that kernel repaired, the same build took the rounds of replay.
- `rejection_sample_method: synthetic` sets `synthetic_acceptance_rates`: K unconditional rates by
  position, never increasing. CPU builds refuse it. `block` is block verification
  (v1/worker/gpu/spec_decode/rejection_sampler.py), only on the V2 model runner: drafts must be
  sampled, by eagle, eagle3, mtp, dflash or dspark. For a draft model, a look-up or Medusa heads
  vLLM falls back to the V1 runner (config/vllm.py, `_get_v2_model_runner_unsupported_features`),
  which ignores the setting and drafts argmaxes (v1/spec_decode/llm_base_proposer.py,
  `_enable_probabilistic_draft_probs`); with VLLM_USE_V2_MODEL_RUNNER=1 it refuses to start instead.
  `fly` is lossy.
- `enable_adaptive_verification` (config/vllm.py, `_validate_adaptive_verification`): each step
  decides how many drafted tokens of each request are verified, from their confidences and from step
  costs that are profiled at the start. Only DSpark drafters have it, on the V2 runner with full
  CUDA graphs, without LoRA and pipeline parallelism.
- vllm/v1/spec_decode/dynamic (0.32): `num_speculative_tokens_per_batch_size` is [low, high, K] with
  both ends included, from 1; a gap and everything above the last range keep the last K. The batch
  is the number of requests scheduled in a step, including those in their prefill. K is at most
  `num_speculative_tokens`. At K = 0 the draft still runs once in each step, so a plain server is
  faster: by 4 to 11 % with MTP layers (vllm#53426), by 7 and 17 % elsewhere (137.1 ms against
  127.7, 148.4 against 127.2). On the V1 runner graphs are piecewise then (config/vllm.py,
  `_maybe_override_dynamic_sd_cudagraph_mode`), and Medusa heads keep one K
  (`_maybe_disable_dynamic_sd_for_v1`). It is off under data parallelism. A request's answer has the
  drafted tokens of each step, and the largest K as `num_spec_tokens` (v1/metrics/stats.py); steps
  without drafts are left out.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from harness.engine_facts.draft_kinds import DRAFTS, DraftKind
from harness.engine_facts.spec import (
    ANCHORED_BLOCK,
    BLOCK,
    Counting,
    EngineSpec,
    PairToServe,
    ServingLine,
    VaryingK,
    ranges,
)
from harness.records import LONGEST_NGRAM, Rule

# `method`, where it is not the kind's name
METHODS: Mapping[DraftKind, str] = {
    "model": "draft_model",
    "pard": "draft_model",
    "peagle": "eagle3",
}
COUNTING = Counting(first_position=1, shortens_last_draft=False)
# The settings of each acceptance rule
RULE_SETTINGS: Mapping[Rule, Mapping[str, str]] = {
    "greedy_draft": {},
    "ratio": {"draft_sample_method": "probabilistic"},
    "block": {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
}
# The settings for K by the number of requests, and for adaptive verification
BY_BATCH = "num_speculative_tokens_per_batch_size"
ADAPTIVE = "enable_adaptive_verification"
VERIFIES_FEWER = (
    f'"{ADAPTIVE}":true decides in every step how many drafts of each request are verified; at low'
    " load a fixed K is faster."
)


def speculative_config(
    kind: DraftKind, draft: str | None, k: int, rule: Rule | None = None
) -> dict[str, Any]:
    """The value of `--speculative-config`; `rule` None takes the default.

    `draft` is the hub id or folder of its weights, None for look-ups and the target's own layers.
    """
    config: dict[str, Any] = {"method": METHODS.get(kind, kind)}
    if draft is not None and DRAFTS[kind].has_checkpoint:
        config["model"] = draft
    config["num_speculative_tokens"] = k
    if kind in ("peagle", "pard"):
        config["parallel_drafting"] = True
    if kind == "ngram":
        config |= {"prompt_lookup_max": LONGEST_NGRAM, "prompt_lookup_min": 1}
    config |= {} if rule is None else RULE_SETTINGS[rule]
    if DRAFTS[kind].looks_up:
        config.pop("draft_sample_method", None)  # look-ups do not sample
    return config


def _serve(pair: PairToServe) -> str:
    return f"vllm serve {shlex.quote(pair.target)}"


def _drafting(pair: PairToServe, **settings: Any) -> str:
    config = speculative_config(pair.kind, pair.weights, pair.k, pair.rule)
    packed = json.dumps(config | settings, separators=(",", ":"))
    return f"{_serve(pair)} --speculative-config {shlex.quote(packed)}"


def _schedule(
    pair: PairToServe, commands: Mapping[int, str], k_by_load: Mapping[int, int], largest: int
) -> str:
    """The command of one server with K by batch size, from the measured command if there is one."""
    by_batch: dict[str, Any] = {BY_BATCH: ranges(k_by_load, largest)}
    if not commands:
        return _drafting(pair, **by_batch)
    words = shlex.split(commands[pair.k])
    config = words[words.index("--speculative-config") + 1]
    ranged = json.dumps({**json.loads(config), **by_batch})
    return commands[pair.k].replace(shlex.quote(config), shlex.quote(ranged))


def _schedule_notes(k_by_load: Mapping[int, int], largest: int) -> Sequence[str]:
    notes = [
        f"Above concurrency {largest}, not measured, vLLM keeps the last K.",
        "Requests in their prefill count too, so K can change with every step where their number is"
        " near a threshold, and throughput collapse there (vllm#49548); and the V1 runner's CUDA"
        " graphs are piecewise then: measure the server with this schedule before it is used.",
        f"With a DSpark drafter {VERIFIES_FEWER}",
    ]
    if 0 in k_by_load.values():
        notes.append(
            "At K=0 it still runs the draft in each step, which published measurements found 4 to"
            " 17 % slower; what was measured at K=0 is a server without one, so its throughput is"
            " not this line's."
        )
    return notes


def _mtp_notes(pair: PairToServe) -> Sequence[str]:
    if pair.k == 1:
        return ()
    return (
        "It refuses a K above the checkpoint's number of MTP layers (num_nextn_predict_layers) that"
        " is no multiple of it.",
    )


_KINDS = (
    "model",
    "eagle",
    "eagle3",
    "peagle",
    "pard",
    "mtp",
    "medusa",
    "dflash",
    "dspark",
    "ngram",
)
SPEC = EngineSpec(
    name="vllm",
    title="vLLM",
    rules=("greedy_draft", "ratio", "block"),
    phrase="vLLM with its defaults",
    counting=COUNTING,
    mixes_prompts=True,
    draft_by_temperature=True,
    alike=frozenset(_KINDS),
    unknown_above_zero=(
        "vLLM's builds for CPUs (0.32 samples wrongly while it drafts, vllm#55005)"
    ),
    version="0.33",
    plain=_serve,
    lines={
        **dict.fromkeys(_KINDS, ServingLine(_drafting)),
        "eagle": ServingLine(_drafting, "It refuses a head whose fc has a bias."),
        "mtp": ServingLine(_drafting, more=_mtp_notes),
        "dflash": ServingLine(_drafting, BLOCK),
        "dspark": ServingLine(
            _drafting,
            f"On its V2 runner alone. {ANCHORED_BLOCK} {VERIFIES_FEWER} It is measured by"
            " k=[4,7,adaptive] with loads, as concurrency=[1,16].",
        ),
    },
    schedule=_schedule,
    schedule_notes=_schedule_notes,
    varying={
        "schedule": VaryingK(
            BY_BATCH,
            frozenset(_KINDS) - {"medusa", "dspark"},
            "drafts other than Medusa heads",
        ),
        "adaptive": VaryingK(ADAPTIVE, frozenset(("dspark",)), "DSpark drafters"),
    },
    in_production=("--max-model-len", "--max-num-seqs", "--gpu-memory-utilization"),
    client="harness.engines.vllm",
    lists_logprobs=True,
    drafts=tuple(kind for kind in _KINDS if kind != "medusa"),
    synthetic="on CUDA",
    mtp_multiples=True,
    one_dtype=True,
    alone=True,
    memory_flag="--gpu-memory-utilization",
    rented="vllm==0.33.0",
)
# Block verification, for the kinds that its V2 runner drafts with
_BLOCK_KINDS = ("eagle", "eagle3", "mtp", "dflash", "dspark")
_V2_ONLY = (
    "Block verification is its V2 runner's: where the log says that V1 is used instead, the setting"
    " is ignored."
)
PROBABILISTIC = SPEC.variant(
    name="vllm_probabilistic",
    row_name="probabilistic vLLM",
    setting="draft_sample_method=probabilistic",
    kinds=[kind for kind in SPEC.lines if kind != "medusa"],  # Medusa heads never sample
    rule="ratio",
)
BLOCK_VERIFICATION = SPEC.variant(
    name="vllm_block",
    row_name="vLLM with block verification",
    setting="rejection_sample_method=block",
    kinds=_BLOCK_KINDS,
    rule="block",
    note=_V2_ONLY,
)
