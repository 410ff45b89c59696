"""Statistics that know nothing of models: the jackknife, cross-fitting, sums of skew terms."""
