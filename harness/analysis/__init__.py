"""From a stored run to its `Summary`: pure, without a model, a clock or a file.

`analyse` is the one way there, for every command, and for complete, interrupted and resumed runs
alike; what a run lacks is left empty. Evidence: `setup` reads configuration and manifest, `cells`,
`replayed`, `round_costs` and `lossless` turn what was measured into counts, `scored_drafts` and
`server_texts` are what a pair and a server stored. Decision: `predicted` and `server_predictions`
join rounds and costs, `verdict` and `answers` decide. The modules that `analyse` imports make the
summary of each command, `comparison` that of several runs.
"""

from dataclasses import replace

from harness.storage import StoredRun
from harness.summary import Summary


def analyse(run: StoredRun) -> Summary:
    """Derive everything that a run says from what it stored.

    Raises:
        UserError: traces, step times or settings that do not fit together.
    """
    # numpy, scipy and pandas are imported where they are used, so that --help does not wait
    from harness.analysis.breakeven import analyse_breakeven
    from harness.analysis.counters import analyse_counters
    from harness.analysis.plan import analyse_plan
    from harness.analysis.profile_and_snapshot import analyse_profile, analyse_snapshot
    from harness.analysis.served_audition import analyse_served_audition
    from harness.analysis.server_run import analyse_served
    from harness.analysis.setup import Setup, run_facts
    from harness.analysis.sweep_and_audition import analyse_pair

    commands = {
        "sweep": analyse_pair,
        "audition": analyse_pair,
        "profile": analyse_profile,
        "breakeven": analyse_breakeven,
        "snapshot": analyse_snapshot,
        "server": analyse_served,
        "metrics": analyse_counters,
        "plan": analyse_plan,
    }
    setup = Setup(run)
    if setup.command not in commands:
        # What a comparison rests on is in other folders
        facts = run_facts(setup, ())
        return Summary(facts) if run.summary is None else replace(run.summary, run=facts)
    made = commands[setup.command]
    if setup.command == "audition" and str(setup.conf("model").get("id")).endswith(".gguf"):
        made = analyse_served_audition
    return replace(made(setup), cards=run.manifest.cards)
