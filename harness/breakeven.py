"""Break-even and speedups from two latencies, by arithmetic alone; no model, no torch.

    python -m harness.breakeven draft_ms=22.09 target_ms=29.92
    python -m harness.breakeven draft_ms=22.09 target_ms=29.92 k=[4] acceptance_rate=0.34
    python -m harness.breakeven draft_ms=2 target_ms=13.4 k=[1,2] verify_ms=[13.4,13.6,13.9]
    python -m harness.breakeven latency_from=results/A_PROFILE acceptance_by_position=[0.7,0.5,0.3]

What each K could gain if everything were accepted, the alpha it needs to break even, and the
speedup at the alphas listed. `verify_ms` entry i is the target's time over i positions, so K needs
K + 1 of them. An acceptance_rate (accepted / drafted) is not an alpha: give it under its own name.

With an acceptance there is a verdict. `vllm bench serve` prints one by position
(spec_decode_per_position_acceptance_rates) and a time per token (mean_tpot_ms). Latencies may be
those of a run of this harness.
"""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("breakeven")


if __name__ == "__main__":
    main()
