"""Render a stored run again, compare runs, or list them all; no model is loaded."""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("report")


if __name__ == "__main__":
    main()
