"""Does speculation leave the output unchanged?"""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("snapshot")


if __name__ == "__main__":
    main()
