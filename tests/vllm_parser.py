"""What vLLM's own parser makes of command lines: run by `test_servers_vllm` with vLLM's Python.

python tests/vllm_parser.py < [["serve", ...], ...] > refused lines, by what is wrong with them
"""

import argparse
import json
import sys
from dataclasses import fields
from importlib import import_module
from typing import Any

# Where releases have it, today's first
MODULES = ("vllm.entrypoints.common", "vllm.entrypoints.launchers", "vllm.entrypoints.openai")


def parser() -> Any:
    """That of `vllm serve`."""
    flexible: Any = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    for module in MODULES:
        try:
            return import_module(f"{module}.cli_args").make_arg_parser(flexible())
        except ModuleNotFoundError:
            continue
    raise SystemExit("vLLM has its parser elsewhere")


def refusal(serve: Any, line: list[str], settings: frozenset[str]) -> str | None:
    """What is wrong with a line after `vllm`; None of one that is parsed."""
    try:
        parsed: argparse.Namespace = serve.parse_args(line[1:])
    except SystemExit:
        return "not parsed"
    unknown = {*(parsed.speculative_config or {})} - settings
    return f"no {', '.join(sorted(unknown))} in --speculative-config" if unknown else None


if __name__ == "__main__":
    config: Any = import_module("vllm.config.speculative").SpeculativeConfig
    known, serve = frozenset(each.name for each in fields(config)), parser()
    lines: list[list[str]] = json.load(sys.stdin)
    refused = {" ".join(line): refusal(serve, line, known) for line in lines}
    json.dump({line: why for line, why in refused.items() if why}, sys.stdout)
