"""The facts of each engine that serves a pair, and of each kind of draft, as data.

`vllm.py`, `sglang.py`, `llamacpp.py`, ... are one engine each: its acceptance rules, drafts,
counting, flags and serving lines, with the source of each fact. `spec.py` has the record that they
fill, with the rules by which an engine counts rounds and drafted tokens, and `engines.py` lists
them. `draft_kinds.py` has the kinds of draft.

Configuration, `--help`, analysis and reports read these modules, so they import no torch.
`harness.engines` starts engines and sends requests to them, `harness.models.heads` loads heads.
"""
