"""`llama-server` from the Python wheel `xllamacpp`, for machines without the binary.

    python -m harness.engines.xllamacpp_server --model FILE --port N ...

It takes the flags of llama-server that the harness uses, with the same names and defaults, so that
runs and reports have one command line for both. The wheel contains llama.cpp's server as a library.
"""

import argparse
import sys
import threading
from importlib import import_module
from typing import Any

from harness.engine_facts.llamacpp import SPEC_TYPES

xllamacpp: Any = import_module("xllamacpp")  # an extra, without types
# The prefix of the wheel's names of kinds of draft
ENUM = "COMMON_SPECULATIVE_TYPE_"
# The flags of look-ups after the prefix --spec-ngram-, and their defaults
NGRAMS = (
    *(("simple-size-n", 12), ("simple-size-m", 48)),
    *(("mod-n-match", 24), ("mod-n-min", 48), ("mod-n-max", 64)),
)


def arguments() -> argparse.Namespace:
    """The parsed flags; an unknown flag is an error, as in llama-server."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--ctx-size", type=int, default=0, help="0: the model's own")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cache-type-k", default="f16")
    parser.add_argument("--cache-type-v", default="f16")
    parser.add_argument("--flash-attn", choices=("on", "off", "auto"), default="auto")
    parser.add_argument("--kv-unified", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--spec-type", help=f"of {', '.join(sorted({*SPEC_TYPES.values()}))}")
    parser.add_argument("--spec-draft-model")
    parser.add_argument("--spec-draft-n-max", type=int, default=3)
    parser.add_argument("--spec-draft-n-min", type=int, default=0)
    parser.add_argument("--spec-draft-p-min", type=float, default=0.0)
    parser.add_argument("--spec-draft-sampling", choices=("greedy", "probabilistic"))
    parser.add_argument("--spec-draft-threads", type=int)
    parser.add_argument("--spec-draft-type-k", default="f16")
    parser.add_argument("--spec-draft-type-v", default="f16")
    for name, default in NGRAMS:
        parser.add_argument(f"--spec-ngram-{name}", type=int, default=default)
    parser.add_argument("--spec-synth-rates")
    return parser.parse_args()


def parameters(given: argparse.Namespace) -> Any:
    """The flags as the library's settings."""
    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.hostnames, params.port = [given.host], given.port
    params.n_ctx, params.n_parallel = given.ctx_size, given.parallel
    params.endpoint_metrics, params.kv_unified = given.metrics, given.kv_unified
    params.cache_type_k, params.cache_type_v = map(_type, (given.cache_type_k, given.cache_type_v))
    attention = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[given.flash_attn]
    params.flash_attn_type = getattr(
        xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{attention}"
    )
    _set_threads(params, given.threads)
    if given.spec_type is not None:
        name = ENUM + given.spec_type.replace("-", "_").upper()
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
        params.load_mtp = given.spec_type == SPEC_TYPES["mtp"]
        for name, _ in NGRAMS:
            kind, size = name.replace("-", "_").split("_", 1)
            lookup = getattr(params.speculative, f"ngram_{kind}")
            setattr(lookup, size, getattr(given, f"spec_ngram_{kind}_{size}"))
        draft = params.speculative.draft
        draft.n_max, draft.n_min = given.spec_draft_n_max, given.spec_draft_n_min
        draft.p_min = given.spec_draft_p_min
        if given.spec_draft_model is not None:
            draft.mparams.path = given.spec_draft_model
        draft.probabilistic = given.spec_draft_sampling == "probabilistic"
        draft.cache_type_k = _type(given.spec_draft_type_k)
        draft.cache_type_v = _type(given.spec_draft_type_v)
        _set_threads(draft, given.spec_draft_threads)
        if given.spec_synth_rates is not None:
            rates = [float(rate) for rate in given.spec_synth_rates.split(",")]
            params.speculative.synth_rates = rates
    return params


def _type(name: str) -> Any:
    return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}")


def _set_threads(of: Any, count: int | None) -> None:
    if count is not None:
        of.cpuparams.n_threads = of.cpuparams_batch.n_threads = count


def main() -> None:
    """Serve until the process is ended."""
    server = xllamacpp.Server(parameters(arguments()))
    sys.stderr.write(f"listening on {server.listening_address}\n")
    threading.Event().wait()


if __name__ == "__main__":
    main()
