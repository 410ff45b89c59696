"""Which K meets a latency goal at a rate of requests, and on how many cards."""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("plan")


if __name__ == "__main__":
    main()
