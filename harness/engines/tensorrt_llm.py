"""A parser of what TensorRT-LLM's benchmark wrote of its requests; no server is started here.

`harness.engines.stored_answers` recognises such files and calls it.

The file is that of `trtllm-bench ... --request_json FILE`. A server that runs already is measured
by `harness.engines.openai`, which the `client` of `harness.serving.tensorrt_llm` names. To start
one, write an `adapter` here as `harness.engines.sglang` has it, and name this module there, without
`starts=False`. Read in tensorrt_llm/bench of main, late 2026:

- benchmark/throughput.py and low_latency.py write `get_request_info` of dataclasses/reporting.py:
  an array with each request's `RequestRecord` (dataclasses/statistics.py), its text in place of its
  tokens. Times are the client's, in nanoseconds; that of the first token is known with
  `--streaming` alone, else -1.
- `decode_iteration` is the steps after the prefill's: reporting.py takes a request's accepted
  tokens as its tokens less `decode_iteration` less 1. Neither K nor the temperature is in the file.
- `--report_json` and `--iteration_log` have sums over requests, and the second of each step.
"""

from collections.abc import Mapping
from typing import Any

from harness.engines.protocol import ServedRecord
from harness.serving.tensorrt_llm import SPEC

# A field of each kind of file, by which it is known; and the counts and times of a request
REQUEST, SUMS = "decode_iteration", frozenset(("performance", "iterLatencyMS"))
TOKENS = ("num_total_output_tokens", "output_tokens", "num_output_tokens")
COUNTS = (REQUEST, *TOKENS, "error_tokens")
TIMES = ("start_timestamp", "end_timestamp")
ONLY_SUMS = (
    "of trtllm-bench's files this one has sums over requests alone; give the one of --request_json"
)


def parse(entry: Mapping[str, Any]) -> ServedRecord:
    """One request of the file.

    Raises:
        KeyError, TypeError, ValueError: it lacks what it should have.
    """
    begin_s, end_s = (entry[name] * 1e-9 for name in TIMES)
    if entry.get("error_tokens"):
        return ServedRecord(engine=SPEC.name, error="trtllm-bench noted an error")
    counts = [entry[name] for name in TOKENS if entry.get(name) is not None]
    if not counts:
        raise KeyError(TOKENS[0])
    returned, rounds = int(counts[0]), int(entry[REQUEST])
    if not 0 <= rounds < returned:
        raise ValueError(f"{returned} tokens in {rounds} steps after the first")
    first = entry.get("first_token_timestamp", -1)
    first_s = first * 1e-9 if first > 0 else None
    return ServedRecord(
        engine=SPEC.name,
        returned=returned,
        rounds=rounds,
        accepted=returned - 1 - rounds,
        prefill_s=None if first_s is None else first_s - begin_s,
        decode_s=None if first_s is None else end_s - first_s,
        text=entry.get("output"),
        span_s=(begin_s, end_s),
    )
