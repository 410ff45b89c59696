"""Which draft model and which K to serve with a target, here, or not to speculate at all.

The commands, each run with `python -m`: harness.profile, harness.breakeven, harness.sweep,
harness.audition, harness.snapshot, harness.server, harness.plan, harness.report. Data flows one
way: configure (`config`, `cli`), open the pair and measure (`commands`, `models`, `decoding`,
`measurement`), store (`storage`), analyse (`analysis`, with `theory`, `simulation` and `stats`: a
stored run in, a `summary.Summary` out) and render (`reporting`).
"""

# What pip calls it: the name in pyproject.toml
PACKAGE = "speculation-harness"
