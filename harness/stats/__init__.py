"""Statistics that know nothing of models: the jackknife, cross-fitting, the bootstrap."""
