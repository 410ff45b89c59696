"""Break-even and speedups from two latencies, by arithmetic alone; no model, no torch."""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("breakeven")


if __name__ == "__main__":
    main()
