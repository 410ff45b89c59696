"""Every sentence of a report, one module a subject; a Summary holds codes and numbers only.

    run          what the run is: title, banner, status, engine, failures
    verdict      what to do, and the reason; the outcome of a snapshot
    explanation  why the verdict is what it is, and what would change it; rules of thumb
    caveats      what to know before acting, first what changes the reading of a number
    served       of a server run: what to serve on it, how well it was predicted, the gate
    running      of a running server's counters: tokens per round, which K pays
    comparison   the same for runs that are compared

The words are the same in the console, report.md, report.html and the index. `harness/summary.py`
has the table of codes and of the values that each quotes: a new code gets its sentence here.
"""


def as_sentence(clause: str) -> str:
    """A clause with a capital letter and a full stop."""
    ended = clause if clause.endswith((".", "!", "?", ")")) else f"{clause}."
    return ended[0].upper() + ended[1:]
