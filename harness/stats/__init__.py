"""Statistics that know nothing of models: the bootstrap, ratio tests, cross-fitting."""
