"""Command lines that are refused: one line, which names the key, and nothing is stored."""

from pathlib import Path

import pytest
from runs import FROZEN, outcome_of

from harness.records import UserError

TYPED = "latency.target_ms=10 latency.draft_ms=2"
TEXTS = f"texts_from=http://127.0.0.1:9 {TYPED}"
RANDOM = "model=qwen3_4b model.weights=dummy"
RATE = "decode.acceptance=0.8"
PENALTY = "decode.repetition_penalty=1.2"
ONLY_MEASURED = "decode.acceptance: only a sweep with mode=measure"

# Commands, the words after it, and a part of the line; by what is refused
REFUSED = {
    "a key that there is not": [
        ("sweep", "+decode.min_q=0.1", "min_q: there is no such key; similar names: decode.min_p"),
        ("sweep", "+new_token=5", "new_token: there is no such key; similar names: new_tokens"),
        ("sweep", "++prompts.wieghts={easy:1}", "similar names: prompts.weights"),
        ("sweep", "+decode.presence_penalty=1", "similar names: decode.repetition_penalty"),
        ("sweep", "+zzz=1", "zzz: there is no such key; it takes: "),
    ],
    "numbers": [
        ("sweep", "temperature=[1e-39]", "temperature: 1e-39 is not 0 (greedy) or a number of at"),
        ("sweep", "threads=100000", "threads: 100000 is not auto or a whole number"),
        ("sweep", "k=[1000000]", "k: 1000000 is not a whole number of at least 0 and at most 1024"),
        ("sweep", "repetitions=1000000000", "not a whole number of at least 1 and at most 10000"),
        ("sweep", "gpu.memory_gb=3", "gpu.memory_gb: no gpu is chosen; choose one, gpu=..."),
        ("sweep", "gpu=h100 gpu.price_per_hour_usd=-5", "gpu.price_per_hour_usd: -5.0 is not"),
        ("snapshot", "draws=1000000000", "draws: 1000000000 is not a whole number of at least"),
        ("snapshot", "draws=4999", "draws: 4999"),
        ("profile", "batches=[0]", "batches: 0 is not"),
        ("profile", "contexts=[]", "contexts=[]: give at least one"),
        ("profile", "contexts={a:1}", "contexts={'a': 1}: give auto or a list"),
    ],
    "model and draft": [
        ("sweep", "model=hf draft=hf", "give draft.id=... model.id=..."),
        ("sweep", "draft.name=tiny", "draft.name=tiny: the same as model.name"),
        ("sweep", "draft.device=cpu draft.device_map=auto", "draft.device and draft.device_map"),
        ("sweep", "model.weights=dummy", "model.weights=dummy: model=tiny has no architecture"),
        ("sweep", RANDOM, "set both to dummy or both to pretrained"),
        ("sweep", "draft=qwen3_4b draft.weights=dummy", "set both to dummy or both to pretrained"),
        ("sweep", f"{RANDOM} model.quantization=int4", "model.quantization: not with"),
        ("sweep", f"{RANDOM} model.architecture.layers=0", "model.architecture.layers=0"),
        ("sweep", "draft=tiny_eagle3 backend=cuda_graphs k=[2]", "graphs do not keep; use backend"),
        ("profile", "draft=tiny_eagle3", "takes a draft model, and that is a head; sweep"),
    ],
    "decode": [
        ("sweep", "decode.min_p=1.5", "decode.min_p: 1.5 is not a number above 0 and at most 1"),
        ("sweep", "decode.repetition_penalty=0", "decode.repetition_penalty: 0.0 is not a number"),
        ("sweep", "decode.stop_strings=['']", "decode.stop_strings: an empty string"),
        ("sweep", r"decode.stop_strings=['\n']", "holds a backslash and an n, not a line break"),
        ("sweep", "draft=ngram p_min=[0,0.5]", "no probability that a threshold"),
        ("sweep", "p_min=[0.5] backend=cuda_graphs", "backend=eager"),
        ("sweep", f"{PENALTY} p_min=[0.5] mode=replay", "not replayed with decode.repetition_pen"),
        ("sweep", f"{PENALTY} p_min=[0,0.5]", "and a penalty, which are not replayed together"),
        ("sweep", "until=all p_min=[0,0.5]", "until=all measures every K at one threshold"),
        ("sweep", "p_min=[1]", "p_min: 1.0 is not a number of at least 0 and at most"),
        ("audition", f"{PENALTY} p_min=[0.5]", "not with decode.repetition_penalty"),
        ("snapshot", RATE, ONLY_MEASURED),
        ("audition", RATE, ONLY_MEASURED),
        ("sweep", f"{RATE} mode=replay", ONLY_MEASURED),
        ("sweep", f"{RATE} p_min=[0.5]", "give one of the two"),
        ("sweep", "decode.acceptance=[0.5] k=[8]", "needs 8"),
        ("sweep", "decode.rule=block p_min=[0.5]", "decode.rule=block"),
        ("audition", "decode.rule=block p_min=[0.5]", "decode.rule=block"),
        ("server", "engine=vllm decode.rule=fly", "'fly' is refused (vLLM's fly accepts"),
    ],
    "looks and budgets": [
        ("sweep", "until=soon", "until: 'soon' is unknown; use one of decided, all"),
        ("sweep", "until=decided mode=replay", "until=decided: not with mode=replay, which runs"),
        ("sweep", f"until=decided {RATE}", "until=decided: not with decode.acceptance"),
        ("sweep", "until=all budget_s=60", "budget_s: not with until=all; leave it out"),
        ("sweep", "mode=replay budget_s=60", "not with until=all, as it is with mode=replay"),
        ("sweep", "budget_s=0", "budget_s: 0.0 is not a number above 0"),
        ("sweep", "clock=cuckoo", "clock: 'cuckoo' is unknown; use one of wall, cpu"),
        ("sweep", "prompts.limit=some", "prompts.limit: 'some' is not auto or a whole number"),
        ("audition", "until=soon", "until: 'soon' is unknown; use one of decided, all"),
        ("audition", "until=all budget_s=60", "budget_s: not with until=all; leave it out"),
        (
            "audition",
            "texts_from=http://localhost:1 latency.target_ms=1 budget_s=5",
            "budget_s: not with until=all, as it is with texts_from",
        ),
    ],
    "plan": [
        ("plan", "run=x rate=0 tpot_ms=30", "rate: 0.0 is not a number above 0"),
        ("plan", "run=x rate=20", "tpot_ms: no goal is given"),
        ("plan", "run=x rate=20 tpot_ms=3 temperature=[0,1]", "a plan is for one"),
        ("plan", "run=x rate=20 tpot_ms=-1", "tpot_ms: -1.0 is not a number above 0"),
        ("plan", "run=x tpot_ms=30", "rate: no value and no default"),
        ("plan", "run=x rate=2 tpot_ms=3 cache_tokens=[1,2,3]", "give one number, or that of a"),
    ],
    "prompts": [
        ("sweep", "prompts.hub_split=x", "prompts.hub_split: only with prompts.hub=ORG/NAME"),
        ("sweep", "prompts.sample=50", "prompts.sample: only with prompts.log=FILE"),
        ("sweep", "prompts.files=[[a]]", "prompts.files: ['a'] is not a text"),
    ],
    "drafts of an audition": [
        ("audition", "draft=tiny_good drafts=[ngram]", "draft=tiny_good and drafts: give one"),
        ("audition", "drafts=[ngram,ngram]", "'ngram' is listed twice"),
        ("audition", "drafts=[5]", "drafts: no draft named '5'"),
        ("audition", "combine=[a,a]", "combine: a is given twice"),
        ("audition", "drafts=[remote@http://127.0.0.1:9]", "drafts: remote: a server's address"),
    ],
    "latency of an audition": [
        ("audition", "latency.draft_ms={tiny_good:0}", "latency.draft_ms.tiny_good: 0 is not"),
        ("audition", f"{TYPED} latency.verify_ms=[10,-1]", "latency.verify_ms: -1.0 is not a"),
        ("audition", f"{TYPED} latency.verify_ms=[]", "latency.verify_ms=[]: give at least one"),
        ("audition", f"{TYPED} latency.verify_ms=[10]", "1 entries, but k=1 verifies 2 positions"),
    ],
    "texts_from": [
        ("audition", "texts_from=http://127.0.0.1:9", "texts_from: nothing is timed here; give"),
        ("audition", f"{TEXTS} traces_from={FROZEN}/audition", "texts_from and traces_from: give"),
        ("audition", f"{TEXTS} temperature=0.7", "temperature=0.7: a server tells"),
        ("audition", f"{TEXTS} decode.top_k=5", "decode.top_k at temperature 1"),
        ("audition", f"{TEXTS} decode.repetition_penalty=1.1", "decode.repetition_penalty"),
        ("audition", f'{TEXTS} decode.stop_strings=["a"]', "decode.stop_strings"),
        ("audition", f"{TEXTS} model.weights=dummy", "model.weights=dummy"),
        ("audition", f"texts_from=host:8000 {TYPED}", "texts_from: 'host:8000' is not an address"),
        ("audition", f"texts_from=http://me:secret@host {TYPED}", "host, port and path; name the"),
        (
            "audition",
            f"drafts=[a@http://me:secret@host] {TYPED}",
            "drafts: a: a server's address; drafts are scored here, give name@folder-or-hub-id",
        ),
    ],
    "report": [
        ("report", "run=x temperature=[0]", "temperature: needs records="),
        ("report", "run=x k=[2]", "k: needs records="),
        ("report", "run=x latency_from=y", "latency_from: needs metrics="),
        ("report", "run=x metrics=http://host", "run and metrics: give one of them"),
        ("report", "metrics=host:8000", "metrics: 'host:8000' is not an address"),
        ("report", "metrics=http://me:secret@host", "host, port and path; name the variable"),
        ("report", "metrics=http://host fail_below=1", "it has no effect on metrics"),
    ],
}


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        pytest.param(*row, id=" ".join(row[:2]).replace(str(FROZEN), "frozen"))
        for rows in REFUSED.values()
        for row in rows
    ],
)
def test_a_command_line_is_refused_in_one_line_that_names_its_key(
    command: str, words: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        outcome_of(command, tmp_path, *words.split())
    line = str(refused.value)
    assert says in line
    assert "\n" not in line
    assert "secret" not in line
    assert list(tmp_path.iterdir()) == []
