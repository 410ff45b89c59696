"""Statistics that know nothing of models: jackknife, bounds of a chosen speedup, skew sums."""
