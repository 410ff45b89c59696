"""One pair, measured: K x temperature x prompt sets, and a verdict."""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("sweep")


if __name__ == "__main__":
    main()
