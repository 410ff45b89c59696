"""The work of the commands: plan the cells, execute or resume them, finish the run.

A module with the name of a command has its `run`; the others are parts, most of several commands.

No Hydra and no argv here: a command line, a notebook or a cloud function hands over a configuration
object and gets an `Outcome` back.
"""
