"""The commands on rented GPUs; thin, because all the work is in the package.

    modal run modal_app.py::profile --model qwen3_4b --draft qwen3_0_6b --gpu A10G
    modal run modal_app.py::sweep --model qwen3_4b --draft qwen3_0_6b --overrides "k=[1,2,4]"
    modal run modal_app.py::snapshot --gpu L4
    modal run modal_app.py::audition --model qwen3_4b --drafts qwen3_0_6b,ngram --gpus A10G,L4,H100
    modal run modal_app.py::server --engine vllm --model qwen3_4b --draft qwen3_0_6b --gpu H100
    modal run modal_app.py::server --draft eagle3 --overrides "draft.id=ORG/HEAD"
    modal run modal_app.py::acceptance_demo
    modal run modal_app.py::temperature_demo

The configuration is composed and checked here first, so that a mistake is reported before any GPU
is rented. A small container without a GPU then runs the jobs, so the machine that started the
command may be switched off: `modal run --detach ...` continues without it, and the same command
with `--resume LAUNCH` copies the results here later. Models are downloaded once, into a volume;
runs are written into another, where a container that replaces a stopped one finds them and
continues. The run folders are copied into the local results/. `HF_TOKEN`, where it is set here, is
passed on for gated models. `server` measures the pair on vLLM or SGLang, each in an image of its
own. docs/cloud.md has the details.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import modal

if TYPE_CHECKING:  # the harness and its libraries are imported only where work is done
    from harness.cloud.jobs import Job
    from harness.cloud.remote import Delivery

HERE = Path(__file__).resolve().parent
HUB_CACHE, COMPILED, RUNS = "/cache/huggingface", "/cache/compiled", "/runs"
CPUS = 4.0
TIMEOUT_S = 4 * 60 * 60
WAIT_S = 24 * 60 * 60

# Engines that have an image, and the release that is in it
ENGINES = {"vllm": "vllm==0.33.0", "sglang": "sglang==0.5.23"}
# Their kernels are compiled for the card by CUDA's own compiler
CUDA = "nvidia/cuda:13.0.1-devel-ubuntu24.04"


def _with_packages(base: modal.Image) -> modal.Image:
    """What the harness needs, installed; its own files are added last."""
    return (
        base.apt_install("gcc", "g++")  # Triton and inductor compile their launchers
        # accelerate: with it transformers loads weights onto the card, and casts them there
        .pip_install_from_pyproject(
            str(HERE / "pyproject.toml"), optional_dependencies=["accelerate"]
        )
        .env(
            {
                "HF_HOME": HUB_CACHE,
                "TORCHINDUCTOR_CACHE_DIR": f"{COMPILED}/inductor",
                "TRITON_CACHE_DIR": f"{COMPILED}/triton",
                # Else one compiler per core of the machine, of which a container has a few
                "TORCHINDUCTOR_COMPILE_THREADS": str(round(CPUS)),
            }
        )
    )


def _with_engine(name: str) -> modal.Image:
    """An engine on PATH, in a Python of its own: it needs another torch than the harness."""
    base = modal.Image.from_registry(CUDA, add_python="3.12").entrypoint([])
    return _with_packages(base).run_commands(
        "python -m venv /opt/engine",
        f"/opt/engine/bin/pip install {ENGINES[name]}",
        f"ln -s /opt/engine/bin/{name} /usr/local/bin/{name}",
    )


def _with_files(base: modal.Image) -> modal.Image:
    """Folders rather than Python sources: conf/, prompts and embedded models must come along."""
    return (
        base.add_local_dir(str(HERE / "harness"), "/root/harness", ignore=["**/__pycache__"])
        .add_local_dir(str(HERE / "conf"), "/root/conf")
        # For the first run on a card; no function calls it (docs/cloud.md)
        .add_local_file(str(HERE / "benchmarks" / "gpu.py"), "/root/benchmarks/gpu.py")
    )


image = _with_files(_with_packages(modal.Image.debian_slim(python_version="3.12")))
engine_images = {name: _with_files(_with_engine(name)) for name in ENGINES}
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
    # A second container finds what the first one stored, and continues it
    "retries": modal.Retries(max_retries=2, initial_delay=5.0, backoff_coefficient=1.0),
}


@app.function(image=image, **ON_A_CARD)
def on_gpu(job: "Job", root: str = RUNS) -> "Delivery":
    """Run one job on this container's GPU, or what is missing of it, and return its run."""
    return _run(job, root)


@app.function(image=engine_images["vllm"], **ON_A_CARD)
def on_vllm(job: "Job", root: str = RUNS) -> "Delivery":
    """The same, next to vLLM."""
    return _run(job, root)


@app.function(image=engine_images["sglang"], **ON_A_CARD)
def on_sglang(job: "Job", root: str = RUNS) -> "Delivery":
    """The same, next to SGLang."""
    return _run(job, root)


def _run(job: "Job", root: str) -> "Delivery":
    from harness.cloud import remote

    _reload()
    try:
        return remote.run_job(job, root)
    finally:
        if not modal.is_local():
            for volume in (runs, hub_cache, compiled):
                volume.commit()


@app.function(image=image, volumes={RUNS: runs}, timeout=WAIT_S)
def in_cloud(jobs: "Sequence[Job]", root: str = RUNS) -> "list[Delivery]":
    """Run the jobs of one launch, each on its GPU, and return what each of them gave."""
    from harness.cloud import remote

    _reload()
    return remote.fan_out(jobs, root, lambda waiting: _run_each(waiting, root))


def _run_each(jobs: "Sequence[Job]", root: str) -> "list[Delivery]":
    """One container per job, all at the same time; a job that fails stops no other."""
    from harness.cloud import remote

    def run_on_gpu(job: "Job") -> "Delivery | Exception":
        function = {"vllm": on_vllm, "sglang": on_sglang}.get(job.engine, on_gpu)
        try:
            sized = function.with_options(gpu=job.gpu, memory=job.memory_mib)
            return sized.remote(job, root)
        except Exception as error:  # also where no such GPU is available
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(run_on_gpu, jobs))
    _reload()  # what a failed job had stored
    return [
        remote.failed(job, result, root) if isinstance(result, Exception) else result
        for job, result in zip(jobs, results, strict=True)
    ]


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
def server(
    engine: str = "vllm",
    model: str = "qwen3_4b",
    draft: str = "qwen3_0_6b",
    gpu: str = "A10G",
    overrides: str = "",
    resume: str = "",
) -> None:
    """Measure one pair on the engine that will serve it, on one GPU."""
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
    sys.exit(remote.launch(command, everything, gpus, resume, in_cloud.remote))


def _reload() -> None:
    """See what other containers stored since this one was started."""
    if not modal.is_local():
        runs.reload()
