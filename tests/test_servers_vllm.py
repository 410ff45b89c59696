"""vLLM itself: `make test-servers` installs its CPU build apart from .venv and runs these.

The command runs each embedded pair, one thread to a server, the servers side by side: one per K and
a plain one. -s prints what was measured.
"""

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import outcome_of, stored
from safetensors.torch import load_file, save_file
from served_pair import Served, embedded
from test_pard import checkpoint as pard_checkpoint

from harness import prompts as prompt_sets
from harness.analysis import analyse
from harness.analysis.counters import running_server
from harness.cli import draft_conf
from harness.config import PromptsConf
from harness.decoding.sampling import SamplingParameters
from harness.engine_facts import vllm
from harness.engine_facts.draft_kinds import DRAFTS
from harness.engine_facts.spec import PairToServe
from harness.engines.http_server import CardMemory
from harness.engines.running import CountingServer
from harness.engines.vllm import Vllm
from harness.measurement.draft_scores import score_texts
from harness.measurement.remote_scores import TextServer
from harness.measurement.target_texts import GeneratedText, generate_texts
from harness.models.heads.eagle3 import Eagle3Network, load_eagle3
from harness.models.load import EMBEDDED
from harness.storage import StoredRun
from harness.summary import SamplingFacts, ServedSummary
from tools.train_embedded.head_files import save_head

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(shutil.which("vllm") is None, reason="no vllm on PATH"),
    pytest.mark.timeout(3000),
]
PAIRS, KS = ("tiny_good", "tiny_small"), (1, 2, 4, 8)
# One process computes: vLLM's others wait for it in loops that cost processor time
FLAGS = "flags=[--enforce-eager,--distributed-executor-backend,uni]"
SERVERS = ["engine=vllm", "servers=5", "threads=1", "clock=cpu", FLAGS]
PROMPTS, ALL = ("new_tokens=48", "prompts.limit=5"), ("new_tokens=64", "prompts.limit=null")
# Its release 0.32 for CPUs draws other tokens than the target's where it drafts above T = 0
NOT_LOSSLESS = "0.32"


def asked(folder: Path, *words: str, prompts: Sequence[str] = PROMPTS) -> StoredRun:
    return stored(outcome_of("server", folder, *SERVERS, *prompts, *words))


def said(run: StoredRun) -> ServedSummary:
    served = analyse(run).served
    assert served is not None
    return served


@pytest.fixture(scope="module", params=PAIRS)
def greedy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    work = ["k=[1,2,4,8]", "temperature=0", "until=all", "repetitions=12"]
    return asked(tmp_path_factory.mktemp(request.param), f"draft={request.param}", *work)


def test_rounds_and_drafted_tokens_equal_replay_and_texts_equal_plain(greedy: StoredRun) -> None:
    gates = {gate.k: gate for gate in said(greedy).gates}
    assert gates.keys() == {*KS}
    for gate in gates.values():
        print(f"K = {gate.k}: {gate.rounds:.0f} rounds in {gate.texts} texts, as replayed")
        assert gate.texts > 0
        assert gate.equal_rounds == gate.equal_drafted == gate.equal_texts == gate.texts
        assert gate.rounds == pytest.approx(gate.expected_rounds)
        assert gate.lossless


@pytest.fixture(scope="module", params=["specforge", "speculators", "ngram"])
def no_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    """All shipped prompts, drafted by the shipped head in one layout, or looked up."""
    folder = tmp_path_factory.mktemp(request.param)
    words = ["draft=ngram"]
    if request.param != "ngram":
        head = load_eagle3(draft_conf("tiny_eagle3"), embedded("tiny")).network
        assert isinstance(head, Eagle3Network)
        save_head(head, folder / "head", request.param, "embedded:tiny")
        words = ["draft=eagle3", f"draft.id={folder / 'head'}", f"draft.name={request.param}"]
    return asked(folder, *words, "k=[1,2,4]", "temperature=0", "repetitions=1", prompts=ALL)


def test_a_head_and_a_look_up_draft_as_replayed_after_every_shipped_prompt(
    no_model: StoredRun,
) -> None:
    gates = {gate.k: gate for gate in said(no_model).gates}
    assert gates.keys() == {1, 2, 4}
    shipped = len(prompt_sets.load(PromptsConf(sets=["easy", "hard"])))
    for gate in gates.values():
        print(f"K = {gate.k}: {gate.rounds:.0f} rounds in {gate.texts} texts, as replayed")
        assert gate.texts == shipped
        assert gate.equal_rounds == gate.equal_drafted == gate.equal_texts == gate.texts
        assert gate.lossless


@pytest.mark.parametrize("kind", ["pard", "peagle"])
def test_drafts_from_mask_tokens_are_as_replayed(kind: str, tmp_path: Path) -> None:
    """Of weights that were not trained for it: some second drafts are accepted all the same."""
    folder = tmp_path / kind
    if kind == "pard":
        pard_checkpoint(folder)
    else:
        shutil.copytree(EMBEDDED / "tiny_eagle3", folder)
        config, weights = folder / "config.json", folder / "model.safetensors"
        config.write_text(json.dumps({**json.loads(config.read_text()), "ptd_token_id": 7}))
        tensors = load_file(weights)
        width = tensors["fc.weight"].shape[1]
        states = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(0))
        save_file({**tensors, "mask_hidden": states.to(tensors["fc.weight"].dtype)}, weights)
    words = [f"draft={kind}", f"draft.id={folder}", "k=[2,4]", "temperature=0", "repetitions=1"]
    run = asked(tmp_path / "runs", *words)
    for gate in said(run).gates:
        print(f"{kind}, K = {gate.k}: {gate.rounds:.0f} rounds in {gate.texts} texts, as replayed")
        assert gate.texts > 0
        assert gate.equal_rounds == gate.equal_drafted == gate.equal_texts == gate.texts
    lengths = [trial.accepted_lengths for trial in run.trials if trial.k == 4]
    assert sum(sum(each[2:]) for each in lengths if each is not None) > 0


def test_a_server_whose_k_follows_a_schedule_is_measured_under_load(tmp_path: Path) -> None:
    words = ["draft=tiny_small", "schedule=[[1,1,4],[2,4,1]]", "k=[1,4]", "concurrency=[1,2]"]
    prompts = ("new_tokens=24", "prompts.limit=2")
    run = asked(tmp_path, *words, "temperature=0", "repetitions=1", prompts=prompts)
    alone, together = said(run).varying
    assert (alone.concurrency, together.concurrency) == (1, 2)
    for cell in (alone, together):
        assert cell.varying == "schedule"


def test_each_round_of_a_text_is_known(greedy: StoredRun) -> None:
    for trial in greedy.trials:
        assert trial.status == "ok"
        if trial.k:
            assert trial.rounds is not None
            assert trial.drafted == trial.k * trial.rounds
            assert trial.accepted_lengths is not None
            assert sum(trial.accepted_lengths) == trial.rounds


def test_speedups_of_a_prompt_set_are_predicted_from_the_other(greedy: StoredRun) -> None:
    cells = [
        (measured, predicted.speedup / measured.speedup - 1.0)
        for measured, predicted in analyse(greedy).predicted_cells
        if measured.speedup and predicted.speedup
    ]
    errors = [abs(error) for _, error in cells]
    assert len(errors) == 2 * len(KS)
    for cell, error in cells:
        print(f"{cell.prompt_set} K = {cell.k}: {cell.speedup:.3f}x measured, {100 * error:+.1f} %")
    print(f"median error {100 * np.median(errors):.1f} %, largest {100 * max(errors):.1f} %")
    assert np.median(errors) <= 0.05


def test_a_build_that_is_not_lossless_above_temperature_0_is_caught(tmp_path: Path) -> None:
    served = said(asked(tmp_path, "k=[4]", "temperature=1", "repetitions=2"))
    plain, drafting = served.gates
    for gate in served.gates:
        print(
            f"T = 1, K = {gate.k}: {gate.nats_per_token:.2f} nats per token,"
            f" {gate.expected_nats_per_token:.2f} expected, z {gate.text_z:.1f}"
        )
    assert (plain.k, plain.lossless) == (0, True)
    assert (drafting.k, drafting.lossless) == (4, not served.version.startswith(NOT_LOSSLESS))


def test_completions_are_scored_as_by_the_loaded_models(tmp_path: Path) -> None:
    pair = Served(tmp_path, "tiny_small", 2)
    texts: list[GeneratedText] = []
    with pair.vllm().open(0) as target:
        remote = TextServer(target.url)
        for temperature in (0.0, 1.0):
            for request in pair.requests:
                asked = replace(request, sampling=SamplingParameters(temperature))
                texts.append(remote.complete(asked, pair.loaded.tokenizer.decode))
    assert remote.engine == "vllm"
    models = pair.target_model, pair.draft_model
    of_server, here = (
        score_texts(each, *models, draft_name="tiny_small")
        for each in (texts, [replace(text, logprobs=None) for text in texts])
    )
    for trace, expected in zip(of_server, here, strict=True):
        np.testing.assert_allclose(trace.target_logprob, expected.target_logprob, atol=1e-3)
    print(f"{sum(len(text.tokens) for text in texts)} tokens of {len(texts)} texts scored alike")


def test_its_own_parser_reads_every_line_that_is_printed_or_started(tmp_path: Path) -> None:
    printed: list[str] = []
    for spec in (vllm.SPEC, vllm.PROBABILISTIC, vllm.BLOCK_VERIFICATION):
        rule = None if spec is vllm.SPEC else spec.rule
        for kind, k in product(spec.lines, (1, 4)):
            pair = PairToServe("T", "a folder/D", k, 1.0, SamplingFacts(), rule, kind=kind)
            printed += [spec.lines[kind].line(pair), spec.plain(pair)]
    pair = PairToServe("T", "D", 2, 1.0, SamplingFacts())
    assert vllm.SPEC.schedule is not None
    printed.append(vllm.SPEC.schedule(pair, {}, {1: 2, 5: 0}, 8))
    started: list[list[str]] = []
    for kind, rule, varying in product(vllm.SPEC.drafts, vllm.SPEC.rules, ("", *vllm.SPEC.varying)):
        server = Vllm(
            "T", "D" if DRAFTS[kind].has_checkpoint else None, tmp_path, 100, revision="main",
            draft_revision="main", kind=kind, rule=rule, varying=varying, schedule=((1, 4, 2),),
            memory=CardMemory(80 * 10**9, 80 * 10**9, 10**9),
        )  # fmt: skip
        started += [[*server.flags(k), "--port", "8000"] for k in (0, 2)]
    wrong = ["serve", "T", "--speculative-config", '{"method": "ngram", "tokens": 2}']
    lines = [*(shlex.split(line)[1:] for line in printed), *started, wrong]
    python = Path(str(shutil.which("vllm"))).with_name("python")
    script = Path(__file__).with_name("vllm_parser.py")
    done = subprocess.run(
        [python, script], input=json.dumps(lines), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    refused = json.loads(done.stdout.splitlines()[-1])
    assert refused == {" ".join(wrong): "no tokens in --speculative-config"}


@pytest.mark.parametrize("k", [1, 4])
def test_its_counters_are_the_rounds_of_the_same_texts(k: int, tmp_path: Path) -> None:
    """A round near a text's end drafts K tokens too, so the text is continued beyond it."""
    pair = Served(tmp_path, "tiny_good", 4)
    server_texts: list[tuple[int, ...]] = []
    with pair.vllm().open(k) as server:
        counting = CountingServer(server.url)
        for each in pair.requests:
            asked = each.asked._replace(sampling=SamplingParameters(0.0))
            server_texts.append(server.generate(asked).tokens)
        total = running_server(counting.engine, [counting.first, counting.scrape()]).total
    assert total is not None
    longer = [
        replace(each, sampling=SamplingParameters(0.0), eos=(), budget=each.budget + k + 1)
        for each in pair.requests
    ]
    continued = generate_texts(pair.target_model, longer, name="model=tiny", batch=8)
    traces = score_texts(continued, pair.target_model, pair.draft_model, draft_name="draft")
    at_least, rounds = np.zeros(k, dtype=int), 0
    for tokens, trace in zip(server_texts, traces, strict=True):
        assert tuple(trace.tokens[: len(tokens)]) == tokens
        start = 1
        while start < len(tokens):
            matches = trace.draft_is_argmax[start : start + k]
            accepted = k if matches.all() else int(np.argmin(matches))
            at_least[:accepted] += 1
            rounds, start = rounds + 1, start + accepted + 1
    print(f"K = {k}: {rounds} rounds, accepted at 1, 2, ...: {at_least.tolist()}, as counted")
    assert (total.rounds, total.accepted_at) == (rounds, tuple(at_least))
    assert total.requests == len(pair.requests)
    assert total.drafted == k * rounds
