"""The doors on rented GPUs; thin, because all the work is in the package.

    modal run modal_app.py::profile --model qwen3_4b --draft qwen3_0_6b --gpu A10G
    modal run modal_app.py::sweep --model qwen3_4b --draft qwen3_0_6b --overrides "k=[1,2,4]"
    modal run modal_app.py::snapshot --gpu L4
    modal run modal_app.py::audition --model qwen3_4b --drafts qwen3_0_6b,ngram --gpus A10G,L4,H100
    modal run modal_app.py::acceptance_demo
    modal run modal_app.py::temperature_demo

The configuration is composed and checked here first, so that a typing error rents nothing. A small
container without a GPU then has the jobs done, so the machine that typed the command is not needed
on the way: `modal run --detach ...` goes on without it, and the same command with `--resume LAUNCH`
brings the results home later. Models are downloaded once, into a volume; runs are written into
another, where a container that takes over from one that was stopped finds them and goes on. The run
folders are copied into the local results/. `HF_TOKEN`, where it is set here, goes along for gated
models. docs/cloud.md says the rest.
"""

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import modal

if TYPE_CHECKING:
    from harness.cloud.jobs import Job
    from harness.cloud.remote import Delivery
    from harness.commands.outcome import Outcome
    from harness.config import GpuConf

HERE = Path(__file__).resolve().parent
HUB_CACHE, COMPILED, RUNS = "/cache/huggingface", "/cache/compiled", "/runs"
CPUS = 4.0
TIMEOUT_S = 4 * 60 * 60
WAIT_S = 24 * 60 * 60

# Folders rather than Python sources: conf/, the prompts and the embedded models must come along.
image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("gcc", "g++")  # Triton and inductor compile their launchers
    # accelerate: with it transformers loads weights onto the card, and casts them there
    .pip_install_from_pyproject(str(HERE / "pyproject.toml"), optional_dependencies=["accelerate"])
    .env(
        {
            "HF_HOME": HUB_CACHE,
            "TORCHINDUCTOR_CACHE_DIR": f"{COMPILED}/inductor",
            "TRITON_CACHE_DIR": f"{COMPILED}/triton",
            # Else one compiler per core of the machine, of which a container has a few
            "TORCHINDUCTOR_COMPILE_THREADS": str(round(CPUS)),
        }
    )
    .add_local_dir(str(HERE / "harness"), "/root/harness", ignore=["**/__pycache__"])
    .add_local_dir(str(HERE / "conf"), "/root/conf")
    # For the first run on a card; no function calls it (docs/cloud.md)
    .add_local_file(str(HERE / "benchmarks" / "gpu.py"), "/root/benchmarks/gpu.py")
)
hub_cache = modal.Volume.from_name("speculation-harness-hub-cache", create_if_missing=True)
compiled = modal.Volume.from_name("speculation-harness-compiled", create_if_missing=True)
runs = modal.Volume.from_name("speculation-harness-results", create_if_missing=True)
TOKEN = os.environ.get("HF_TOKEN", "")
secrets = [modal.Secret.from_dict({"HF_TOKEN": TOKEN})] if TOKEN else []

app = modal.App("speculation-harness")


@app.function(
    image=image,
    gpu="A10",
    cpu=CPUS,
    volumes={HUB_CACHE: hub_cache, COMPILED: compiled, RUNS: runs},
    secrets=secrets,
    timeout=TIMEOUT_S,
    # A second container finds what the first one stored, and goes on with it
    retries=modal.Retries(max_retries=2, initial_delay=5.0, backoff_coefficient=1.0),
)
def on_gpu(job: "Job", root: str = RUNS) -> "Delivery":
    """Does one job on this container's card, or what is missing of it, and returns its run."""
    from harness.cloud import remote

    _reload()
    try:
        return remote.carry_out(job, root, lambda words: do(job.door, words))
    finally:
        if not modal.is_local():
            for volume in (runs, hub_cache, compiled):
                volume.commit()


@app.function(image=image, volumes={RUNS: runs}, timeout=WAIT_S)
def in_cloud(jobs: "Sequence[Job]", root: str = RUNS) -> "list[Delivery]":
    """Has the jobs of one launch done, each on its card, and returns what came back from each."""
    from harness.cloud import remote

    _reload()
    return remote.fan_out(jobs, root, lambda job: _each([job], root)[0], lambda s: _each(s, root))


def _each(jobs: "Sequence[Job]", root: str) -> "list[Delivery]":
    """One container per job; a card at a time has its own `starmap`, all cards go side by side."""
    from harness.cloud import remote

    by_gpu: dict[str, list[Job]] = {}
    for job in jobs:
        by_gpu.setdefault(job.gpu, []).append(job)
    with ThreadPoolExecutor(len(by_gpu)) as cards:
        mapped = cards.map(lambda gpu: _on_card(gpu, by_gpu[gpu], root), by_gpu)
        back = {
            job.name: entry
            for gpu_jobs, deliveries in zip(by_gpu.values(), mapped, strict=True)
            for job, entry in zip(gpu_jobs, deliveries, strict=True)
        }
    _reload()  # what a failed job had stored
    return [
        remote.failed(job, entry, root) if isinstance(entry, BaseException) else entry
        for job, entry in ((job, back[job.name]) for job in jobs)
    ]


def _on_card(gpu: str, jobs: "Sequence[Job]", root: str) -> "list[Delivery | BaseException]":
    """Deliveries of the jobs of one card; a job that failed gives its error and stops no other."""
    try:
        card = on_gpu.with_options(gpu=gpu, memory=max(job.memory_mib for job in jobs))
        inputs = [(job, root) for job in jobs]
        back: Iterable[Any] = card.starmap(
            inputs, return_exceptions=True, wrap_returned_exceptions=False
        )
        return list(back)
    except Exception as error:  # of the whole card, such as one that is not available
        return [error] * len(jobs)


@app.local_entrypoint()
def profile(
    model: str = "qwen3_4b",
    draft: str = "qwen3_0_6b",
    gpu: str = "A10G",
    overrides: str = "",
    resume: str = "",
) -> None:
    """Times both models on a cloud GPU: what could speculation gain?"""
    _pair("profile", [f"model={model}", f"draft={draft}"], gpu, overrides, resume)


@app.local_entrypoint()
def sweep(
    model: str = "qwen3_4b",
    draft: str = "qwen3_0_6b",
    gpu: str = "A10G",
    overrides: str = "",
    resume: str = "",
) -> None:
    """Measures a pair on a cloud GPU: which K to serve, or none?"""
    _pair("sweep", [f"model={model}", f"draft={draft}"], gpu, overrides, resume)


@app.local_entrypoint()
def snapshot(
    model: str = "qwen3_4b",
    draft: str = "qwen3_0_6b",
    gpu: str = "A10G",
    overrides: str = "",
    resume: str = "",
) -> None:
    """Checks on a cloud GPU that speculation leaves the output unchanged."""
    _pair("snapshot", [f"model={model}", f"draft={draft}"], gpu, overrides, resume)


@app.local_entrypoint()
def acceptance_demo(
    model: str = "qwen3_4b",
    draft: str = "qwen3_0_6b",
    gpu: str = "A10G",
    overrides: str = "",
    resume: str = "",
) -> None:
    """Shows on a cloud GPU how acceptance depends on the task."""
    words = [f"model={model}", f"draft={draft}", "experiment=acceptance_demo"]
    _pair("sweep", words, gpu, overrides, resume)


@app.local_entrypoint()
def temperature_demo(
    model: str = "qwen3_4b",
    draft: str = "qwen3_0_6b",
    gpu: str = "A10G",
    overrides: str = "",
    resume: str = "",
) -> None:
    """Shows on a cloud GPU how acceptance depends on the temperature."""
    words = [f"model={model}", f"draft={draft}", "experiment=temperature_demo"]
    _pair("sweep", words, gpu, overrides, resume)


@app.local_entrypoint()
def audition(
    model: str = "qwen3_4b",
    drafts: str = "qwen3_0_6b,qwen3_1_7b,ngram",
    gpus: str = "A10G",
    chunk: int = 4,
    overrides: str = "",
    resume: str = "",
) -> None:
    """Ranks drafts on one or more cloud GPUs: one container per card and `chunk` drafts."""
    sys.exit(told(lambda: _audition(model, drafts, gpus, chunk, overrides, resume)))


def _pair(door: str, words: list[str], gpu: str, overrides: str, resume: str) -> None:
    """Has one door's work done on one card and exits with its status."""
    sys.exit(told(lambda: _single(door, words, gpu, overrides, resume)))


def _single(door: str, words: list[str], gpu: str, overrides: str, resume: str) -> int:
    from harness.cloud.jobs import Job, container_memory_mib, launch_name

    name, card = card_named(gpu)
    words = [*words, *_priced(door, card), *shlex.split(overrides)]
    config, prompts = checked(door, words, {name: card})
    launch = launch_name(door, resume)
    memory = container_memory_mib([config.model, config.draft])
    job = Job(launch, f"{door}-{card.name}", door, name, card, tuple(words), prompts, memory)
    _, status = _brought([job], config)
    return status


def _audition(model: str, drafts: str, gpus: str, chunk: int, overrides: str, resume: str) -> int:
    from dataclasses import replace

    from harness.cloud.jobs import audition_jobs, container_memory_mib, launch_name

    words = [f"model={model}", *shlex.split(overrides)]
    names = [name for name in drafts.split(",") if name]
    cards = dict(card_named(gpu) for gpu in gpus.split(",") if gpu)
    config, prompts = checked("audition", [*words, f"drafts=[{','.join(names)}]"], cards)
    launch = launch_name("audition", resume)
    jobs = audition_jobs(
        launch,
        cards,
        names,
        chunk,
        overrides=words,
        prompts=prompts,
        memory_mib=container_memory_mib([config.model]),
    )
    deliveries, status = _brought(jobs, config)
    folders = [str(path) for path, entry in deliveries if path and entry.failure is None]
    if len(jobs) == 1 or not folders:
        return status
    from harness.commands import fleet

    failures = [failure for _, entry in deliveries if (failure := entry.failure) is not None]
    outcome = fleet.run(replace(config, combine=folders), failures)
    print(f"run: {outcome.folder}")
    return max(status, outcome.status)


def _brought(jobs: "list[Job]", config: Any) -> "tuple[list[tuple[Path | None, Delivery]], int]":
    """Has jobs done, unpacks what came back and says what it was and cost."""
    from harness.reporting.cloud import lines

    print(f"launch: {jobs[0].launch} (--resume {jobs[0].launch} goes on with it)", flush=True)
    found: list[tuple[Path | None, Delivery]] = []
    for entry in in_cloud.remote(jobs):
        path = entry.unpack(config.results_root)
        found.append((path, entry))
        print(*lines(entry.receipt, path), sep="\n", flush=True)
    return found, max(entry.status for _, entry in found)


def told(work: Callable[[], int]) -> int:
    """Runs `work` and returns its status; what the user can mend is one line."""
    from harness.records import UserError

    try:
        return work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def do(door: str, words: list[str]) -> "Outcome":
    """Does a door's work, given its command line.

    Raises:
        harness.records.UserError: what the user can mend, for example an unknown hub id.
    """
    from harness.cli import compose

    return importlib.import_module(f"harness.{door}").work(compose(door, words))


def card_named(gpu: str) -> "tuple[str, GpuConf]":
    """A card's name in the cloud, and its figures.

    Raises:
        UserError: no such card; the message lists those that there are.
    """
    from harness.cli import compose
    from harness.cloud.jobs import card_of

    name, card = card_of(gpu)
    return name, compose("sweep", [f"gpu={card}"]).gpu


def checked(
    door: str, overrides: list[str], cards: "Mapping[str, GpuConf] | None" = None
) -> tuple[Any, tuple[tuple[str, bytes], ...]]:
    """Composes and checks a configuration before anything is rented.

    Args:
        door: profile, sweep, ...
        overrides: its command line.
        cards: what is to be rented, by the cloud's name of each.

    Returns:
        It, and the user's own prompt files, which must go along.

    Raises:
        UserError: an override that does not fit, one that makes no sense on a rented machine, or a
            card whose memory is too small.
    """
    from hydra.errors import HydraException

    from harness.cli import compose, draft_conf
    from harness.cloud.jobs import check_fits, check_rentable
    from harness.records import UserError

    try:
        config = compose(door, overrides)
    except HydraException as error:
        raise UserError(" ".join(str(error).split())) from error
    drafts = [draft_conf(entry) for entry in getattr(config, "drafts", ())]
    prompts = check_rentable(door, config)
    check_fits(config, drafts or [config.draft], cards or {})
    return config, prompts


def _priced(door: str, card: "GpuConf") -> list[str]:
    """The card as an override of those doors that show its price."""
    from harness.config import SCHEMAS

    return [f"gpu={card.name}"] if "gpu" in SCHEMAS[door].__dataclass_fields__ else []


def _reload() -> None:
    """See what other containers stored since this one was started."""
    if not modal.is_local():
        runs.reload()
