"""What is known of each engine that serves a pair, as data.

`counting.py`: where an engine's rounds begin and how its last draft ends, which replay must follow
to give the same numbers as the engine.
"""
