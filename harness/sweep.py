"""One pair, measured: K x temperature x prompt sets, and a verdict.

    python -m harness.sweep                                       the embedded pair, on any CPU
    python -m harness.sweep model=qwen3_4b draft=qwen3_0_6b       the headline use
    python -m harness.sweep model=hf model.id=ORG/TARGET draft=hf draft.id=ORG/DRAFT k=[2,4]

Step times first, then plain decoding and every K are run, interleaved, on the same prompts: so the
speedup is a ratio within one run. The report says which K to serve with, or that none pays, and
shows the prediction from acceptance and latency next to what was measured.
"""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("sweep")


if __name__ == "__main__":
    main()
