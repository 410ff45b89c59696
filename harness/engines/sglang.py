"""SGLang's server: started here by `sglang serve`, or running elsewhere.

Facts from its documentation and the sources of release 0.5.23. It has no build for a CPU such as
those of this project's tests, so only the reading of answers was tried, with a stand-in server:

- `POST /generate` takes `input_ids` and returns `output_ids`, with `meta_info`.
- `meta_info` has `spec_verify_ct` (rounds), `spec_num_proposed_drafts` and
  `spec_num_correct_drafts` of a request that drafted (other names before 0.5.11), and
  `e2e_latency`. It has no time of the prefill alone, so the time of a one-token request is
  subtracted to get that of decoding.
- The first token comes from the prefill. Every round verifies K drafted tokens, near the budget
  too, where the text is cut.
- A request's `sampling_seed` counts only with `--enable-deterministic-inference`.
- Acceptance is set by variables (`harness.engine_facts.sglang`), not by flags.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.engine_facts.sglang import SPEC, TIERS, speculative_flags, tiers
from harness.engine_facts.spec import EngineSpec
from harness.engines.adapters import Adapter, checkpoints, rule_of, started_with
from harness.engines.counters import CounterNames
from harness.engines.http_server import (
    CardMemory,
    HttpServer,
    Interface,
    Running,
    StartedEngine,
    field_of,
)
from harness.engines.process import on_path
from harness.engines.protocol import Asked, Completion, EngineFacts, stop_reason, token_ids
from harness.records import Rule, UserError, Varying

SERVER = "SGLang's server"
ABOUT = ("/server_info", "version")
# Names of drafted tokens, accepted tokens, and rounds by accepted tokens; those of the newest
# release first
DRAFTED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
LENGTHS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
# The memory that SGLang leaves free by default (`_handle_gpu_memory_settings` in
# sglang/srt/server_args.py): metadata, activations by tokens of a prefill, CUDA graphs by requests,
# and CUDA graphs of a draft
MIB = 2**20
METADATA_BYTES, DRAFT_BYTES = 512 * MIB, 2048 * MIB
BYTES_PER_PREFILL_TOKEN, BYTES_PER_REQUEST = 1.5 * MIB, 2 * MIB
PREFILL_STEP, MOST_PREFILL_TOKENS = 2048, 8192
# Accepted tokens have no counter, only gauges of the last steps
COUNTERS = CounterNames(
    tokens="sglang:generation_tokens_total",
    rounds="sglang:spec_verify_calls_total",
    shown_with="with --enable-metrics",
    drafts_with="--speculative-algorithm",
    since="0.5.13",
    signs=("sglang:spec_accept_length", "sglang:spec_accept_rate"),
    requests="sglang:num_requests_total",
    k="sglang:spec_num_steps",
)


@dataclass(frozen=True)
class Sglang(StartedEngine):
    """A pair that SGLang serves on this machine."""

    spec = SPEC
    measuring = frozenset(("--chunked-prefill-size", "--disable-radix-cache"))
    variables = ("SGLANG_", "SGL_")

    def open(self, k: int, synthetic: Sequence[float] | None = None) -> HttpServer:
        """Start a server; for a schedule, write its file of K by load first."""
        if self.varying == "schedule":
            self._tiers.write_text(tiers({low: each for low, _, each in self.schedule}))
        return super().open(k, synthetic)

    def server(self, running: Running, k: int) -> "SglangServer":
        return SglangServer(running, k, self.rule, self.varying)

    @property
    def _tiers(self) -> Path:
        return self.logs / "sglang_tiers.json"

    def environment(self, synthetic: Sequence[float] | None = None) -> Mapping[str, str]:
        """The variables of synthetic acceptance: the mean tokens per round, with the target's."""
        if synthetic is None:
            return {}
        return {
            "SGLANG_SIMULATE_ACC_LEN": f"{1.0 + sum(synthetic):g}",
            "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
            "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
        }

    def flags(self, k: int, synthetic: Sequence[float] | None = None) -> list[str]:  # noqa: ARG002
        drafting: list[str] = []
        if k:
            draft = None if self.draft is None else str(self.draft)
            drafting += speculative_flags(self.kind, draft, None if self.varying else k, self.rule)
            if self.varying == "schedule":
                drafting += [TIERS, str(self._tiers)]
            if self.draft is not None and self.draft_revision is not None:
                drafting += ["--speculative-draft-model-revision", self.draft_revision]
        prefills = ["--chunked-prefill-size", str(self.prefill_tokens), "--disable-radix-cache"]
        model = ["serve", "--model-path", str(self.target)]
        return [*model, *self.common_flags(k), *drafting, *prefills, *self.more_flags]

    @property
    def prefill_tokens(self) -> int:
        """The tokens of one prefill: those of all slots, in steps that every page size divides.

        SGLang's default grows with the card (8192 on an H100), and with it the memory that it needs
        besides its KV cache.
        """
        steps = math.ceil(self.slots * self.context_tokens / PREFILL_STEP)
        return min(steps * PREFILL_STEP, MOST_PREFILL_TOKENS)

    def spare_bytes(self, k: int) -> float:
        """The bytes of activations and CUDA graphs at the largest load."""
        graphs = self.slots * BYTES_PER_REQUEST + (DRAFT_BYTES if k else 0)
        return METADATA_BYTES + self.prefill_tokens * BYTES_PER_PREFILL_TOKEN + graphs

    def memory_share(self, room: float, memory: CardMemory) -> float:
        """The share of the free memory before anything is loaded: room / free.

        SGLang's KV cache takes the memory left after the weights, less `free * (1 - share)`
        (`_profile_available_bytes` of sglang/srt/mem_cache/kv_cache_configurator.py, in earlier
        releases of sglang/srt/model_executor/model_runner_kv_cache_mixin.py), so weights and cache
        together take `free * share`.
        """
        return room / memory.free


class SglangServer(HttpServer):
    """One running server of SGLang; where K varies, `k` is the largest."""

    decoded_field = "text"

    def __init__(
        self, running: Running, k: int, rule: Rule = "greedy_draft", varying: Varying = ""
    ) -> None:
        super().__init__(f"SGLang at k={k}", k, running)
        facts = running.client.about(*ABOUT, SERVER)
        # The state of each data-parallel copy of the model, in releases that report it
        states = facts.get("internal_states") or [{}]
        each = states[0].get("effective_max_running_requests_per_dp")
        self.facts = EngineFacts(
            SPEC,
            str(facts["version"]),
            rule,
            drafts_fewer=bool(varying),
            slots=None if each is None else int(each) * len(states),
        )
        steps = facts.get("speculative_num_steps") or 0
        self._drafts = bool(steps)
        if k and steps and steps != k and not varying:
            raise UserError(f"{self.where}: it drafts {steps} tokens per round, not k={k}")

    def complete(self, asked: Asked, deadline_s: float) -> Completion:
        answer = self.ask(INTERFACE.path, request_body(asked), deadline_s)
        for name in ("output_ids", "meta_info"):
            field_of(answer.body, name, self.where, SERVER)
        record = parse(answer.body)
        if record.rounds is None:
            if self.facts.drafts_fewer:
                return self.completion(answer, record)
            if self.k and self._drafts and len(record.tokens) > 2:
                raise self.without_counters(
                    "in its answers, though it drafts", "release 0.5.11 or later has them"
                )
            # The counts are missing where nothing was drafted
            record = replace(record, rounds=0, drafted=0, accepted=0)
        self.check_drafts(record.drafted, len(record.tokens), "--speculative-algorithm")
        return self.completion(answer, record)


def request_body(asked: Asked) -> dict[str, Any]:
    """The body of a request with the sampling parameters of the harness, and no others."""
    sampling = asked.sampling
    penalty = sampling.repetition_penalty
    settings = {
        "max_new_tokens": asked.budget,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": 1.0 if penalty is None else penalty,
        "sampling_seed": asked.seed,
    }
    return {
        "input_ids": list(asked.prompt),
        "sampling_params": settings,
        "return_logprob": asked.logprobs > 0,
        "top_logprobs_num": asked.logprobs,
    }


def parse(answer: Mapping[str, Any]) -> Completion:
    """The record of an answer of `/generate` or of an OpenAI-compatible path.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: it is not an answer of SGLang.
    """
    (choice, *_) = answer.get("choices") or [{}]
    meta = answer.get("meta_info") or choice["meta_info"]
    rounds, drafted = meta.get("spec_verify_ct"), _first(meta, DRAFTED)
    accepted, lengths = _first(meta, ACCEPTED), _first(meta, LENGTHS)
    if rounds is None:
        signs = [name for name, value in meta.items() if name.startswith("spec_") and value]
        if signs:
            raise ValueError(f"it drafted ({signs[0]}), and has no spec_verify_ct, its rounds")
    kept = sum(kept * count for kept, count in enumerate(lengths or ()))
    logprobs = meta.get("output_token_logprobs") or ()
    record = Completion(
        engine="sglang",
        counted=int(meta["completion_tokens"]),
        k=0,
        stop_reason=stop_reason((meta.get("finish_reason") or {}).get("type")),
        tokens=token_ids(answer.get("output_ids")),
        text=answer.get("text"),
        logprobs=tuple(entry[0] for entry in logprobs),
        likeliest=tuple(
            {int(token): float(logprob) for logprob, token, *_ in listed or ()}
            for listed in meta.get("output_top_logprobs") or ()
        ),
        model=answer.get("model"),
    )
    if not rounds:
        return record
    return replace(
        record,
        k=None,  # an adaptive K is not its mean
        rounds=int(rounds),
        drafted=drafted,
        accepted=accepted,
        # In some releases the histogram counts something else
        accepted_lengths=tuple(lengths) if lengths and kept == accepted else None,
    )


def _first(meta: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((meta[name] for name in names if meta.get(name) is not None), None)


def adapter(spec: EngineSpec) -> Adapter:
    return Adapter(
        spec,
        attach=lambda config, _: partial(SglangServer, rule=rule_of(config)),
        start=lambda serve: Sglang(*checkpoints(serve), **started_with(serve)),
        check=lambda config: on_path(config.engine),
    )


INTERFACE = Interface("sglang", ABOUT, ABOUT, "/generate", request_body, parse, COUNTERS)
