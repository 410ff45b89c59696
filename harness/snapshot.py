"""Does speculation leave the output unchanged?

    python -m harness.snapshot                          the embedded pair, greedy, K = 4
    python -m harness.snapshot temperature=[1.0]        the distribution drawn from, by chi-square
    python -m harness.snapshot show=tokens              which tokens the draft proposed

Greedy: the speculative text must equal the plain one, token by token, on every prompt (PASS), or
differ first where two logits are closer than rounding (TIE); anything else is FAIL and exit 1.
At a temperature above 0, draws after one fixed prefix are tested against the exact probabilities.
"""

from harness.cli import run_app

if __name__ == "__main__":
    run_app("snapshot")
