"""Every number of stored runs' summaries against tests/numbers, to nine digits.

The golden reports (test_reports) round to two or three digits: they hold layout, and these files
hold the numbers, and the codes next to them. `pytest tests/test_numbers.py --renew-golden` (or
`make golden`) writes them anew; read the difference before committing it.

A path names the keys on the way to a value, and an entry of a list by what it is of:
`results/engine=own,draft=tiny_good,prompt_set=easy,temperature=0.0,k=2/speedup`.
"""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from runs import EXAMPLES, FROZEN, analysed, ran
from server_answers import turns, vllm_answers, vllm_page
from stand_in_server import StandIn

from harness.summary import to_json

HERE = Path(__file__).parent
NUMBERS = HERE / "numbers"
RELATIVE, ABSOLUTE = 1e-9, 1e-12
SHOWN = 10  # of the paths that differ

# What was removed on purpose, by a pattern of its paths (`*` stands for any characters), and why.
# It may be missing; while it is there it must be what it was.
REMOVED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("batch_gains/*", "block_gains/*", "bytes_read/*", "card_drafts/*", "length_alpha/*"),
            *("leaderboards/*/draft_step_s", "request/*", "rules_of_thumb/*"),
            *("served/acceptance_lengths/*", "stopping_batches/*"),
        ),
        "no decision hung on it: docs/decisions/0026-what-left-the-pages.md",
    ),
    "answers/*/pairs/chance_to_decide": "a prompt set keeps no run going: docs/decisions/0030",
    **dict.fromkeys(
        (
            *("comparison/*/source", "comparison/caveats/code=plain_moved*"),
            *("comparison/engines/*", "comparison/every/*"),
            *(
                f"comparison/caveats/code={code}*"
                for code in ("machine_changed", "different_devices")
            ),
        ),
        "runs are compared pair by pair alone",
    ),
    **dict.fromkeys(
        (
            *("plan/drafts/*", "plan/measured_draft", "plan/*/draft"),
            *("plan/choices/policy=tiers*", "plan/choices/policy=oracle*"),
        ),
        "a plan is of the draft that was served: no draft, fixed K, K by load",
    ),
    "speedups_by_k/*/rule": "the linear rule holds for a measured rate alone",
    **dict.fromkeys(
        (
            *("served/by_k/*/whole_request_speedup", "served/by_k/*/round_cost"),
            "served/costs/*start_error_s",
            "served/latencies/*/paired/*",
        ),
        "no page showed it: docs/decisions/0028-pages-and-caveats-are-records.md",
    ),
    "*/reason_values/measured": "a verdict from given numbers is of no server's own speedup",
    "explanation/*": "of losses alone; tables have the rest",
    **dict.fromkeys(
        ("outlier_cells/*", "caveats/code=outlier_generations*"),
        "its interval has what a few generations decide",
    ),
    **dict.fromkeys(
        ("results/*source=replayed*/ttft_ms", "results/*source=replayed*/request_speedup"),
        "whole requests are measured",
    ),
    "unstable/*draft=*": "steps price nothing; a profile marks them",
    **dict.fromkeys(("generation_s", "scoring_s"), "the manifest has them"),
    **dict.fromkeys(
        (
            *("memory/*/device", "memory/*/kv_bytes_per_token", "memory/*/fits"),
            *("memory/*/context_tokens", "memory/*/sequences"),
        ),
        "no page showed it: docs/decisions/0028-pages-and-caveats-are-records.md",
    ),
    "leaderboards/*/usd_per_million_tokens": "the price of a token / the speedup",
    "leaderboards/*/draft_memory_bytes": "memory has it",
    "category_alpha/*": "a user's category is a prompt set, which has a verdict",
    "adaptive/*": "a threshold is a candidate: 0034-a-threshold-is-part-of-the-grid.md",
    **dict.fromkeys(
        (
            *("replay_checks/*/prompts", "replay_checks/*/measured_*"),
            *("replay_checks/*/replayed_*", "replay_checks/*/p_value"),
        ),
        "results has both rates; the page shows their gap",
    ),
    "acceptance_by_position/*": "no page showed it: 0028-pages-and-caveats-are-records.md",
    "steps/*/context_tokens": "latency has it",
    "rounds/*": "R(K) / R(0) says what a round costs",
    "least_regret/*": "the verdict names one K, and the grid the best of each prompt set",
    "served/*/predicted_ratio": "K by load is chosen by it, and no page showed it",
    "served/cells/*": "measured and predicted rows of results have it",
    **dict.fromkeys(
        ("served/load/*/requests", "served/load/*/ms_per_token"),
        "waits under the same load have it",
    ),
    "served/latencies/*/within_goals": "percentiles are next to a goal, and plans meet one",
    "served/latencies/*/visits/*": "a caution names the K that lack visits",
    "served/schedules/*/loss": "the K that tie with the named one have the spread of visits",
    "served/other_ks/*": "likewise, and the answers of each prompt set and temperature",
    "served/structured*": "answers of a server are not checked",
    "*/round_fit*": "a server's csv of rounds is no longer read",
    "round_fit*": "likewise",
    "running/*intervals/*": "counters are scraped twice",
    "running/*restarts": "likewise",
    **dict.fromkeys(
        (
            "served/load/*/groups/*",
            "results/*source=replayed*concurrency=[!1]*",
            "caveats/code=load_predictions_off*",
        ),
        "loads are no longer predicted from others: docs/decisions/0027-k-by-load.md",
    ),
    **dict.fromkeys(
        (
            *(
                f"caveats/code={code}*"
                for code in (
                    *("scattered_steps", "unstable_timings", "launch_bound", "rounds_of_engine"),
                    *("counters_of_longer_drafts", "counters_under_load"),
                    "plan_rate_not_measured",
                )
            ),
            "comparison/caveats/code=other_weights*",
        ),
        "merged, or said elsewhere: docs/decisions/0029-pages-and-caveats-are-records.md",
    ),
}

# What is not compared, and why
SKIPPED: dict[str, str] = {
    "run/made_with/*": "of a command run here, this machine's",
    "run/created_utc": "of a command run here, now",
    "running/*seconds": "between scrapes, as this machine made them",
    "running/*end_s": "likewise",
}

FROZEN_RUNS = sorted(path.name for path in FROZEN.iterdir())
EXAMPLE_RUNS = sorted(path.name for path in EXAMPLES.iterdir())
FEW = ("seeds=2", "requests=100")
PLAN = ("rate=60", "tpot_ms=6", "ttft_ms=60", *FEW)
PRICED = ("alpha=[0.6,0.8]", "k=[1,2,4]", "acceptance_by_position=[0.7,0.5,0.3,0.2]")
# What follows from stored runs by a command that loads no model; {url} is of a running server
DERIVED: dict[str, tuple[str, ...]] = {
    "breakeven_of_a_run": ("breakeven", "latency_from=tests/frozen/profile", *PRICED),
    "comparison": ("report", "runs=[tests/frozen/sweep,tests/frozen/sweep_small]"),
    "comparison_of_servers": ("report", "runs=[tests/frozen/server,tests/frozen/server_load]"),
    "counters": ("report", "metrics={url}", "latency_from=tests/frozen/server"),
    "plan": ("plan", "run=tests/frozen/server_load", *PLAN),
}

# What an entry of a list is of, as far as it says it
IDENTITY = (
    *("code", "cause", "reference", "run", "engine", "source", "rule", "convention", "policy"),
    *("role", "model", "draft", "kind", "name", "device", "prompt_set", "category", "axis", "low"),
    *("high", "prompt", "group", "temperature", "k", "concurrency", "varying", "tokens"),
    *("context_tokens", "batch", "repetition"),
)


def matching(path: str, patterns: Mapping[str, str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def kept(value: Any, path: str = "") -> Any:
    """A summary's numbers and codes; None where nothing of a value is compared.

    A code, or a name, is a string without a space and a slash: sentences and folders go.
    """
    if isinstance(value, dict):
        entries = {name: kept(each, f"{path}/{name}".lstrip("/")) for name, each in value.items()}
        return {name: each for name, each in entries.items() if each is not None} or None
    if isinstance(value, list):
        entries = [kept(each, f"{path}/*") for each in value]
        return entries if any(each is not None for each in entries) else None
    prose = isinstance(value, str) and (not value or any(c in value for c in " /\n"))
    return None if prose or matching(path, SKIPPED) else value


def text_of(value: Any) -> str:
    """JSON in which what is short stands on one line, so that a difference of files is short."""
    line = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if len(line) <= 1000 or not isinstance(value, dict | list):
        return line
    if isinstance(value, list):
        return "[\n" + ",\n".join(map(text_of, value)) + "\n]"
    return "{\n" + ",\n".join(f"{json.dumps(key)}:{text_of(value[key])}" for key in value) + "\n}"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What is compared, by its path."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from leaves(each, f"{path}/{name}".lstrip("/"))
    elif isinstance(value, list):
        count = Counter[str]()
        for each in value:
            label = identity(each, path) if isinstance(each, dict) else ""
            count[label] += 1
            number = f"#{count[label]}" if count[label] > 1 or not label else ""
            yield from leaves(each, f"{path}/{label}{number}")
    elif value is not None:
        yield path, value


def identity(entry: Mapping[str, Any], path: str) -> str:
    """What an entry of a list is of; a key that was removed on purpose names nothing any more."""
    known = (name for name in IDENTITY if isinstance(entry.get(name), str | int | float))
    left = (name for name in known if not matching(f"{path}/*/{name}", REMOVED))
    return ",".join(f"{name}={entry[name]}" for name in left)


def same(stored: Any, made: Any) -> bool:
    numbers = (int, float)
    if type(stored) in numbers and type(made) in numbers:
        return math.isclose(stored, made, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(stored) is type(made) and stored == made


@cache
def made(name: str) -> Any:
    """What is compared of a stored run, as its summary.json would have it."""
    return kept(json.loads(to_json(analysed(name))))


def compared(name: str, now: Any, *, renew: bool) -> None:
    file = NUMBERS / f"{name}.json"
    if renew:
        file.write_text(text_of(now) + "\n", encoding="utf-8")
    stored, found = dict(leaves(json.loads(file.read_text("utf-8")))), dict(leaves(now))
    assert stored
    wrong = [
        f"{path}: {value!r}, now {found.get(path, 'missing')!r}"
        for path, value in stored.items()
        if not (same(value, found[path]) if path in found else matching(path, REMOVED))
    ]
    new = len(found.keys() - stored)
    sys.stdout.write(f"{name}: {len(stored)} numbers and codes, and {new} new ones\n")
    shown = "\n".join(wrong[:SHOWN])
    assert not wrong, f"{name}: {len(wrong)} of {len(stored)} differ, first\n{shown}"


@pytest.mark.parametrize("name", [*FROZEN_RUNS, *EXAMPLE_RUNS])
def test_a_stored_run_has_the_numbers_that_it_had(name: str, pytestconfig: pytest.Config) -> None:
    compared(name, made(name), renew=bool(pytestconfig.getoption("renew_golden")))


@pytest.mark.parametrize("name", DERIVED)
def test_what_follows_from_stored_runs_has_the_numbers_that_it_had(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.chdir(HERE.parent)  # stored runs name each other from there
    monkeypatch.setattr("harness.reporting.render", lambda *_: None)
    monkeypatch.setattr("harness.commands.served_elsewhere.INTERVAL_S", 0.01)
    server = StandIn(vllm_answers(**{"/metrics": turns(vllm_page)}))
    command, *words = DERIVED[name]
    folder = ran(command, tmp_path, *(word.format(url=server.url) for word in words)).folder
    server.close()
    now = kept(json.loads((folder / "summary.json").read_text("utf-8")))
    compared(name, now, renew=bool(pytestconfig.getoption("renew_golden")))


def test_numbers_are_stored_of_these_runs_and_of_no_others() -> None:
    stored = {file.name for file in NUMBERS.iterdir()}
    assert stored == {f"{name}.json" for name in (*FROZEN_RUNS, *EXAMPLE_RUNS, *DERIVED)}


def test_a_changed_or_missing_number_is_found_by_its_path_and_a_removed_one_may_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without(name: str, row: int = 0) -> Any:
        changed = json.loads(json.dumps(made("breakeven")))
        del changed["results"][row][name]
        return changed

    def said(now: Any) -> str:
        with pytest.raises(AssertionError) as error:
            compared("breakeven", now, renew=False)
        return str(error.value)

    compared("breakeven", made("breakeven"), renew=False)
    changed = json.loads(json.dumps(made("breakeven")))
    (row, *_) = changed["results"]
    was = row["tokens_per_round"]
    row["tokens_per_round"] *= 1 + 1e-10
    changed["results"].append({"k": 99, "speedup": 2.0})  # new
    compared("breakeven", changed, renew=False)
    row["tokens_per_round"] = was * (1 + 1e-8)
    assert "1 of " in said(changed)
    assert re.search(r"results/\S*k=\d\S*/tokens_per_round: \S+, now", said(changed))
    assert "tokens_per_round" in said(without("tokens_per_round"))
    monkeypatch.setitem(REMOVED, "results/*/tokens_per_round", "of this test")
    compared("breakeven", without("tokens_per_round"), renew=False)
    assert "1 of " in said(changed)  # it is still there
    # Rows are told apart by `source`, until it is removed
    assert "source" in said(without("source"))
    monkeypatch.setitem(REMOVED, "results/*/source", "of this test")
    for row in (everywhere := json.loads(json.dumps(made("breakeven"))))["results"]:
        del row["source"]
    compared("breakeven", everywhere, renew=False)
