"""Render a stored run again, compare runs, or list them all; no model is loaded.

    python -m harness.report run=results/FOLDER
    python -m harness.report run=results/FOLDER fail_below=1.2      exit 1 below that speedup
    python -m harness.report runs=[results/A,results/B]             B (and C, ...) against A
    python -m harness.report index=results                          index.html over every run there
    python -m harness.report records=[plain.jsonl,k4.jsonl]         what a server recorded
    python -m harness.report metrics=http://HOST:PORT               what a running server counts
    python -m harness.report runs=[results/A,results/B] fail_below=0.95

The last one is for builds: it exits 1 when B's speedup is below 0.95 of A's beyond its uncertainty
(the whole interval, over the prompts that both have). Everything shown comes from the folder's own
files, so it works wherever the folder lies. `records` are answers of vLLM, SGLang or llama.cpp, a
file per server; they are stored as a run of the server door.
"""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("report")


if __name__ == "__main__":
    main()
