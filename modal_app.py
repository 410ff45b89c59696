"""The profile door on a rented GPU; thin, because all the work is in the package.

    modal run modal_app.py::profile --model qwen3_4b --draft qwen3_0_6b --gpu A10G
    modal run modal_app.py::profile --gpu L4 --overrides "k=[1,2,4] new_tokens=64"

The configuration is composed and checked here first, so that a typing error rents nothing. Models
are downloaded once, into a volume; the run folder is kept in another and copied into the local
results/. `HF_TOKEN`, where it is set here, goes along for gated models.
"""

import io
import os
import shlex
import sys
import tarfile
from pathlib import Path

import modal

HERE = Path(__file__).resolve().parent
HUB_CACHE, RUNS = "/cache/huggingface", "/runs"
TIMEOUT_S = 60 * 60

# Folders rather than Python sources: conf/, the prompts and the embedded models must come along.
image = (
    modal.Image.debian_slim(python_version="3.12")
    .pip_install_from_pyproject(str(HERE / "pyproject.toml"))
    .env({"HF_HOME": HUB_CACHE})
    .add_local_dir(str(HERE / "harness"), "/root/harness", ignore=["**/__pycache__"])
    .add_local_dir(str(HERE / "conf"), "/root/conf")
)
hub_cache = modal.Volume.from_name("speculation-harness-hub-cache", create_if_missing=True)
runs = modal.Volume.from_name("speculation-harness-results", create_if_missing=True)
hub_token = modal.Secret.from_dict({"HF_TOKEN": os.environ.get("HF_TOKEN", "")})

app = modal.App("speculation-harness")


@app.function(
    image=image,
    gpu="A10",
    volumes={HUB_CACHE: hub_cache, RUNS: runs},
    secrets=[hub_token],
    timeout=TIMEOUT_S,
)
def profile_on_gpu(overrides: list[str], results_root: str = RUNS) -> bytes:
    """Runs the profile door's work and returns its run folder as a tar archive.

    Args:
        overrides: the door's command line, such as `model=qwen3_4b`.
        results_root: where the run is stored; the results volume.

    Raises:
        harness.records.UserError: what the user can mend, for example an unknown hub id.
    """
    from harness.entry import compose
    from harness.experiments import profile

    outcome = profile.run(compose("profile", [*overrides, f"results_root={results_root}"]))
    assert outcome.folder is not None, "dry_run is refused before anything is rented"
    return pack(outcome.folder)


@app.local_entrypoint()
def profile(
    model: str = "qwen3_4b",
    draft: str = "qwen3_0_6b",
    gpu: str = "A10G",
    overrides: str = "",
) -> None:
    """Profiles a pair on a cloud GPU and copies the run into the local results/."""
    from harness.records import UserError

    words = [f"model={model}", f"draft={draft}", *shlex.split(overrides)]
    try:
        results_root = checked(words)
        archive = profile_on_gpu.with_options(gpu=gpu).remote(words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"run: {unpack(archive, Path(results_root))}")


def checked(overrides: list[str]) -> str:
    """Composes and checks the configuration before anything is rented; returns its results_root.

    Raises:
        UserError: an override that does not fit, or one that makes no sense on a rented machine.
    """
    from hydra.errors import HydraException

    from harness.entry import compose
    from harness.experiments.validate import validated
    from harness.records import UserError

    try:
        config = validated(compose("profile", overrides))
    except HydraException as error:
        raise UserError(" ".join(str(error).split())) from error
    if config.dry_run or config.resume:
        raise UserError("dry_run and resume are for local runs: python -m harness.profile")
    return config.results_root


def pack(folder: Path) -> bytes:
    """A run folder as a compressed tar archive, under its own name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    return buffer.getvalue()


def unpack(content: bytes, results_root: Path) -> Path:
    """Writes a packed run folder into `results_root` and returns where it is."""
    results_root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        name = Path(archive.getnames()[0]).parts[0]
        archive.extractall(results_root, filter="data")
    return results_root / name
