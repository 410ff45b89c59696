"""The maths: formulas, intervals, verdicts. Numpy and scipy only; no clock, no files, no torch."""
