"""One pair on the engine that will serve it: K x temperature x prompt sets, and a verdict."""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("server")


if __name__ == "__main__":
    main()
