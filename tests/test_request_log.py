"""A log of requests: its strata, its sample, what that stands for, and its time stamps."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import ran

from harness.analysis import analyse
from harness.analysis.setup import Setup, request_weights
from harness.commands.plan import recorded_times
from harness.config import PromptsConf
from harness.prompts import available, load, log_sample
from harness.prompts.log import RequestLog, drawn
from harness.records import UserError

DOCS = Path(__file__).parent.parent / "docs" / "prompts.md"
SHARES = {"chat": 300, "code": 500, "poem": 15, "sql": 85}


def request(category: str, number: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Do {category} number {number}, please."}]
    return {"category": category, "timestamp": 100 + number, "body": {"messages": messages}, **more}


def written(path: Path, lines: list[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


@pytest.fixture
def log(tmp_path: Path) -> str:
    names = [name for name, count in SHARES.items() for _ in range(count)]
    lines = [request(name, number) for number, name in enumerate(names)]
    return written(tmp_path / "log.jsonl", lines)


def conf(log: str, **more: Any) -> PromptsConf:
    made = PromptsConf(log=log, **more)
    made.check()
    return made


def test_each_stratum_has_its_share_of_the_sample_and_stands_for_its_requests(log: str) -> None:
    made = conf(log, sample=100)
    of_stratum: Counter[str] = Counter()
    for name, size in available(made).items():
        of_stratum[name.partition(",")[0]] += size
    # The three rarest are one stratum: two of them are worth eleven of the hundred
    assert of_stratum == {"code": 500, "other": 400}
    taken = Counter(prompt.prompt_set for prompt in load(made))
    assert taken.total() == 100
    for name, size in available(made).items():
        assert abs(taken[name] - 100 * size / 900) < 1.0


def test_a_sample_is_drawn_by_its_seed(log: str) -> None:
    first, again, other = (
        [prompt.id for prompt in RequestLog(Path(log)).sample(50, seed).prompts]
        for seed in (0, 0, 1)
    )
    assert first == again != other
    assert first == [prompt.id for prompt in load(conf(log, sample=50))]


def test_every_request_of_a_stratum_is_drawn_equally_often() -> None:
    names = ["a"] * 40 + ["b"] * 10
    times = Counter(row for seed in range(400) for row in drawn(names, 25, seed))
    assert sum(times.values()) == 400 * 25
    counts = np.array([times[row] for row in range(50)])
    assert np.abs(counts - 200).max() < 5 * np.sqrt(400 * 0.25)


def test_the_weighted_mean_of_a_sample_is_that_of_the_log(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    sizes = random.integers(20, 2000, 600).tolist()
    lines = [
        {"category": "ab"[number % 2], "prompt": "x" * size} for number, size in enumerate(sizes)
    ]
    log = RequestLog(Path(written(tmp_path / "log.jsonl", lines)))
    means = [log.sample(120, seed).facts.sampled_bytes for seed in range(40)]
    standard_error = np.std(means) / np.sqrt(len(means))
    assert abs(np.mean(means) - np.mean(sizes)) < 4 * standard_error
    assert np.std(means) < 0.6 * np.std(sizes) / np.sqrt(120)  # strata of length cut the error


def test_a_request_is_answered_in_its_last_turn_alone(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Name a river."},
    ]
    log = written(tmp_path / "log.jsonl", [{"messages": talk}] * 3)
    prompt, *_ = load(conf(log))
    assert (list(prompt.answered), prompt.turns[-1], prompt.answers) == (
        [2],
        "Name a river.",
        ("Hi.",),
    )


def test_lines_that_cannot_be_generated_from_are_counted(tmp_path: Path) -> None:
    tool = {"messages": [{"role": "tool", "content": "42"}]}
    log = written(tmp_path / "log.jsonl", [tool, *(request("a", number) for number in range(5))])
    sample = log_sample(conf(log))
    assert sample is not None
    assert (sample.facts.unusable, sample.facts.requests, sample.facts.span_s) == (1, 5, 4.0)
    log = written(tmp_path / "bad.jsonl", [tool, tool, request("a", 1)])
    with pytest.raises(UserError, match=r"prompts.log=.*2 of 3 lines .* role 'tool' is not read"):
        load(conf(log))


@pytest.mark.parametrize(
    ("key", "value"),
    [("files", ["x"]), ("weights", {"a": 1}), ("max_turns", 1), ("sets", ["easy"])],
)
def test_a_log_is_the_whole_workload(key: str, value: Any, log: str) -> None:
    with pytest.raises(UserError, match=rf"prompts.{key}: not with prompts.log"):
        conf(log, **{key: value})


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts.log: cannot read .*no.jsonl"):
        load(conf(str(tmp_path / "no.jsonl")))


def test_time_stamps_are_read_in_any_unit(tmp_path: Path) -> None:
    stamps: list[Any] = [1763900000.5, 1763900001500, "2025-11-23T12:13:22+00:00", "1763900004"]
    file = written(tmp_path / "log.jsonl", [{"timestamp": stamp} for stamp in stamps])
    times = recorded_times(file)
    assert [time - times[0] for time in times] == pytest.approx([0, 1, 1.5, 3.5])
    unordered = written(tmp_path / "other.jsonl", [{"ts": 2}, {"ts": 1}])
    with pytest.raises(UserError, match=r"line 2: 1 comes after 2; sort the file"):
        recorded_times(unordered)
    with pytest.raises(UserError, match=r"arrivals=.*line 1: no time stamp; read are timestamp"):
        recorded_times(written(tmp_path / "none.jsonl", [{"prompt": "a"}]))


@pytest.mark.parametrize(
    "line",
    [
        {"timestamp": 10**400, "prompt": "a"},
        {"timestamp": "yesterday", "prompt": "a"},
        {"timestamp": True, "prompt": "a"},
    ],
)
def test_a_time_that_is_not_read_is_said_to_be_that_and_loses_no_request(
    line: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = written(tmp_path / "log.jsonl", [request("a", 1), line, line])
    sample = log_sample(conf(log))
    assert sample is not None
    assert (sample.facts.requests, sample.facts.unusable, sample.facts.span_s) == (3, 0, None)
    (said,) = caplog.messages
    assert re.search(r"^2 time stamps are not read; .*line 2: the time stamp timestamp=", said)
    with pytest.raises(UserError, match=r"line 2: the time stamp timestamp=.* is not read; read"):
        recorded_times(log)


def test_a_batch_file_is_a_log_and_its_answers_are_said_to_be_answers(tmp_path: Path) -> None:
    body = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "Hi."}]}
    asked = {"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions"}
    (prompt, *more) = load(conf(written(tmp_path / "log.jsonl", [{**asked, "body": body}] * 3)))
    assert (prompt.turns, len(more)) == (("Hi.",), 2)
    answer = {"status_code": 200, "body": {"choices": [{"message": {"content": "Ho."}}]}}
    answers = written(tmp_path / "out.jsonl", [{"custom_id": "request-1", "response": answer}])
    with pytest.raises(UserError, match=r"line 1: an answer of a server, without its request"):
        load(conf(answers))
    listed = tmp_path / "list.jsonl"
    listed.write_text(json.dumps([{"body": body}]))
    with pytest.raises(UserError, match=r"line 1: not a JSON object; give a request a line"):
        load(conf(str(listed)))


def test_a_time_without_a_zone_is_utc_and_a_strange_temperature_is_none(tmp_path: Path) -> None:
    lines = [
        {"timestamp": stamp, "prompt": "a", "temperature": 10**400}
        for stamp in ("2025-03-30T00:30:00", "2025-03-30T03:30:00+00:00")
    ]
    sample = log_sample(conf(written(tmp_path / "log.jsonl", lines)))
    assert sample is not None
    assert (sample.facts.unusable, sample.facts.span_s) == (0, 3 * 3600.0)


def test_the_log_of_the_documentation_is_read(tmp_path: Path) -> None:
    found = re.search(r"Two lines of one:\s+```jsonl\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    assert found is not None
    file = tmp_path / "requests.jsonl"
    file.write_text(found[1], encoding="utf-8")
    prompts = load(conf(str(file)))
    assert [(prompt.category, len(prompt.answered)) for prompt in prompts] == [
        ("code", 1),
        ("chat", 1),
    ]
    assert recorded_times(str(file))[1] - recorded_times(str(file))[0] == pytest.approx(1.7)


@pytest.mark.usefixtures("few_samples")
def test_strata_count_by_the_tokens_of_their_requests(log: str, tmp_path: Path) -> None:
    run = ran(
        "sweep",
        *(f"prompts.log={log}", "prompts.sample=20", "new_tokens=4", "k=[1]", "temperature=[0]"),
        *("until=all", "mode=replay", f"results_root={tmp_path}", "threads=1"),
    )
    stored = run.manifest.prompts_log
    assert stored is not None
    assert (stored.requests, stored.sampled) == (900, 20)
    tokens = Counter[str]()
    texts = Counter[str]()
    for trial in run.trials:
        if trial.k == 0:
            tokens[trial.prompt_set] += trial.new_tokens or 0
            texts[trial.prompt_set] += 1
    sizes = run.manifest.prompts_available
    expected = {name: sizes[name] * tokens[name] / texts[name] for name in sizes}
    weights = Setup(run).weights
    assert weights is not None
    assert weights == pytest.approx(
        {name: value / sum(expected.values()) for name, value in expected.items()}
    )
    requests = request_weights(Setup(run))
    assert requests == {name: count / 900 for name, count in sizes.items()}
    again = ran("audition", f"traces_from={run.folder}", "latency.target_ms=5",
                "latency.draft_ms=1", "drafts=[tiny_good]", f"results_root={tmp_path}")  # fmt: skip
    assert request_weights(Setup(again)) == requests
    summary = analyse(run)
    assert "sampled_log" in {each.code for each in summary.caveats}
