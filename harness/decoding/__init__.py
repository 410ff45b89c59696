"""The loop: plain and speculative decoding as generators of rounds.

Nothing here knows of clocks, files or configuration. A loop asks for a `CausalModel` (protocols.py)
whose cache is filled with prompt[:-1], and yields one `Round` per turn; whoever wants to know how
long that took times the iterator (`harness.measurement`).
"""
