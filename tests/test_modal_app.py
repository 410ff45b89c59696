"""The cloud app, as far as it goes without a cloud: help, no token, the work itself run here."""

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from modal._utils.async_utils import synchronizer

import modal_app
from harness import reporting
from harness.cli import compose
from harness.cloud import remote
from harness.cloud.jobs import (
    GPUS,
    Job,
    audition_jobs,
    card_of,
    container_memory_mib,
    launch_name,
)
from harness.commands import report, sweep
from harness.commands.cost import all_cards
from harness.prompts import load as load_prompts
from harness.records import UserError
from harness.reporting.cloud import lines
from harness.storage import RunFolder, load, load_traces

ROOT = Path(__file__).resolve().parents[1]
ENTRYPOINTS = ("profile", "sweep", "snapshot", "audition", "acceptance_demo", "temperature_demo")
ONE_AT_A_TIME = threading.Lock()
SMALL = ("model=tiny", "new_tokens=6", "prompts.limit=1", "k=[1,2]", "threads=1")

pytestmark = pytest.mark.filterwarnings("ignore:The .* function is executing locally")


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times are not what these tests are about."""
    monkeypatch.setattr("harness.measurement.step_times.REPETITIONS", 5)


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


def job(door: str, gpu: str = "L4", *words: str, launch: str = "launch") -> Job:
    name, card = modal_app.card_named(gpu)
    overrides = (*SMALL, *(words or ("draft=tiny_good",)))
    return Job(launch, f"{door}-{card.name}", door, name, card, overrides)


class Container:
    """Stands for the remote function: cards that are there run the work here, others fail."""

    def __init__(self, absent: str | None = None, gpu: str = "") -> None:
        self.absent, self.gpu = absent, gpu
        self.done: list[Job] = []

    def with_options(self, *, gpu: str, memory: int) -> "Container":
        assert memory >= 1024
        card = Container(self.absent, gpu)
        card.done = self.done
        return card

    def starmap(self, inputs: Iterable[tuple[Job, str]], **_: Any) -> Iterator[Any]:
        for entry, root in inputs:
            assert entry.gpu == self.gpu
            if entry.gpu == self.absent:
                yield RuntimeError("no such card\nwas free")
                continue
            with ONE_AT_A_TIME:  # containers share no process, and so no Hydra
                self.done.append(entry)
                yield remote.carry_out(entry, root, partial(modal_app.do, entry.door))


class Cloud:
    """Stands for the function that has jobs done: runs it here, with another volume."""

    def __init__(self, root: Path) -> None:
        self.function, self.root = modal_app.in_cloud, root

    def remote(self, jobs: list[Job]) -> list[remote.Delivery]:
        return self.function.local(jobs, str(self.root))


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_help_works_without_a_token_and_names_the_parameters(
    entrypoint: str, tmp_path: Path
) -> None:
    ended = modal(tmp_path, entrypoint, "--help")
    assert ended.returncode == 0
    several = entrypoint == "audition"
    gpu, drafts = ("--gpus", "--drafts") if several else ("--gpu ", "--draft ")
    for word in ("--model", drafts, gpu, "--overrides", "--resume"):
        assert word in ended.stdout


def test_without_a_token_one_line_says_what_to_run(tmp_path: Path) -> None:
    ended = modal(tmp_path, "sweep")
    assert ended.returncode != 0
    (line,) = (ended.stdout + ended.stderr).strip().splitlines()
    assert "Token missing" in line
    assert "modal token new" in line


def mounted(image: Any) -> dict[str, Path]:
    """The files that an image takes along: where they are in a container, and where here."""
    files: dict[str, Path] = {}
    layers: list[Any] = [synchronizer._translate_in(image)]
    while layers:
        layer = layers.pop()
        if hasattr(layer, "entries"):
            for entry in layer.entries:
                for source, target in entry.get_files_to_upload():
                    files[Path(target).as_posix()] = Path(source)
        else:
            layers += layer._deps() if layer._deps else []
    return files


def test_the_image_takes_along_no_caches() -> None:
    there = mounted(modal_app.image)
    assert "/root/conf/gpu/a10g.yaml" in there
    assert not any("__pycache__" in name for name in there)


# What a container does, in a process that finds no other harness than the mounted one
IN_CONTAINER = """
import json, sys
from pathlib import Path
here = Path.cwd()
others = [entry for entry in sys.path if not (Path(entry) / "harness").is_dir()]
sys.path[:] = [str(here), *others]
import harness, modal_app
assert Path(harness.__file__).is_relative_to(here)
from harness.commands import execute, stage
from harness.cloud.jobs import Job
from harness.measurement import step_times
step_times.REPETITIONS = 5
small = ("model=tiny", "new_tokens=6", "prompts.limit=1", "k=[1,2]", "threads=1", "temperature=[0]")
done = {}
def noted(door, work):
    try:
        done[door] = work()
    except Exception as error:
        done[door] = f"{type(error).__name__}: {error}"
def rented(door, *words):
    name, card = modal_app.card_named("L4")
    words = [*(word for word in small if door != "profile" or "temperature" not in word), *words]
    job = Job("launch", f"{door}-{card.name}", door, name, card, tuple(words))
    delivery = modal_app.on_gpu.local(job, str(here / "volume"))
    assert delivery.status == 0, delivery.error
    return str(delivery.unpack(here / "results"))
def local(door, *words):
    return str(modal_app.do(door, [*words, f"results_root={here / 'results'}"]).folder)
noted("sweep", lambda: rented("sweep", "draft=tiny_good"))
noted("profile", lambda: rented("profile", "draft=tiny_good"))
noted("snapshot", lambda: rented("snapshot", "draft=tiny_good"))
noted("audition", lambda: rented("audition", "drafts=[tiny_good,ngram]"))
noted("breakeven", lambda: local("breakeven", "draft_ms=22.09", "target_ms=29.92", "k=[1]"))
Path(done["sweep"], "report.html").unlink(missing_ok=True)
noted("report", lambda: local("report", f"run={done['sweep']}"))
Path("done.json").write_text(json.dumps(done))
"""


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each door made of exactly the files that the image mounts: a run folder, or an error."""
    root = tmp_path_factory.mktemp("container")
    for target, source in mounted(modal_app.image).items():
        place = root / Path(target).relative_to("/root")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(source.read_bytes())
    (root / "modal_app.py").write_bytes((ROOT / "modal_app.py").read_bytes())  # Modal's own doing
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_CONTAINER],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads((root / "done.json").read_text())


@pytest.mark.parametrize(
    "door", ["sweep", "profile", "snapshot", "audition", "breakeven", "report"]
)
def test_every_door_runs_to_a_report_from_exactly_the_files_that_the_image_mounts(
    door: str, container: dict[str, str]
) -> None:
    folder = Path(container[door])
    assert folder.is_dir(), container[door]
    page = (folder / "report.html").read_text()
    assert '<dt id="m-' in page
    assert (folder / "report.md").is_file()
    stored = load(folder)
    assert stored.manifest["status"] == "complete"
    if door not in ("breakeven", "report"):
        assert stored.door == door
        assert folder.name.endswith("_l4")
        assert stored.manifest["cloud"]["asked_gpu"] == "L4"
        assert stored.manifest["cloud"]["upgraded"]
        assert "engine: eager forward of the harness" in page


def test_a_card_that_was_upgraded_is_told(tmp_path: Path) -> None:
    receipt = replace(remote.Delivery(job("sweep"), 0).receipt, device="NVIDIA H200", upgraded=True)
    told = lines(receipt, tmp_path)
    assert "L4 was asked for and NVIDIA H200 ran" in told[1]
    assert told[-1] == f"run: {tmp_path}"


def test_a_run_that_cannot_be_rendered_is_brought_back_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> None:
        raise FileNotFoundError("no such\ndefinitions")

    asked = job("sweep", "L4", "draft=tiny_good", "temperature=[0]", "k=[1]")
    with monkeypatch.context() as patch:
        patch.setattr(reporting, "render", broken)
        delivery = modal_app.on_gpu.local(asked, str(tmp_path / "volume"))
    assert delivery.status == 1
    assert delivery.error == "FileNotFoundError: no such definitions"
    folder = delivery.unpack(tmp_path / "results")
    assert folder is not None
    told = "\n".join(lines(delivery.receipt, folder))
    assert "failed: FileNotFoundError: no such definitions" in told
    assert f"python -m harness.report run={folder}" in told
    assert delivery.failure is not None
    assert not (folder / "report.md").exists()
    report.run(compose("report", [f"run={folder}"]))
    assert (folder / "report.html").is_file()


def test_what_cannot_be_derived_is_brought_back_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("in a table")

    monkeypatch.setattr(sweep, "finish_sweep", broken)
    asked = job("sweep", "L4", "draft=tiny_good", "temperature=[0]", "k=[1]")
    delivery = modal_app.on_gpu.local(asked, str(tmp_path / "volume"))
    assert (delivery.status, delivery.error) == (1, "ZeroDivisionError: in a table")
    folder = delivery.unpack(tmp_path / "results")
    assert folder is not None
    assert load(folder).trials


def test_a_job_that_is_given_up_brings_back_what_it_had_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job("sweep")
    monkeypatch.setattr(modal_app, "on_gpu", Container(absent="L4"))
    (nothing,) = modal_app._each([asked], str(tmp_path))
    assert (nothing.archive, nothing.status) == (None, 1)
    run = RunFolder.create(asked.home(tmp_path), "sweep", ["tiny"], {"traces_from": None})
    (delivery,) = modal_app._each([asked], str(tmp_path))
    assert delivery.error == "RuntimeError: no such card was free"
    unpacked = delivery.unpack(tmp_path / "results")
    assert unpacked is not None
    assert unpacked.name.startswith(run.path.name)


@pytest.mark.parametrize("weights", ["pretrained", "dummy"])
def test_a_model_that_the_card_cannot_hold_is_refused_before_anything_is_rented(
    weights: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modal_app, "in_cloud", None)
    overrides = f"model.weights={weights} draft.weights={weights}"
    assert typed(modal_app.sweep, model="qwen3_32b", gpu="A10G", overrides=overrides) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --gpu A10G: 66.7 GB of memory needed (65.5 GB for model=qwen3")
    assert (
        "and the card has 24 GB; use --gpu A100-80GB or H100 or H200 or B200, or a smaller" in line
    )
    assert typed(modal_app.audition, model="qwen3_32b", gpus="H200,L40S") == 2
    assert "--gpu L40S: " in capsys.readouterr().err
    with pytest.raises(UserError, match="no card has as much; use a smaller model"):
        modal_app.checked("sweep", ["model=qwen3_235b_a22b"], dict([modal_app.card_named("B200")]))


def test_a_larger_model_asks_for_a_larger_container() -> None:
    asked = [
        container_memory_mib([compose("sweep", [f"model={name}"]).model])
        for name in ("tiny", "qwen3_4b", "qwen3_32b", "qwen3_235b_a22b")
    ]
    assert asked == sorted(asked)
    assert asked[1] < asked[2]
    # Less than the 65 GB of its weights: they are not held here
    assert 16 * 1024 < asked[2] < 40 * 1024


def test_a_typing_error_is_refused_before_anything_is_rented(tmp_path: Path) -> None:
    for door, words, says in (
        ("profile", ["model=no_such_model"], "no_such_model"),
        ("sweep", ["k=[-1]"], "k: -1"),
        ("snapshot", ["dry_run=true"], "dry_run"),
        ("audition", ["traces_from=results/a"], "traces_from"),
        ("sweep", ["model=hf", f"model.id={tmp_path}"], "give a hub id"),
        ("audition", [f"drafts=[mine@{tmp_path}]"], "give a hub id"),
        ("audition", ["drafts=[no_such_draft]"], "no draft named 'no_such_draft'"),
        ("sweep", ["prompts.files=[absent.jsonl]"], "absent.jsonl"),
    ):
        with pytest.raises(UserError, match=says):
            modal_app.checked(door, words)


def test_an_unknown_card_is_one_line_that_lists_the_cards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert typed(modal_app.sweep, gpu="RTX9000") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --gpu RTX9000: no such card")
    assert all(name in line for name in GPUS)


def test_every_card_has_figures_and_a_price() -> None:
    priced = {card.name: card.price_per_hour_usd for card in all_cards()}
    for name, card in GPUS.items():
        assert card_of(f" {name.lower()}") == (name, card)
        assert priced[card] > 0
    assert modal_app.card_named("a10g")[1].name == "a10g"


def test_one_job_per_card_and_chunk_of_drafts_the_first_cards_first() -> None:
    cards = dict(map(modal_app.card_named, ("A10G", "L4")))
    jobs = audition_jobs("it", cards, ["a", "b", "c"], 2, overrides=["k=[1]"])
    assert [(entry.gpu, entry.name, entry.overrides) for entry in jobs] == [
        ("A10G", "audition-a10g-1", ("k=[1]", "drafts=[a,b]", "gpu=a10g")),
        ("A10G", "audition-a10g-2", ("k=[1]", "drafts=[c]", "gpu=a10g")),
        ("L4", "audition-l4-1", ("k=[1]", "drafts=[a,b]", "gpu=l4")),
        ("L4", "audition-l4-2", ("k=[1]", "drafts=[c]", "gpu=l4")),
    ]
    twice = dict(map(modal_app.card_named, ("H100", "H100!")))
    for given, drafts, chunk, says in (
        (twice, ["a"], 1, "h100 is there twice"),
        ({}, ["a"], 1, "--gpus: name at least one"),
        (cards, [], 1, "--drafts: name at least one"),
        (cards, ["a"], 0, "--chunk 0"),
    ):
        with pytest.raises(UserError, match=says):
            audition_jobs("it", given, drafts, chunk)
    with pytest.raises(UserError, match="give the launch's name"):
        launch_name("sweep", "../elsewhere")


def test_prompt_files_of_one_name_go_along_and_stay_two_prompt_sets(tmp_path: Path) -> None:
    files = [tmp_path / folder / "mine.jsonl" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(json.dumps({"prompt": f"Count in {file.parent.name}."}))
    asked = f"prompts.files=[{','.join(map(str, files))}]"
    config, prompts = modal_app.checked("sweep", [asked, "prompts.sets=[]"])
    seen: list[list[str]] = []

    def work(words: list[str]) -> Any:
        seen.append(words)
        raise UserError("no need to go on")

    there = replace(job("sweep"), prompts=prompts)
    remote.carry_out(there, tmp_path / "volume", work)
    over_there = compose("sweep", [*seen[0], "prompts.sets=[]"]).prompts
    over_there.limit = config.prompts.limit
    assert load_prompts(over_there) == load_prompts(config.prompts)
    assert {prompt.prompt_set for prompt in load_prompts(over_there)} == {"a/mine", "b/mine"}


def test_a_hub_data_set_does_not_go_along() -> None:
    with pytest.raises(UserError, match=r"prompts\.hub=a/b: not on a rented machine"):
        modal_app.checked("sweep", ["prompts.hub=a/b", "prompts.sets=[]"])


def test_a_prompt_file_of_the_users_goes_along(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"id": "one", "turns": ["Count from one to ten."]}\n')
    config, prompts = modal_app.checked("sweep", [f"prompts.files=[{mine}]", "prompts.sets=[]"])
    assert config.prompts.files == [str(mine)]
    there = replace(job("sweep"), prompts=prompts)
    mine.unlink()
    seen: list[list[str]] = []

    def work(words: list[str]) -> Any:
        seen.append(words)
        raise UserError("no need to go on")

    remote.carry_out(there, tmp_path / "volume", work)
    (files,) = compose("sweep", seen[0]).prompts.files
    assert Path(files).read_text().startswith('{"id": "one"')
    assert Path(files).name == "mine.jsonl"


def test_a_container_that_takes_over_goes_on_with_what_the_first_one_stored(
    tmp_path: Path,
) -> None:
    asked, volume = job("sweep", "L4", "draft=tiny_good", "temperature=[0]"), str(tmp_path)
    whole = modal_app.on_gpu.local(asked, volume)
    assert whole.folder is not None
    trials = Path(whole.folder) / "trials.jsonl"
    stored = trials.read_text().splitlines(keepends=True)
    trials.write_text("".join(stored[:2]) + stored[2][:9])
    RunFolder(Path(whole.folder), load(whole.folder).manifest).update_manifest(
        {"status": "running"}
    )
    assert remote.delivered(asked, volume) is None
    again = modal_app.on_gpu.local(asked, volume)
    assert (again.folder, again.status) == (whole.folder, 0)
    lines_now = trials.read_text().splitlines(keepends=True)
    assert lines_now[:2] == stored[:2]
    assert len(lines_now) == len(stored)
    found = remote.delivered(asked, volume)
    assert found is not None
    assert found.folder == whole.folder


def test_what_the_user_can_mend_is_not_tried_again(tmp_path: Path) -> None:
    delivery = modal_app.on_gpu.local(
        job("sweep", "L4", "draft=tiny_good", "new_tokens=100000"), str(tmp_path)
    )
    assert delivery.status == 2
    assert delivery.error is not None
    assert delivery.error.startswith("new_tokens=100000")
    assert delivery.unpack(tmp_path / "results") is None


def test_an_archive_cannot_write_outside_the_results(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"))
    with pytest.raises(tarfile.TarError):
        remote.unpack(buffer.getvalue(), tmp_path / "results", "name")
    assert not (tmp_path / "results" / "name").exists()
    assert not (tmp_path / "escaped").exists()


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Container:
    """A cloud that lacks the H100; runs are stored in tmp_path / "volume"."""
    container = Container(absent="H100")
    monkeypatch.setattr(modal_app, "on_gpu", container)
    monkeypatch.setattr(modal_app, "in_cloud", Cloud(tmp_path / "volume"))
    return container


def auditioned(tmp_path: Path, gpus: str) -> int:
    overrides = " ".join([*SMALL[1:], "temperature=[0]", f"results_root={tmp_path / 'results'}"])
    return typed(
        modal_app.audition,
        model="tiny",
        drafts="tiny_good,ngram",
        gpus=gpus,
        chunk=1,
        overrides=overrides,
    )


def test_an_audition_over_cards_writes_the_texts_once_and_ranks_them_together(
    cloud: Container, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert auditioned(tmp_path, "A10G,H100,L4") == 1
    out = capsys.readouterr().out
    assert "audition-h100-1 on H100: failed: RuntimeError: no such card was free" in out
    assert cloud.done[0].name == "audition-a10g-1"
    others = sorted(entry.name for entry in cloud.done[1:])
    assert others == ["audition-a10g-2", "audition-l4-1", "audition-l4-2"]
    first, *rest = (dict(w.split("=", 1) for w in entry.overrides) for entry in cloud.done)
    assert "traces_from" not in first
    assert {Path(entry["traces_from"]).parent.name for entry in rest} == {"audition-a10g-1"}
    runs = [load(path) for path in sorted((tmp_path / "results").glob("2*"))]
    assert len(runs) == 5
    combined = next(run for run in runs if "cards" in (run.summary or {}))
    parts = [run for run in runs if run is not combined]
    texts = {tuple(sorted((t.prompt, t.tokens) for t in run.trials)) for run in parts}
    assert len(texts) == 1
    assert all(not run.latency_samples.empty for run in parts)
    assert combined.summary is not None
    drafts = {row["draft"] for row in combined.summary["card_drafts"]}
    assert drafts == {"tiny_good", "ngram", None}
    assert len(combined.summary["cards"]) == 2
    assert [entry["where"] for entry in combined.summary["failures"]] == [
        "audition-h100-1 on H100",
        "audition-h100-2 on H100",
    ]
    assert combined.manifest["status"] == "failed"
    assert out.splitlines()[-1] == f"run: {combined.folder}"
    assert {trace.draft for trace in load_traces(combined.folder)} == {"tiny_good", "ngram"}


def fanned_out(
    root: Path, jobs: list[Job], absent: frozenset[str] = frozenset()
) -> tuple[list[remote.Delivery], list[Job]]:
    """`fan_out` where a job's work is a folder with its configuration; returns what was rented."""
    rented: list[Job] = []

    def one(asked: Job) -> remote.Delivery:
        if asked.gpu in absent:
            return remote.failed(asked, RuntimeError("not to be had"), root)
        rented.append(asked)
        keys = dict(word.split("=", 1) for word in asked.overrides)
        config = {"traces_from": keys.get("traces_from")}
        run = RunFolder.create(asked.home(root), "audition", [asked.name], config)
        run.update_manifest({"status": "complete"})
        return remote.deliver(asked, run.path)

    return remote.fan_out(jobs, root, one, lambda several: [one(job) for job in several]), rented


def two_cards() -> list[Job]:
    cards = dict(map(modal_app.card_named, ("H100", "L4")))
    return audition_jobs("it", cards, ["tiny_good", "ngram"], 1)


def source_of(entry: Job) -> str | None:
    keys = dict(word.split("=", 1) for word in entry.overrides)
    found = keys.get("traces_from")
    return None if found is None else Path(found).parent.name


def test_where_the_first_card_is_absent_the_next_one_writes_the_texts(tmp_path: Path) -> None:
    deliveries, rented = fanned_out(tmp_path, two_cards(), frozenset({"H100"}))
    assert [(entry.name, source_of(entry)) for entry in rented] == [
        ("audition-l4-1", None),
        ("audition-l4-2", "audition-l4-1"),
    ]
    assert [entry.job.name for entry in deliveries] == [entry.name for entry in two_cards()]
    assert [entry.status for entry in deliveries] == [1, 1, 0, 0]


def test_a_launch_that_is_resumed_rents_only_what_is_missing(tmp_path: Path) -> None:
    fanned_out(tmp_path, two_cards(), frozenset({"H100"}))
    deliveries, rented = fanned_out(tmp_path, two_cards())
    assert [(entry.name, source_of(entry)) for entry in rented] == [
        ("audition-h100-1", "audition-l4-1"),
        ("audition-h100-2", "audition-l4-1"),
    ]
    assert all(entry.archive for entry in deliveries)


def test_a_job_that_was_begun_keeps_the_texts_it_began_with(tmp_path: Path) -> None:
    fanned_out(tmp_path, two_cards())
    first, *others = two_cards()
    for entry in (first, others[0]):
        begun = remote.stored_run(entry.home(tmp_path))
        assert begun is not None
        RunFolder(begun, load(begun).manifest).update_manifest({"status": "failed"})
    _, rented = fanned_out(tmp_path, two_cards())
    assert [(entry.name, source_of(entry)) for entry in rented] == [
        ("audition-h100-1", None),
        ("audition-h100-2", "audition-h100-1"),
    ]


@pytest.mark.usefixtures("cloud")
def test_where_nothing_comes_back_nothing_is_combined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert auditioned(tmp_path, "H100") == 1
    assert not (tmp_path / "results").exists()
    assert "failed: RuntimeError" in capsys.readouterr().out
