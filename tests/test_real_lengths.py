"""A vocabulary of 151,936, prompts of 600 tokens and answers of 100: memory and pages."""

import subprocess
import sys
from typing import NamedTuple

import pytest
from full_vocabulary import PROMPT_TOKENS, VOCABULARY, save_pair, write_prompts

from harness.analysis import analyse
from harness.storage import StoredRun, load

PROMPTS, NEW_TOKENS, KS = 2, 100, (1, 4)
# Of the process. Its imports, tokenizers and models take 0.85 GB; the logits of these texts at once
# would take 0.85 GB more in float32, and those of one text 0.4 GB
MOST_MEMORY_BYTES = 1.5e9
MOST_TRACE_BYTES_PER_TOKEN, MOST_PAGE_BYTES = 40, 1e6


# The process's own peak: ru_maxrss counts that of the process which starts it, too
MEASURED = """
import atexit, pathlib, re, runpy, sys

def note():
    status = pathlib.Path("/proc/self/status").read_text()
    pathlib.Path("peak").write_text(re.search(r"VmHWM:\\s+(\\d+)", status)[1])

atexit.register(note)
runpy.run_module("harness.audition", run_name="__main__", alter_sys=True)
"""


class Audition(NamedTuple):
    run: StoredRun
    peak_kb: int


@pytest.fixture(scope="module")
def audition(tmp_path_factory: pytest.TempPathFactory) -> Audition:
    """An audition of one draft, as it is typed, in a process of its own."""
    folder = tmp_path_factory.mktemp("full_vocabulary")
    target, draft = save_pair(folder)
    prompts = write_prompts(folder / "long.jsonl", PROMPTS)
    words = [
        f"model={target}",
        f"drafts=[first@{draft}]",
        f"prompts.files=[{prompts}]",
        f"k=[{','.join(map(str, KS))}]",
        f"new_tokens={NEW_TOKENS}",
        *("temperature=[0]", "threads=1", f"results_root={folder / 'results'}"),
    ]
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", MEASURED, *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        status = process.wait()
        output.seek(0)
        assert status == 0, output.read()
    (stored,) = (folder / "results").iterdir()
    return Audition(load(stored), int((folder / "peak").read_text()))


def test_texts_have_real_lengths_and_ids_from_the_whole_vocabulary(audition: Audition) -> None:
    traces = audition.run.traces
    assert len(traces) == PROMPTS
    assert min(trace.prompt_tokens for trace in traces) >= PROMPT_TOKENS
    assert {len(trace.tokens) for trace in traces} == {NEW_TOKENS}
    assert max(trace.tokens.max() for trace in traces) > VOCABULARY // 2
    accepted = sum(int(trace.draft_is_argmax.sum()) for trace in traces)
    assert 0 < accepted < PROMPTS * NEW_TOKENS


def test_the_target_s_chat_template_is_used(audition: Audition) -> None:
    assert audition.run.manifest.models["target"].chat_template


def test_scoring_keeps_few_positions_of_a_large_vocabulary_in_memory(audition: Audition) -> None:
    assert 1024 * audition.peak_kb < MOST_MEMORY_BYTES


def test_stored_scores_and_pages_grow_with_tokens_and_not_with_the_vocabulary(
    audition: Audition,
) -> None:
    size = {file.name: file.stat().st_size for file in audition.run.folder.iterdir()}
    assert size["traces.parquet"] < MOST_TRACE_BYTES_PER_TOKEN * PROMPTS * NEW_TOKENS
    assert size["report.html"] < MOST_PAGE_BYTES
    assert size["report.md"] < MOST_PAGE_BYTES / 10


def test_the_draft_has_a_predicted_speedup_at_every_k(audition: Audition) -> None:
    rows = audition.run.results
    predicted = rows[(rows.source == "replayed") & (rows.k > 0)]
    assert set(predicted.k) == set(KS)
    assert predicted.speedup.notna().all()
    assert analyse(audition.run).answers
