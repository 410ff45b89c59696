"""Measurements: step and round times, timed generations, scores of drafts, and the machine."""
