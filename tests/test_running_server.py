"""Counters of a server that serves others: read, differenced, priced."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import EXAMPLES, FROZEN, needs_llamacpp, outcome_of, stored
from served_pair import Served, answered
from server_answers import ACCEPTED_AT, sglang_answers, turns, vllm_answers, vllm_page
from stand_in_server import StandIn

from harness.analysis import analyse, counters
from harness.analysis.caveats import given
from harness.analysis.replayed import replayed
from harness.commands import served_elsewhere
from harness.decoding.sampling import SamplingParameters
from harness.engines import running
from harness.engines.counters import Samples
from harness.records import Rule, TextTrace, UserError
from harness.reporting.content import content_of
from harness.storage import StoredRun, load
from harness.summary import RunningServer
from harness.theory.acceptance import positions_at_k

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_elsewhere, "INTERVAL_S", 0.01)


def llamacpp_page(times: int) -> str:
    """What llama.cpp shows: a position has no line before something was accepted there."""
    lines = [f"llamacpp:{name} {n * times}" for name, n in LLAMACPP.items()]
    name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    at = [f'{name}{{position="{j}"}} {n * times}' for j, n in enumerate((50, 30))]
    return "\n".join([*lines, *(at if times else [])])


LLAMACPP = {
    "tokens_predicted_total": 184,
    "spec_decode_num_draft_tokens_total": 391,
    "spec_decode_num_accepted_tokens_total": 80,
    "spec_decode_num_drafts_total": 100,
}
# Of releases without a counter of rounds
TOKENS_50 = "vllm:generation_tokens_total 50"
VLLM_DRAFTED = "vllm:spec_decode_num_draft_tokens_total 30"
SGLANG_GAUGES = "sglang:generation_tokens_total 50\nsglang:spec_accept_length 2.81"
PROPS = {"build_info": "b11549-abc", "total_slots": 1}


def sglang_page(times: int, k: int = 3) -> str:
    """What SGLang shows: no counter of accepted tokens, and rounds once there was one."""
    lines = [
        f'sglang:generation_tokens_total{{is_streaming="true"}} {310 * times}',
        f'sglang:num_requests_total{{is_streaming="true"}} {10 * times}',
        *(f'sglang:spec_num_steps{{tp_rank="{rank}"}} {k}' for rank in (0, 1)),
    ]
    return "\n".join([*lines, *([f"sglang:spec_verify_calls_total {100 * times}"] * (times > 0))])


def vllm_server(**answers: Any) -> StandIn:
    return StandIn(vllm_answers(**{"/metrics": turns(vllm_page), **answers}))


def reported(server: StandIn, folder: Path, *words: str) -> StoredRun:
    asked = (f"metrics={server.url}", folder, *words)
    return stored(outcome_of("report", *asked))


def told(run: StoredRun) -> RunningServer:
    found = analyse(run).running
    assert found is not None
    return found


def sentences(run: StoredRun) -> str:
    content = content_of(analyse(run))
    return " ".join((*content.verdicts, *content.caveats))


# ---- the page ------------------------------------------------------------------------------------


def test_a_page_is_read_with_labels_that_hold_anything_and_with_time_stamps() -> None:
    samples = Samples.of(
        'a{x="1 } \\" 2",position="1"} 3 1700000000000\na 1.5e1\n# a 9\nb{} NaN\nnonsense\nc +Inf'
    )
    assert samples.sums == {"a": 18.0}
    assert samples.lines[0][1] == {"x": '1 } \\" 2', "position": "1"}
    assert samples.at_positions("a") == (0, 3)
    assert not Samples.of('a{position="99999999999"} 1').at_positions("a")


# ---- two scrapes ---------------------------------------------------------------------------------


def test_vllm_tells_acceptance_by_position_over_all_of_its_parts(tmp_path: Path) -> None:
    with_metrics = vllm_server()
    run = reported(with_metrics, tmp_path)
    total = told(run).total
    assert total is not None
    assert (told(run).engine, told(run).k) == ("vllm", 4)
    assert (total.rounds, total.requests, total.accepted_at) == (100, 10, ACCEPTED_AT)
    assert total.acceptance_by_position == (0.8, 0.6, 0.5, 0.4)
    assert total.tokens_per_round == pytest.approx(3.3)
    rows = analyse(run).results
    assert [row.k for row in rows] == [1, 2, 3, 4]
    assert rows[-1].tokens_per_round == pytest.approx(3.3)
    assert all(row.speedup is None for row in rows)
    text = sentences(run)
    assert "vLLM emits 3.30 tokens per round at K=4 (100 rounds of 10 requests" in text
    assert "if a round takes less time than 3.30 ordinary tokens" in text
    assert "for K = 1, 2, 3 it is estimated" in text


def test_llama_cpp_tells_k_by_what_it_drafts_and_no_requests(tmp_path: Path) -> None:
    server = StandIn({"/props": PROPS, "/metrics": turns(llamacpp_page)})
    run = reported(server, tmp_path)
    total = told(run).total
    assert total is not None
    assert (told(run).k, total.requests, total.accepted_at) == (4, None, (50, 30))
    # Nothing was accepted at a position without a counter
    rows = analyse(run).results
    assert [row.k for row in rows] == [1, 2, 3, 4]
    assert rows[-1].tokens_per_round == total.tokens_per_round == pytest.approx(1.8)


def test_counters_of_several_models_are_those_of_the_one_that_is_asked_for(tmp_path: Path) -> None:
    def page(times: int) -> str:
        own = vllm_page(times)
        other = own.replace('model_name="org/a b}"', 'model_name="other"')
        assert other != own
        return f"{own}\n{other}"

    listed = {"/v1/models": {"data": [{"id": "m"}, {"id": "other"}]}}
    with pytest.raises(UserError, match=r"2 models \(org/a b}, other\).*served_name=org"):
        reported(vllm_server(**{"/metrics": turns(page), **listed}), tmp_path)
    run = reported(
        vllm_server(**{"/metrics": turns(page), **listed}), tmp_path, "served_name=other"
    )
    total = told(run).total
    assert total is not None
    assert (total.rounds, total.requests) == (100, 10)


@pytest.mark.parametrize("drafted", [260, 350])
def test_a_mean_of_drafts_that_end_early_is_not_taken_for_k(tmp_path: Path, drafted: int) -> None:
    """Of a llama.cpp with --spec-draft-n-max 16 and a threshold; some rounds had 4 accepted."""

    def page(times: int) -> str:
        before = "spec_decode_num_draft_tokens_total 391"
        name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
        at = [f'{name}{{position="{j}"}} {3 * times}' for j in (2, 3)]
        made = llamacpp_page(1).replace(before, f"{before.split()[0]} {drafted}")
        lines = (
            f"{line.rsplit(' ', 1)[0]} {int(line.rsplit(' ', 1)[1]) * times}"
            for line in made.splitlines()
        )
        return "\n".join([*lines, *(at if times and drafted == 350 else [])])

    server = StandIn({"/props": PROPS, "/metrics": turns(page)})
    run = reported(server, tmp_path)
    summary = analyse(run)
    assert summary.running is not None
    assert (summary.running.k, summary.results) == (0, ())
    text = sentences(run)
    assert f"at a K that its counters do not tell, for rounds drafted {drafted / 100:.1f}" in text


def test_sglang_tells_tokens_per_round_and_nothing_by_position(tmp_path: Path) -> None:
    server = StandIn(sglang_answers(**{"/metrics": turns(sglang_page)}))
    run = reported(server, tmp_path)
    total = told(run).total
    assert total is not None
    assert (told(run).k, total.accepted, total.accepted_at) == (3, 200, ())
    (row,) = analyse(run).results
    assert (row.k, row.tokens_per_round) == (3, pytest.approx(3.0))


def test_round_times_of_a_run_price_every_k_that_it_timed(tmp_path: Path) -> None:
    run = reported(vllm_server(), tmp_path, f"latency_from={EXAMPLES / 'embedded_sweep'}")
    rows = analyse(run).results
    (timed,) = analyse(run).round_times
    assert timed.source == "rounds"
    assert [row.k for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row.tokens_per_round is not None
        if row.k in timed.round_s:
            expected = row.tokens_per_round * timed.plain_s / timed.round_s[row.k]
            assert row.speedup == pytest.approx(expected)
        assert row.tokens_per_round == pytest.approx(
            1.0 + sum(positions_at_k((0.8, 0.6, 0.5, 0.4), row.k))
        )
    (answer,) = analyse(run).answers
    assert answer.named[1] == max(rows, key=lambda row: row.speedup or 0.0).k
    assert answer.speedup_lo is not None  # vLLM counts requests


def test_round_times_of_a_server_run_price_too(tmp_path: Path) -> None:
    server_run = FROZEN / "server"
    run = reported(vllm_server(), tmp_path, f"latency_from={server_run}")
    assert analyse(run).results[0].speedup is not None


def test_a_report_of_the_stored_run_says_the_same_and_holds_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret-value")
    server = vllm_server()
    run = reported(server, tmp_path, "api_key_env=MY_KEY")
    assert "Bearer sk-secret-value" in server.keys
    again = outcome_of("report", f"run={run.folder}")
    assert again.status == 0
    assert load(run.folder).summary == run.summary
    files = [file for file in run.folder.rglob("*") if file.is_file()]
    assert files
    assert not any(b"sk-secret-value" in file.read_bytes() for file in files)
    assert not server.asked  # nothing was sent to the model


# ---- what cannot be said -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (vllm_answers(**{"/metrics": "python_gc_total 3"}), "without --disable-log-stats"),
        ({"/props": PROPS, "/metrics": 501}, "start llama.cpp with --metrics, SGLang with --en"),
        ({"/": "<html>"}, "no counters that are known here at /metrics; start llama.cpp"),
        (
            vllm_answers(**{"/metrics": "vllm:generation_tokens_total 50"}),
            "has not drafted a token in the 50 that it generated; it drafts if it is started with"
            " --speculative-config",
        ),
        (
            {"/props": PROPS, "/metrics": "llamacpp:tokens_predicted_total 50"},
            "started with --spec-type",
        ),
        (sglang_answers(**{"/metrics": sglang_page(0, k=0)}), "--speculative-algorithm"),
        # A counter that is absent is not zero: pages of earlier releases
        (
            vllm_answers(**{"/metrics": f"{TOKENS_50}\n{VLLM_DRAFTED}"}),
            "it drafts (vllm:spec_decode_num_draft_tokens_total is 30), but /metrics has no"
            " vllm:spec_decode_num_drafts_total, the counter of rounds; vLLM 0.9 or later has it",
        ),
        (
            vllm_answers(**{"/metrics": TOKENS_50, "/version": {"version": "0.8.5"}}),
            "whether it drafts is not known, but /metrics has no vllm:spec_decode_num_drafts_total",
        ),
        (
            sglang_answers(**{"/metrics": SGLANG_GAUGES, "/server_info": {"version": "0.5.9"}}),
            "it drafts (sglang:spec_accept_length is 2.81), but /metrics has no"
            " sglang:spec_verify_calls_total, the counter of rounds; SGLang 0.5.13 or later has it",
        ),
        (
            sglang_answers(
                **{
                    "/metrics": SGLANG_GAUGES.replace("2.81", "0.0"),
                    "/server_info": {"version": "0.5.9"},
                }
            ),
            "whether it drafts is not known",
        ),
        (
            {
                "/props": {"build_info": "b6000-0a1b2c3"},
                "/metrics": "llamacpp:tokens_predicted_total 50",
            },
            "whether it drafts is not known, but /metrics has no"
            " llamacpp:spec_decode_num_drafts_total, the counter of rounds; llama.cpp b11368 or"
            " later has it where it is started with --spec-type, and its version is b6000",
        ),
        (vllm_answers(**{"/metrics": vllm_page(3)}), "no round was counted within"),
        (vllm_answers(**{"/metrics": turns(lambda n: vllm_page(3 - n))}), "counters are lower"),
    ],
)
def test_a_server_that_tells_nothing_is_refused_with_what_to_do(
    answers: dict[str, Any], says: str, tmp_path: Path
) -> None:
    server = StandIn(answers)
    with pytest.raises(UserError) as refused:
        reported(server, tmp_path)
    assert f"metrics={server.url}: " in str(refused.value)
    assert says in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_an_address_without_a_server_is_refused(tmp_path: Path) -> None:
    server = StandIn({})
    server.close()
    with pytest.raises(UserError, match="not reachable"):
        reported(server, tmp_path)


# ---- against replay ------------------------------------------------------------------------------


def errors(traces: list[TextTrace], rule: Rule) -> Iterator[float]:
    """Of tokens per round of a smaller K, estimated from counters of each larger one."""
    shares: dict[int, tuple[float, ...]] = {}
    for k, counts in replayed(traces, rule, range(1, 9)).items():
        at_least = counts.accepted_lengths.sum(axis=0)[::-1].cumsum()[::-1]
        shares[k] = tuple(float(rounds) for rounds in at_least[1:] / at_least[0])
    for longer in (2, 3, 4, 5, 8):
        for k in range(1, longer):
            estimated = 1.0 + sum(positions_at_k(shares[longer], k))
            yield estimated / (1.0 + sum(shares[k])) - 1.0


def test_what_is_said_of_the_estimate_of_a_smaller_k_holds_on_the_shipped_sets() -> None:
    run = load(EXAMPLES / "embedded_audition")
    worst = {"model": 0.0, "head": 0.0}
    for draft in ("tiny_good", "tiny_small", "tiny_eagle3"):
        cells: list[tuple[float, Rule]]
        cells = [(0.0, "greedy_draft"), (1.0, "greedy_draft"), (1.0, "ratio")]
        for temperature, rule in cells:
            cell = (draft, temperature)
            traces = [each for each in run.traces if (each.draft, each.temperature) == cell]
            kind = "head" if draft == "tiny_eagle3" else "model"
            worst[kind] = max(worst[kind], *map(abs, errors(traces, rule)))
    said = {"model": given.MODEL_ERROR, "head": given.HEAD_ERROR}
    for kind, error in worst.items():
        assert error == pytest.approx(said[kind], abs=0.0015), kind


@needs_llamacpp
@pytest.mark.parametrize("k", [4, *(pytest.param(k, marks=pytest.mark.exhaustive) for k in (1, 2))])
def test_the_counters_of_llama_cpp_are_replays_of_the_same_texts(k: int, tmp_path: Path) -> None:
    pair = Served(tmp_path, prompts=3)
    engine = pair.llamacpp()
    requests = [replace(each, sampling=SamplingParameters(0.0), k=k) for each in pair.requests]
    with engine.open(k) as server:
        counting = running.CountingServer(server.url)
        texts = [answered(each, server) for each in requests]
        scrapes = [counting.first, counting.scrape()]
    total = counters.running_server(counting.engine, scrapes).total
    assert total is not None
    expected = pair.replayed(texts, server.facts, k)
    lengths = expected.accepted_lengths.sum(axis=0)
    at_least = tuple(round(float(lengths[j:].sum())) for j in range(1, k + 1))
    assert (*total.accepted_at, *[0] * k)[:k] == at_least
    # On the last position of a budget it drafts nothing, and does not count the round
    drafting = float(expected.rounds.sum() - expected.proposals[:, 0].sum())
    assert total.rounds == pytest.approx(drafting)
    assert counters.running_server(counting.engine, scrapes).k == k
