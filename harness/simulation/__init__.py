"""A continuously batching server, simulated from stored texts: what users wait for at a rate.

`requests` says what arrives and when, and `server` runs the clock. All of it is seeded, and knows
no wall clock, no model and no file.
"""
