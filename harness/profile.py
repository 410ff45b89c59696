"""Profiles: how fast each model is here, and the most that speculation could gain.

(Run it with -m: as a script, this file would shadow the standard library's `profile`.)
"""

from harness.cli import run_app

if __name__ == "__main__":
    run_app("profile")
