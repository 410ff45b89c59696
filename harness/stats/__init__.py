"""Statistics that know nothing of models: the jackknife, and cross-fitting."""
