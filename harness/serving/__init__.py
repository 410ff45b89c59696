"""Facts of each engine that serves a pair, and of each kind of draft.

`spec.py` has the record of an engine and `engines.py` lists them; most have a module of their own,
with the source of each fact. `drafts.py` has the kinds of draft. `round_counting.py` has the rules
by which an engine counts rounds and drafted tokens, which replay follows to give the same numbers.
`harness.engines` starts engines and sends requests to them, `harness.models.heads` loads heads.
"""
