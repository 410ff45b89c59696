"""What machine is this, as far as can be told without torch."""

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("torch", "transformers", "numpy", "scipy", "pandas", "hydra-core", "modal")
# Variables whose values are secrets, and secrets that can be told by their form.
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)
SECRETS = re.compile(r"\b(?:hf_|sk-|ghp_|xox[a-z]-)[\w-]{12,}|(?<=://)[^/@\s]+:[^/@\s]+(?=@)")
SHORTEST_SECRET = 6


def describe_host() -> dict[str, Any]:
    """The command line, the software and the machine, for the manifest.

    No environment variable is stored, and secrets that were typed are left out: runs are sent on.
    """
    argv = sys.argv[1:]
    return {
        "command": ["python", "-m", f"harness.{Path(sys.argv[0]).stem}", *map(_public, argv)],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "git": _git(),
    }


def _public(word: str) -> str:
    """A word of the command line without the secrets in it."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST_SECRET and SECRET_NAMES.search(name):
            word = word.replace(value, f"${name}")
    return SECRETS.sub("***", word)


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def cpu_name() -> str:
    """The processor's own name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _git() -> dict[str, Any] | None:
    """The checkout's commit and whether it has uncommitted changes; None outside one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None

    def ask(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    return None
