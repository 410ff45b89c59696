"""Break-even and speedups from two latencies, by arithmetic alone; no model, no torch."""

from harness.cli import run_app

if __name__ == "__main__":
    run_app("breakeven")
