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

import os
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import modal

if TYPE_CHECKING:  # the harness and its libraries are imported only where work is done
    from harness.cloud.jobs import Job
    from harness.cloud.remote import Delivery

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
        return remote.carry_out(job, root)
    finally:
        if not modal.is_local():
            for volume in (runs, hub_cache, compiled):
                volume.commit()


@app.function(image=image, volumes={RUNS: runs}, timeout=WAIT_S)
def in_cloud(jobs: "Sequence[Job]", root: str = RUNS) -> "list[Delivery]":
    """Has the jobs of one launch done, each on its card, and returns what came back from each."""
    from harness.cloud import remote

    _reload()
    return remote.fan_out(jobs, root, lambda several: _each(several, root))


def _each(jobs: "Sequence[Job]", root: str) -> "list[Delivery]":
    """One container per job, all at the same time; a job that fails stops no other."""
    from harness.cloud import remote

    def on_card(job: "Job") -> "Delivery | Exception":
        try:
            card = on_gpu.with_options(gpu=job.gpu, memory=job.memory_mib)
            return card.remote(job, root)
        except Exception as error:  # also of a card that is not available
            return error

    with ThreadPoolExecutor(len(jobs)) as cards:
        back = list(cards.map(on_card, jobs))
    _reload()  # what a failed job had stored
    return [
        remote.failed(job, entry, root) if isinstance(entry, Exception) else entry
        for job, entry in zip(jobs, back, strict=True)
    ]


def _pair(name: str, door: str, *words: str) -> modal.app.LocalEntrypoint:
    """An entrypoint that has one command's work done for a pair on one card."""

    def entrypoint(
        model: str = "qwen3_4b",
        draft: str = "qwen3_0_6b",
        gpu: str = "A10G",
        overrides: str = "",
        resume: str = "",
    ) -> None:
        _rent(door, [f"model={model}", f"draft={draft}", *words], [gpu], overrides, resume)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    return app.local_entrypoint(name=name)(entrypoint)


profile = _pair("profile", "profile")
sweep = _pair("sweep", "sweep")
snapshot = _pair("snapshot", "snapshot")
acceptance_demo = _pair("acceptance_demo", "sweep", "experiment=acceptance_demo")
temperature_demo = _pair("temperature_demo", "sweep", "experiment=temperature_demo")


@app.local_entrypoint()
def audition(
    model: str = "qwen3_4b",
    drafts: str = "qwen3_0_6b,qwen3_1_7b,ngram",
    gpus: str = "A10G",
    overrides: str = "",
    resume: str = "",
) -> None:
    """Ranks drafts on one or more cloud GPUs, one container per card, and then the cards."""
    cards = [gpu for gpu in gpus.split(",") if gpu]
    _rent("audition", [f"model={model}", f"drafts=[{drafts}]"], cards, overrides, resume)


def _rent(door: str, words: list[str], gpus: list[str], overrides: str, resume: str) -> None:
    """Has a command's work done on each card and exits with its status."""
    from harness.cloud import remote

    words = [*words, *shlex.split(overrides)]
    sys.exit(remote.launch(door, words, gpus, resume, in_cloud.remote))


def _reload() -> None:
    """See what other containers stored since this one was started."""
    if not modal.is_local():
        runs.reload()
