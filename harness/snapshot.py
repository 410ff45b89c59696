"""Does speculation leave the output unchanged?

    python -m harness.snapshot                          the embedded pair, greedy, K = 4
    python -m harness.snapshot temperature=[1.0]        the distribution drawn from, by chi-square

Greedy: the speculative text must equal the plain one, token by token, on every prompt (PASS), or
differ first where two logits are closer than rounding (TIE); anything else is FAIL and exit 1.
At a temperature above 0, draws after one fixed prefix are tested against the exact probabilities.
"""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("snapshot")


if __name__ == "__main__":
    main()
