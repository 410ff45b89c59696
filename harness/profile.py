"""Profiles: how fast each model is here, and the most that speculation could gain.

(Run it with -m: as a script, this file would shadow the standard library's `profile`.)
"""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("profile")


if __name__ == "__main__":
    main()
