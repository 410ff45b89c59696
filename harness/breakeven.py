"""The arithmetic alone, from two latencies; no model, no torch.

    python -m harness.breakeven draft_ms=22.09 target_ms=29.92
    python -m harness.breakeven draft_ms=22.09 target_ms=29.92 k=[4] acceptance_rate=0.34
    python -m harness.breakeven draft_ms=2 target_ms=13.4 k=[1,2] verify_ms=[13.4,13.6,13.9]

What each K could gain if everything were accepted, the alpha it needs to break even, and the
speedup at the alphas listed. `verify_ms` entry i is the target's time over i positions, so K needs
K + 1 of them. An acceptance_rate (accepted / drafted) is not an alpha: give it under its own name.
"""

from typing import NoReturn

from harness.config import BreakevenConfig
from harness.entry import run_door
from harness.experiments.outcome import Outcome


def work(config: BreakevenConfig) -> Outcome:
    """Does the door's work."""
    from harness.experiments import breakeven

    return breakeven.run(config)


def main() -> NoReturn:
    """Runs the door and exits with its status."""
    run_door("breakeven", work)


if __name__ == "__main__":
    main()
