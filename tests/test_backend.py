"""backend=auto: graphs where they can be, and every report names what ran."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_models import qwen3, save
from runs import FROZEN

from harness.analysis import analyse
from harness.cli import compose
from harness.commands.run_lifecycle import Described, begin, resumed
from harness.config import SweepConfig
from harness.models import load as loading
from harness.models import memory, probe
from harness.models.dummy import config_of
from harness.models.lean.model import LeanModel
from harness.models.load import load
from harness.models.probe import cached_model
from harness.records import UserError
from harness.reporting.sentences import run as sentences
from harness.storage import RunFolder
from harness.storage import load as load_run
from harness.storage.manifest import Environment, ModelEntry
from harness.summary import Summary

CUDA = torch.device("cuda")
GRAPHS = {"engine": "cuda_graphs", "compiled": True}
NO_COMPILER = "compiled graphs: RuntimeError: no C compiler"


def on_cuda() -> Any:
    """Stands for a network on a card, as far as the choice of a backend looks at it."""
    config = SimpleNamespace(get_text_config=lambda: config)
    return SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=CUDA)]), config=config)


def opened(monkeypatch: pytest.MonkeyPatch, backend: str, graphed: Any, why: str | None) -> Any:
    monkeypatch.setattr(probe, "check_causal", lambda *_: None)  # it has no forward
    monkeypatch.setattr(probe, "graphed_model", lambda *_: (graphed, why))
    monkeypatch.setattr(probe, "lean_model", lambda *_: (SimpleNamespace(), None))
    return cached_model(on_cuda(), 8, "model=x", backend)


def test_auto_is_graphs_on_a_card_and_eager_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {compose(command).backend for command in ("profile", "sweep", "snapshot")} == {"auto"}
    assert isinstance(cached_model(qwen3(), 1024, "model=x", "auto"), LeanModel)
    graphs = SimpleNamespace()
    assert opened(monkeypatch, "auto", graphs, None) is graphs
    assert opened(monkeypatch, "eager", graphs, None) is not graphs
    fallen = opened(monkeypatch, "auto", None, "no CUDA graphs, it is quantized")
    assert fallen.engine_reason == "no CUDA graphs, it is quantized"


def test_a_run_begun_with_eager_goes_on_with_eager(tmp_path: Path) -> None:
    for command in ("sweep", "audition"):
        words = [f"results_root={tmp_path}", "threads=1"]
        old = compose(command, [*words, "backend=eager", "model.attention=sdpa"])
        run = RunFolder.create(tmp_path, command, ["tiny"], asdict(old))
        config = compose(command, [*words, f"resume={run.path}"])
        folder = resumed(config, command)
        assert folder is not None
        assert (folder.path, config.backend) == (run.path, "eager")
        assert config.model.attention == "sdpa"
        with pytest.raises(UserError, match="differs in backend"):
            resumed(
                compose(command, [*words, f"resume={run.path}", "backend=cuda_graphs"]), command
            )


def test_one_run_does_not_mix_two_engines(tmp_path: Path) -> None:
    def described(**ran: Any) -> Described:
        names = {"target": "t", "draft": "d"}
        models = {role: ModelEntry.of({"name": name, **ran}) for role, name in names.items()}
        return Described(Environment.of({"device_name": "H100"}), models, {}, "0")

    config = compose("sweep")
    assert isinstance(config, SweepConfig)
    run = RunFolder.create(tmp_path, "sweep", ["tiny"], {})
    begin(config, "sweep", run, described(**GRAPHS))
    begin(config, "sweep", run, described(**GRAPHS))
    for other in ({**GRAPHS, "compiled": False}, {"engine": "lean"}):
        with pytest.raises(UserError, match="engines changed since"):
            begin(config, "sweep", run, described(**other))
    older = RunFolder.create(tmp_path, "sweep", ["tiny"], {})
    begin(config, "sweep", older, described())
    begin(config, "sweep", older, described(**GRAPHS))


def ran_on(target: dict[str, Any], draft: dict[str, Any], **environment: Any) -> Summary:
    """The small frozen sweep, had it run on these engines."""
    run = load_run(FROZEN / "sweep_small")
    described = {role: entry.entries for role, entry in run.manifest.models.items()}
    for role, ran in (("target", target), ("draft", draft)):
        engine = {"engine": None, "engine_reason": None, "compiled": None, **ran}
        described = {**described, role: {**described[role], **engine}}
    machine = {**run.manifest.environment.entries, **environment}
    manifest = run.manifest.updated(models=described, environment=machine)
    return analyse(replace(run, manifest=manifest))


@pytest.mark.parametrize(
    ("target", "draft", "line"),
    [
        ({}, {}, None),  # runs of before engines were stored
        (GRAPHS, GRAPHS, "engine: CUDA graphs"),
        ({"engine": "lean"}, {"engine": "lean"}, None),  # as every run on processors
        (
            {"engine": "transformers"},
            {"engine": "lean"},
            "engine: eager forward of transformers (target); eager forward of the harness (draft)",
        ),
        (
            GRAPHS,
            {"engine": "cuda_graphs", "compiled": False, "engine_reason": NO_COMPILER},
            f"engine: CUDA graphs (target); CUDA graphs, uncompiled (draft: {NO_COMPILER})",
        ),
        (
            {"engine": "transformers", "engine_reason": "its weights are quantized"},
            GRAPHS,
            "engine: eager forward of transformers (target: its weights are quantized); "
            "CUDA graphs (draft)",
        ),
    ],
)
def test_what_ran_is_named_model_by_model_where_it_differs(
    target: dict[str, Any], draft: dict[str, Any], line: str | None
) -> None:
    assert sentences.engine(ran_on(target, draft).run) == line


def test_a_fallback_of_auto_or_an_unused_card_is_a_caveat() -> None:
    lean = {"engine": "lean", "engine_reason": "no CUDA graphs, its weights are quantized"}
    on_card = ran_on(lean, GRAPHS, device="cuda")
    assert "engine_fallback" in {caveat.code for caveat in on_card.caveats}
    on_cpu = ran_on(lean, GRAPHS, device="cpu", unused_card="there is a card (X), but")
    said = {caveat.code: caveat.values for caveat in on_cpu.caveats}
    assert said["other_card"] == {"unused": "there is a card (X), but"}
    assert "engine_fallback" not in said


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CUDA card with 24 GB, as far as loading asks it anything."""
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 24e9)
    monkeypatch.setattr(loading, "check_dtype", lambda *_: None)
    return CUDA


@pytest.mark.parametrize("weights", ["pretrained", "dummy"])
def test_a_model_that_does_not_fit_the_card_is_refused_before_it_is_loaded(
    weights: str, small_card: torch.device, tmp_path: Path
) -> None:
    conf = compose("sweep", ["model=qwen3_32b"]).model
    conf.weights = weights
    if weights == "pretrained":  # the config.json of a checkpoint that nobody needs to download
        config = config_of(conf.architecture)
        config.dtype = torch.bfloat16
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(tmp_path)
        conf.id = str(tmp_path)
    with pytest.raises(UserError) as refused:
        load(conf, small_card)
    (line,) = str(refused.value).splitlines()
    assert line.startswith("model=qwen3_32b: 65.5 GB of memory needed (65.5 GB for model=qwen3_32b")
    assert "24 GB free on cuda" in line


def test_with_accelerate_weights_go_straight_to_the_card(
    small_card: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, asked = qwen3(), []

    def from_pretrained(*_: Any, **options: Any) -> Any:
        asked.append(options.get("device_map"))
        raise ImportError("no card here")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    conf = compose("sweep", ["model=hf", f"model.id={save(network, tmp_path)}"]).model
    for installed, device in ((True, small_card), (False, small_card), (True, torch.device("cpu"))):
        monkeypatch.setattr(loading, "is_accelerate_available", lambda there=installed: there)
        with pytest.raises(UserError, match="no card here"):
            load(conf, device)
    assert asked == [{"": small_card}, None, None]
