"""The cloud app, as far as it goes without a cloud: help, no token, the work itself run here."""

import functools
import inspect
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import pytest
from modal import App, FunctionCall, exception
from modal._utils.async_utils import synchronizer
from modal.cli.import_refs import _get_runnable_app, import_and_filter, parse_import_ref
from modal.exception import (
    InternalError,
    NotFoundError,
    RemoteError,
    ServiceError,
)
from modal.types import AppState
from packaging.requirements import Requirement

import modal_app
from harness import reporting
from harness.cli import compose
from harness.cloud import remote
from harness.cloud.jobs import GPUS, Job, card_named, container_memory_mib, plan_jobs
from harness.commands import report
from harness.prompts import load as load_prompts
from harness.records import UserError
from harness.storage import RunFolder, load, load_traces

ROOT = Path(__file__).resolve().parents[1]
ONE_AT_A_TIME = threading.Lock()
URL = "http://127.0.0.1:8000"
SMALL = ("model=tiny", "new_tokens=6", "prompts.limit=1", "k=[1,2]", "threads=1")
SWEEP = (*SMALL, "draft=tiny_good", "temperature=[0]", "until=all")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .* function is executing locally"),
    pytest.mark.usefixtures("few_samples"),
]


def modal(tmp_path: Path, entrypoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`modal run modal_app.py::... ...` as someone without an account would type it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MODAL_")}
    return subprocess.run(
        [sys.executable, "-m", "modal", "run", f"modal_app.py::{entrypoint}", *words],
        cwd=ROOT,
        env={**env, "MODAL_CONFIG_PATH": str(tmp_path / "no-such.toml"), "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def typed(entrypoint: Any, **parameters: Any) -> int:
    """Runs an entrypoint as the command line would, and returns its exit status."""
    with pytest.raises(SystemExit) as end:
        entrypoint.info.raw_f(**parameters)
    assert isinstance(end.value.code, int)
    return end.value.code


@functools.cache
def sweep_job(*overrides: str) -> Job:
    (job,), _ = plan_jobs("sweep", [*SWEEP, *overrides], ["L4"], resume="launch")
    return job


class Call:
    """Stands for a call that was spawned: its work is done once, when its result is asked for."""

    made: ClassVar[dict[str, "Call"]] = {}
    running: ClassVar[str | None] = None  # the id that the work of a call is told

    def __init__(
        self, work: Callable[[], Any], polls: int = 0, answer: type[Exception] = TimeoutError
    ) -> None:
        self.work, self.polls, self.answer = functools.cache(work), polls, answer
        self.object_id = f"fc-{len(self.made)}"
        self.made[self.object_id] = self

    def get(self, timeout: float | None = None) -> Any:
        if timeout is not None and self.polls:
            self.polls -= 1
            raise self.answer
        return self.work()


class Card:
    """Stands for the remote function: cards that are there run the work here, others fail."""

    def __init__(
        self,
        absent: str | None = None,
        polls: int = 0,
        running: int | None = 0,
        answer: type[Exception] = TimeoutError,
    ) -> None:
        self.absent, self.polls, self.running, self.answer = absent, polls, running, answer
        self.done: list[Job] = []

    def with_options(self, *, gpu: str, cpu: float, memory: int) -> "Card":
        assert gpu.partition(":")[0] in GPUS
        assert cpu >= 4
        assert memory >= 1024
        return self

    def get_current_stats(self) -> SimpleNamespace:
        if self.running is None:
            raise OSError("no route to host")
        return SimpleNamespace(num_running_inputs=self.running)

    def spawn(self, job: Job, root: str) -> Call:
        return Call(lambda: self.run(job, root), self.polls, self.answer)

    def run(self, job: Job, root: str) -> remote.Delivery:
        if job.gpu == self.absent:
            raise RuntimeError("no such card\nwas free")
        with ONE_AT_A_TIME:  # containers share no process, and so no Hydra
            self.done.append(job)
            return remote.run_job(job, root)


class Cloud:
    """Stands for the function that has jobs done: runs it here, with another volume."""

    def __init__(self, root: Path) -> None:
        self.function, self.root = modal_app.in_cloud, root
        self.spawned = 0

    def spawn(self, jobs: list[Job]) -> Call:
        self.spawned += 1

        def work() -> Any:
            Call.running = call.object_id
            return self.function.local(jobs, str(self.root))

        call = Call(work)
        return call


class Results(dict[str, bytes]):
    """Stands for the volume's files that are read and written from outside a container."""

    def read_file(self, path: str) -> Iterator[bytes]:
        if path not in self:
            raise FileNotFoundError(path)
        yield self[path]

    @contextmanager
    def batch_upload(self, force: bool = False) -> Iterator["Results"]:
        assert force
        yield self

    def put_file(self, file: BinaryIO, path: str) -> None:
        self[path] = file.read()


@pytest.fixture(autouse=True)
def stored(monkeypatch: pytest.MonkeyPatch) -> Results:
    """The results volume's files; no test reaches Modal, or waits for it."""
    results = Results()
    Call.made.clear()
    monkeypatch.setattr("modal.current_function_call_id", lambda: Call.running)
    monkeypatch.setattr(FunctionCall, "from_id", lambda number: Call.made[number])
    monkeypatch.setattr(modal_app, "runs", results)
    monkeypatch.setattr(modal_app, "SILENCE_S", 0.0)
    return results


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Card:
    """A cloud that lacks the H100; runs are stored in tmp_path / "volume"."""
    card = Card(absent="H100")
    monkeypatch.setattr(modal_app, "on_gpu", card)
    monkeypatch.setattr(modal_app, "in_cloud", Cloud(tmp_path / "volume"))
    return card


def test_help_works_without_a_token_and_names_the_parameters(tmp_path: Path) -> None:
    ended = modal(tmp_path, "server", "--help")
    assert ended.returncode == 0
    for word in ("--model", "--draft ", "--gpu ", "--overrides", "--resume", "--engine"):
        assert word in ended.stdout
    for entrypoint in (modal_app.temperature_demo, modal_app.sweep, modal_app.audition):
        several = entrypoint is modal_app.audition
        names = ("gpus", "drafts") if several else ("gpu", "draft")
        function: Any = entrypoint.info.raw_f
        parameters = {*inspect.signature(function).parameters}
        assert {"model", *names, "overrides", "resume"} <= parameters
        assert "engine" not in parameters


def test_without_a_token_one_line_says_what_to_run(tmp_path: Path) -> None:
    ended = modal(tmp_path, "sweep")
    assert ended.returncode != 0
    (line,) = (ended.stdout + ended.stderr).strip().splitlines()
    assert "Token missing" in line
    assert "modal token new" in line


def mounted(image: Any) -> dict[str, Path]:
    """The files that an image takes along: where they are in a container, and where here."""
    files: dict[str, Path] = {}
    for layer in layers_of(image):
        for entry in getattr(layer, "entries", ()):
            for source, target in entry.get_files_to_upload():
                files[Path(target).as_posix()] = Path(source)
    return files


def test_the_image_mounts_every_file_that_a_command_may_read() -> None:
    files = mounted(modal_app.image)
    assert not any("__pycache__" in name for name in files)
    sources = {path.resolve() for path in files.values()}
    for path in (*(ROOT / "harness").rglob("*"), *(ROOT / "conf").rglob("*")):
        assert path.is_dir() or "__pycache__" in path.parts or path in sources


@pytest.mark.parametrize(
    ("engine", "function"),
    [("own", "on_gpu"), ("vllm", "on_engine"), ("sglang", "on_engine")],
)
def test_a_server_runs_in_its_engines_image_and_its_share_of_the_card_is_decided_there(
    engine: str,
    function: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Job] = []

    class Noted(Card):
        def run(self, job: Job, root: str) -> remote.Delivery:
            asked.append(job)
            raise RuntimeError(f"nothing in {Path(root).name}")

    for name in ("on_gpu", "on_engine"):
        monkeypatch.setattr(modal_app, name, Noted() if name == function else None)
    monkeypatch.setattr(modal_app, "in_cloud", Cloud(tmp_path))
    flags = "" if engine == "own" else "'flags=[--enforce-eager]'"
    assert typed(modal_app.server, engine=engine, model="qwen3_4b", overrides=flags) == 1
    assert "failed: RuntimeError: nothing in " in capsys.readouterr().out
    (job,) = asked
    given = dict(word.split("=", 1) for word in job.overrides)
    assert (job.command, job.engine, given["engine"]) == ("server", engine, engine)
    assert given.get("flags") == (None if engine == "own" else "[--enforce-eager]")


@pytest.mark.parametrize("word", ["engine=vllm", "++engine=sglang"])
def test_an_engine_among_the_overrides_of_a_server_is_refused(
    word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modal_app, "in_cloud", None)
    assert typed(modal_app.server, engine="own", overrides=f"k=[1] {word}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "give --engine" in line


@dataclass(frozen=True)
class Registered:
    """What Modal creates, and so builds and mounts, before it calls an entrypoint."""

    options: dict[str, dict[str, Any]]

    @property
    def images(self) -> dict[str, str]:
        """The commands that build each function's image."""
        return {name: commands(options["image"]) for name, options in self.options.items()}


def registered(monkeypatch: pytest.MonkeyPatch, *words: str) -> Registered:
    """The functions of the app that `modal run WORDS` loads, by Modal's own loading."""
    options: dict[str, dict[str, Any]] = {}
    function = App.function

    def noted(self: App, **given: Any) -> Any:
        register = function(self, **given)

        def register_and_note(raw: Any) -> Any:
            options[raw.__name__] = given
            return register(raw)

        return register_and_note

    with monkeypatch.context() as patch:
        patch.setattr(App, "function", noted)
        patch.setattr(sys, "argv", ["modal", "run", *words])
        patch.setattr(sys, "path", [*sys.path])
        patch.setitem(sys.modules, "modal_app", modal_app)  # put back afterwards
        patch.chdir(ROOT)
        reference = next(word for word in words if "::" in word)
        runnable, _, _ = import_and_filter(parse_import_ref(reference), base_cmd="modal run")
    assert runnable is not None, words
    app: Any = synchronizer._translate_in(_get_runnable_app(runnable))
    assert set(app._local_state.functions) == set(options)
    return Registered(options)


def layers_of(image: Any) -> Iterator[Any]:
    """An image's layers and the files that it takes along."""
    waiting: list[Any] = [synchronizer._translate_in(image)]
    while waiting:
        layer = waiting.pop()
        yield layer
        if not hasattr(layer, "entries"):
            waiting += layer._deps() if layer._deps else []


def commands(image: Any) -> str:
    """The commands that build an image, as Modal sends them."""
    lines: list[str] = []
    for layer in layers_of(image):
        make = inspect.getclosurevars(layer._load).nonlocals.get("dockerfile_function")
        lines += make("2025.06").commands if make else []
    return "\n".join(lines)


ENTRYPOINTS = (
    *("profile", "sweep", "snapshot", "audition", "acceptance_demo", "temperature_demo", "smoke"),
    "server --engine own",
)


@pytest.mark.parametrize("line", ENTRYPOINTS)
def test_an_entrypoint_without_an_engine_registers_no_engines_image(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = registered(monkeypatch, *f"modal_app.py::{line}".split()).images
    assert set(images) == {"on_gpu", "in_cloud"}
    assert images["on_gpu"] == images["in_cloud"]
    assert "pip install" in images["on_gpu"]
    assert "/opt/engine" not in images["on_gpu"]


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("modal_app.py::server", "vllm==0.33.0"),
        ("--detach modal_app.py::app.server --gpu H100", "vllm==0.33.0"),
        ("modal_app.py::server --gpu L4 --engine sglang", "sglang==0.5.23"),
        ("modal_app.py::server --engine=sglang", "sglang==0.5.23"),
    ],
)
def test_server_registers_the_image_of_its_engine_alone(
    line: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = registered(monkeypatch, *line.split())
    assert set(found.images) == {"on_gpu", "in_cloud", "on_engine"}
    assert re.findall(r"/opt/engine/bin/pip install (.*)", found.images["on_engine"]) == [engine]
    files = mounted(found.options["on_gpu"]["image"])
    assert "/root/benchmarks/gpu.py" in files
    assert mounted(found.options["on_engine"]["image"]) == files


def test_a_container_finds_its_function_whatever_was_typed_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("modal.is_local", lambda: False)
    found = registered(monkeypatch, "modal_app.py::sweep")
    assert {"on_gpu", "in_cloud", "on_engine"} == set(found.options)


def test_containers_are_used_once_and_the_one_that_coordinates_is_not_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = registered(monkeypatch, "modal_app.py::server").options
    for name in ("on_gpu", "on_engine"):
        assert options[name]["single_use_containers"]
        assert options[name]["retries"].max_retries == 2
    assert options["in_cloud"]["nonpreemptible"]


def test_images_have_the_transformers_of_pyproject_and_keep_what_engines_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["rented"]]
    wanted = [word for word in map(Requirement, listed) if word.name == "transformers"]
    (pin,) = [str(word) for word in wanted if str(word.specifier).startswith("==")]
    version = pin.partition("==")[2]
    assert all(version in word.specifier for word in wanted)
    for image in registered(monkeypatch, "modal_app.py::server").images.values():
        assert pin in image
        (cache,) = re.findall(r"VLLM_CACHE_ROOT=(\S+)", image)
        assert cache.startswith(f"{modal_app.COMPILED}/")
    of_engine = registered(monkeypatch, "modal_app.py::server").images["on_engine"]
    assert re.search(r"apt-get install .*\bninja-build\b", of_engine)
    assert f"FLASHINFER_WORKSPACE_BASE={modal_app.COMPILED}/" in of_engine


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume with the run of `sweep_job`, which is complete; copied by each test."""
    volume = tmp_path_factory.mktemp("finished")
    modal_app.on_gpu.local(sweep_job(), str(volume))
    return volume


def coordinated(job: Job, root: Path) -> remote.Delivery:
    """What the coordinator gives of a launch with one job."""
    deliveries = modal_app.in_cloud.local([job], str(root))
    assert deliveries is not None
    (delivery,) = deliveries
    return delivery


def copied(finished: Path, volume: Path) -> tuple[Job, Path]:
    """The job of a finished sweep, and its run on another volume."""
    job = sweep_job()
    shutil.copytree(finished, volume, dirs_exist_ok=True)
    folder = remote.stored_run(job.home(volume))
    assert folder is not None
    return job, folder


def test_resume_waits_for_a_launch_that_runs_and_starts_no_second_writer(
    cloud: Card,
    stored: Results,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = " ".join([*SWEEP[1:], f"results_root={tmp_path / 'results'}"])
    assert typed(modal_app.sweep, model="tiny", gpu="L4", overrides=overrides) == 0
    launch = capsys.readouterr().out.split()[1]
    file = f"{launch}/call.json"
    coordinator: Any = modal_app.in_cloud
    assert json.loads(stored[file])["call"] in Call.made
    spawned_before = coordinator.spawned

    def end() -> None:
        assert coordinator.spawned == spawned_before, "nothing is started while it runs"

    detached = Call(end, polls=3)  # as it is for who comes in the middle
    stored[file] = json.dumps({"call": detached.object_id, "app": None}).encode()
    words = {"model": "tiny", "gpu": "L4", "overrides": overrides}
    assert typed(modal_app.sweep, **words, resume=launch) == 0
    out = capsys.readouterr().out
    assert out.count(f"{launch}: still running, waiting for it; logs: modal app logs ") == 3
    assert detached.polls == 0
    assert coordinator.spawned == spawned_before + 1
    assert len(cloud.done) == 1, "what is complete takes no card"
    assert "run: " in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("answer", "state", "starts"),
    [
        (RemoteError("stopped"), "stopped", True),
        (NotFoundError("no such call"), "stopped", True),
        (TimeoutError(), "stopped", True),
        (TimeoutError(), None, True),
        (TimeoutError(), "detached", False),
        (ServiceError("unavailable"), "detached", False),
    ],
)
def test_a_call_is_replaced_only_where_it_is_known_to_have_ended(
    answer: Exception,
    state: str | None,
    starts: bool,
    stored: Results,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Started(Exception):
        """A second call was made."""

    class Coordinator(Cloud):
        def spawn(self, jobs: list[Job]) -> Call:
            raise Started(jobs)

    class Earlier(Call):
        def get(self, timeout: float | None = None) -> Any:
            if timeout:
                raise ServiceError("asked again")  # it was waited for
            raise answer

    def lookup(app_id: str) -> Any:
        assert app_id == "ap-1"
        if state is None:
            raise NotFoundError(app_id)
        lifecycle = SimpleNamespace(state=AppState(state))
        return SimpleNamespace(info=lambda: SimpleNamespace(lifecycle=lifecycle))

    monkeypatch.setattr(modal_app, "SILENCE_S", 60.0)  # a wait is told by it
    monkeypatch.setattr(modal_app, "in_cloud", Coordinator(tmp_path))
    monkeypatch.setattr(App, "lookup", lookup)
    job = sweep_job()
    content = {"call": Earlier(lambda: None).object_id, "app": "ap-1"}
    stored[f"{job.launch}/call.json"] = json.dumps(content).encode()
    with pytest.raises(Started if starts else ServiceError):
        modal_app._started([job])


def test_a_launch_that_another_call_has_begun_meanwhile_is_waited_for(
    stored: Results,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job, card = sweep_job(), Card(absent="L4")
    other = Call(lambda: None, polls=2)

    class Overtaken(Cloud):
        """The other call's container starts after this one was asked for, and before it starts."""

        def spawn(self, jobs: list[Job]) -> Call:
            if not self.spawned:
                content = {"call": other.object_id, "app": modal_app.app.app_id}
                stored[f"{job.launch}/call.json"] = json.dumps(content).encode()
            return super().spawn(jobs)

    coordinator = Overtaken(tmp_path)
    monkeypatch.setattr(modal_app, "on_gpu", card)
    monkeypatch.setattr(modal_app, "in_cloud", coordinator)
    (delivery,) = modal_app._started([job])
    assert delivery.error == "RuntimeError: no such card was free"
    assert capsys.readouterr().out.count(f"{job.launch}: still running, waiting for it") == 1
    assert coordinator.spawned == 2
    _, second, _ = (name for name in Call.made if Call.made[name] is not other)
    assert json.loads(stored[f"{job.launch}/call.json"])["call"] == second


def test_a_coordinator_that_is_replaced_takes_the_calls_that_run(
    stored: Results,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    card, job = Card(), sweep_job()
    monkeypatch.setattr(modal_app, "on_gpu", card)
    running = Call(lambda: remote.Delivery(job, 1, error="of the first call"), polls=2)
    content = {"call": running.object_id, "app": modal_app.app.app_id}
    stored[f"{job.launch}/{job.name}/call.json"] = json.dumps(content).encode()
    delivery = coordinated(job, tmp_path)
    assert delivery.error == "of the first call"
    assert list(Call.made.values()) == [running], "no other call was spawned"
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "sweep-l4: still running or queued, waiting (0 min)"


@pytest.mark.parametrize(
    ("card", "line", "times"),
    [
        ({"answer": ServiceError}, "Modal was not reached, asking again", 2),
        ({"answer": InternalError}, "Modal was not reached, asking again", 2),
        ({"answer": exception.ConnectionError}, "Modal was not reached, asking again", 2),
        ({"running": 0}, "no container with L4 so far", 2),
        ({"running": 1}, "no container with L4 so far", 0),
        ({"running": None}, "no container with L4 so far", 0),  # also where nobody can say
    ],
)
def test_a_job_is_waited_for_and_what_it_waits_for_is_said(
    card: dict[str, Any],
    line: str,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(modal_app, "on_gpu", Card(absent="L4", polls=2, **card))
    delivery = coordinated(sweep_job(), tmp_path)
    assert delivery.error == "RuntimeError: no such card was free", "of the job itself"
    assert capsys.readouterr().out.count(f"sweep-l4: {line}") == times


@pytest.mark.parametrize("error", [TimeoutError, ServiceError])
def test_a_timeout_inside_a_job_is_not_taken_for_a_job_that_still_runs(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: Any) -> None:
        raise error("the hub did not answer")

    monkeypatch.setattr(remote, "run_command", slow)
    with pytest.raises(RuntimeError, match="the hub did not answer"):
        modal_app.on_gpu.local(sweep_job(), str(tmp_path))


def test_a_container_with_another_card_begins_a_new_run_and_leaves_the_first_as_it_is(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, first = copied(finished, tmp_path)
    stored = "".join((first / "trials.jsonl").read_text().splitlines(keepends=True)[:2])
    (first / "trials.jsonl").write_text(stored)
    manifest = load(first).manifest
    environment = {**manifest.environment.entries, "device_name": "NVIDIA A10"}
    RunFolder(first, manifest).note(environment=environment, status="running")
    again = modal_app.on_gpu.local(job, str(tmp_path))
    assert (again.status, again.error) == (0, None)
    assert again.folder is not None
    assert Path(again.folder).parent == first.parent
    assert again.folder != str(first)
    assert (first / "trials.jsonl").read_text() == stored
    assert f"{first} was begun on another card" in capsys.readouterr().out
    assert load(again.folder).manifest.environment.device_name != "NVIDIA A10"


@pytest.mark.parametrize(
    ("overrides", "gpu", "says"),
    [
        ("model.device_map=auto", "H100:2", None),
        ("model=qwen3_8b model.device_map=auto", "A10G", None),
        ("model.device_map=auto", "L40S", "66.8 GB of memory needed"),
        ("model.device_map=auto", "A10G:2", "66.8 GB of memory needed"),
        ("", "H100:2", "only one card would be used; model.device_map=auto spreads the model"),
        ("", "H100:0", "after the colon stands how many, 1 to 8"),
        (
            "model.device_map=auto draft=qwen3_14b new_tokens=8",
            "A10G:8",
            "and 8 cards have 24 GB each (29.5 GB must be on one; ",
        ),
    ],
)
def test_memory_of_several_cards_is_that_of_all_for_what_is_spread_over_them(
    overrides: str, gpu: str, says: str | None
) -> None:
    words = ["model=qwen3_32b", "draft=qwen3_0_6b", *overrides.split()]
    if says is not None:
        with pytest.raises(UserError, match=re.escape(says)):
            plan_jobs("sweep", words, [gpu])
        return
    (job,), _ = plan_jobs("sweep", words, [gpu])
    count = int(gpu.partition(":")[2] or 1)
    assert (job.gpu, job.price_per_hour_usd) == (gpu, count * job.card.price_per_hour_usd)


def commands_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Programs that print their own name, before all others of that name."""
    for name in names:
        program = folder / name
        program.write_text(f"#!/bin/sh\necho {name} stands here\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def smoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], Path]:
    """Exit status of a smoke run, what it printed, and the folder that came back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)  # results/ is made there
        status = typed(modal_app.smoke, gpu="A10G")
    lines = capsys.readouterr().out.splitlines()
    name, _, folder = lines[-1].partition(": ")
    assert name == "output"
    return status, lines, tmp_path / folder


@pytest.mark.usefixtures("cloud")
def test_a_smoke_run_stops_at_the_first_step_that_fails_and_brings_back_what_was_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands_on_path(tmp_path, monkeypatch, "nvidia-smi", "gcc")
    status, lines, folder = smoked(tmp_path, capsys)
    assert status == 1
    (failed,) = [line for line in lines if line.startswith("smoke run: FAIL: ")]
    assert failed.endswith("torch sees no CUDA device")
    output = (folder / "output.txt").read_text()
    assert output.splitlines()[0] == "nvidia-smi stands here"
    assert "transformers" in output.splitlines()[1]
    assert "gcc" not in output
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    status, lines, _ = smoked(tmp_path, capsys)
    assert status == 1
    assert any("FAIL: nvidia-smi ended with status 127" in line for line in lines)


# Stands for the benchmark, whose own test runs it with the words of this step
PASSES = "import sys; open(sys.argv[-1] + '/gpu.json', 'w').write(sys.argv[-3]); print('passed')"


@pytest.mark.usefixtures("cloud")
def test_a_smoke_run_that_passes_brings_back_the_benchmarks_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands_on_path(tmp_path, monkeypatch, "nvidia-smi", "gcc")
    python, *module, targets, model, out, folder = remote.SMOKE_STEPS[-1]
    assert module == ["-m", "benchmarks.gpu"]
    benchmark = (python, "-c", PASSES, targets, model, out, folder)
    no_card = ("nvidia-smi",), ("gcc", "--version"), benchmark
    monkeypatch.setattr(remote, "SMOKE_STEPS", no_card)
    status, lines, folder = smoked(tmp_path, capsys)
    assert (status, lines[-2]) == (0, "smoke run: PASS")
    assert folder.name.endswith("_smoke_a10g")
    assert (folder / "gpu.json").read_text() == "qwen3_4b"
    assert (folder / "output.txt").read_text().splitlines()[-1] == "passed"


def test_a_card_that_was_upgraded_is_named(tmp_path: Path) -> None:
    delivery = remote.Delivery(sweep_job(), 0, device="NVIDIA H200", upgraded=True)
    lines = delivery.lines(tmp_path)
    assert "L4 was asked for and NVIDIA H200 ran" in lines[1]
    assert lines[-1] == f"run: {tmp_path}"


def test_a_run_that_cannot_be_rendered_is_brought_back_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise FileNotFoundError("no such\ndefinitions")

    with monkeypatch.context() as patch:
        patch.setattr(reporting, "render", broken)
        delivery = modal_app.on_gpu.local(sweep_job(), str(tmp_path / "volume"))
    assert delivery.status == 1
    assert delivery.error == "FileNotFoundError: no such definitions"
    folder = delivery.unpack(tmp_path / "results")
    assert folder is not None
    lines = "\n".join(delivery.lines(folder))
    assert "failed: FileNotFoundError: no such definitions" in lines
    assert f"python -m harness.report run={folder}" in lines
    assert delivery.failure is not None
    report.run(compose("report", [f"run={folder}"]))
    assert (folder / "report.html").is_file()


def test_a_job_that_is_given_up_brings_back_what_it_had_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sweep_job()
    monkeypatch.setattr(modal_app, "on_gpu", Card(absent="L4"))
    (nothing,) = modal_app._run_each([job], str(tmp_path))
    assert (nothing.archive, nothing.status) == (None, 1)
    run = RunFolder.create(job.home(tmp_path), "sweep", ["tiny"], {"traces_from": None})
    (delivery,) = modal_app._run_each([job], str(tmp_path))
    assert delivery.error == "RuntimeError: no such card was free"
    unpacked = delivery.unpack(tmp_path / "results")
    assert unpacked is not None
    assert unpacked.name.startswith(run.path.name)


def test_a_container_that_takes_over_goes_on_with_what_the_first_one_stored(
    finished: Path, tmp_path: Path
) -> None:
    (job, first), volume = copied(finished, tmp_path), str(tmp_path)
    trials = first / "trials.jsonl"
    stored = trials.read_text().splitlines(keepends=True)
    trials.write_text("".join(stored[:2]) + stored[2][:9])
    folder = RunFolder(trials.parent, load(trials.parent).manifest)
    folder.note(status="running")
    again = modal_app.on_gpu.local(job, volume)
    assert (again.folder, again.status) == (str(first), 0)
    lines = trials.read_text().splitlines(keepends=True)
    assert lines[:2] == stored[:2]
    assert len(lines) == len(stored)
    (delivery,) = remote.fan_out([job], volume, lambda _: pytest.fail("complete: nothing to rent"))
    assert delivery.folder == str(first)


def test_what_the_user_can_fix_is_not_tried_again(tmp_path: Path) -> None:
    delivery = modal_app.on_gpu.local(sweep_job("new_tokens=100000"), str(tmp_path))
    assert delivery.status == 2
    assert (delivery.error or "").startswith("new_tokens=100000")
    assert delivery.unpack(tmp_path / "results") is None


@pytest.mark.parametrize("weights", ["pretrained", "dummy"])
def test_a_model_that_the_card_cannot_hold_is_refused_before_anything_is_rented(
    weights: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modal_app, "in_cloud", Cloud(Path()))
    overrides = f"model.weights={weights} draft.weights={weights} new_tokens=48"
    assert typed(modal_app.sweep, model="qwen3_32b", gpu="A10G", overrides=overrides) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --gpu A10G: 66.7 GB of memory needed (65.5 GB for model=qwen3")
    assert (
        "and the card has 24 GB; use --gpu A100-80GB or H100 or H200 or B200, or a smaller" in line
    )
    assert typed(modal_app.audition, model="qwen3_32b", gpus="H200,L40S") == 2
    assert "--gpu L40S: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "overrides", "gpus", "says"),
    [
        ("profile", ["model=no_such_model"], ["L4"], "no_such_model"),
        ("sweep", ["k=[-1]"], ["L4"], "k: -1"),
        ("snapshot", ["dry_run=true"], ["L4"], "dry_run"),
        ("audition", ["traces_from=results/a"], ["L4"], "traces_from"),
        ("sweep", ["model=hf", "model.id=/tmp"], ["L4"], "give a hub id"),
        ("audition", ["drafts=[mine@/tmp]"], ["L4"], "give a hub id"),
        ("audition", ["drafts=[no_such_draft]"], ["L4"], "no draft named 'no_such_draft'"),
        ("sweep", ["prompts.files=[absent.jsonl]"], ["L4"], "absent.jsonl"),
        ("sweep", ["prompts.hub=a/b", "prompts.sets=[]"], ["L4"], "prompts.hub=a/b: not on"),
        ("sweep", ["model=qwen3_235b_a22b"], ["B200"], "no card has as much; use a smaller model"),
        ("audition", [], ["H100", "H100!"], "a card is there twice"),
        ("audition", [], [], "--gpus: name at least one"),
        ("sweep", [], ["RTX9000"], "--gpu RTX9000: no such card; there are L4, A10, A10G"),
        ("server", ["engine=llamacpp"], ["L4"], "engine=llamacpp: not on a rented machine; there"),
        (
            "server",
            ["engine=vllm", "draft=medusa", "draft.id=a/b"],
            ["L4"],
            "engine=vllm does not draft with Medusa heads here",
        ),
        ("server", ["engine=vllm", "k=1", f"url=[{URL},{URL}]"], ["L4"], "url: for local runs"),
        (
            "server",
            ["engine=vllm", "model=qwen3_8b", "draft=qwen3_0_6b"],
            ["A10G"],
            "--gpu A10G: the server and the models that score its texts need 3",
        ),
    ],
)
def test_a_typing_error_is_refused_before_anything_is_rented(
    command: str, overrides: list[str], gpus: list[str], says: str
) -> None:
    with pytest.raises(UserError) as refused:
        plan_jobs(command, overrides, gpus)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_launch_to_resume_is_a_name_and_no_path() -> None:
    with pytest.raises(UserError, match="give the launch's name"):
        plan_jobs("sweep", [], ["L4"], resume="../elsewhere")


def test_every_card_has_a_price_and_a_larger_model_a_larger_container() -> None:
    for name in GPUS:
        known_name, card = card_named(f" {name.lower()}")
        assert known_name == name
        assert card.price_per_hour_usd > 0
    small, large, huge = (
        container_memory_mib([compose("sweep", [f"model={name}"]).model])
        for name in ("qwen3_4b", "qwen3_32b", "qwen3_235b_a22b")
    )
    # Less than the 65 GB of its weights: they are not held on the host
    assert small < large < 40 * 1024
    assert huge >= large


def test_prompt_files_go_along_and_those_of_one_name_stay_two_prompt_sets(tmp_path: Path) -> None:
    files = [tmp_path / folder / "mine.jsonl" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(json.dumps({"prompt": f"Count in {file.parent.name}."}))
    prompts_of_mine = [f"prompts.files=[{','.join(map(str, files))}]", "prompts.sets=[]"]
    (job,), config = plan_jobs("sweep", [*SWEEP, *prompts_of_mine], ["L4"])
    wanted = load_prompts(config.prompts)
    for file in files:
        file.unlink()
    delivery = modal_app.on_gpu.local(job, str(tmp_path / "volume"))
    prompts = load(delivery.folder or "").manifest.prompts
    assert prompts == {"a/mine": 1, "b/mine": 1}
    assert {prompt.prompt_set for prompt in wanted} == set(prompts)


def auditioned(tmp_path: Path, gpus: str) -> int:
    overrides = " ".join([*SMALL[1:], "temperature=[0]", f"results_root={tmp_path / 'results'}"])
    return typed(
        modal_app.audition, model="tiny", drafts="tiny_good,ngram", gpus=gpus, overrides=overrides
    )


@pytest.mark.exhaustive
def test_an_audition_over_cards_generates_the_texts_once_and_ranks_the_cards(
    cloud: Card, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert auditioned(tmp_path, "H100,A10G,L4") == 1
    out = capsys.readouterr().out
    assert "audition-h100 on H100: failed: RuntimeError: no such card was free" in out
    assert [job.name for job in cloud.done] == ["audition-a10g", "audition-l4"]
    assert [source_of(job) for job in cloud.done] == [None, "audition-a10g"]
    runs = [load(path) for path in sorted((tmp_path / "results").glob("2*"))]
    combined = next(run for run in runs if run.folder.name.endswith("_cards"))
    parts = [run for run in runs if run is not combined]
    assert len({tuple(sorted((t.prompt, t.tokens) for t in run.trials)) for run in parts}) == 1
    assert all(not run.latency_samples.empty for run in parts)
    assert combined.manifest.status == "failed"
    assert out.splitlines()[-1] == f"run: {combined.folder}"
    assert {trace.draft for trace in load_traces(combined.folder)} == {"tiny_good", "ngram"}
    report_text = (combined.folder / "report.md").read_text()
    assert "## Which card" in report_text
    assert "audition-h100 on H100" in report_text


@pytest.mark.usefixtures("cloud")
def test_where_nothing_comes_back_nothing_is_combined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert auditioned(tmp_path, "H100") == 1
    assert not (tmp_path / "results").exists()
    assert "failed: RuntimeError" in capsys.readouterr().out


def fanned_out(
    root: Path, absent: frozenset[str] = frozenset()
) -> tuple[list[remote.Delivery], list[tuple[str, str | None]]]:
    """`fan_out` over three cards where a job's work is a folder with its configuration.

    Returns:
        What came back, and the name of each job that was rented with its source of texts.
    """
    jobs, _ = plan_jobs("audition", ["drafts=[ngram]"], ["H100", "L4", "A10G"], resume="it")
    rented: list[tuple[str, str | None]] = []

    def one(job: Job) -> remote.Delivery:
        if job.gpu in absent:
            return remote.failed(job, RuntimeError("not to be had"), root)
        rented.append((job.name, source_of(job)))
        keys = dict(word.split("=", 1) for word in job.overrides)
        config = {"traces_from": keys.get("traces_from")}
        run = RunFolder.create(job.home(root), "audition", [job.name], config)
        run.note(status="complete")
        return remote.deliver(job, run.path)

    deliveries = remote.fan_out(jobs, root, lambda several: [one(job) for job in several])
    assert [entry.job.name for entry in deliveries] == [job.name for job in jobs]
    return deliveries, rented


def source_of(job: Job) -> str | None:
    """The job whose texts it takes."""
    keys = dict(word.split("=", 1) for word in job.overrides)
    source = keys.get("traces_from")
    return None if source is None else Path(source).parent.name


def test_the_first_card_that_there_is_generates_the_texts_and_a_launch_goes_on(
    tmp_path: Path,
) -> None:
    deliveries, rented = fanned_out(tmp_path, frozenset({"H100"}))
    assert rented == [("audition-l4", None), ("audition-a10g", "audition-l4")]
    assert [entry.status for entry in deliveries] == [1, 0, 0]
    deliveries, rented = fanned_out(tmp_path)
    assert rented == [("audition-h100", "audition-l4")], "only what is missing"
    assert all(entry.archive for entry in deliveries)
    previous_run = remote.stored_run(deliveries[2].job.home(tmp_path))
    assert previous_run is not None
    RunFolder(previous_run, load(previous_run).manifest).note(status="failed")
    _, rented = fanned_out(tmp_path)
    assert rented == [("audition-a10g", "audition-l4")], "the texts that it began with"
