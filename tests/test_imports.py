"""Records that servers write of requests become a server run.

Entries are those of the documentation of vLLM 0.32 and SGLang 0.5.23; llama.cpp's are asked of its
server.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from runs import needs_llamacpp, ran
from served_pair import Served
from server_answers import PLAIN_META, sglang_answers, vllm_answers
from stand_in_server import StandIn

from harness.analysis import analyse
from harness.commands.served_elsewhere import read_records
from harness.decoding.sampling import SamplingParameters
from harness.engines.http_client import HttpClient
from harness.engines.http_server import AttachedEngine, HttpServer
from harness.engines.llamacpp import LlamaCppServer, request_body
from harness.engines.protocol import Asked, Completion
from harness.engines.sglang import SglangServer
from harness.engines.stored_answers import FailedAnswerError, imported, record_of
from harness.engines.vllm import VllmServer
from harness.records import UserError
from harness.reporting.content import content_of
from harness.storage import StoredRun

pytestmark = pytest.mark.usefixtures("no_plots")

# ---- one entry -----------------------------------------------------------------------------------

SPECULATIVE = {
    "mean_acceptance_length": 2.0,
    "draft_acceptance_rate": 0.5,
    "acceptance_histogram": [1, 1, 1],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 6,
    "num_spec_tokens": 2,
}
VLLM: dict[str, Any] = {
    "model": "org/target",
    "choices": [{"index": 0, "text": "abc", "finish_reason": "length", "token_ids": [1, 2, 3]}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12},
    "metrics": {
        "time_to_first_token_ms": 20.0,
        "generation_time_ms": 60.0,
        "speculative_decoding": SPECULATIVE,
    },
}
COUNTS: dict[str, Any] = {"k": 2, "rounds": 3, "drafted": 6, "accepted": 3}
FROM_VLLM = {
    **COUNTS,
    "engine": "vllm",
    "counted": 7,
    "accepted_lengths": (1, 1, 1),
    "prefill_s": pytest.approx(0.02),
    "decode_s": pytest.approx(0.06),
    "stop_reason": "budget",
    "tokens": (1, 2, 3),
    "text": "abc",
    "model": "org/target",
}
PER_STEP = {"per_step_accepted": [0, 2, 1], "per_step_drafted": [2, 2, 2]}
META = {
    "completion_tokens": 7,
    "finish_reason": {"type": "stop", "matched": 3},
    "spec_verify_ct": 3,
    "spec_num_proposed_drafts": 6,
    "spec_num_correct_drafts": 3,
    "spec_correct_drafts_histogram": [1, 1, 1],
}
OLDER_META = {
    **{name: META[name] for name in ("completion_tokens", "finish_reason", "spec_verify_ct")},
    "spec_draft_token_num": 6,
    "spec_accept_token_num": 3,
    "spec_accept_histogram": [0, 1, 1, 1],  # of tokens that a round emits
}
FROM_SGLANG = {
    **COUNTS,
    "k": None,  # its sums say it, with those of the other requests
    "engine": "sglang",
    "counted": 7,
    "accepted_lengths": (1, 1, 1),
    "stop_reason": "eos",
}
PLAIN_COUNTS = dict.fromkeys(("rounds", "drafted", "accepted", "accepted_lengths"))
LLAMACPP: dict[str, Any] = {
    "tokens": [1, 2, 3],
    "stop_type": "limit",
    "generation_settings": {"temperature": 0.5},
    "timings": {
        "prompt_ms": 10.0,
        "predicted_n": 7,
        "predicted_ms": 60.0,
        "draft_n": 5,
        "draft_n_accepted": 3,
    },
}
FROM_LLAMACPP = {
    "engine": "llamacpp",
    "counted": 7,
    "drafted": 5,
    "accepted": 3,
    "prefill_s": pytest.approx(0.01),
    "decode_s": pytest.approx(0.06),
    "stop_reason": "budget",
    "tokens": (1, 2, 3),
    "temperature": 0.5,
}


def without(entry: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}


def with_counts(**speculative: Any) -> dict[str, Any]:
    """vLLM's answer with other counts."""
    metrics = {**VLLM["metrics"], "speculative_decoding": {**SPECULATIVE, **speculative}}
    return {**VLLM, "metrics": metrics}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (VLLM, FROM_VLLM),
        (with_counts(**PER_STEP), FROM_VLLM),
        (
            {**VLLM, "metrics": without(VLLM["metrics"], "speculative_decoding")},
            {**FROM_VLLM, **PLAIN_COUNTS, "k": 0},
        ),
        (
            without(VLLM, "metrics"),
            {**FROM_VLLM, **PLAIN_COUNTS, "k": 0, "prefill_s": None, "decode_s": None},
        ),
        ({"request": {"temperature": 0.7}, "response": VLLM}, {**FROM_VLLM, "temperature": 0.7}),
        (
            {"text": "a", "output_ids": [1], "meta_info": META},
            {**FROM_SGLANG, "tokens": (1,), "text": "a"},
        ),
        ({"choices": [{"meta_info": META}]}, FROM_SGLANG),
        ({"meta_info": OLDER_META}, {**FROM_SGLANG, "accepted_lengths": None}),
        (
            {
                "request": {"sampling_params": {"temperature": 1.0}},
                "response": {"meta_info": {"completion_tokens": 7}},
            },
            {"engine": "sglang", "counted": 7, "k": 0, "temperature": 1.0},
        ),
        (
            {**without(PER_STEP, "per_step_drafted"), "k": 2, "temperature": 0.5, "prompt": "a"},
            {
                **{name: FROM_VLLM[name] for name in (*COUNTS, "engine", "counted")},
                "accepted_lengths": (1, 1, 1),
                "temperature": 0.5,
                "prompt": "a",
            },
        ),
        (LLAMACPP, FROM_LLAMACPP),
        (
            {**LLAMACPP, "timings": without(LLAMACPP["timings"], "draft_n", "draft_n_accepted")},
            {**FROM_LLAMACPP, "drafted": None, "accepted": None, "k": 0},
        ),
    ],
)
def test_each_kind_of_entry_is_read_by_its_documented_fields(
    entry: dict[str, Any], expected: dict[str, Any]
) -> None:
    record = record_of(entry, "here")
    nothing = {field.name: field.default for field in fields(Completion)}
    assert vars(record) == {**nothing, **expected}


@pytest.mark.parametrize(
    ("server", "answers", "path"),
    [
        (VllmServer, vllm_answers(), "/v1/completions"),
        (SglangServer, sglang_answers(), "/generate"),
    ],
)
def test_a_stored_answer_is_read_as_the_running_server_is(
    server: Callable[..., HttpServer],
    answers: dict[str, Any],
    path: str,
    stand_in: Callable[[Mapping[str, Any]], StandIn],
) -> None:
    with AttachedEngine({2: stand_in(answers).url}, server).open(2) as running:
        done = running.generate(Asked([1, 2, 3], SamplingParameters(0.0), 7, 6))
    record = record_of(answers[path], "here")
    assert record.rounds
    names = ("tokens", "stop_reason", "rounds", "drafted", "accepted", "prefill_s", "decode_s")
    assert [getattr(record, name) for name in names] == [getattr(done, name) for name in names]


BATCH = {"id": "batch-1", "custom_id": "request-1", "error": None}


def test_an_answer_of_run_batch_is_read_and_named_by_its_id() -> None:
    answered = {**BATCH, "response": {"status_code": 200, "request_id": "a", "body": VLLM}}
    record = record_of(answered, "here")
    assert vars(record) == {**vars(record_of(VLLM, "here")), "prompt": "request-1"}
    body = {"temperature": 0.5, "messages": [{"role": "user", "content": "Hi."}]}
    for request in ({"body": body}, {"request": {**BATCH, "body": body}}):
        both = record_of({**answered, **request}, "here")
        assert both.temperature == 0.5
        assert both.prompt not in (None, "request-1")
    with pytest.raises(UserError, match="a request without its answer; give the file of the ans"):
        record_of({"custom_id": "request-1", "body": body}, "here")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({**VLLM, "choices": []}, r"choices is '\[\]'"),
        ({**VLLM, "choices": [None]}, r"choices is '\[null\]'"),
        ({**VLLM, "choices": "none"}, "choices is 'none'"),
        ({"error": "overloaded"}, "'overloaded'"),
        ({"error": {"message": "too long", "code": 400}}, "'too long'"),
        ({"object": "error", "message": "too\nlong"}, "'too long'"),
        ({"detail": "Not Found"}, "'Not Found'"),
        ({"request": {"prompt": "a"}, "response": "Internal Server Error"}, "'Internal Server"),
        ({"request": {"prompt": "a"}, "response": None}, "no answer"),
        ({**BATCH, "response": None, "error": {"message": "expired"}}, "'expired'"),
        ({**BATCH, "response": {"status_code": 500, "body": {}}}, "status 500"),
        ({**BATCH, "response": {"status_code": 500, "body": "upstream"}}, "'upstream'"),
        ("Bad Gateway", "'Bad Gateway'"),
    ],
)
def test_an_answer_that_failed_is_said_to_be_that(entry: Any, says: str) -> None:
    with pytest.raises(FailedAnswerError, match=rf"^here: the request failed: ({says})"):
        record_of(entry, "here")


# ---- a run ---------------------------------------------------------------------------------------


def write(file: Path, *entries: Any) -> str:
    file.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    return str(file)


def run(root: Path, files: Sequence[str | Path], *overrides: str, status: int = 0) -> StoredRun:
    names = ",".join(map(str, files))
    return ran("report", root, f"records=[{names}]", *overrides, status=status)


def request(number: int, k: int, step_ms: float) -> dict[str, Any]:
    """vLLM's answer to a prompt: 20 to 29 tokens after the first."""
    emitted = 20 + number
    metrics: dict[str, Any] = {"time_to_first_token_ms": 5.0}
    if k == 0:
        metrics["generation_time_ms"] = emitted * step_ms
    else:
        accepted = emitted // 2
        rounds = emitted - accepted
        metrics["generation_time_ms"] = rounds * step_ms
        metrics["speculative_decoding"] = {
            "acceptance_histogram": [rounds - accepted, accepted],
            "num_spec_steps": rounds,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": rounds * k,
            "num_spec_tokens": k,
        }
    ids = list(range(emitted + 1))
    return {
        "model": "org/target",
        "choices": [{"finish_reason": "length", "token_ids": ids}],
        "usage": {"completion_tokens": emitted + 1},
        "metrics": metrics,
    }


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Ten prompts, plain and at K = 1, where a round takes 1.2 plain tokens."""
    return [
        write(tmp_path / f"k{k}.jsonl", *(request(number, k, ms) for number in range(10)))
        for k, ms in ((0, 10.0), (1, 12.0))
    ]


def test_records_of_two_servers_become_a_run_with_its_speedup_and_acceptance(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(tmp_path, files, "temperature=0")
    assert (done.door, done.manifest.status) == ("server", "complete")
    emitted = sum(20 + number for number in range(10))
    rounds = sum((21 + number) // 2 for number in range(10))
    plain, drafted = (done.results[done.results.k == k].iloc[0] for k in (0, 1))
    assert plain.ms_per_token == pytest.approx(10.0)
    assert drafted.new_tokens == emitted
    assert drafted.rounds == rounds
    assert drafted.tokens_per_round == pytest.approx(emitted / rounds)
    assert drafted.speedup == pytest.approx(10.0 * emitted / (12.0 * rounds))
    assert (drafted.engine, drafted.source, drafted.rule) == ("vllm", "measured", "greedy_draft")
    summary = analyse(done)
    assert summary.headline is not None
    assert (summary.headline.decision, summary.headline.k) == ("speculate", 1)
    assert summary.served is not None
    assert summary.served.not_predicted == "no_weights"
    assert "do not say what the draft is" in " ".join(content_of(summary).snippets[0].notes)
    assert "vllm" in capsys.readouterr().out.lower()
    assert (done.folder / "report.html").is_file()


def test_requests_are_paired_by_their_prompts_where_records_hold_them(tmp_path: Path) -> None:
    def asked(number: int, k: int, ms: float, *, ids: bool) -> dict[str, Any]:
        answer = request(number, k, ms)
        if not ids:
            return {"request": {"prompt": f"prompt {number}"}, "response": answer}
        (choice,) = answer["choices"]
        return {**answer, "choices": [{**choice, "prompt_token_ids": [number]}]}

    for ids in (True, False):
        plain = [asked(number, 0, 10.0, ids=ids) for number in range(10)]
        drafted = [asked(number, 1, 12.0, ids=ids) for number in reversed(range(10))]
        files = [write(tmp_path / "a.jsonl", *plain), write(tmp_path / "b.jsonl", *drafted)]
        done = run(tmp_path, files, "temperature=0")
        by_prompt = {trial.prompt: trial.new_tokens for trial in done.trials if trial.k == 0}
        assert len(by_prompt) == 10
        for trial in done.trials:
            assert trial.new_tokens == by_prompt[trial.prompt]


def test_one_failed_answer_does_not_refuse_a_file_nor_move_the_others(
    files: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = Path(files[1]).read_text().split("\n")
    for failed in ('{"error": "overloaded"}', "upstream connect error", '{"choices": []}'):
        caplog.clear()
        Path(files[1]).write_text("\n".join([*lines[:3], failed, *lines[4:]]))
        done = run(tmp_path, files, "temperature=0")
        by_k = {k: {t.prompt: t.new_tokens for t in done.trials if t.k == k} for k in (0, 1)}
        assert (len(by_k[0]), len(by_k[1])) == (10, 9)
        assert by_k[1].items() <= by_k[0].items()
        assert any("1 of 10 requests failed; " in line for line in caplog.messages)
        assert analyse(done).headline is not None
    Path(files[1]).write_text("\n".join([*lines[:3], *[failed] * 7]))
    with pytest.raises(UserError, match=r"7 of 10 requests failed; the first: .*line 4: the req"):
        run(tmp_path, files, "temperature=0")


def test_one_speculating_server_alone_has_its_acceptance_and_no_verdict(
    files: list[str], tmp_path: Path
) -> None:
    summary = analyse(run(tmp_path, files[1:], "temperature=1"))
    assert summary.headline is None
    content = content_of(summary)
    assert "No verdict: no file decodes plainly; add the plain server's" in content.verdicts[0]
    assert not content.snippets
    (row,) = summary.results
    assert row.tokens_per_round


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (
            {**VLLM, "metrics": {"generation_time_ms": 60.0}},
            "metrics.speculative_decoding, which vLLM 0.29 or later writes with",
        ),
        ({"meta_info": PLAIN_META}, "meta_info.spec_verify_ct, which SGLang writes"),
        (
            {**LLAMACPP, "timings": without(LLAMACPP["timings"], "draft_n", "draft_n_accepted")},
            "timings.draft_n, which llama.cpp b4990 or later writes",
        ),
    ],
)
@pytest.mark.parametrize("many", [1, 2])
def test_files_of_plain_decoding_alone_are_refused_by_what_they_lack(
    entry: dict[str, Any], field: str, many: int, tmp_path: Path
) -> None:
    files = [write(tmp_path / f"{place}.jsonl", *[entry] * 3) for place in range(many)]
    words = [] if "timings" in entry else ["temperature=0"]
    with pytest.raises(UserError) as refused:
        run(tmp_path / "results", files, *words)
    assert str(refused.value).startswith(f"records: no file drafts: no answer has {field}")
    assert not (tmp_path / "results").exists()


def test_accepted_tokens_of_each_round_give_tokens_per_round(tmp_path: Path) -> None:
    steps = [{"per_step_accepted": [4, 0, 2, 4, 1], "k": 4}] * 10
    written = write(tmp_path / "rounds.jsonl", *steps)
    (row,) = analyse(run(tmp_path, [written], "temperature=0")).results
    assert row.tokens_per_round == pytest.approx(1 + 11 / 5)


def llamacpp_sums(drafted: int, accepted: int, tokens: int = 200) -> dict[str, Any]:
    """An answer of llama.cpp that filled its budget."""
    timings = {"predicted_n": tokens, "draft_n": drafted, "draft_n_accepted": accepted}
    times = {"prompt_n": 8, "prompt_ms": 20.0, "predicted_ms": 900.0}
    return {"tokens_predicted": tokens, "stop_type": "limit", "timings": {**timings, **times}}


@pytest.mark.parametrize("few", [1, 12])
def test_k_is_not_a_mean_that_a_threshold_makes(tmp_path: Path, few: int) -> None:
    """Twelve answers of a server with draft-max 16 and a threshold: 2.7 tokens a round."""
    sums = [(336 + n, 65 + n) for n in range(12)]
    answers = [llamacpp_sums(*each) for each in sums[:few]]
    written = write(tmp_path / "answers.jsonl", *answers)
    with pytest.raises(UserError, match=r"K is not known: .* 2\.\d to 2\.\d tokens"):
        run(tmp_path, [written], "temperature=0")
    stored = run(tmp_path, [written], "temperature=0", "k=[16]")
    assert {trial.k for trial in stored.trials} == {16}
    with pytest.raises(UserError, match=r"k=2: .* drafted 3 tokens"):
        run(tmp_path, [written], "temperature=0", "k=[2]")


def test_k_is_what_all_rounds_but_a_texts_last_ones_draft(tmp_path: Path) -> None:
    """With K = 4 a budget takes up to 3 + 2 + 1 tokens off; short answers look like a smaller K."""
    answers = [llamacpp_sums(4 * (199 - 80) - less, 80) for less in (0, 3, 6)]
    short = llamacpp_sums(2, 1, 4)
    written = write(tmp_path / "answers.jsonl", *answers, short)
    stored = run(tmp_path, [written], "temperature=0")
    assert {trial.k for trial in stored.trials} == {4}


BUDGET_ENDED = {**LLAMACPP["timings"], "draft_n": 11}  # three rounds of 4, the last shortened


def test_k_is_not_known_where_two_fit_short_answers(tmp_path: Path) -> None:
    """Rounds of 4, 4 and 3 drafted tokens, or of 5, 4 and 2 with K = 5, as llama.cpp shortens."""
    entry = {**LLAMACPP, "timings": BUDGET_ENDED}
    written = write(tmp_path / "answers.jsonl", entry)
    with pytest.raises(UserError, match=r"K is not known: .* too short to tell K=4 from K=5; give"):
        run(tmp_path, [written])
    assert {trial.k for trial in run(tmp_path, [written], "k=[4]").trials} == {4}


DATA = Path(__file__).parent / "data"
# What 12 answers of xllamacpp's server with --spec-draft-n-max 16 say of K: None where it is open.
# tests/data/README.md has its command lines.
K_16 = {"k16": None, "k16_long": 16, "k16_p40": None, "k16_p75": None}


@pytest.mark.parametrize("name", K_16)
def test_answers_of_a_real_server_with_draft_max_16_say_16_or_nothing(
    name: str, tmp_path: Path
) -> None:
    file = DATA / f"llamacpp_{name}.jsonl"
    records = list(read_records(str(file)))
    assert len(records) == 12
    assert _k_said(records) == K_16[name]
    few = [*combinations(records, 1), *combinations(records, 2)]
    assert {_k_said(some) for some in few} <= {None, 16}
    stored = run(tmp_path, [DATA / "llamacpp_plain.jsonl", file], "k=[0,16]")
    assert {trial.k for trial in stored.trials} == {0, 16}


def _k_said(records: Sequence[Completion]) -> int | None:
    try:
        return max(trial.k for trial in imported({"answers": records}, None, None).trials)
    except UserError:
        return None


def test_k_is_not_guessed_from_the_most_tokens_that_a_round_accepted(tmp_path: Path) -> None:
    steps = [{"per_step_accepted": [2, 0, most]} for most in (1, 2, 3)] * 3
    written = write(tmp_path / "rounds.jsonl", *steps)
    with pytest.raises(UserError, match=r"K is not known \(none in its records\)"):
        run(tmp_path, [written], "temperature=0")
    with pytest.raises(UserError, match=r"k=2: .* says that its server drafted 3 tokens"):
        run(tmp_path, [written], "temperature=0", "k=[2]")
    stored = run(tmp_path, [written], "temperature=0", "k=[4]")
    assert {(trial.k, trial.drafted) for trial in stored.trials} == {(4, 12)}
    (row,) = analyse(stored).results
    assert row.acceptance_rate == pytest.approx(4 / 12)


def test_records_without_times_have_acceptance_and_neither_times_nor_verdict(
    tmp_path: Path,
) -> None:
    plain = {"meta_info": without(META, *(name for name in META if name.startswith("spec")))}
    files = [
        write(tmp_path / f"{place}.jsonl", *[entry] * 10)
        for place, entry in enumerate((plain, {"meta_info": META}))
    ]
    done = run(tmp_path, files, "temperature=0")
    row = done.results[done.results.k == 2].iloc[0]
    assert row.tokens_per_round == pytest.approx(2.0)
    assert done.results[["ms_per_token", "speedup_lo"]].isna().all(axis=None)
    assert row.speedup != row.speedup
    summary = analyse(done)
    assert summary.headline is None
    assert content_of(summary).verdicts == (
        "No verdict: the records do not say what decoding took.",
    )


@pytest.mark.parametrize(
    ("stop", "timings", "given", "k", "rounds"),
    [
        ("limit", BUDGET_ENDED, 4, 4, 3),
        # An accepted end of text leaves a round without a token of its own
        ("eos", {**BUDGET_ENDED, "draft_n": 16}, 4, 4, 4),
        ("eos", {**BUDGET_ENDED, "draft_n": 13}, 4, 4, None),
    ],
)
def test_llamacpps_rounds_follow_from_its_counts_or_are_left_open(
    stop: str, timings: dict[str, Any], given: int | None, k: int, rounds: int, tmp_path: Path
) -> None:
    entry = {**LLAMACPP, "stop_type": stop, "timings": timings}
    plain = {**entry, "timings": without(timings, "draft_n", "draft_n_accepted")}
    files = [write(tmp_path / "a.jsonl", plain), write(tmp_path / "b.jsonl", entry)]
    asked = [] if given is None else [f"k=[0,{given}]"]
    done = run(tmp_path, files, *asked)
    (trial,) = [trial for trial in done.trials if trial.k]
    assert (trial.k, trial.rounds, trial.temperature) == (k, rounds, 0.5)


def rounds(**changes: Any) -> str:
    return json.dumps({"per_step_accepted": [0, 2, 1], "k": 4, "temperature": 0, **changes})


DRAFTED_4 = json.dumps({**LLAMACPP, "stop_type": "limit", "timings": BUDGET_ENDED})


@pytest.mark.parametrize(
    ("entries", "overrides", "says"),
    [
        (["{"], [], "line 1: not JSON"),
        (["[1]"], [], "entry 1: not a JSON object"),
        ([""], [], "no request in it"),
        (['{"a": 1}'], [], "line 1: no record that is known here; give answers of vLLM, SGLang"),
        (['{"usage": {}}'], [], "line 1: has no field 'completion_tokens'"),
        (['{"usage": {"completion_tokens": null}}'], [], "line 1: its fields are not those of an"),
        ([json.dumps({**VLLM, "metrics": "off"})], [], 'field metrics is "off"; it must be an obj'),
        ([rounds(per_step_accepted="1,2")], [], 'line 1: field per_step_accepted is "1,2"; it'),
        ([rounds(), rounds(per_step_accepted=[1, -2])], [], "line 2: field per_step_accepted is"),
        ([rounds(k="four")], [], 'field k is "four"; it must be a whole number from 0'),
        ([rounds(temperature="hot")], [], 'field temperature is "hot"; it must be a number from 0'),
        ([rounds(k=1)], [], "line 1: cannot be read: 2 tokens accepted in a round of K=1"),
        ([rounds(per_step_drafted=[4])], [], "per_step_drafted of 1 rounds, accepted of 3"),
        (
            [json.dumps({"choices": [{"meta_info": {**META, "completion_tokens": "many"}}]})],
            [],
            'field completion_tokens is "many"',
        ),
        (
            [json.dumps({"meta_info": {**PLAIN_META, "spec_accept_length": 2.8}})],
            [],
            "line 1: cannot be read: it drafted (spec_accept_length), and has no spec_verify_ct",
        ),
        ([json.dumps(VLLM)], [], "they do not say their temperature; give temperature="),
        ([json.dumps(VLLM)], ["temperature=[0,1]"], "temperature=[0,1]: records= are of one"),
        ([json.dumps(VLLM)], ["temperature=[0]", "k=[0,2]"], "k: 2 entries for 1 files"),
        ([json.dumps(VLLM)], ["temperature=0", "k=[4]"], "says that its server drafted 2 tokens"),
        ([DRAFTED_4], ["k=[2]"], "k=2: {file} says that its server drafted 4 tokens per round"),
        ([DRAFTED_4], ["temperature=1", "k=[4]"], "temperature=1: {file} says that its requests"),
        (
            [json.dumps({**LLAMACPP, "stop_type": "eos"})],
            [],
            "K is not known (none in its records); give k=[...], one each",
        ),
        (
            [json.dumps(VLLM), json.dumps({"meta_info": META})],
            ["temperature=0"],
            "of 2 engines (sglang, vllm)",
        ),
        ([json.dumps(VLLM)], ["temperature=0", "fail_below=1"], "fail_below: needs run= or runs="),
        ([json.dumps(VLLM)], ["temperature=0", "run=x"], "run and records: give one of them"),
    ],
)
def test_records_that_cannot_be_used_are_refused_in_one_line(
    entries: list[str], overrides: list[str], says: str, tmp_path: Path
) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(entries), encoding="utf-8")
    with pytest.raises(UserError) as refused:
        run(tmp_path / "results", [file], *overrides)
    assert says.replace("{file}", str(file)) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("drafted", [DRAFTED_4, json.dumps(VLLM)])
def test_a_file_of_drafting_requests_is_not_taken_for_the_plain_one(
    drafted: str, tmp_path: Path
) -> None:
    drafting, other = tmp_path / "k4.jsonl", tmp_path / "other.jsonl"
    for file in (drafting, other):
        file.write_text(drafted, encoding="utf-8")
    more = [] if drafted == DRAFTED_4 else ["temperature=0"]
    with pytest.raises(UserError, match=r"k=0: .*k4.jsonl says that its server drafted [24] "):
        run(tmp_path / "results", [drafting, other], "k=[0,4]", *more)


# ---- llama.cpp itself ----------------------------------------------------------------------------


@pytest.mark.exhaustive
@needs_llamacpp
def test_llamacpps_own_answers_give_the_rounds_that_its_adapter_counts(tmp_path: Path) -> None:
    pair = Served(tmp_path, prompts=5)
    expected: list[tuple[int | None, ...]] = []
    files: list[str] = []
    for k in (0, 4):
        answers: list[Any] = []
        with pair.llamacpp().open(k) as server:
            assert isinstance(server, LlamaCppServer)
            client = HttpClient(server.url)
            for request in pair.requests:
                answers.append(client.post("/completion", request_body(request.asked)))
                done = server.generate(request.asked)
                if k:
                    expected.append((len(done.tokens) - 1, done.rounds, done.drafted))
        files.append(write(tmp_path / f"k{k}.jsonl", *answers))
    stored = run(tmp_path, files, "k=[0,4]")
    trials = [trial for trial in stored.trials if trial.k == 4]
    counted = [(trial.new_tokens, trial.rounds, trial.drafted) for trial in trials]
    known = [(a, b) for a, b in zip(counted, expected, strict=True) if a[1] is not None]
    assert len(known) >= 8
    assert all(a == b for a, b in known)
    assert analyse(stored).served is not None
    assert {trial.temperature for trial in stored.trials} == {0.0}
