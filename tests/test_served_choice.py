"""A server run that measures the K that replay chooses: which servers it asks what, and says."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import outcome_of, ran
from runs import stored as stored_of

from harness.analysis import analyse
from harness.analysis.looks import best_started, most_started, searched_next, to_start
from harness.analysis.verdict import Candidate, Evidence, Timed, decide
from harness.cli import compose
from harness.commands import server as command
from harness.commands import server_plan, server_visits
from harness.commands.server_plan import SAFE_SHARE, Pace, expected, fitted
from harness.commands.tasks import EncodedPrompt, everything
from harness.engines.own import OwnLoop
from harness.records import Prompt, UserError
from harness.stats.verdict_interval import look_shares
from harness.storage import StoredRun
from harness.storage.manifest import ServedKs
from harness.summary import from_json, to_json

pytestmark = pytest.mark.usefixtures("few_samples")
PROMPTS, VISITS = 5, 2
GRID = [
    *("engine=own", "k=[1,2,3,6]", "temperature=[0]", f"prompts.limit={PROMPTS}"),
    *(f"repetitions={VISITS}", "new_tokens=12", "threads=1"),
]
# Where it does not matter how many prompts price the rounds of other K
FEW = 2
SHORT = [*GRID, f"prompts.limit={FEW}"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredRun]:
    """A run whose looks decide nothing, so that it makes all of them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_visits, "decided", lambda *_: frozenset())
        yield ran("server", f"results_root={tmp_path_factory.mktemp('results')}", *GRID)


def chosen_of(run: StoredRun) -> ServedKs:
    chosen = run.manifest.served_ks
    assert chosen is not None
    return chosen


def test_every_prompt_is_asked_plainly_and_at_one_k_and_few_at_the_others(run: StoredRun) -> None:
    chosen = chosen_of(run)
    assert chosen.started[:2] == (2, 3)
    assert len(chosen.started) == 3
    k = chosen.k_at(0.0)
    assert k in chosen.started
    done = Counter((trial.k, trial.repetition) for trial in run.trials)
    # The plain texts by which K was chosen are asked again next to it
    assert done == {
        (0, 0): 4 * PROMPTS,
        (0, 1): 2 * PROMPTS,
        **{(k, visit): 2 * PROMPTS for visit in range(VISITS)},
    }
    assert {trial.k for trial in run.probes} == {0, *chosen.started}
    few = {(trial.prompt_set, trial.prompt) for trial in run.probes}
    assert Counter(name for name, _ in few) == {"easy": 4, "hard": 4}
    assert {trial.k for trial in run.starts} == {0, *chosen.started}
    assert not run.rounds, "a server that rejects every draft is one more"


def test_only_the_chosen_k_is_measured_and_the_others_are_predicted(run: StoredRun) -> None:
    summary, k = analyse(run), chosen_of(run).k_at(0.0)
    measured = [row for row in summary.results if row.source == "measured"]
    assert {row.k for row in measured} == {0, k}
    assert {row.status for row in measured} == {"complete"}
    predicted = {(row.prompt_set, row.k) for row in summary.results if row.source == "replayed"}
    priced = (0, *chosen_of(run).started)
    assert predicted == {(name, each) for name in ("easy", "hard") for each in priced}
    assert summary.served is not None
    assert {row.k for row, _ in summary.predicted_cells} == {k}
    assert {entry.k for entry in summary.served.by_k} == {k}
    assert {answer.named[1] for answer in summary.answers} == {k}
    assert {answer.source for answer in summary.answers} == {"measured"}
    assert not any(entry.code == "server_visits_lacking" for entry in summary.caveats)
    assert from_json(to_json(summary)) == summary


def test_an_answer_names_the_measured_k_even_where_another_is_predicted_to_gain_more() -> None:
    rng, prompts = np.random.default_rng(0), 24
    plain = Timed(np.full(prompts, 1.0), np.full(prompts, 100.0))
    spread = np.exp(0.05 * rng.standard_normal(prompts))
    seconds = {1: 0.8 * spread, 2: 0.7 * spread}
    evidence = Evidence(
        temperature=0.0,
        names=tuple(("ab"[2 * n // prompts], str(n)) for n in range(prompts)),
        baseline=plain,
        candidates={Candidate("d", k): Timed(each, plain.tokens) for k, each in seconds.items()},
    )
    assert decide(evidence).k == 2
    answer = decide(replace(evidence, named=Candidate("d", 1)))
    assert (answer.decision, answer.k) == ("speculate", 1)
    assert answer.speedup == pytest.approx(1.25, rel=0.03)
    of_set = decide(replace(evidence, named=Candidate("d", 1)), prompt_set="a")
    assert of_set.k == 1


def slower(run: StoredRun, ks: set[int], factor: float) -> StoredRun:
    """The run as it is when K is chosen, had the rounds of some K taken longer."""
    return replace(
        run,
        trials=tuple(t for t in run.trials if t.k == 0 and t.repetition == 0),
        manifest=replace(run.manifest, served_ks=None),
        **{
            name: tuple(
                replace(t, decode_s=(t.decode_s or 0.0) * (factor if t.k in ks else 1.0))
                for t in getattr(run, name)
            )
            for name in ("probes", "starts")
        },
    )


@pytest.mark.parametrize("number", range(1, 14))
def test_the_search_finds_the_largest_of_what_rises_and_falls_with_few_looks(number: int) -> None:
    ks, looks = [2 * k + 1 for k in range(number)], []
    for best in range(number):
        # Whatever the slopes: they fall by less than they rise, and the other way
        for left, right in ((1.0, 0.01), (0.01, 1.0)):
            speedup = {
                k: -abs(at - best) * (left if at < best else right) for at, k in enumerate(ks)
            }
            known: dict[int, float] = {}
            while lacking := searched_next(ks, known):
                assert not {*lacking} & {*known}
                known |= {k: speedup[k] for k in lacking}
            if number > 1:
                assert max(known, key=known.__getitem__) == ks[best]
            looks.append(len(known))
    assert max(looks) <= most_started(number, 1) <= max(number, 1)
    assert most_started(4, 1) == 3


def test_servers_are_started_towards_the_fastest_k(run: StoredRun) -> None:
    ks = (1, 2, 3, 6)

    def only(priced: tuple[int, ...], slow: dict[int, float]) -> StoredRun:
        """The run as it is when so many K are priced, had the rounds of some taken longer."""
        made = run
        for k, factor in slow.items():
            made = slower(made, {k}, factor)
        probes, starts = (
            tuple(t for t in x if t.k in (0, *priced)) for x in (made.probes, made.starts)
        )
        return replace(slower(made, set(), 1.0), probes=probes, starts=starts)

    assert to_start(run, ks, ()) == (2, 3)
    known = tuple(sorted(chosen_of(run).started))
    assert {2, 3} < {*known}
    assert len(known) == 3
    # Where rounds of one of both cost ten times as much, the next lies on the other's side
    for slow, further in ((2, 6), (3, 1)):
        assert to_start(only((2, 3), {slow: 10.0}), ks, (2, 3)) == (further,)
    assert not to_start(only(known, {}), ks, known)
    for k in known:
        made = only(known, {other: 50.0 for other in known if other != k})
        assert [each.k for each in best_started(made, known)] == [k]
    assert best_started(only((), {}), (2, 3)) == ()
    assert to_start(only((), {}), ks, (2, 3)) == ()


class Stops:
    """Interrupts a run before a request of the chosen K, or of one that prices rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: str = "trials", k: int = 0) -> None:
        self._left, self._ask, self._file, self._k = 3, server_visits._ask, file, k
        monkeypatch.setattr(server_visits, "_ask", self)

    def __call__(self, work: Any, server: Any, task: Any, turn: Any) -> Any:
        if task.file == self._file and (task.role.k == self._k if self._k else task.role.k):
            self._left -= 1
            if not self._left:
                raise KeyboardInterrupt
        return self._ask(work, server, task, turn)


def test_a_resumed_run_measures_the_k_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = compose("server", [f"results_root={tmp_path}", *SHORT])
    with monkeypatch.context() as patched:
        Stops(patched)
        with pytest.raises(KeyboardInterrupt):
            command.run(asked)
    (folder,) = tmp_path.iterdir()
    before = json.loads((folder / "manifest.json").read_text())["served_ks"]
    monkeypatch.setattr(server_visits, "decided", lambda *_: frozenset())
    probes = (folder / "probes.jsonl").read_bytes()
    # Whatever would be chosen now
    monkeypatch.setattr(server_visits, "best_started", lambda *_: ())
    again = ran("server", f"resume={folder}")
    after = json.loads((folder / "manifest.json").read_text())["served_ks"]
    assert (after["started"], after["chosen"]) == (before["started"], before["chosen"])
    assert (after["made"], after["ended"]) == (4, "prompts")
    assert (folder / "probes.jsonl").read_bytes() == probes
    k = chosen_of(again).k_at(0.0)
    done = {(t.k, t.prompt_set, t.prompt, t.repetition) for t in again.trials if t.status == "ok"}
    assert len(done) == 2 * 2 * FEW * VISITS
    assert {each for each, *_ in done} == {0, k}


@pytest.mark.exhaustive
def test_a_run_that_stopped_within_its_search_completes_the_k_that_it_had_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last that the search comes to, whichever it is by these times
    turns = iter([(2, 3), (6,)])
    with monkeypatch.context() as patched:
        Stops(patched, "probes", 6)
        patched.setattr(server_visits, "to_start", lambda *_: next(turns))
        with pytest.raises(KeyboardInterrupt):
            command.run(compose("server", [f"results_root={tmp_path}", *SHORT]))
    (folder,) = tmp_path.iterdir()
    again = ran("server", f"resume={folder}")
    assert sorted(chosen_of(again).started) == [2, 3, 6]
    assert {trial.k for trial in again.probes} == {0, 2, 3, 6}
    done = Counter(trial.k for trial in again.probes if trial.status == "ok")
    assert done[6] == done[2] == 2 * FEW * VISITS


@pytest.mark.exhaustive
def test_where_a_server_that_prices_rounds_fails_every_k_is_measured_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: Callable[..., Any] = OwnLoop.open

    def open_(self: OwnLoop, k: int, synthetic: Any = None) -> Any:
        if k == 3:
            raise UserError("K=3 is too many here")
        return opened(self, k, synthetic)

    monkeypatch.setattr(OwnLoop, "open", open_)
    outcome = outcome_of("server", f"results_root={tmp_path}", *SHORT)
    run = stored_of(outcome)
    assert outcome.status == 1
    assert chosen_of(run).why_all == "server_failed"
    done = Counter(trial.k for trial in run.trials if trial.status == "ok")
    assert all(done[k] == 2 * FEW * VISITS for k in (1, 2, 6))
    assert run.rounds, "as where all are asked for"
    assert "every K is measured: a server that was to tell what its rounds cost" in caplog.text


@pytest.mark.exhaustive
def test_where_few_requests_tell_no_costs_every_k_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_visits, "best_started", lambda *_: ())
    run = ran("server", f"results_root={tmp_path}", *SHORT)
    assert chosen_of(run).why_all == "no_costs"
    measured = run.results[run.results.source == "measured"]
    assert {*measured.k} == {0, 1, 2, 3, 6}
    assert {*measured.status} == {"complete"}
    assert "every K is measured: few requests do not tell what rounds cost here" in caplog.text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["k=[1,2,4]"], "3 K or fewer"),
        (["engine=llamacpp", "concurrency=[1,4]"], "concurrency or rate"),
        (["engine=llamacpp", "rate=2"], "concurrency or rate"),
        (["engine=llamacpp", "score=false"], "score=false"),
        (["engine=openai"], "engine=openai"),
        (["engine=llamacpp", f"url=[{','.join(['http://127.0.0.1:9'] * 5)}]"], "url"),
    ],
)
def test_what_measures_every_k_does_so_by_default_and_refuses_to_choose_one(
    words: list[str], named: str
) -> None:
    asked = [*GRID, *words]
    assert [compose("server", each).until for each in (GRID, asked)] == ["decided", "all"]
    with pytest.raises(UserError, match=f"until=decided: not with {named}"):
        compose("server", [*asked, "until=decided"])


# ---- looks and the budget ------------------------------------------------------------------------


def test_a_run_ends_at_the_look_that_decides_it_and_lacks_no_visit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_visits, "decided", lambda _, look: {0.0} if look == 2 else ())
    run = ran("server", f"results_root={tmp_path}", *SHORT)
    chosen = chosen_of(run)
    assert (chosen.made, chosen.ended) == (2, "decided")
    k = chosen.k_at(0.0)
    assert sum(trial.k == k for trial in run.trials) == 2 * FEW * VISITS // 2
    summary = analyse(run)
    assert {row.status for row in summary.results if row.source == "measured"} == {"complete"}
    assert not any(entry.code == "server_visits_lacking" for entry in summary.caveats)
    said = capsys.readouterr().err
    assert said.index("plan: ") < said.index("first answer: ") < said.index("after look 1 of 4: ")


def test_bounds_at_an_earlier_look_are_wider_than_at_the_last() -> None:
    rng, prompts = np.random.default_rng(0), 24
    plain = Timed(np.full(prompts, 1.0), np.full(prompts, 100.0))
    seconds = 0.9 * np.exp(0.1 * rng.standard_normal(prompts))
    evidence = Evidence(
        temperature=0.0,
        names=tuple(("a", str(n)) for n in range(prompts)),
        baseline=plain,
        candidates={Candidate("d", 1): Timed(seconds, plain.tokens)},
        named=Candidate("d", 1),
    )
    widths = [
        (answer.speedup_hi or 0.0) - (answer.speedup_lo or 0.0)
        for answer in (decide(replace(evidence, looks=look_shares(made))) for made in (1, 2, 4))
    ]
    assert widths[0] > widths[1] > widths[2]


def test_what_does_not_fit_the_budget_is_left_out_in_the_stated_order() -> None:
    config = compose("server", ["k=[1,2,4,8]", "new_tokens=256", "repetitions=4"])
    prompts = [
        EncodedPrompt(Prompt("easy" if n % 2 else "hard", str(n), ("words",)), (1,) * 100)
        for n in range(20)
    ]
    pace = Pace(start_s=1.0, prompt_token_s=0.03, token_s=0.06)
    whole = expected(everything(config, prompts), config, prompts, pace).total_s
    assert fitted(config, prompts, pace, whole / SAFE_SHARE)[0].everything
    made = [fitted(config, prompts, pace, whole / part) for part in (2, 4, 8, 16, 32, 64, 128)]
    for less, fits in made[:-1]:
        assert not less.everything
        assert less.repetitions == 1 or less.new_tokens == 256
        assert less.new_tokens == 64 or less.temperature == (0.0, 1.0)
        assert less.temperature == (0.0,) or less.prompts == 20
        assert less.prompts == 12 or less.k == (1, 2, 4, 8)
        assert fits.total_s > 0.0
    last, _ = made[-1]
    assert (last.repetitions, last.new_tokens, last.temperature) == (1, 64, (0.0,))
    assert (last.prompts, last.k, last.of_each_set) == (12, (2, 4), 1)


@pytest.mark.exhaustive
def test_a_run_that_would_take_longer_than_its_budget_asks_for_less_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Pace(start_s=1.0, prompt_token_s=0.05, token_s=30.0)
    monkeypatch.setattr(server_plan, "_pace", lambda *_: slow)
    words = [*GRID, "temperature=[0,1]", "new_tokens=256", "prompts.limit=10"]
    run = ran("server", f"results_root={tmp_path}", *words)
    less = run.manifest.asked_less
    assert less is not None
    assert (less.repetitions, less.new_tokens, less.temperature) == (1, 64, (0.0,))
    assert run.config["new_tokens"] == 64
    assert max(len(trial.tokens or ()) for trial in run.trials) <= 64
    assert len({(trial.prompt_set, trial.prompt) for trial in run.trials}) == less.prompts == 12
    (caveat,) = [each for each in analyse(run).caveats if each.code == "server_asked_less"]
    assert caveat.values["prompts"] == 12
    said = capsys.readouterr().err
    assert (
        "visits 2 -> 1; tokens a text 256 -> 64; temperatures 0, 1 -> 0; prompts 20 -> 12" in said
    )
    again = ran("server", f"resume={run.folder}")
    assert again.trials == run.trials


def test_a_budget_that_scoring_alone_would_take_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Pace(start_s=1.0, prompt_token_s=1000.0, token_s=1000.0)
    monkeypatch.setattr(server_plan, "_pace", lambda *_: slow)
    words = [*GRID, "temperature=[0]", "prompts.limit=4", "budget_s=60"]
    with pytest.raises(UserError, match=r"budget_s=60: scoring the texts .* budget_s=\d"):
        outcome_of("server", f"results_root={tmp_path}", *words)
