"""A continuously batching server, simulated from stored texts: what users wait for at a rate.

`requests` says what arrives and when, `server` runs the clock, and `policies` decide how many
tokens each round drafts. All of it is seeded, and knows no wall clock, no model and no file.
"""
