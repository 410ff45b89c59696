"""Make the stored runs of tests/frozen anew, by the commands themselves.

    python tools/freeze_runs.py [NAME ...]

Every test of the analysis and of reports reads these runs, and the golden reports are of them. They
are small and seeded, but their times are this machine's: use a machine that does nothing else, then
`make golden`, and read the difference. What a report derives is not kept. A run that reads another
frozen one finds it under tests/frozen, so that it stores no folder of this machine.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.models.embedded import EMBEDDED, gguf_of

FROZEN = Path(__file__).parents[1] / "tests" / "frozen"
PROMPTS = ("prompts.limit=8", "new_tokens=32", "k=[1,2,4]", "seed=3", "threads=1")
# What runs on a server have
SERVED = ("prompts.limit=5", "new_tokens=32", "seed=3", "threads=1")
SWEEP = (*PROMPTS, "temperature=[0.0,1.0]", "prompts.weights={easy: 3, hard: 1}", "until=all")
TYPED = (
    *("draft_ms=17.1", "target_ms=23.4", "k=[1,2,4]", "verify_ms=[23.4,24.5,26.0,28.0,30.5]"),
    "acceptance_rate={4: 0.34}",
)
DRAFTS = "drafts=[tiny_good,tiny_small,tiny_eagle3,ngram,early_exit@layers:4]"
# By the run's name, its command and overrides
RUNS = {
    "sweep": ("sweep", *SWEEP),
    "sweep_replay": ("sweep", *SWEEP, "mode=replay"),
    "sweep_small": ("sweep", *PROMPTS, "draft=tiny_small", "temperature=[0.0]", "until=all"),
    "sweep_decided": (
        *("sweep", "prompts.limit=6", "new_tokens=32", "k=[1,2,4,6]", "seed=3", "threads=1"),
        *("temperature=[0.0]", "until=decided"),
    ),
    "audition": ("audition", *PROMPTS, "temperature=[0.0,1.0]", DRAFTS),
    "audition_threshold": (
        *("audition", *SERVED, "k=[1,2,4]", "temperature=[0.0]", "drafts=[tiny_good,tiny_small]"),
        "p_min=[0,0.5,0.9]",
    ),
    "profile": ("profile", "k=[1,2,4]", "seed=3", "threads=1"),
    "breakeven": ("breakeven", *TYPED),
    "snapshot": ("snapshot", "prompts.limit=8", "new_tokens=32", "seed=3", "threads=1"),
    "server": (
        *("server", "engine=llamacpp", "clock=cpu", "prompts.limit=5", "new_tokens=32"),
        *("k=[1,2,4]", "seed=3", "threads=1", "repetitions=3", "concurrency=[1,4]"),
    ),
    "audition_server": (
        *("audition", *SERVED, "k=[1,2,4]", "temperature=[0.0,1.0]", "until=all"),
        *("drafts=[tiny_good,tiny_unrelated,tiny_small]", "latency_from=tests/frozen/server"),
    ),
    "server_load": (
        *("server", "engine=llamacpp", *SERVED, "k=[1,2]", "temperature=[0.0]", "repetitions=2"),
        *("concurrency=[1,4]", "rate=[40]"),
    ),
    "server_decided": (
        *("server", "engine=llamacpp", *SERVED, "k=[1,2,4,6]", "temperature=[0.0]"),
        *("repetitions=2", "until=decided"),
    ),
    "audition_files": (
        *("audition", "model=tiny.gguf", "drafts=[tiny_small.gguf,tiny_good.gguf,ngram_simple]"),
        *("prompts.limit=6", "new_tokens=24", "seed=3", "threads=1", "k=[1,4,8]"),
    ),
}
# Derived from the rest, or of the servers alone
LEFT_OUT = ("results.csv", "summary.json", "report.*", "plots", "logs", "gguf", "*.lock", ".lock")


def freeze(name: str) -> None:
    """Run one command in an empty folder and keep its run folder."""
    command, *words = RUNS[name]
    with tempfile.TemporaryDirectory() as root:
        Path(root, "tests").mkdir()
        Path(root, "tests", "frozen").symlink_to(FROZEN)
        for model in ("tiny", "tiny_small", "tiny_good"):
            Path(root, f"{model}.gguf").symlink_to(gguf_of(EMBEDDED / model))
        line = [sys.executable, "-m", f"harness.{command}", *words]
        subprocess.run(line, cwd=root, check=True, stdin=subprocess.DEVNULL)
        (run,) = (path for path in Path(root, "results").iterdir() if path.is_dir())
        for pattern in LEFT_OUT:
            for path in run.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(FROZEN / name, ignore_errors=True)
        shutil.copytree(run, FROZEN / name)


def main() -> None:
    """Freeze the runs that are named, or all."""
    for name in sys.argv[1:] or RUNS:
        freeze(name)


if __name__ == "__main__":
    main()
