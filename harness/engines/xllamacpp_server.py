"""`llama-server` from the Python wheel `xllamacpp`, for machines without the binary.

    python -m harness.engines.xllamacpp_server --model FILE --port N ...

It takes the flags of llama-server that the harness uses, with the same names, so that runs and
reports have one command line for both. Defaults are the library's, which the wheel contains.
"""

import argparse
import sys
import threading
from functools import reduce
from importlib import import_module
from typing import Any

from harness.engine_facts.llamacpp import ENUM, SPEC_TYPES

xllamacpp: Any = import_module("xllamacpp")  # an extra, without types


def _type(name: str) -> Any:
    return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}")


def _attention(name: str) -> Any:
    named = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
    return getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{_one_of(named, name)}")


def _sampled(name: str) -> bool:
    return _one_of({"greedy": False, "probabilistic": True}, name)


def _one_of(named: dict[str, Any], name: str) -> Any:
    if name not in named:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(named)}")
    return named[name]


def _kinds(name: str) -> Any:
    return [getattr(xllamacpp.common_speculative_type, ENUM + name.replace("-", "_").upper())]


def _rates(names: str) -> list[float]:
    return [float(rate) for rate in names.split(",")]


def parameters() -> Any:
    """The flags of the command line as the library's settings; an unknown flag is an error."""
    parser = argparse.ArgumentParser(allow_abbrev=False, argument_default=argparse.SUPPRESS)

    def flag(name: str, setting: str, read: Any = int, **more: Any) -> None:
        parser.add_argument(f"--{name}", dest=setting, type=read, **more)

    flag("model", "model.path", str, required=True)
    flag("host", "hostnames", lambda name: [name])
    flag("port", "port", default=8080)
    flag("ctx-size", "n_ctx")
    flag("parallel", "n_parallel")
    flag("threads", "cpuparams.n_threads")
    flag("cache-type-k", "cache_type_k", _type)
    flag("cache-type-v", "cache_type_v", _type)
    flag("flash-attn", "flash_attn_type", _attention)
    parser.add_argument("--kv-unified", action=argparse.BooleanOptionalAction)
    parser.add_argument("--metrics", dest="endpoint_metrics", action="store_true")
    flag("spec-type", "speculative.types", _kinds)
    flag("spec-synth-rates", "speculative.synth_rates", _rates)
    flag("spec-ngram-simple-size-n", "speculative.ngram_simple.size_n")
    flag("spec-ngram-simple-size-m", "speculative.ngram_simple.size_m")
    flag("spec-ngram-mod-n-match", "speculative.ngram_mod.n_match")
    flag("spec-ngram-mod-n-min", "speculative.ngram_mod.n_min")
    flag("spec-ngram-mod-n-max", "speculative.ngram_mod.n_max")
    draft = "speculative.draft"
    flag("spec-draft-model", f"{draft}.mparams.path", str)
    flag("spec-draft-n-max", f"{draft}.n_max")
    flag("spec-draft-n-min", f"{draft}.n_min")
    flag("spec-draft-p-min", f"{draft}.p_min", float)
    flag("spec-draft-sampling", f"{draft}.probabilistic", _sampled)
    flag("spec-draft-threads", f"{draft}.cpuparams.n_threads")
    flag("spec-draft-type-k", f"{draft}.cache_type_k", _type)
    flag("spec-draft-type-v", f"{draft}.cache_type_v", _type)
    params = xllamacpp.CommonParams()
    for setting, value in vars(parser.parse_args()).items():
        *holders, name = setting.split(".")
        setattr(reduce(getattr, holders, params), name, value)
    for of in (params, params.speculative.draft):
        of.cpuparams_batch.n_threads = of.cpuparams.n_threads
    params.load_mtp = _kinds(SPEC_TYPES["mtp"]) == params.speculative.types
    return params


def main() -> None:
    server = xllamacpp.Server(parameters())
    sys.stderr.write(f"listening on {server.listening_address}\n")
    threading.Event().wait()


if __name__ == "__main__":
    main()
