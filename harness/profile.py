"""How fast is each model here, and what could speculation gain at best?

    python -m harness.profile model=qwen3_4b draft=qwen3_0_6b

Each model alone: tokens per second, time to first token, peak memory; then single steps and
verifies over 1..K+1 positions. From these: the step ratio c, the verify cost v(K), the ideal
speedup and the alpha that a draft must reach to break even. Acceptance is not measured here.

(Run it with -m: as a script, this file would shadow the standard library's `profile`.)
"""

import sys
from typing import NoReturn

from harness.cli import USER_ERROR, run_app
from harness.config import CONF_DIR


def unknown_card(word: str) -> str | None:
    """Why `word` of the command line names no card, in one line; Hydra's own text takes many."""
    key, _, name = word.partition("=")
    known = sorted(path.stem for path in (CONF_DIR / "gpu").glob("*.yaml"))
    if key.lstrip("+") != "gpu" or name in (*known, "null") or "," in name:
        return None
    return f"gpu={name}: no such card; there are {', '.join(known)}"


def main() -> NoReturn:
    """Run the command and exit with its status."""
    for word in sys.argv[1:]:
        refused = unknown_card(word)
        if refused:
            print(f"error: {refused}", file=sys.stderr)
            sys.exit(USER_ERROR)
    run_app("profile")


if __name__ == "__main__":
    main()
