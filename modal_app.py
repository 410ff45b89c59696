"""The commands on rented GPUs, as a Modal app over the package.

`harness.cloud.jobs` makes one job for each card, `harness.cloud.remote` runs and combines them.

    modal run modal_app.py::smoke --gpu A10G
    modal run modal_app.py::profile --model qwen3_4b --draft qwen3_0_6b --gpu A10G
    modal run modal_app.py::sweep --model qwen3_4b --draft qwen3_0_6b --overrides "k=[1,2,4]"
    modal run modal_app.py::snapshot --gpu L4
    modal run modal_app.py::audition --model qwen3_4b --drafts qwen3_0_6b,ngram --gpus A10G,L4,H100
    modal run modal_app.py::server --engine vllm --model qwen3_4b --draft qwen3_0_6b --gpu H100
    modal run modal_app.py::server --draft eagle3 --overrides "draft.id=ORG/HEAD"
    modal run modal_app.py::acceptance_demo
    modal run modal_app.py::temperature_demo

`smoke` checks a card before anything is measured on it. The configuration is composed and checked
here first, so that a mistake is reported before any GPU is rented. A small container without a GPU
then runs the jobs, so the machine that started the command may be switched off: with `--detach`
behind `modal run` the jobs continue, and the same command with `--resume LAUNCH` copies the results
here later; if the launch still runs, it waits for the launch and starts nothing. Models are
downloaded once, into a volume. Runs are written into another volume, where a container that
replaces a stopped one finds and continues them. The run folders are copied into the local results/.
If `HF_TOKEN` is set here, it is passed on for gated models. `server` measures the pair on vLLM or
SGLang, each in its own image, which no other command builds. docs/cloud.md has the details.
"""

import argparse
import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import modal

from harness.engine_facts.engines import rented  # this import needs no library

if TYPE_CHECKING:  # the rest of the harness is imported only in the functions that need it
    from harness.cloud.jobs import Job
    from harness.cloud.remote import Delivery

HERE = Path(__file__).resolve().parent
HUB_CACHE, COMPILED, RUNS = "/cache/huggingface", "/cache/compiled", "/runs"
CPUS = 4.0
TIMEOUT_S = 4 * 60 * 60
WAIT_S = 24 * 60 * 60
# Seconds between two lines on a wait
SILENCE_S = 60.0
# The file with the id of a call, in the folder that the call writes
CALL = "call.json"
# Errors of reaching Modal, after which the state of a call is not known
UNKNOWN = (
    modal.exception.AuthError,
    modal.exception.ConnectionError,
    modal.exception.InternalError,
    modal.exception.ResourceExhaustedError,
    modal.exception.ServiceError,
)

DEFAULT_ENGINE = "vllm"
# The engines compile kernels for the card with CUDA's compiler
CUDA = "nvidia/cuda:13.0.1-devel-ubuntu24.04"


def _with_packages(base: modal.Image) -> modal.Image:
    """The image with the packages that the harness needs; its own files are added last."""
    return (
        base.apt_install("gcc", "g++")  # Triton and inductor compile their launchers
        .pip_install_from_pyproject(str(HERE / "pyproject.toml"), optional_dependencies=["rented"])
        .env(
            {
                "HF_HOME": HUB_CACHE,
                "TORCHINDUCTOR_CACHE_DIR": f"{COMPILED}/inductor",
                "TRITON_CACHE_DIR": f"{COMPILED}/triton",
                "VLLM_CACHE_ROOT": f"{COMPILED}/vllm",  # its compiled and autotuned kernels
                # By default one compiler per core of the machine; a container has only a few
                "TORCHINDUCTOR_COMPILE_THREADS": str(round(CPUS)),
            }
        )
    )


def _with_engine(name: str) -> modal.Image:
    """The image with an engine on PATH, in its own Python, since it needs another torch."""
    base = modal.Image.from_registry(CUDA, add_python="3.12").entrypoint([])
    # FlashInfer calls ninja by its name, and the one in the engine's Python is not on PATH
    kernels = {"FLASHINFER_WORKSPACE_BASE": f"{COMPILED}/flashinfer"}
    return _with_packages(base.apt_install("ninja-build").env(kernels)).run_commands(
        "python -m venv /opt/engine",
        f"/opt/engine/bin/pip install {rented()[name]}",
        f"ln -s /opt/engine/bin/{name} /usr/local/bin/{name}",
    )


def _with_files(base: modal.Image) -> modal.Image:
    """The image with the folders of the harness, which contain prompts and embedded models too."""
    return (
        base.add_local_dir(str(HERE / "harness"), "/root/harness", ignore=["**/__pycache__"])
        .add_local_dir(str(HERE / "conf"), "/root/conf")
        # The benchmark of a smoke run
        .add_local_file(str(HERE / "benchmarks" / "gpu.py"), "/root/benchmarks/gpu.py")
    )


def _typed_engine(words: Sequence[str]) -> str | None:
    """The engine on the command line of `modal run modal_app.py::server`; None for other commands.

    Modal creates all functions of an app, and so builds their images, before it calls the
    entrypoint. So the functions to register must be decided while this file is imported.
    """
    entrypoints = [index for index, word in enumerate(words) if re.search(r"(::|\.)server$", word)]
    if not entrypoints:
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--engine", default=DEFAULT_ENGINE)
    with suppress(argparse.ArgumentError):  # Modal's own parser reports the error
        engine = parser.parse_known_args(words[entrypoints[0] + 1 :])[0].engine
        return engine if engine in rented() else None
    return None


image = _with_files(_with_packages(modal.Image.debian_slim(python_version="3.12")))
hub_cache = modal.Volume.from_name("speculation-harness-hub-cache", create_if_missing=True)
compiled = modal.Volume.from_name("speculation-harness-compiled", create_if_missing=True)
runs = modal.Volume.from_name("speculation-harness-results", create_if_missing=True)
TOKEN = os.environ.get("HF_TOKEN", "")
secrets = [modal.Secret.from_dict({"HF_TOKEN": TOKEN})] if TOKEN else []

app = modal.App("speculation-harness")

ON_A_CARD: dict[str, Any] = {
    "gpu": "A10",
    "cpu": CPUS,
    "volumes": {HUB_CACHE: hub_cache, COMPILED: compiled, RUNS: runs},
    "secrets": secrets,
    "timeout": TIMEOUT_S,
    # Otherwise a retry would run in the same process, whose CUDA context an error may have broken
    "single_use_containers": True,
    # A second container finds the stored run of the first one, and continues it
    "retries": modal.Retries(max_retries=2, initial_delay=5.0, backoff_coefficient=1.0),
}


@app.function(image=image, **ON_A_CARD)
def on_gpu(job: "Job", root: str = RUNS) -> "Delivery":
    """Run one job, or the missing part of it, on this container's GPU, and return its run."""
    return _run(job, root)


def _for_engine(function: Any) -> Any:
    """Register a function with the image of the engine on the command line, if there is one.

    A container imports this file too, without the command line. There functions are found by their
    names, and the image is already chosen.
    """
    engine = _typed_engine(sys.argv) if modal.is_local() else DEFAULT_ENGINE
    if engine is None:
        return function
    return app.function(image=_with_files(_with_engine(engine)), **ON_A_CARD)(function)


@_for_engine
def on_engine(job: "Job", root: str = RUNS) -> "Delivery":
    """Run one job in the image of the measured engine; see `on_gpu`."""
    return _run(job, root)


def _run(job: "Job", root: str) -> "Delivery":
    from harness.cloud import remote

    with _as_its_own_errors():
        _reload()
        try:
            return remote.run_job(job, root)
        finally:
            if not modal.is_local():
                for volume in (runs, hub_cache, compiled):
                    volume.commit()


@contextmanager
def _as_its_own_errors() -> Iterator[None]:
    """Raise a call's own time-outs, and Modal's errors in it, as RuntimeErrors.

    A polling caller would take such an error for its own: that there is no result yet, or that the
    state of the call is not known.
    """
    try:
        yield
    except (TimeoutError, *UNKNOWN) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


# Not preemptible: a container that replaced a stopped one would start its jobs again
@app.function(image=image, volumes={RUNS: runs}, timeout=WAIT_S, nonpreemptible=True)
def in_cloud(jobs: "Sequence[Job]", root: str = RUNS) -> "list[Delivery] | None":
    """Run the jobs of one launch, each on its GPU, and return their deliveries.

    None where another call runs the launch. The call stores its id itself, before it starts
    anything, since the caller may be stopped before it has received the id.
    """
    from harness.cloud import remote

    launch, call_id = jobs[0].launch, modal.current_function_call_id()
    with _as_its_own_errors():
        if _stored_call(launch).get("call") != call_id and _unfinished(launch) is not None:
            return None
        _store_call(launch, call_id)
        _reload()
        return remote.fan_out(jobs, root, lambda waiting: _run_each(waiting, root))


def _run_each(jobs: "Sequence[Job]", root: str) -> "list[Delivery]":
    """The deliveries of jobs in one container each, in parallel; a failed job stops no other."""
    from harness.cloud import remote

    def run_on_gpu(job: "Job") -> "Delivery | Exception":
        function = on_gpu if job.engine == "own" else on_engine
        try:
            # All resources are given, since missing ones would be Modal's defaults
            sized = function.with_options(gpu=job.gpu, cpu=CPUS, memory=job.memory_mib)

            folder = f"{job.launch}/{job.name}"
            running = _unfinished(folder)
            call = running[0] if running else _spawned(sized, folder, job, root)
            begin = time.monotonic()
            while True:
                try:
                    return call.get(timeout=SILENCE_S)
                except TimeoutError:  # no result so far; a call without a free card raises no error
                    _say_waiting(None if running else sized, job, time.monotonic() - begin)
                except UNKNOWN as error:  # the job itself continues
                    print(f"{job.name}: Modal was not reached, asking again: {error}", flush=True)
                    time.sleep(SILENCE_S)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(run_on_gpu, jobs))
    _reload()  # the stored runs of failed jobs
    return [
        remote.failed(job, result, root) if isinstance(result, Exception) else result
        for job, result in zip(jobs, results, strict=True)
    ]


def _say_waiting(function: Any | None, job: "Job", seconds: float) -> None:
    """Print that a job is waited for; `function` is None where the call may be of an earlier app.

    The statistics of this app's function do not include such a call.
    """
    minutes = f"{seconds / 60:.0f} min"
    if function is None:
        print(f"{job.name}: still running or queued, waiting ({minutes})", flush=True)
        return
    # All errors, not only Modal's: a failure to print this line must not lose the job's result
    with suppress(Exception):
        if function.get_current_stats().num_running_inputs == 0:
            print(
                f"{job.name}: no container with {job.gpu} so far, waiting ({minutes})", flush=True
            )


def _started(jobs: "list[Job]") -> "list[Delivery]":
    """The deliveries of a launch: waits while it still runs, then runs its missing jobs."""
    launch, wait_s = jobs[0].launch, 0.0
    while True:
        while (running := _unfinished(launch, wait_s)) is not None:
            print(f"{launch}: still running, waiting for it; logs: {_logs(running[1])}", flush=True)
            wait_s = SILENCE_S
        call = in_cloud.spawn(jobs)
        print(f"logs: {_logs(app.app_id)}", flush=True)
        deliveries = call.get()
        if deliveries is not None:  # None: another call has started the launch in between
            return deliveries


def _logs(app_id: str | None) -> str:
    return f"modal app logs {app_id}"


def _spawned(function: Any, folder: str, *arguments: Any) -> Any:
    """Call a function that writes into a folder of the results volume; store the call's id there.

    The id shows which call writes, since a file lock does not work between containers.
    """
    call = function.spawn(*arguments)
    _store_call(folder, call.object_id)
    return call


def _store_call(folder: str, call_id: str | None) -> None:
    content = json.dumps({"call": call_id, "app": app.app_id}).encode()
    with runs.batch_upload(force=True) as batch:
        batch.put_file(io.BytesIO(content), f"{folder}/{CALL}")


def _stored_call(folder: str) -> dict[str, Any]:
    """The id and app of the last call that wrote into a folder of the volume; empty if none."""
    try:
        return json.loads(b"".join(runs.read_file(f"{folder}/{CALL}")))
    except FileNotFoundError:
        return {}


def _unfinished(folder: str, wait_s: float = 0.0) -> tuple[Any, str | None] | None:
    """The call that still writes into a folder of the results volume, and its app; else None.

    Args:
        folder: on the volume.
        wait_s: seconds to wait for the end of the call.

    Raises:
        modal.Error: Modal cannot be reached, so that it is not known.
    """
    stored = _stored_call(folder)
    if not stored:
        return None
    call = modal.FunctionCall.from_id(stored["call"])
    try:
        call.get(timeout=wait_s)
    except TimeoutError:
        return None if _stopped(stored["app"]) else (call, stored["app"])
    except UNKNOWN:
        raise
    except Exception:  # of the call itself, or Modal's for a stopped or expired call
        return None
    return None


def _stopped(app_id: str | None) -> bool:
    """Whether an app has stopped; Modal may still report its calls as running."""
    if app_id is None or app_id == app.app_id:
        return False
    try:
        return modal.App.lookup(app_id).info().lifecycle.state in ("stopped", "disabled")
    except modal.exception.NotFoundError:
        return True


def _pair(name: str, command: str, *fixed: str) -> modal.app.LocalEntrypoint:
    """An entrypoint that runs one command for a pair on one GPU."""

    def entrypoint(
        model: str = "qwen3_4b",
        draft: str = "qwen3_0_6b",
        gpu: str = "A10G",
        overrides: str = "",
        resume: str = "",
    ) -> None:
        _launch(command, [f"model={model}", f"draft={draft}", *fixed], [gpu], overrides, resume)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    return app.local_entrypoint(name=name)(entrypoint)


profile = _pair("profile", "profile")
sweep = _pair("sweep", "sweep")
snapshot = _pair("snapshot", "snapshot")
acceptance_demo = _pair("acceptance_demo", "sweep", "experiment=acceptance_demo")
temperature_demo = _pair("temperature_demo", "sweep", "experiment=temperature_demo")


@app.local_entrypoint()
def smoke(model: str = "qwen3_4b", gpu: str = "A10G", resume: str = "") -> None:
    """Check a card: driver, versions, compiler, every forward and the benchmark of one model."""
    _launch("smoke", [f"model={model}"], [gpu], "", resume)


@app.local_entrypoint()
def server(
    engine: str = DEFAULT_ENGINE,
    model: str = "qwen3_4b",
    draft: str = "qwen3_0_6b",
    gpu: str = "A10G",
    overrides: str = "",
    resume: str = "",
) -> None:
    """Measure one pair on the engine that will serve it, on one GPU."""
    if any(word.lstrip("+").startswith("engine=") for word in shlex.split(overrides)):
        # The image was chosen by --engine before the overrides are read
        print("error: --overrides engine=...: give --engine instead", file=sys.stderr)
        sys.exit(2)
    fixed = [f"engine={engine}", f"model={model}", f"draft={draft}"]
    _launch("server", fixed, [gpu], overrides, resume)


@app.local_entrypoint()
def audition(
    model: str = "qwen3_4b",
    drafts: str = "qwen3_0_6b,qwen3_1_7b,ngram",
    gpus: str = "A10G",
    overrides: str = "",
    resume: str = "",
) -> None:
    """Rank drafts on one or more cloud GPUs, one container per GPU, and then the GPUs."""
    names = [gpu for gpu in gpus.split(",") if gpu]
    _launch("audition", [f"model={model}", f"drafts=[{drafts}]"], names, overrides, resume)


def _launch(command: str, fixed: list[str], gpus: list[str], overrides: str, resume: str) -> None:
    """Run a command on each GPU and exit with its status."""
    from harness.cloud import remote

    everything = [*fixed, *shlex.split(overrides)]
    sys.exit(remote.launch(command, everything, gpus, resume, _started))


def _reload() -> None:
    """Make files visible that other containers have stored since this one started."""
    if not modal.is_local():
        runs.reload()
