"""The sentences of reports, a module for each subject; a Summary holds codes and numbers only.

    run          banner, status, engine, failures and caveats of a run
    verdict      the decision and its reason, the next step, the outcome of a snapshot
    explanation  what prevents a gain, and what would change it; rules of thumb
    served       a server run: load, reasons, prediction errors, losslessness, memory
    running      a running server's counters: tokens per round, and which K pays
    plan         a plan: the choice, the cards it needs, what one card serves
    comparison   compared runs: speedups and their ratios

The console, report.md, report.html and the index share these sentences. The codes, and the values
that each sentence quotes, are in `harness/summary.py`; a new code gets its sentence here.
"""


def as_sentence(clause: str) -> str:
    """A clause with a capital letter and a full stop."""
    ended = clause if clause.endswith((".", "!", "?", ")")) else f"{clause}."
    return ended[0].upper() + ended[1:]
