"""One module per command's work: plan the cells, execute or resume them, finish the run.

No Hydra and no argv here: a command line, a notebook or a cloud function hands over a configuration
object and gets an `Outcome` back.
"""
