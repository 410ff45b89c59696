"""Many drafts, one target: which one is worth serving?"""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("audition")


if __name__ == "__main__":
    main()
