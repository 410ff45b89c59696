"""What is known of each engine that serves a pair, as data, and of each kind of draft.

`spec.py` has the record of an engine, `engines.py` lists them, and a module for each has its facts
with their source. `counting.py` is where an engine's rounds begin and how its last draft ends,
which replay must follow to give the same numbers as the engine.
"""
