"""What servers answer: of vLLM 0.32 and llama.cpp as they were run, of SGLang as documented."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TOKENS = [5, 6, 7, 8, 9, 10]
SPECULATIVE = {
    "mean_acceptance_length": 1.67,
    "draft_acceptance_rate": 0.33,
    "acceptance_histogram": [1, 2, 0],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 2,
    "num_draft_tokens": 6,
    "num_spec_tokens": 2,
    "per_step_accepted": None,
    "per_step_drafted": None,
}
TIMES = {"time_to_first_token_ms": 2.0, "generation_time_ms": 30.0, "queue_time_ms": 0.1}
CHOICE = {"index": 0, "text": "abc", "finish_reason": "length", "token_ids": TOKENS}
USAGE = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
# What /metrics has before any request of a server that drafts, and after ours
BEFORE = {
    "vllm:generation_tokens_total": 100.0,
    "vllm:spec_decode_num_drafts_total": 40.0,
    "vllm:spec_decode_num_draft_tokens_total": 80.0,
    "vllm:spec_decode_num_accepted_tokens_total": 20.0,
    "vllm:request_prefill_time_seconds_sum": 1.0,
    "vllm:request_decode_time_seconds_sum": 2.0,
}
OURS = dict(zip(BEFORE, (6.0, 3.0, 6.0, 2.0, 0.002, 0.03), strict=True))
AFTER = {name: value + OURS[name] for name, value in BEFORE.items()}


def completion(metrics: Any = None, choice: Any = None) -> dict[str, Any]:
    """An answer of /v1/completions."""
    return {"choices": [CHOICE if choice is None else choice], "usage": USAGE, "metrics": metrics}


def page(sums: Mapping[str, float]) -> str:
    """Those sums as /metrics has them: in two parts, by label, among comments and buckets."""
    lines = ["# HELP a page of metrics", 'vllm:steps_bucket{le="1.0",model_name="m"} 3.0', ""]
    for name, value in sums.items():
        lines += [f'{name}{{engine="{part}",model_name="m"}} {value / 2}' for part in (0, 1)]
    return "\n".join(lines)


def in_turn(*pages: Mapping[str, float]) -> Callable[[Any], str]:
    """Each of these at one call, the last at every later one."""
    left = list(pages)
    return lambda _: page(left.pop(0) if len(left) > 1 else left[0])


def vllm_answers(**answers: Any) -> dict[str, Any]:
    metrics = {**TIMES, "speculative_decoding": SPECULATIVE}
    return {
        "/version": {"version": "0.32.0"},
        "/v1/models": {"object": "list", "data": [{"id": "m"}]},
        "/v1/completions": completion(metrics),
        "/metrics": page(BEFORE),
        "/health": "",
        **answers,
    }


META = {
    "finish_reason": {"type": "stop", "matched": 10},
    "completion_tokens": 6,
    "spec_verify_ct": 3,
    "spec_num_proposed_drafts": 6,
    "spec_num_correct_drafts": 2,
    "e2e_latency": 0.04,
}
# Of a request that drafted nothing
PLAIN_META = {name: value for name, value in META.items() if not name.startswith("spec")}


def sglang_answers(**answers: Any) -> dict[str, Any]:
    return {
        "/server_info": {"version": "0.5.23", "speculative_num_steps": 2},
        "/generate": {"text": "abc", "output_ids": TOKENS, "meta_info": META},
        "/health": "",
        **answers,
    }


LLAMACPP_TIMES = {"prompt_ms": 2.0, "predicted_ms": 30.0, "predicted_n": 6}
LLAMACPP = {
    "tokens": TOKENS,
    "stop_type": "limit",
    "truncated": False,
    "timings": {**LLAMACPP_TIMES, "draft_n": 8, "draft_n_accepted": 4},
}


def llamacpp_answers(**answers: Any) -> dict[str, Any]:
    return {
        "/props": {"build_info": "b11549-c0ffee"},
        "/completion": LLAMACPP,
        "/health": "",
        **answers,
    }


# Of 4 draft tokens a round: 100 rounds that accepted at least 1, 2, 3, 4
ACCEPTED_AT = (80, 60, 50, 40)


def vllm_page(times: int, accepted_at: Sequence[int] = ACCEPTED_AT, requests: int = 10) -> str:
    """What vLLM 0.32 shows after so many equal intervals, in two data-parallel parts."""
    counts = {
        "vllm:generation_tokens_total": 100 + sum(accepted_at) + requests,
        "vllm:time_to_first_token_seconds_count": requests,
        "vllm:spec_decode_num_drafts_total": 100,
        "vllm:spec_decode_num_draft_tokens_total": 100 * len(accepted_at),
        "vllm:spec_decode_num_accepted_tokens_total": sum(accepted_at),
    }
    lines = ["# HELP vllm:generation_tokens_total Number of generation tokens processed."]
    for part in (0, 1):
        labels = f'engine="{part}",model_name="org/a b}}"'
        lines += [f"{name}{{{labels}}} {times * n / 2}" for name, n in counts.items()]
        lines += [
            "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            f'{{{labels},position="{position}"}} {times * n / 2} 1700000000000'
            for position, n in enumerate(accepted_at)
        ]
    return "\n".join(lines)


def turns(page: Callable[..., str], *rest: Any) -> Callable[[Any], str]:
    """The page as it grows by an interval with every call."""
    calls = itertools.count()
    return lambda _: page(next(calls), *rest)
