"""Generated command lines, each run in process through a command's own main."""

import io
import math
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import cli
from harness.config import SCHEMAS, ModelConf

pytestmark = pytest.mark.usefixtures("no_plots")
SEED_DOORS = ("sweep", "audition", "profile", "snapshot", "server", "breakeven", "report")
SAMPLE, EXHAUSTIVE = 12, 2500


def words(text: str) -> list[str]:
    return text.split()


NUMBERS = words(
    "0 1 -1 2 4 0.5 1.0 1e-39 1e308 1e309 nan inf -inf 100000 1000000000 99999999999999999999 0x10 "
    "1_000 007 true null"
)
TEXTS = [
    *words("abc ngram tiny auto [] {} [1,2,4] [4,4] [[1]] {a:1} {easy:1,hard:2} [1,a] [null] [-1]"),
    *words("[0] [0.7] [nan] cuda:9 / ~ ${nothing} ${oc.env:HOME} a=b ( ] ' \" a,b 1,2 * eagle3@"),
    *words("@x x@y:z none easy [easy,hard] '' '../..' '\\0' '🙂' '\ud800' '${x'"),
    *("' '", "'a b'", f"'{'9' * 400}'", "[" * 60 + "]" * 60, f"'{'x' * 3000}'"),
]
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.lists(st.sampled_from(NUMBERS), max_size=3).map(lambda some: f"[{','.join(some)}]"),
    st.text(max_size=6),
    st.integers(-(10**6), 10**6).map(str),
    st.floats(allow_nan=True).map(str),
)


WHOLE = st.one_of(st.integers(-3, 40), st.sampled_from([10**6, 2**63, -(2**63), 10**30]))
REAL = st.one_of(
    st.sampled_from(["0", "0.5", "1", "1e-39", "1e300", "-0.0", "nan", "inf", "100", "-1"]),
    st.floats(-1, 3).map(str),
)
WORDS = ("auto", "tiny", "ngram", "ratio", "eager", "none", "cpu", "dummy", "x", "null", "int8")


def values_of(kind: str) -> st.SearchStrategy[str]:
    """Values that a key of this type may have, sensible and not."""
    if kind.startswith("list["):
        inside = values_of(kind[5:-1])
        return st.lists(inside, max_size=4).map(lambda some: f"[{','.join(some)}]")
    if "int" in kind:
        return WHOLE.map(str)
    if "float" in kind:
        return REAL
    if "bool" in kind:
        return st.sampled_from(["true", "false"])
    return st.sampled_from(WORDS)


def keys_of(schema: Any, prefix: str = "") -> dict[str, str]:
    """Every dotted key of a command, with its type."""
    found: dict[str, str] = {}
    for key in fields(schema):
        nested = key.default_factory() if callable(key.default_factory) else None
        if is_dataclass(nested):
            found |= keys_of(type(nested), f"{prefix}{key.name}.")
        else:
            kind = key.type if isinstance(key.type, str) else getattr(key.type, "__name__", "")
            found[f"{prefix}{key.name}"] = str(key.type) if kind in ("list", "") else kind
    return found


def not_harmful(key: str) -> bool:
    return key.split(".")[-1] not in {"results_root", "debug", "dry_run", "resume"}


KEYS = {
    command: {key: kind for key, kind in keys_of(keys).items() if not_harmful(key)}
    for command, keys in SCHEMAS.items()
}
GROUPS = ("model", "draft", "prompts", "device", "decode", "gpu", "experiment")


@st.composite
def overrides(draw: st.DrawFn, command: str) -> list[str]:
    known = st.sampled_from(sorted(KEYS[command]))
    misspelt = known.map(lambda key: key[:-1] + key[-1:] * 2)
    key = st.one_of(known, known, known, misspelt, st.sampled_from(GROUPS))
    sign = st.sampled_from(["", "", "", "", "", "+", "++"])
    one = st.tuples(sign, key, VALUES).map(lambda parts: f"{parts[0]}{parts[1]}={parts[2]}")
    typed = known.flatmap(
        lambda key: values_of(KEYS[command][key]).map(lambda value: f"{key}={value}")
    )
    bare = st.one_of(known.map("~{}".format), st.text(max_size=8), known)
    words = draw(
        st.one_of(
            st.lists(typed, min_size=1, max_size=4),
            st.lists(st.one_of(one, typed, bare), min_size=1, max_size=3),
        )
    )
    # A word that Python's argument parser takes for an option of Hydra's is Hydra's business
    return [word for word in words if not word.startswith("-")]


def run(command: str, words: list[str], root: Path) -> tuple[int, str]:
    """Run a command as its module does; its status and what it said on standard error."""
    fixed = [f"results_root={root}"]
    if command in ("sweep", "audition", "profile", "snapshot", "server"):
        fixed.append("dry_run=true")
    if command == "breakeven":
        fixed = ["draft_ms=2", "target_ms=10", *fixed]
    seen: list[Any] = []

    def watched(name: str, config: Any) -> Any:
        seen.append(config)
        return real(name, config)

    real = cli.work
    out, err = io.StringIO(), io.StringIO()
    argv = [f"harness/{command}.py", *words, *fixed]
    with (
        patch.object(sys, "argv", argv),
        patch.object(cli, "work", watched),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            cli.run_app(command)
        except SystemExit as done:
            status = done.code if isinstance(done.code, int) else 1
    if status == 0:
        for config in seen:
            check_sense(config)
    return status, err.getvalue()


def check_sense(config: Any) -> None:
    """What a command may not accept, said without its own checks."""
    for key, low, high in (
        ("new_tokens", 1, 1e8),
        ("repetitions", 1, 1e5),
        ("draws", 1, 1e7),
        ("batch", 1, math.inf),
        ("draft_ms", 1e-300, math.inf),
        ("target_ms", 1e-300, math.inf),
    ):
        value = getattr(config, key, None)
        assert value is None or (low <= value <= high and math.isfinite(value)), (key, value)
    ks = getattr(config, "k", None)
    assert ks is None or (ks and all(0 <= k <= 10_000 for k in ks) and len(set(ks)) == len(ks))
    heats = getattr(config, "temperature", None)
    assert heats is None or (heats and all(math.isfinite(t) and t >= 0 for t in heats))
    for alpha in getattr(config, "alpha", None) or []:
        assert 0 <= alpha <= 1
    for role in ("model", "draft"):
        model = getattr(config, role, None)
        if isinstance(model, ModelConf):
            assert model.id.strip()
            assert model.name.strip()


def hold(command: str, words: list[str], root: Path) -> str:
    status, said = run(command, words, root)
    assert "Traceback" not in said, (words, said)
    assert "run again with debug=true" not in said, (words, said)
    assert status in (0, 2), (words, status)
    if status == 2:
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        assert lines, (words, said)
        assert max(map(len, lines)) < 1000, (words, said)
    return {0: "accepted", 2: "refused"}[status]


def check(root: Path, examples: int, commands: tuple[str, ...]) -> Counter[str]:
    counts: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.data())
    def one(data: st.DataObject) -> None:
        command = data.draw(st.sampled_from(commands))
        counts[hold(command, data.draw(overrides(command)), root)] += 1

    one()
    return counts


def test_generated_command_lines_end_in_an_answer_or_in_one_clear_line(tmp_path: Path) -> None:
    counts = check(tmp_path, SAMPLE, SEED_DOORS)
    assert counts["refused"]
    assert hold("sweep", ["k=a"], tmp_path) == "refused"


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_all_generated_command_lines_end_in_an_answer_or_in_one_clear_line(tmp_path: Path) -> None:
    counts = check(tmp_path, EXHAUSTIVE, SEED_DOORS)
    assert counts["accepted"], counts
    assert sum(counts.values()) >= EXHAUSTIVE
