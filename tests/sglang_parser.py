"""What SGLang's wheel makes of command lines: run by `test_sglang_parser` in a process of its own.

    python tests/sglang_parser.py FOLDER < {"lines": [[...]], "algorithms": [...], ...} > answers

FOLDER has the wheel without its dependencies (`make test-parsers`). Its package imports FlashInfer
and more when it is imported, and a module that the parser needs imports Triton for kernels that it
never compiles: the first is passed over, the second is replaced where it is not installed.
"""

import argparse
import json
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import MagicMock


def importable(folder: Path) -> None:
    """Make the wheel's modules importable, without what needs a card."""
    sys.path.insert(0, str(folder))
    package = ModuleType("sglang")
    package.__path__ = [str(folder / "sglang")]
    sys.modules["sglang"] = package
    if find_spec("triton") is None:
        for name in ("triton", "triton.language"):
            module: Any = ModuleType(name)
            module.__path__, module.__spec__ = [], ModuleSpec(name, None)
            module.__getattr__ = lambda _: MagicMock()
            sys.modules[name] = module


class Parser(argparse.ArgumentParser):
    """Without abbreviations; an error is raised, not printed."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def answers(asked: dict[str, Any]) -> dict[str, Any]:
    """By question, what the wheel says."""

    def of_wheel(module: str, name: str) -> Any:
        return getattr(import_module(f"sglang.{module}"), name)

    candidates = of_wheel(
        "srt.speculative.adaptive_spec_params", "resolve_candidate_steps_from_config"
    )
    variables = of_wheel("srt.environ", "envs")
    parser = Parser(allow_abbrev=False)
    of_wheel("srt.server_args", "ServerArgs").add_cli_args(parser)
    refused: dict[str, str] = {}
    for line in asked["lines"]:
        try:
            parser.parse_args(line)
        except ValueError as error:
            refused[" ".join(line)] = str(error)
    known = {each.name for each in of_wheel("srt.speculative.spec_info", "SpeculativeAlgorithm")}
    return {
        "version": of_wheel("version", "__version__"),
        "refused": refused,
        "algorithms": sorted({*asked["algorithms"]} - known),
        "variables": [name for name in asked["variables"] if not hasattr(variables, name)],
        "candidates": [candidates(file) for file in asked["tiers"]],
    }


if __name__ == "__main__":
    importable(Path(sys.argv[1]))
    json.dump(answers(json.load(sys.stdin)), sys.stdout)
