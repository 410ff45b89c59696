"""vLLM's server: started here by `vllm serve`, or running elsewhere.

Facts from vllm/entrypoints/openai and vllm/v1 of releases 0.29 to 0.33, also tried with a server
(0.32, on a CPU):

- `POST /v1/completions` takes token ids and, with `return_token_ids`, returns them. Every sampling
  parameter is sent, because a server takes missing ones from the model's generation_config.
- `--enable-per-request-metrics` puts a request's times into its answer: `time_to_first_token_ms`
  from when it was scheduled, `generation_time_ms` from the first token to the last.
  `--per-request-spec-decode-metrics detailed` (from 0.29) adds `speculative_decoding`, its rounds
  (`num_spec_steps`), drafted and accepted tokens, in sum and of each round. All servers started
  here have the first flag, and those that draft the second.
- A server without these flags has the same counts as sums at `/metrics`. They are used where the
  tokens generated in between are exactly this request's, so that no other request ran.
- The first token comes from the prefill. Every later step drafts and verifies K tokens, also near
  the budget, where the text is cut.
- A step of a look-up may draft fewer tokens, or none, and the answer does not have steps without
  drafts. So its rounds are the steps that `/metrics` counts (`iteration_tokens_total`), less the
  prefill's.
- `--dtype auto` serves a float32 checkpoint in 16 bits (vllm/config/model.py), so the dtype of the
  replayed model is given. A draft is served in the dtype of its target: vllm/config/speculative.py
  takes it from there, and `--speculative-config` has none.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from harness.config import ServerConfig
from harness.engine_facts.draft_kinds import DraftKind, looks_up
from harness.engine_facts.spec import EngineSpec
from harness.engine_facts.vllm import ADAPTIVE, BY_BATCH, COUNTING, SPEC, speculative_config
from harness.engines.adapters import Adapter, checkpoints, rule_of, served_kind, started_with
from harness.engines.counters import CounterNames, Samples
from harness.engines.http_server import (
    MODELS,
    CardMemory,
    HttpServer,
    Interface,
    Running,
    StartedEngine,
    field_of,
    served_model,
)
from harness.engines.process import LOOPBACK, on_path
from harness.engines.protocol import (
    Asked,
    Completion,
    EngineFacts,
    seconds,
    stop_reason,
    token_ids,
)
from harness.records import Round, Rule, UserError, Varying

SERVER = "vLLM's server"
# The prefix of token names with `return_tokens_as_token_ids`, which distinguishes tokens of equal
# text
TOKEN_ID = "token_id:"
ABOUT = ("/version", "version")
# The bytes of the CUDA context and of NCCL, which are taken before vLLM reads the free memory
SPARE_BYTES = 0.7e9
# The sums of `/metrics` that are read; a server has one model
GENERATED = "vllm:generation_tokens_total"
STEPS = "vllm:iteration_tokens_total_count"
DRAFT_ROUNDS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PREFILL_S = "vllm:request_prefill_time_seconds_sum"
DECODE_S = "vllm:request_decode_time_seconds_sum"
COUNTERS = CounterNames(
    tokens=GENERATED,
    rounds=DRAFT_ROUNDS,
    shown_with="without --disable-log-stats",
    drafts_with="--speculative-config",
    since="0.9",
    signs=(DRAFTED, ACCEPTED, "vllm:spec_decode_draft_acceptance_rate"),
    requests="vllm:time_to_first_token_seconds_count",
    drafted=DRAFTED,
    accepted=ACCEPTED,
    by_position="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    at_end=False,
)
# The counts of a request may appear at /metrics after its answer has been sent
COUNTED_WITHIN_S, COUNTED_POLL_S = 1.0, 0.01


@dataclass(frozen=True)
class Vllm(StartedEngine):
    """A pair that vLLM serves on this machine."""

    spec = SPEC
    measuring = frozenset(
        (
            *("--enable-per-request-metrics", "--per-request-spec-decode-metrics"),
            "--no-enable-prefix-caching",
        )
    )
    variables = ("VLLM_",)

    def environment(self, synthetic: Sequence[float] | None = None) -> Mapping[str, str]:  # noqa: ARG002
        """The variables for its threads, the address between its processes, and the model runner.

        Only the V2 runner has block verification. By default vLLM falls back to V1 where V2 lacks a
        feature, and V1 would ignore the rule.
        """
        variables = {"VLLM_HOST_IP": LOOPBACK}
        if self.rule == "block":
            variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if self.threads is not None:
            variables["OMP_NUM_THREADS"] = str(self.threads)
            # By default vLLM binds its threads to cores, and every server to the same ones
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            if looks_up(self.kind):  # its own threads wait for each other on a busy machine
                variables["NUMBA_NUM_THREADS"] = str(self.threads)
        return variables

    def server(self, running: Running, k: int) -> "VllmServer":
        return VllmServer(running, k, self.rule, self.kind, self.varying)

    def flags(self, k: int, synthetic: Sequence[float] | None = None) -> list[str]:
        flags = ["serve", str(self.target), *self.common_flags(k)]
        if k:
            draft = None if self.draft is None else str(self.draft)
            speculative = speculative_config(self.kind, draft, k, self.rule)
            if self.draft_revision is not None:
                speculative["revision"] = self.draft_revision
            if synthetic is not None:
                speculative["rejection_sample_method"] = "synthetic"
                speculative["synthetic_acceptance_rates"] = list(synthetic)
            if self.varying == "schedule":
                speculative[BY_BATCH] = [list(entry) for entry in self.schedule]
            if self.varying == "adaptive":
                speculative[ADAPTIVE] = True
            flags += ["--speculative-config", json.dumps(speculative)]
            flags += ["--per-request-spec-decode-metrics", "detailed"]
        # Without prefix caching, so that a repeated prompt has a prefill as well
        measured = ("--enable-per-request-metrics", "--no-enable-prefix-caching")
        return [*flags, *measured, *self.more_flags]

    def spare_bytes(self, k: int) -> float:  # noqa: ARG002
        return SPARE_BYTES

    def memory_share(self, room: float, memory: CardMemory) -> float:
        """The share of the whole card: room / total.

        vLLM takes `total * share` for weights, activations, CUDA graphs and, with the rest, its KV
        cache. It refuses to start where less than that is free (`request_memory` in
        vllm/v1/worker/utils.py), as it always is at the default of 0.9 where other processes hold a
        part of the card.
        """
        return room / memory.total


class VllmServer(HttpServer):
    """One running server of vLLM.

    Where K varies, `k` is the largest. Steps without drafts are in no answer, so they are not
    counted then.
    """

    decoded_field = "prompt"

    def __init__(
        self,
        running: Running,
        k: int,
        rule: Rule = "greedy_draft",
        kind: DraftKind = "model",
        varying: Varying = "",
    ) -> None:
        super().__init__(f"vLLM at k={k}", k, running)
        version = str(running.client.about(*ABOUT, SERVER)["version"])
        lookup = looks_up(kind)
        self.facts = EngineFacts(SPEC, version, rule, drafts_fewer=lookup or bool(varying))
        # A server may have adapters besides its model
        self.named, self._varying = {"model": served_model(running.client)}, varying
        # Whether answers have times and counts, as the first answer shows
        self._answers_complete = False
        # Whether rounds are taken from /metrics, since answers do not have rounds without drafts
        self._steps_counted = lookup and k > 0

    def complete(self, asked: Asked, deadline_s: float) -> Completion:
        before = None if self._answers_complete else self._sums(deadline_s)
        body = {**request_body(asked), **self.named}
        answer = self.ask(INTERFACE.path, body, deadline_s, asked)
        (choice,) = field_of(answer.body, "choices", self.where, SERVER)
        returned = len(field_of(choice, "token_ids", self.where, f"{SERVER}, 0.11 or later"))
        record = parse(answer.body)
        counted = record.rounds is not None
        if self.k and counted and record.k != self.k:
            raise UserError(f"{self.where}: it drafts {record.k} tokens per round, not k={self.k}")
        timed = record.decode_s is not None
        self._answers_complete = timed and (self.k == 0 or counted) and not self._steps_counted
        sums = None
        if before is not None and not self._answers_complete:
            sums = self._sums_of_request(before, returned, deadline_s)
            record = record if sums is None else _with_sums(record, sums)
        if self.k and not counted and before is None:
            raise self.without_counters(
                "in its answers or at /metrics",
                "start it with --enable-per-request-metrics --per-request-spec-decode-metrics"
                " detailed",
            )
        self.check_drafts(record.drafted, returned, "--speculative-config")
        completion = self.completion(answer, record)
        if self._varying and completion.steps is None:  # some steps drafted nothing
            return replace(completion, rounds=None)
        if not self._steps_counted:
            return completion
        steps = None if sums is None else sums.get(STEPS)
        rounds = None if steps is None else int(steps) - COUNTING.first_position
        each = completion.steps if len(completion.steps or ()) == rounds else None
        return replace(completion, rounds=rounds, steps=each)

    def _sums(self, deadline_s: float) -> dict[str, float] | None:
        """The server's counters over all requests, by name; None where it does not show them."""
        sums = Samples.shown(lambda: self._client.get("/metrics", deadline_s)).sums
        return sums if GENERATED in sums else None

    def _sums_of_request(
        self, before: Mapping[str, float], tokens: int, deadline_s: float
    ) -> dict[str, float] | None:
        """The counts since `before`; None where they include other requests."""
        give_up = monotonic() + COUNTED_WITHIN_S
        while True:
            now = self._sums(deadline_s)
            if now is None:
                return None
            since = {name: value - before.get(name, 0.0) for name, value in now.items()}
            if since[GENERATED] == tokens:
                return since
            if since[GENERATED] > tokens or monotonic() > give_up:
                return None
            sleep(COUNTED_POLL_S)


def request_body(asked: Asked) -> dict[str, Any]:
    """The body of a request with the sampling parameters of the harness, without the model."""
    sampling = asked.sampling
    penalty = sampling.repetition_penalty
    listed = {"logprobs": asked.logprobs, "return_tokens_as_token_ids": True}
    return {
        "prompt": list(asked.prompt),
        "max_tokens": asked.budget,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": 1.0 if penalty is None else penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": asked.seed,
        "return_token_ids": True,
        **(listed if asked.logprobs else {}),
    }


def parse(answer: Mapping[str, Any]) -> Completion:
    """The record of an answer.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: it is not an answer of vLLM, or its
            counts contradict each other.
    """
    (choice, *_) = answer.get("choices") or [{}]
    metrics, usage = answer.get("metrics") or {}, answer.get("usage")
    tokens, spec_metrics = token_ids(choice.get("token_ids")), metrics.get("speculative_decoding")
    counted = counts(spec_metrics)
    return Completion(
        engine="vllm",
        counted=None if usage is None else int(usage["completion_tokens"]),
        steps=rounds_of(tokens, spec_metrics) if tokens and spec_metrics is not None else None,
        prefill_s=seconds(metrics.get("time_to_first_token_ms")),
        decode_s=seconds(metrics.get("generation_time_ms")),
        stop_reason=stop_reason(choice.get("finish_reason")),
        tokens=tokens,
        text=choice.get("text"),
        logprobs=tuple((choice.get("logprobs") or {}).get("token_logprobs") or ()),
        likeliest=tuple(map(_by_id, (choice.get("logprobs") or {}).get("top_logprobs") or ())),
        model=answer.get("model"),
        **counted,
    )


def _by_id(listed: Mapping[str, float] | None) -> dict[int, float]:
    """The log-probabilities of one position by token id, from names such as `token_id:42`."""
    return {
        int(name.removeprefix(TOKEN_ID)): float(logprob)
        for name, logprob in (listed or {}).items()
        if name.startswith(TOKEN_ID)
    }


def counts(spec_metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of a record from vLLM's counts of a request.

    `spec_metrics` is `speculative_decoding` of an answer; None for plain decoding.
    """
    if spec_metrics is None:
        return {"k": 0}
    steps, drafted = spec_metrics.get("per_step_accepted"), spec_metrics.get("per_step_drafted")
    histogram = spec_metrics.get("acceptance_histogram") or Counter(steps or ())
    pairs = histogram.items() if isinstance(histogram, Mapping) else enumerate(histogram)
    by_length = {int(kept): int(rounds) for kept, rounds in pairs}
    k = spec_metrics.get("num_spec_tokens") or max(drafted or by_length or [0])
    if max(by_length, default=0) > k:
        raise ValueError(f"{max(by_length)} tokens accepted in a round of K={k}")
    if steps is not None and drafted is not None and len(steps) != len(drafted):
        raise ValueError(f"per_step_drafted of {len(drafted)} rounds, accepted of {len(steps)}")
    if steps is not None:
        spec_metrics = {
            "num_draft_tokens": sum(drafted or [k] * len(steps)),
            "num_spec_steps": len(steps),
            "num_accepted_draft_tokens": sum(steps),
            **spec_metrics,
        }
    return {
        "k": int(k),
        "rounds": int(spec_metrics["num_spec_steps"]),
        "drafted": int(spec_metrics["num_draft_tokens"]),
        "accepted": int(spec_metrics["num_accepted_draft_tokens"]),
        "accepted_lengths": tuple(by_length.get(kept, 0) for kept in range(int(k) + 1)),
    }


def rounds_of(tokens: Sequence[int], spec_metrics: Mapping[str, Any]) -> tuple[Round, ...] | None:
    """The rounds of a text, prefill included, from an answer's `speculative_decoding`.

    A round emits its accepted tokens and one of the target's own; the last round emits fewer where
    an accepted end of text, or the budget, cuts it. None where the answer has only sums, or the
    counts do not fit the text.
    """
    accepted, drafted = spec_metrics.get("per_step_accepted"), spec_metrics.get("per_step_drafted")
    if accepted is None or drafted is None:
        return None
    rounds: list[Round] = []
    left = tuple(tokens[COUNTING.first_position :])
    for kept, proposed in zip(accepted, drafted, strict=True):
        emitted, left = left[: kept + 1], left[kept + 1 :]
        end = "bonus" if kept == proposed else "rejected"
        if len(emitted) <= kept:
            end = "cut"
        rounds.append(Round(emitted, min(kept, len(emitted)), proposed, end))
    return tuple(rounds) if not left and all(each.tokens for each in rounds) else None


def _with_sums(record: Completion, sums: Mapping[str, float]) -> Completion:
    """A record completed from `/metrics`; zero rounds where the server does not draft."""
    if record.rounds is None:
        names = (DRAFT_ROUNDS, DRAFTED, ACCEPTED)
        rounds, drafted, accepted = (int(sums.get(name, 0)) for name in names)
        record = replace(record, rounds=rounds, drafted=drafted, accepted=accepted)
    if record.prefill_s is None or record.decode_s is None:
        record = replace(record, prefill_s=sums.get(PREFILL_S), decode_s=sums.get(DECODE_S))
    return record


def check_build(config: ServerConfig) -> None:
    """Refuse features that the build of vLLM on PATH lacks; vLLM would fail only after minutes."""
    program = Path(on_path(config.engine)).resolve()
    # The package's metadata is in lib/python*/site-packages next to bin/vllm
    packages = program.parent.parent.glob("lib/python*/site-packages/vllm-*.dist-info")
    for_cpus = next((each.name for each in packages if "+cpu" in each.name), None)
    key, needs = "", "vLLM's V2 model runner"
    if config.decode.rule == "block":
        key = "decode.rule=block"
    if served_kind(config) == "dspark":
        key = f"draft={config.draft.name}"
    if "adaptive" in config.varying:
        key, needs = "k=adaptive", f"full CUDA graphs ({ADAPTIVE})"
    if for_cpus is not None and key:
        version = for_cpus.removeprefix("vllm-").removesuffix(".dist-info")
        raise UserError(
            f"{key}: needs {needs}, which builds for CUDA have (`pip install {SPEC.rented}`, where"
            f" there is a card); vLLM {version} on PATH is a build for CPUs"
        )


def adapter(spec: EngineSpec) -> Adapter:
    return Adapter(
        spec,
        attach=lambda config, _: partial(
            VllmServer, rule=rule_of(config), kind=served_kind(config)
        ),
        start=lambda serve: Vllm(*checkpoints(serve), **started_with(serve)),
        check=check_build,
    )


INTERFACE = Interface(
    engine="vllm",
    probe=(MODELS, "data"),
    version=ABOUT,
    path="/v1/completions",
    body=request_body,
    parse=parse,
    counters=COUNTERS,
    names_model=True,
    drafts=lambda client: DRAFTED in Samples.shown(lambda: client.stated("/metrics")).sums,
)
