"""Which draft model and which K to serve with a target, here, or not to speculate at all.

The doors, each run with `python -m`: harness.profile, harness.breakeven, harness.sweep,
harness.snapshot, harness.report. Below them, imports go down only: experiments, reporting and
measurement, decoding and models, theory, records, config.
"""

# What pip calls it: the name in pyproject.toml
PACKAGE = "speculation-harness"
