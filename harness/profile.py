"""Profiles: how fast each model is here, and the most that speculation could gain.

    python -m harness.profile model=qwen3_4b draft=qwen3_0_6b

Each model alone: tokens per second, time to first token, peak memory; then single steps and
verifies over 1..K+1 positions. From these: the step ratio c, the verify cost v(K), the ideal
speedup and the alpha that a draft must reach to break even. Acceptance is not measured here.

(Run it with -m: as a script, this file would shadow the standard library's `profile`.)
"""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("profile")


if __name__ == "__main__":
    main()
