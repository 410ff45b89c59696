"""What to do with an answer, in one sentence."""

from harness.records import GREEDY
from harness.reporting import grid
from harness.summary import Summary

SENTENCES = {
    "profile": "a sweep (python -m harness.sweep) measures whether alpha is that high",
    "breakeven": "a sweep (python -m harness.sweep) measures alpha for a pair",
}
AUDITION = "an audition (python -m harness.audition) looks for a draft that pays"
SERVERS = "url=[PLAIN,SPECULATIVE] score=false"
OTHER_DRAFTS = "name other drafts (drafts=[...])"


def next_step(summary: Summary) -> str | None:
    """What to do next; None where the answer says it all."""
    if summary.run.command in SENTENCES:
        return SENTENCES[summary.run.command]
    shown = grid.marked(summary)
    if shown is None or summary.run.dummies:
        return None
    answer = shown.row.answer
    if answer.decision == "undecided":
        return None
    if answer.decision == "does_not_pay":
        return OTHER_DRAFTS if summary.run.command == "audition" else AUDITION
    if summary.served is not None:
        return "serve your own requests so (prompts.files=[...] measures with them)"
    if answer.source == "measured":
        if shown.server == "transformers":
            return "run your own requests with this draft and without it, and compare"
        engine = shown.server.removesuffix("_probabilistic")
        return f"python -m harness.server engine={engine} measures this pair on that server"
    served_by = next((c.values["engine"] for c in summary.caveats if c.code == "texts_from"), None)
    if served_by is not None:
        keys = f"engine={served_by} k=[{answer.k}] temperature=[{answer.temperature:g}] {SERVERS}"
        return (
            f"start its server with this draft too; python -m harness.server {keys} measures both"
        )
    if summary.run.command == "audition":
        keys = f"draft={answer.draft} k=[{answer.k}] temperature=[{answer.temperature:g}]"
        if answer.temperature != GREEDY:
            keys += f" decode.rule={answer.rule}"
        return f"python -m harness.sweep {keys} (and this run's other keys) measures it"
    if summary.run.replay_only:
        return "the same sweep with mode=measure measures what is predicted"
    return f"the same sweep with decode.rule={answer.rule} measures what is predicted"
