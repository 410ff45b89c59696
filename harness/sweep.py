"""One pair, measured: K x temperature x prompt sets, and a verdict."""

from harness.cli import run_app

if __name__ == "__main__":
    run_app("sweep")
