"""Render a stored run again, compare runs, or list them all; no model is loaded."""

from harness.cli import run_app

if __name__ == "__main__":
    run_app("report")
