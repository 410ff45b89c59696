"""One pair on the engine that will serve it: K x temperature x prompt sets, and a verdict."""

from harness.cli import run_app

if __name__ == "__main__":
    run_app("server")
