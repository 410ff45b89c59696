"""Which K meets a latency goal at a rate of requests, and on how many cards."""

from harness.cli import run_app

if __name__ == "__main__":
    run_app("plan")
