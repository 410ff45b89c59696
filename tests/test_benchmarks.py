"""The benchmarks run; what they measure is printed, not asserted."""

import ast
import json
import re
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from random_models import qwen3
from runs import FROZEN
from transformers import AutoModelForCausalLM

from harness.cloud.remote import SMOKE_STEPS
from harness.models.lean.model import LeanModel

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def script(name: str) -> ModuleType:
    spec = util.spec_from_file_location(f"bench_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


Bench = Callable[..., None]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs a benchmark from its command line: words, and more of them that hold spaces."""

    def run(name: str, words: str, *more: object) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.split(), *map(str, more)])
        script(name).main()

    return run


@pytest.mark.exhaustive
def test_the_gpu_benchmark_runs_on_toy_shapes_and_keeps_what_it_has(
    bench: Bench, tmp_path: Path
) -> None:
    sizes = "--context 8 --new-tokens 6 --prompts 1 --samples 2"
    # As a smoke run types it
    _, _, _, *step = (w.format(model="qwen3_4b", folder=tmp_path) for w in SMOKE_STEPS[-1])
    bench("gpu", f"--device cpu --shape tiny {sizes}", *step)
    stored = json.loads((tmp_path / "gpu.json").read_text())
    (pair,) = stored["pairs"]
    assert pair["engine"]["engine"] == "lean"
    assert set(pair["verify_ms"]) == {"1", "2", "3", "5", "9"}
    assert [(row["set"], row["k"]) for row in pair["synthetic"][1:]] == [
        (name, k) for k in (1, 2, 4, 8) for name in ("easy", "hard")
    ]
    assert stored["copy_gb_s"] > 0
    steps = [entry["step"] for entry in stored["smoke"]]
    assert "qwen3_4b: text with itself as the draft" in steps
    assert "qwen3_4b: fixed shapes" in steps


SMOKE = ["--device", "cpu", "--shape", "tiny", "--smoke", "--targets", "--context", "8"]


def stopped(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_smoke_run_stops_with_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *SMOKE])
    gpu = script("gpu")
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "forward_error", lambda _: float("nan"))
        line = stopped(gpu, capsys)
    assert line.startswith("error: qwen3_0_6b, as opened: logits are off by nan of their range")
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "forward_error", lambda _: 0.0)
        patch.setattr(gpu, "LeanModel", OffByOne)
        assert "eager attention, 2 positions after 1: logits are off" in stopped(gpu, capsys)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "build", lambda *_, **__: 1 / 0)
        assert "qwen3_0_6b: opened: ZeroDivisionError" in stopped(gpu, capsys)


def test_the_smoke_run_compares_what_every_command_runs_on_a_card() -> None:
    gpu = script("gpu")
    model = SimpleNamespace(network=qwen3(), vocab_size=64, device=torch.device("cuda"))
    assert list(gpu.implementations(SimpleNamespace(model=model))) == [
        *("as opened", "eager", "fixed shapes", "compiled")
    ]


class OffByOne(LeanModel):
    """Sees other tokens than it was given where there are several."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens + (len(tokens) > 1))


def test_the_smoke_run_accepts_nothing_but_compiled_graphs_on_a_card() -> None:
    gpu = script("gpu")
    card, graphs = torch.device("cuda"), {"engine": "cuda_graphs"}
    for described, passes in (
        (graphs, True),
        ({**graphs, "compiled": True}, True),
        ({**graphs, "compiled": False}, False),
        ({**graphs, "engine_reason": "compiled graphs: no C compiler"}, False),
        ({"engine": "lean", "engine_reason": "no CUDA graphs"}, False),
    ):
        model = SimpleNamespace(describe=lambda described=described: described)
        gpu.check_engine("x", model, torch.device("cpu"))
        if passes:
            gpu.check_engine("x", model, card)
        else:
            with pytest.raises(gpu.Stopped, match="x does not run as compiled CUDA graphs"):
                gpu.check_engine("x", model, card)


def test_overhead_is_a_share_of_the_round(bench: Bench, tmp_path: Path) -> None:
    sizes = "--k 2 --temperature 1.0 --context 8 --new-tokens 6 --repetitions 1"
    bench("overhead", f"{sizes} --json", tmp_path / "o.json")
    (row,) = json.loads((tmp_path / "o.json").read_text())
    assert 0 < row["overhead"] < 1


def test_texts_are_those_of_transformers_assisted_generation(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "ratios.json"
    sizes = "--k 2 --temperature 0 --prompts 1 --new-tokens 8 --repetitions 1"
    bench("vs_transformers", f"{sizes} --json", out)
    rows = json.loads(out.read_text())
    assert [(row["k"], row["same"]) for row in rows] == [(0, True), (2, True)]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("few_samples")
def test_prediction_holds_predictions_against_measurements_cell_by_cell(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = "k=[2] temperature=[0] prompts.limit=2 new_tokens=8 threads=1"
    bench("prediction", f"--runs 2 {keys}")
    out = capsys.readouterr().out
    assert "run 1" in out
    assert "run 2" in out
    cells = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    assert [tuple(word.strip() for word in cell[1:4]) for cell in cells] == [
        (name, "0", "2") for name in ("easy", "hard") * 2
    ]
    # Greedy text is the same at every K: then the two errors are one
    assert all(cell[6] == cell[7] for cell in cells)
    last = out.partition("median of 2 runs:")[2]
    assert re.search(r"time: median [\d.]+%, mean [+-][\d.]+%, p90 [\d.]+%", last)
    assert "whole, T=0: median" in last


@pytest.mark.exhaustive
@pytest.mark.usefixtures("few_samples")
def test_the_benchmark_of_servers_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, page = script("servers"), tmp_path / "validation.md"
    own = ("engine=own", "clock=engine", "k=[1,2]", "new_tokens=12", "temperature=[0,1]")
    monkeypatch.setattr(servers, "RUNS", (own,))
    asked = ["--limit", "2", "--visits", "2", "--out", str(page), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["servers.py", *asked])
    servers.main()
    text = page.read_text()
    assert "| tiny + tiny_good | 2 | 4 of 4 | 4 of 4 | 4 of 4 |" in text
    assert re.search(r"from its own rounds: median error .* over 4 cells", text)
    assert "## Sampled texts" in text
    (run,) = tmp_path.glob("*_server_*")
    monkeypatch.setattr(sys, "argv", ["servers.py", "--add", str(run), "--out", str(page)])
    servers.main()
    lines, more = text.splitlines(), page.read_text().splitlines()
    rows = [
        line for line in lines if "of 4" in line or "| greedy_draft" in line or "| ratio" in line
    ]
    assert len(more) == len(lines) + len(rows)
    assert all(more.count(row) == 2 for row in rows)
    assert [line for line in more if line not in rows] == [x for x in lines if x not in rows]


def test_the_cost_of_replay_stands_next_to_the_loops(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench("replay_cost", "--new-tokens 4 --limit 1 --runs 1 --stride 2")
    out = capsys.readouterr().out
    assert "One audition: 24 target tokens" in out  # two prompts at three temperatures
    assert "total / generation alone: " in out
    assert "the loop in all 96 cells: " in out


def test_the_widened_target_says_what_the_shipped_one_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    simulation = script("simulation")
    words = dict(word.split("=", 1) for word in simulation.widened(tmp_path, "vllm"))
    shipped = Path(simulation.embedded.__file__).parent / "tiny"
    tokens = torch.arange(2, 30)[None]
    one, other = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (shipped, words["model.id"])
    )
    assert other.config.intermediate_size == simulation.WIDTH
    with torch.inference_mode():
        torch.testing.assert_close(other(tokens).logits, one(tokens).logits, atol=1e-4, rtol=1e-4)


# ---- timing by hand -----------------------------------------------------------------------------

PROMPTS = BENCHMARKS / "prompts" / "real_pair.jsonl"


def test_the_timing_by_hand_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse((BENCHMARKS / "hand_timing.py").read_text())
    modules = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {name.split(".")[0] for name in modules} <= sys.stdlib_module_names


def test_the_prompts_are_of_three_kinds_and_have_ids_of_their_own() -> None:
    prompts = script("hand_timing").read_prompts(PROMPTS)
    sets = [prompt.prompt_set for prompt in prompts]
    assert {name: sets.count(name) for name in sets} == {"code": 8, "edit": 4, "chat": 8}
    assert len({prompt.name for prompt in prompts}) == len(prompts)


def test_the_requests_timed_by_hand_are_those_of_a_run() -> None:
    requests = script("hand_timing").run_requests(FROZEN / "server")
    lines = (FROZEN / "server" / "trials.jsonl").read_text().splitlines()
    trials = [json.loads(line) for line in lines]
    greedy = [trial for trial in trials if trial["temperature"] == 0 and trial["status"] == "ok"]
    assert set(requests) == {(trial["prompt_set"], trial["prompt"]) for trial in greedy}
    for trial in greedy:
        request = requests[trial["prompt_set"], trial["prompt"]]
        assert trial["k"] in request.ks
        assert request.prompt_tokens == trial["prompt_tokens"]
        assert request.budget >= len(trial["tokens"])


def test_speedups_by_hand_are_ratios_of_sums_over_the_tokens_after_the_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hand = script("hand_timing")
    shared = {"prompt_set": "code", "visit": 0, "ids": [1], "stop": "limit", "drafted": 0}
    answers = [
        SimpleNamespace(prompt=prompt, k=k, tokens=tokens, ms=ms, accepted=accepted, **shared)
        for prompt, k, tokens, ms, accepted in (
            ("a", 0, 11, 100.0, 0),
            ("a", 4, 11, 50.0, 6),
            ("b", 0, 31, 300.0, 0),
            ("b", 4, 31, 350.0, 14),
        )
    ]
    hand.show(answers, [4], by_model=True, run=None)
    assert "| code | 4 | 2 | 2 | 2.00 | 10.0 | 1.000x | - |" in capsys.readouterr().out
