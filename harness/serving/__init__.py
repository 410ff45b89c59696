"""Facts of each engine that serves a pair, and of each kind of draft.

`spec.py` has the record of an engine and `engines.py` lists them; most have a module of their own,
with the source of each fact. `drafts.py` has the kinds of draft. `round_counting.py` says where an
engine's rounds begin and how its last draft ends, which replay must follow to give the same numbers
as the engine. How engines are started and asked is in `harness.engines`, how heads are read in
`harness.models.heads`.
"""
