"""The commands: `harness sweep key=value ...` runs one, `harness` lists them all."""

import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from harness import PACKAGE
from harness.config import SCHEMAS


def main() -> None:
    """Run a command, list them all, or print the version; status 2 for any other word."""
    words = sys.argv[1:]
    if words and words[0] in SCHEMAS:
        from harness.cli import run_app  # imports Hydra

        sys.argv = [str(Path(__file__).with_name(f"{words[0]}.py")), *words[1:]]
        run_app(words[0])
    if "--version" in words:
        print(f"{PACKAGE} {version(PACKAGE)}")
        return
    if not {*words} <= {"-h", "--help"}:
        print(f"error: {words[0]}: no command; there are {', '.join(SCHEMAS)}", file=sys.stderr)
        sys.exit(2)
    for name in SCHEMAS:
        answers, _, _ = (import_module(f"harness.{name}").__doc__ or "").partition("\n")
        print(f"harness {name:<10} {answers}")
    print("Each takes key=value, and --help lists its keys. It is also python -m harness.NAME.")


if __name__ == "__main__":
    main()
