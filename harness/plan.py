"""Which K meets a latency goal at a rate of requests, and on how many cards.

    python -m harness.plan run=results/A_SERVER_RUN rate=20 tpot_ms=30 ttft_ms=500 percentile=95
    python -m harness.plan run=results/A_SERVER_RUN rate=20 tpot_ms=30 gpu=l4     with what it costs
    python -m harness.plan run=results/A_SERVER_RUN rate=20 tpot_ms=30 arrivals=times.txt

A server is simulated from what a run of `harness.server` with concurrency=[1,2,4] stored: its
texts with what rounds accept of them, and what iterations cost by how many requests are active. No
model is loaded, and no server is started.
"""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("plan")


if __name__ == "__main__":
    main()
