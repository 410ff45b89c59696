"""SGLang's own parser reads every command line that is printed or started here.

It has no build for a CPU, so its server cannot run on a test machine; its wheel's parser can.
`make test-parsers` installs the wheel without its dependencies and runs these.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness.engine_facts import sglang
from harness.engine_facts.draft_kinds import DRAFTS
from harness.engine_facts.spec import PairToServe
from harness.engines.http_server import CardMemory
from harness.engines.sglang import Sglang
from harness.summary import SamplingFacts

WHEEL = Path(os.environ.get("SGLANG_WHEEL") or Path(__file__).parents[1] / ".sglang")
pytestmark = pytest.mark.skipif(
    not (WHEEL / "sglang").is_dir(), reason="SGLang's wheel is not here: make test-parsers"
)
VARIANTS = (sglang.SPEC, sglang.REJECTION_SAMPLING, sglang.BLOCK_VERIFICATION)
RANGES = ((1, 3, 4), (4, 15, 2), (16, 32, 0))
HERE = ["--host", "127.0.0.1", "--port", "30000"]


def asked_of_the_wheel(
    lines: list[list[str]],
    tiers: tuple[Path | None, ...] = (),
    variables: tuple[str, ...] = (),
) -> dict[str, Any]:
    asked = {
        "lines": lines,
        "algorithms": [*sglang.ALGORITHMS.values()],
        "variables": variables,
        "tiers": [file and str(file) for file in tiers],
    }
    script = Path(__file__).with_name("sglang_parser.py")
    done = subprocess.run(
        [sys.executable, script, WHEEL],
        input=json.dumps(asked), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def printed() -> list[list[str]]:
    """The words after `python -m sglang.launch_server` of every line that a report can have."""
    lines: list[str] = []
    for spec in VARIANTS:
        for kind, k, draft in product(spec.lines, (1, 4), ("org/target", "a folder/draft")):
            rule = None if spec is sglang.SPEC else spec.rule
            pair = PairToServe("org/target", draft, k, 1.0, SamplingFacts(), rule, kind=kind)
            lines += [spec.lines[kind].line(pair), spec.plain(pair)]
    words = [shlex.split(line) for line in lines]
    assert all(each[:3] == ["python", "-m", "sglang.launch_server"] for each in words)
    return [each[3:] for each in words]


def started(folder: Path) -> list[list[str]]:
    """The words after `sglang serve` of every server that is started."""
    memory = CardMemory(80 * 10**9, 80 * 10**9, 10**9)
    servers = [
        Sglang(
            "org/target", "org/draft" if DRAFTS[kind].has_checkpoint else None, folder, 100,
            revision="main", draft_revision="main", kind=kind, rule=rule, slots=slots,
            memory=memory, more_flags=("--tp-size", "2"),
        )
        for kind, rule, slots in product(sglang.SPEC.drafts, sglang.SPEC.rules, (1, 8))
    ]  # fmt: skip
    changing = [
        replace(server, varying=varying, schedule=RANGES)
        for server in servers
        for varying, known in sglang.SPEC.varying.items()
        if server.kind in known.kinds
    ]
    lines = [server.flags(k) for server in servers for k in (0, 1, 4)]
    lines += [server.flags(4) for server in changing]
    assert all(line[0] == "serve" for line in lines)
    return [[*line[1:], *HERE] for line in lines]


def test_every_line_is_one_that_the_wheel_of_the_release_we_name_parses(tmp_path: Path) -> None:
    wrong = [["--model-path", "x", "--speculative-num-step", "4"]]
    variables = (*Sglang("t", "d", tmp_path, 100).environment([0.5]), "SGLANG_SIMULATE_ACC")
    file = tmp_path / "tiers.json"
    file.write_text(sglang.tiers({low: k for low, _, k in RANGES}))
    lines = [*printed(), *started(tmp_path), *wrong]
    told = asked_of_the_wheel(lines, (file, None), variables)
    assert told["version"] == sglang.SPEC.version
    assert [*told["refused"]] == [" ".join(words) for words in wrong]
    assert told["algorithms"] == []
    of_file, default = told["candidates"]
    assert of_file == [0, 2, 4]
    assert max(default) == sglang.SPEC.varying["adaptive"].largest_k
    assert told["variables"] == ["SGLANG_SIMULATE_ACC"]
