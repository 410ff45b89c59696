"""Which commands there are, each with what it answers: `python -m harness`."""

import sys
from importlib import import_module
from importlib.metadata import version

from harness import PACKAGE
from harness.config import SCHEMAS


def main() -> None:
    """List the commands, or print the version; status 2 for any other word."""
    words = sys.argv[1:]
    if "--version" in words:
        print(f"{PACKAGE} {version(PACKAGE)}")
        return
    if not {*words} <= {"-h", "--help"}:
        known = ", ".join(f"harness.{name}" for name in SCHEMAS)
        print(f"error: {words[0]}: run one of python -m {known}", file=sys.stderr)
        sys.exit(2)
    for name in SCHEMAS:
        answers, _, _ = (import_module(f"harness.{name}").__doc__ or "").partition("\n")
        print(f"python -m {f'harness.{name}':<18} {answers}")
    print("Each takes key=value, and --help lists its keys.")


if __name__ == "__main__":
    main()
