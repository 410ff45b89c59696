"""The benchmarks run; what they measure is printed, not asserted."""

import json
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def script(name: str) -> ModuleType:
    spec = util.spec_from_file_location(f"bench_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_gpu_benchmark_runs_on_toy_shapes_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["--context", "24", "--new-tokens", "8", "--prompts", "1", "--samples", "2"]
    asked = ["--device", "cpu", "--shape", "tiny", "--out", str(tmp_path), *sizes]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *asked, "--targets", "qwen3_4b"])
    script("gpu").main()
    stored = json.loads((tmp_path / "gpu.json").read_text())
    (pair,) = stored["pairs"]
    assert pair["engine"]["engine"] == "lean"
    assert set(pair["verify_ms"]) == {"1", "2", "3", "5", "9"}
    assert [(row["set"], row["k"]) for row in pair["imposed"][1:]] == [
        (name, k) for k in (1, 2, 4, 8) for name in ("easy", "hard")
    ]
    assert stored["copy_gb_s"] > 0


def test_overhead_is_a_share_of_the_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = [
        "--k",
        "2",
        "--temperature",
        "1.0",
        "--context",
        "8",
        "--new-tokens",
        "6",
        "--repetitions",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["overhead.py", *sizes, "--json", str(tmp_path / "o.json")])
    script("overhead").main()
    (row,) = json.loads((tmp_path / "o.json").read_text())
    assert 0 < row["overhead"] < 1
