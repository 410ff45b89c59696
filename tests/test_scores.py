"""Tables of scores made elsewhere: read in every format, replayed and ranked without a model."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from runs import FROZEN, outcome_of, ran

from harness.analysis import analyse
from harness.analysis.replayed import replayed
from harness.records import RULES, TextTrace, UserError
from harness.reporting.content import content_of
from harness.storage import load_traces, traces
from harness.storage.imported_scores import read_scores, read_tables
from harness.summary import Caveat

DOCUMENT = Path(__file__).parents[1] / "docs" / "scores.md"
pytestmark = pytest.mark.usefixtures("no_plots")
# A stored audition of a draft model and a look-up, at temperatures 0 and 1
TIMES = ["latency.target_ms=12", "latency.draft_ms=1"]
NEEDED = ["draft", "prompt_set", "prompt", "token", "draft_is_argmax"]
SAMPLED = ["temperature", "repetition", "target_logprob", "draft_logprob"]
WRITERS: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    ".parquet": lambda frame, file: frame.to_parquet(file),
    ".csv": lambda frame, file: frame.to_csv(file, index=False),
    ".jsonl": lambda frame, file: frame.to_json(file, orient="records", lines=True),
}


def stored(*drafts: str, temperature: float | None = None) -> list[TextTrace]:
    return [
        trace
        for trace in load_traces(FROZEN / "audition")
        if trace.draft in drafts
        and temperature in (None, trace.temperature)
        and trace.draft_temperature == trace.temperature
    ]


def table_of(texts: list[TextTrace], file: Path) -> pd.DataFrame:
    """The rows that a run writes of these."""
    file.write_bytes(traces.content_of_traces(texts))
    return pd.read_parquet(file)


def assert_replayed_alike(made: list[TextTrace], texts: list[TextTrace]) -> None:
    assert [trace.tokens.tolist() for trace in made] == [trace.tokens.tolist() for trace in texts]
    for rule in RULES:
        one, other = replayed(made, rule, [1, 3]), replayed(texts, rule, [1, 3])
        for k in (1, 3):
            for name in ("rounds", "drafted", "accepted", "cut"):
                np.testing.assert_allclose(getattr(one[k], name), getattr(other[k], name))


@pytest.mark.parametrize("draft", ["tiny_good", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_traces_of_a_run_are_such_a_table(
    draft: str, temperature: float, tmp_path: Path
) -> None:
    texts = stored(draft, temperature=temperature)
    table_of(texts, tmp_path / "traces.parquet")
    assert_replayed_alike(read_scores(tmp_path / "traces.parquet"), texts)


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_few_columns_are_enough(suffix: str, temperature: float, tmp_path: Path) -> None:
    texts = stored("tiny_good", temperature=temperature)
    columns = [*NEEDED, "position", *(SAMPLED if temperature else [])]
    frame = table_of(texts, tmp_path / "traces.parquet")[columns]
    WRITERS[suffix](frame, tmp_path / f"scores{suffix}")
    made = read_scores(tmp_path / f"scores{suffix}")
    assert_replayed_alike(made, texts)
    assert {trace.stop_reason for trace in made} == {"budget"}


def test_rows_by_start_may_come_in_any_order_and_end_with_the_text(tmp_path: Path) -> None:
    texts = stored("ngram", temperature=0.0)[:2]
    frame = table_of(texts, tmp_path / "traces.parquet")
    frame = frame[frame["token"].notna()][[*NEEDED, "start", "offset", "proposed", "chosen"]]
    shuffled = frame.sample(frac=1.0, random_state=1)
    shuffled.to_parquet(tmp_path / "scores.parquet")
    by_prompt = {trace.prompt: trace for trace in read_scores(tmp_path / "scores.parquet")}
    made = [by_prompt[trace.prompt] for trace in texts]
    assert all(trace.depth == 4 and trace.chosen for trace in made)
    assert_replayed_alike(made, texts)


@pytest.mark.parametrize("suffix", WRITERS)
def test_names_that_look_like_numbers_stay_names(suffix: str, tmp_path: Path) -> None:
    texts = stored("tiny_good", temperature=0.0)[:2]
    frame = table_of(texts, tmp_path / "traces.parquet")[[*NEEDED, "position"]]
    names = dict(zip(frame["prompt"].unique(), ("001", "1"), strict=True))
    frame = frame.assign(prompt=frame["prompt"].map(names).astype(str), draft="07", prompt_set="1")
    WRITERS[suffix](frame, tmp_path / f"scores{suffix}")
    made = read_scores(tmp_path / f"scores{suffix}")
    assert [(each.draft, each.prompt_set, each.prompt, each.category) for each in made] == [
        ("07", "1", "001", None),
        ("07", "1", "1", None),
    ]
    assert_replayed_alike(made, texts)


@pytest.mark.parametrize("left_out", ["position", "start", "offset"])
def test_of_position_start_and_offset_two_are_enough(left_out: str, tmp_path: Path) -> None:
    texts = stored("ngram", temperature=0.0)[:2]
    frame = table_of(texts, tmp_path / "traces.parquet").drop(columns=left_out)
    frame.to_parquet(tmp_path / "scores.parquet")
    assert_replayed_alike(read_scores(tmp_path / "scores.parquet"), texts)


def with_value(frame: pd.DataFrame, column: str, value: Any) -> pd.DataFrame:
    """The table with another value in its third row."""
    values = frame[column].tolist()
    return frame.assign(**{column: [*values[:2], value, *values[3:]]})


def sampled(frame: pd.DataFrame) -> pd.DataFrame:
    """The table of a text at temperature 1; what rounding leaves above 0 is taken for 0."""
    return frame.assign(temperature=1.0, target_logprob=5e-7, draft_logprob=-0.5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda frame: frame.drop(columns="token"), r"has no column token; docs/scores\.md"),
        (lambda frame: frame.iloc[:0], "has no rows"),
        (lambda frame: frame.drop(index=3), "needs one row per position"),
        (lambda frame: pd.concat([frame, frame.iloc[:1]]), "needs one row per position"),
        (lambda frame: frame.assign(temperature=1.0), "above temperature 0 and no column"),
        (lambda frame: frame.assign(draft_is_argmax="likely"), "row 1: column draft_is_argmax"),
        (lambda frame: frame.assign(token=None), "column token has rows without a number"),
        (lambda frame: with_value(frame, "prompt", None), "row 3: column prompt is empty; give"),
        (lambda frame: frame.assign(draft_is_argmax=3), "row 1: column draft_is_argmax has 3"),
        (
            lambda frame: with_value(frame, "draft_is_argmax", None),
            "row 3: column draft_is_argmax is empty; give true or false",
        ),
        (lambda frame: with_value(frame, "token", -5), "row 3: column token has -5, which cannot"),
        (lambda frame: with_value(frame, "position", 2.5), "row 3: column position has 2.5, which"),
        (lambda frame: frame.assign(temperature=-1.0), "row 1: column temperature has -1.0, which"),
        (
            lambda frame: with_value(sampled(frame), "draft_logprob", 0.7),
            "row 3: column draft_logprob has 0.7, which cannot be; give log-probabilities",
        ),
        (
            lambda frame: with_value(sampled(frame), "target_logprob", 1e-5),
            "row 3: column target_logprob has 1e-05, which cannot be",
        ),
        (
            lambda frame: with_value(sampled(frame), "draft_logprob", None),
            "row 3: column draft_logprob is empty, and texts above temperature 0 need it",
        ),
        (lambda frame: sampled(frame).assign(draft_logprob=np.nan), "row 1: column draft_logprob"),
        (lambda frame: frame.assign(start=frame["position"], offset=1), r"position must be start"),
        (
            lambda frame: frame.assign(start=[0, *[None] * (len(frame) - 1)], offset=0),
            "some rows have a start",
        ),
    ],
)
def test_a_table_that_would_be_misread_is_refused(
    change: Callable[[pd.DataFrame], pd.DataFrame], says: str, tmp_path: Path
) -> None:
    frame = table_of(stored("tiny_good", temperature=0.0)[:1], tmp_path / "traces.parquet")
    file = tmp_path / "scores.parquet"
    change(frame[[*NEEDED, "position"]]).to_parquet(file)
    with pytest.raises(UserError, match=says) as caught:
        read_scores(file)
    assert str(file) in str(caught.value)


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"scores\.txt: no such file; give one of \.parquet"):
        read_scores(tmp_path / "scores.txt")
    (tmp_path / "scores.txt").write_text("no table")
    with pytest.raises(UserError, match=r"scores\.txt: not a table; give one of \.parquet"):
        read_scores(tmp_path / "scores.txt")
    (tmp_path / "scores.parquet").write_bytes(b"no table")
    with pytest.raises(UserError, match=r"scores\.parquet: cannot be read as a table"):
        read_scores(tmp_path / "scores.parquet")


def test_drafts_that_scored_other_prompts_are_refused(tmp_path: Path) -> None:
    texts = stored("tiny_good", temperature=0.0)[:3]
    frame = table_of(texts, tmp_path / "traces.parquet")[[*NEEDED, "position"]]
    names = [frame["prompt"].astype(str) != texts[2].prompt, [True] * len(frame)]
    files = [str(tmp_path / f"{name}.parquet") for name in ("less", "all")]
    for file, kept in zip(files, names, strict=True):
        frame[kept].assign(draft=Path(file).stem).to_parquet(file)
    for order in (files, files[::-1]):
        with pytest.raises(UserError) as caught:
            read_tables(order)
        assert f"{files[0]}: draft 'less' has no rows of prompt {texts[2].prompt} (set" in str(
            caught.value
        )


def test_a_look_up_needs_no_typed_time_whatever_its_name(tmp_path: Path) -> None:
    file = tmp_path / "scores.parquet"
    words = [f"scores_from=[{file}]", f"results_root={tmp_path}", "model=tiny", "k=[1]", TIMES[0]]
    table_of([replace(trace, draft="copying") for trace in stored("ngram")], file)
    ran("audition", *words)
    table_of([replace(trace, draft="ngram") for trace in stored("tiny_good")], file)
    with pytest.raises(UserError, match=r"latency\.draft_ms: no time for draft 'ngram'"):
        outcome_of("audition", *words)


def test_tables_are_ranked_without_a_model(tmp_path: Path) -> None:
    table_of(stored("tiny_good", "ngram"), tmp_path / "scores.parquet")
    words = [f"scores_from=[{tmp_path / 'scores.parquet'}]", f"results_root={tmp_path}"]
    words += ["model=tiny", "k=[1,2,4]", "latency.target_ms=12"]
    words += ["latency.draft_ms={tiny_good:1.5,ngram:0.02}"]
    run = ran("audition", *words)
    assert set(run.results.draft.dropna()) == {"tiny_good", "ngram"}
    rows: list[Any] = run.results[run.results.k > 0].to_dict("records")
    assert len(rows) == 24
    for row in rows:
        texts = stored(row["draft"], temperature=row["temperature"])
        of_set = [text for text in texts if text.prompt_set == row["prompt_set"]]
        expected = replayed(of_set, "ratio", [row["k"]])[row["k"]].tokens_per_round
        assert row["tokens_per_round"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("drafts", "line", "next_step"),
    [
        ([], "The kind of draft head is not known: name it with drafts=[head@FOLDER@", ""),
        (
            ["drafts=[head@/my/head@kind:eagle3]"],
            '"method":"eagle3","model":"/my/head"',
            "python -m harness.sweep model=hf model.id=ORG/T draft=eagle3 draft.id=/my/head k=",
        ),
    ],
)
def test_a_draft_of_a_table_is_served_as_what_it_is_said_to_be(
    drafts: list[str], line: str, next_step: str, tmp_path: Path
) -> None:
    frame = table_of(stored("tiny_good", temperature=0.0), tmp_path / "traces.parquet")
    frame.assign(draft="head").to_parquet(tmp_path / "scores.parquet")
    words = [f"scores_from=[{tmp_path / 'scores.parquet'}]", f"results_root={tmp_path}"]
    named = ["model=hf", "model.id=ORG/T", "k=[1,2]", *TIMES, *drafts]
    made = analyse(ran("audition", *words, *named))
    content = content_of(made)
    shown = " ".join([snippet.code + "".join(snippet.notes) for snippet in content.snippets])
    assert line in shown
    assert "draft_model" not in shown
    assert "STANDALONE" not in shown
    command = content.next_step.command if content.next_step else ""
    assert command.startswith(next_step)
    assert bool(command) == bool(next_step)
    assert Caveat("verify_assumed_equal_step", {"key": "latency.verify_ms"}) in made.caveats


def test_a_plan_says_what_is_read_and_an_interrupted_run_is_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table_of(stored("tiny_good", "ngram", temperature=0.0), tmp_path / "scores.parquet")
    words = [f"scores_from=[{tmp_path / 'scores.parquet'}]", f"results_root={tmp_path / 'runs'}"]
    words += ["model=tiny", "k=[1,2,4]", "latency.target_ms=12"]
    words += ["latency.draft_ms={tiny_good:1.5,ngram:0.02}"]
    assert outcome_of("audition", *words, "dry_run=true", "verbose=true").folder is None
    plan = " ".join(capsys.readouterr().out.split())
    for line in ("tiny_good", "by position, for every K", "by start, for K up to 4", "typed"):
        assert line in plan
    assert not (tmp_path / "runs").exists()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("harness.storage.RunFolder.write_traces", stop)
        with pytest.raises(KeyboardInterrupt):
            outcome_of("audition", *words)
    (folder,) = (tmp_path / "runs").iterdir()
    run = ran("audition", f"resume={folder}")
    assert run.folder == folder
    assert set(run.results.draft.dropna()) == {"tiny_good", "ngram"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model=tiny", *TIMES, "k=[8]"], "k=8: .* scored for K up to 4"),
        (["model=tiny"], "nothing is timed here"),
        (TIMES, "scores_from: give model=, the target whose texts were scored"),
        (["model=tiny", *TIMES, "draft=tiny_good"], "draft: not with scores_from; drafts= says"),
        (["model=tiny", *TIMES, "drafts=auto"], "drafts=auto: not with scores_from"),
        (["model=tiny", *TIMES, "drafts=[tiny_good]"], r"drafts: the tables have no draft"),
    ],
)
def test_what_does_not_go_with_tables_is_refused(
    words: list[str], says: str, tmp_path: Path
) -> None:
    table_of(stored("ngram"), tmp_path / "scores.parquet")
    given = [f"scores_from=[{tmp_path / 'scores.parquet'}]", f"results_root={tmp_path}", *words]
    with pytest.raises(UserError, match=says):
        outcome_of("audition", *given)


def test_scores_by_the_documented_callback_are_those_of_the_run(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    texts = stored("tiny_eagle3", temperature=0.0)
    rows: list[dict[str, Any]] = []
    for trace in texts:
        tokens = trace.tokens.tolist()
        drafted = [
            [
                token if right else -1
                for token, right in zip(tokens[n:], trace.draft_is_argmax[:, n], strict=False)
            ]
            for n in range(4)
        ]
        rows += namespace["score_rows"]("h1_step_5", trace.prompt, tokens, drafted)
    pd.DataFrame(rows).to_parquet(tmp_path / "scores.parquet")
    for read in read_scores(tmp_path / "scores.parquet"):
        trace = next(t for t in texts if t.prompt == read.prompt)
        assert read.tokens.tolist() == trace.tokens.tolist()
        assert (read.draft_is_argmax == trace.draft_is_argmax).all()
