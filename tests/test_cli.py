"""Commands: help without torch, exit statuses, error lines, many jobs, break-even arithmetic."""

import io
import json
import math
import pickle
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import Door
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from runs import ran

import harness.__main__ as package
from harness import PACKAGE, cli, reporting
from harness.analysis import analyse
from harness.cli import as_hydra_takes, compose, run_app
from harness.command_words import as_typed, of_hydra
from harness.commands import breakeven
from harness.commands.run_lifecycle import Outcome
from harness.config import SCHEMAS, BreakevenConfig, SweepConfig, checked, keys_of, register
from harness.records import UserError
from harness.storage import TABLES, load

POST = {"draft_ms": 22.09, "target_ms": 29.92}

# Runs command lines one after the other in a process of its own and prints what they printed, and
# what was imported by then
WITHOUT_TORCH = """
import contextlib, io, json, runpy, sys
def printed(name, *words):
    sys.argv = ["door", *words]
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_module("harness." + name, run_name="__main__", alter_sys=False)
    except SystemExit as end:
        assert end.code in (0, None), end.code
    return out.getvalue()
texts = [printed(*words) for words in json.loads(sys.argv[1])]
heavy = {"torch", "transformers", "pandas", "scipy", "matplotlib"} & set(sys.modules)
print(json.dumps([texts, sorted(heavy)]))
"""

RunDoor = Callable[..., int]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunDoor:
    """Runs a command with other work in it, in this process, and returns its status."""
    monkeypatch.chdir(tmp_path)

    def run_it(work: Callable[[Any], Outcome], *overrides: str, door: str = "breakeven") -> int:
        times = ["draft_ms=1", "target_ms=10"] if door == "breakeven" else []
        monkeypatch.setattr(sys, "argv", ["door", *overrides, *times])
        monkeypatch.setattr(cli, "work", lambda _, config: work(config))
        with pytest.raises(SystemExit) as end:
            run_app(door)
        assert isinstance(end.value.code, int)
        return end.value.code

    return run_it


def fail_with(error: BaseException) -> Callable[[Any], Outcome]:
    def work(_: Any) -> Outcome:
        raise error

    return work


def printed(lines: Sequence[Sequence[str]], cwd: Path) -> tuple[list[str], list[str], str]:
    """What command lines print, the heavy packages that they import, and the standard error."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(lines)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    texts, heavy = json.loads(ended.stdout.splitlines()[-1])
    return texts, heavy, ended.stderr


def test_help_loads_nothing_heavy_and_gives_each_key_a_value_and_a_meaning(tmp_path: Path) -> None:
    lines = [*([name, "--help"] for name in SCHEMAS), ["sweep", "--help", "k=4", "model=hf"]]
    (*texts, changed), heavy, _ = printed(lines, tmp_path)
    assert heavy == []
    for name, out in zip(SCHEMAS, texts, strict=True):
        assert f"python -m harness.{name}" in out
        assert max(map(len, out.splitlines())) <= 100
        assert "by its name:\n\n\n" not in out  # a heading without a group
        rows = dict(re.findall(r"^  ([\w.]+)=\S+\s+(\S.*)$", out, re.MULTILINE))
        for key, entry in keys_of(SCHEMAS[name]):
            if not key.startswith("draft."):
                assert rows[key] == entry.metadata["meaning"]
            else:
                assert "  draft.KEY " in out
    for row in ("k=[4]", "model.id=???", "model=hf"):
        assert f"  {row} " in changed, "the values that the command line sets"


# ---- statuses and lines -------------------------------------------------------------------------


@pytest.mark.parametrize("status", [1, 0])
def test_the_last_line_is_the_run_and_the_status_is_the_works(
    status: int, run: RunDoor, capsys: Captured
) -> None:
    assert run(lambda _: Outcome(Path("results/a_run"), status)) == status
    assert capsys.readouterr() == ("run: results/a_run\n", "")
    assert run(lambda _: Outcome(None)) == 0, "not the status of the command before it"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("k: -1\nis no number"), 2, "k: -1 is no number"),
        (
            ValueError("broken"),
            1,
            "ValueError: broken (run again with debug=true for the traceback)",
        ),
        (KeyboardInterrupt(), 130, "interrupted by SIGINT; no run had begun"),
    ],
)
def test_an_error_is_one_line_and_a_status(
    error: BaseException, status: int, line: str, run: RunDoor, capsys: Captured
) -> None:
    assert run(fail_with(error)) == status
    assert capsys.readouterr() == ("", f"error: {line}\n")
    assert run(fail_with(error), "debug=true") == status
    assert ("Traceback" in capsys.readouterr().err) == (status != 130)


@pytest.mark.parametrize("lost", ["replaced", "dropped"])
def test_a_signal_ends_a_command_that_is_composed_also_where_a_library_loses_it(
    lost: str, run: RunDoor, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if lost == "replaced":
                raise AttributeError("'NoneType' object has no attribute 'stop'") from None
        raise HydraException("as of a word that is refused later")

    monkeypatch.setattr(OverridesParser, "parse_override", parsed)
    assert run(fail_with(AssertionError())) == 130
    assert capsys.readouterr() == ("", "error: interrupted by SIGINT; no run had begun\n")


def test_a_missing_value_is_named_with_what_to_type(run: RunDoor, capsys: Captured) -> None:
    assert run(lambda _: Outcome(None), "seed=???") == 2
    assert capsys.readouterr().err.startswith("error: seed: no value")


def test_a_run_that_cannot_be_rendered_stays_and_says_how_to_render_it(
    run: RunDoor, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise FileNotFoundError("no definitions")

    monkeypatch.setattr(reporting, "render", broken)
    assert run(breakeven.run) == 1
    out, err = capsys.readouterr()
    folder = out.splitlines()[-1].removeprefix("run: ")
    assert (Path(folder) / "results.csv").is_file()
    (line,) = err.splitlines()
    assert line.startswith("error: FileNotFoundError: no definitions; what was measured is stored")
    assert line.endswith(f"python -m harness.report run={folder}")
    assert run(breakeven.run, "debug=true") == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "override", "status", "said"),
    [
        ("sweep", "temprature=0", 2, "error: temprature: there is no such key; similar names:"),
        ("sweep", "decode.topk=4", 2, "decode.topk: there is no such key; similar names:"),
        ("sweep", "top_p=0.9", 2, "top_p: there is no such key; similar names: decode.top_p"),
        ("sweep", "draft=tiny_goood", 2, "there is no such name; similar names: tiny_good"),
        ("sweep", "draft=zzz", 2, "error: draft=zzz: there is no such name; any other model is"),
        ("sweep", "gpu=zzz", 2, "error: gpu=zzz: there is no such name; it takes a100_40, "),
        ("sweep", "k=4,8", 2, "error: k=4,8: several values; k=[4,8] is one run with all of"),
        ("sweep", "seed=1,2", 2, "-m makes one run of each"),
        (
            *("sweep", "prompts.files=my prompts (1).jsonl", 2),
            """for the shell and once more: 'prompts.files="my prompts (1).jsonl"'""",
        ),
        (
            *("sweep", "prompts.files=[a.jsonl, b (1).jsonl]", 2),
            """once more: 'prompts.files=[a.jsonl,"b (1).jsonl"]'""",
        ),
        ("sweep", "prompts.system=Be brief!", 2, """'prompts.system="Be brief!"'"""),
        ("sweep", "results_root=~", 2, """'results_root="~"'"""),
        ("sweep", "resume=/x/模型", 2, """'resume="/x/模型"'"""),
        ("sweep", "prompts.files=[my prompts", 2, "quoted for the shell and once more"),
        ("sweep", "k=[-1]", 2, "error: k: -1 is not a whole number"),
        ("sweep", "k=[1.5]", 2, "error: k: '1.5' is not a whole number"),
        ("sweep", "k=foo", 2, "error: k: 'foo' is not a whole number"),
        ("sweep", "temperature=warm", 2, "error: temperature: 'warm' is not a number"),
        ("breakeven", "hydra.run.dir=elsewhere", 2, "error: hydra.run.dir: "),
        ("breakeven", "verbose=table", 2, "use one of false, tables, true"),
    ],
)
def test_a_bad_word_ends_a_command_before_anything_is_stored(
    name: str,
    override: str,
    status: int,
    said: str,
    run: RunDoor,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    assert run(fail_with(AssertionError()), override, door=name) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert status != 2 or err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["losses", "draft=suffix"])
def test_a_key_that_was_removed_is_refused_with_what_does_its_work(
    key: str, run: RunDoor, tmp_path: Path, capsys: Captured
) -> None:
    word = key if "=" in key else f"{key}=1"
    assert run(fail_with(AssertionError()), word, door="sweep") == 2
    assert capsys.readouterr() == ("", f"error: {key}: was removed; {cli.REMOVED[key]}\n")
    assert list(tmp_path.iterdir()) == []


def test_every_key_that_was_removed_is_lacking_in_some_command() -> None:
    names = {door: [name for name, _ in keys_of(schema)] for door, schema in SCHEMAS.items()}
    for key, does in cli.REMOVED.items():
        draft = key.removeprefix("draft=")
        if draft != key:
            with pytest.raises(UserError, match=re.escape(f"{key}: was removed; {does}")):
                cli.draft_conf(draft)
            continue
        group = key.rpartition(".")[0]
        assert [
            door
            for door, of_door in names.items()
            if (not group or any(name.startswith(f"{group}.") for name in of_door))
            and not any(f".{name}".endswith(f".{key}") for name in of_door)
        ], key


def test_a_path_with_a_space_that_the_shell_took_apart_is_shown_quoted(
    run: RunDoor, capsys: Captured
) -> None:
    assert run(fail_with(AssertionError()), "acceptance_from=my", "bench.json") == 2
    said = "not of the form key=value; a value with a space is quoted: "
    assert capsys.readouterr() == (
        "",
        f"""error: 'bench.json': {said}'acceptance_from="my bench.json"'\n""",
    )


@pytest.mark.parametrize(
    "value",
    [
        *("/x/ra (1)/with=equals/模型", "a,b", "#x", "it's", 'say "hi"', "back\\", 'b\\"q', "~/x"),
        *("Be brief!", "a:b", "http://h:80", "007", "1e3", "null", "True", ".5", "-x", " a ", ""),
        *("[a]", "{a:b}", "$HOME", "${x}", "a@~/b@kind:eagle3", "x\ny", "a*b", "`a`;b|c&d>e"),
        *(["a b", "c,d", 1], [0.5, 1.0, None], {"easy": 0.7, "b_2": 1}, 1, 2.5, 10**9, True),
    ],
)
def test_a_printed_word_is_read_as_what_it_was_made_of(value: Any) -> None:
    (word,) = shlex.split(as_typed("key", value))
    override = OverridesParser.create().parse_override(word)
    assert not override.is_sweep_override()
    read = OmegaConf.create({"key": override.value()})
    assert OmegaConf.to_object(read) == {"key": value}


@pytest.mark.parametrize(
    "name",
    [
        *("ra (1)", "a=b", "a,b", "#x", "it's", 'say "hi"', "模型", "back\\", 'b\\"q', "a:b"),
        *("{a}", "null", "True", "1", "1.5", "1e3", "~", " a ", "${x}", "a;b|c", "x\ty"),
    ],
)
def test_weights_of_any_prompt_set_are_printed_as_they_are_read(name: str) -> None:
    weights = {name: 0.5, "easy": 1}
    (word,) = shlex.split(as_typed("prompts.weights", weights))
    assert compose("sweep", [word]).prompts.weights == weights


def test_a_number_as_a_name_of_a_set_is_its_text() -> None:
    assert compose("sweep", ["prompts.weights={1:0.5,2:1}"]).prompts.weights == {"1": 0.5, "2": 1}


def test_a_path_may_begin_with_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for command, schema in SCHEMAS.items():
        for name, entry in keys_of(schema):
            key = name.rpartition(".")[2]
            if not entry.metadata.get("path") or key in ("resume", "traces_from"):
                continue
            listed = key in ("files", "combine", "runs", "records", "drafts")
            path = "a@~/my runs" if key == "drafts" else "~/my runs"
            register(command)
            words = as_hydra_takes(command, [f"{name}={of_hydra([path] if listed else path)}"])
            config = cli._composed(command, words)
            cli._expand_home(config)
            whole = path.replace("~", str(tmp_path))
            assert OmegaConf.select(config, name) == ([whole] if listed else whole), (command, name)


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("utf-8", "é 模".encode() + b" \xff"), ("cp1252", b"\xe9 \\u6a21 \xff"), ("ascii", None)],
)
def test_text_that_a_stream_cannot_encode_is_escaped(
    encoding: str, shown: bytes | None, run: RunDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of a file name that is no text in the locale is written as it is."""
    name = "é 模 \udcff"
    for stream, work in (
        ("stdout", lambda _: Outcome(Path(name))),
        ("stderr", fail_with(UserError(name))),
    ):
        raw = io.BytesIO()
        written = io.TextIOWrapper(raw, encoding=encoding)
        with monkeypatch.context() as patch:
            patch.setattr(sys, stream, written)
            run(work)
        written.flush()
        begin = b"run: " if stream == "stdout" else b"error: "
        assert raw.getvalue().strip() == begin + (shown or b"\\xe9 \\u6a21 \xff")


def test_a_word_that_is_no_text_in_the_locale_is_refused_with_what_reads_it(
    run: RunDoor, capsys: Captured
) -> None:
    """As "results_root=ä" is in the C locale: no report could name its folder."""
    word = "results_root=" + "ä".encode().decode("ascii", "surrogateescape")
    assert run(lambda _: Outcome(None), "sweep", word) == 2
    assert "it is no text in this locale" in (error := capsys.readouterr().err)
    assert "PYTHONUTF8=1" in error


def test_the_package_lists_its_commands_and_every_command_tells_its_version(
    run: RunDoor, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["harness"])
    package.main()
    listed = capsys.readouterr().out
    assert all(f"harness {name} " in listed for name in SCHEMAS)
    monkeypatch.setattr(sys, "argv", ["harness", "--version"])
    package.main()
    assert run(fail_with(AssertionError()), "--version") == 0
    assert capsys.readouterr().out == f"{PACKAGE} {version(PACKAGE)}\n" * 2
    monkeypatch.setattr(sys, "argv", ["harness", "swep"])
    with pytest.raises(SystemExit, match="2"):
        package.main()
    assert "swep: no command; there are" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--model", "--new-tokens=4"])
def test_the_package_runs_a_command_and_a_key_with_dashes_is_written_without(
    word: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["harness", "sweep", word, "qwen3_4b"])
    with pytest.raises(SystemExit, match="2"):
        package.main()
    key = word.strip("-").partition("=")[0].replace("-", "_")
    assert capsys.readouterr().err == f"error: {word}: keys have no dashes; write {key}=VALUE\n"


# ---- many jobs ----------------------------------------------------------------------------------


def test_a_multirun_runs_every_job_and_exits_with_the_worst_status(
    run: RunDoor, capsys: Captured, tmp_path: Path
) -> None:
    def work(config: BreakevenConfig) -> Outcome:
        if config.seed == 1:
            raise UserError("the second one is bad")
        return Outcome(Path(f"results/{config.seed}"), config.seed // 2)

    assert run(work, "-m", "seed=0,1,2") == 2
    expected = ("run: results/0\nrun: results/2\n", "error: the second one is bad\n")
    assert capsys.readouterr() == expected
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / "results" / ".multirun" / "multirun.yaml"]


def test_json_is_one_document_on_standard_output_whatever_happened(
    run: RunDoor, capsys: Captured
) -> None:
    def work(config: BreakevenConfig) -> Outcome:
        sys.stdout.write("a table\n")
        if config.seed == 1:
            raise UserError("it is bad")
        return Outcome(None)

    assert run(work, "json=true", "seed=0") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["status"], made["error"], made["text"]) == (0, None, ["a table"])
    assert run(work, "json=true", "seed=1") == 2
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    assert (made["status"], made["error"], made["run"]) == (2, "it is bad", None)
    assert printed.err.endswith("error: it is bad\n")
    assert run(work, "json=true", "sed=1") == 2
    assert "sed" in json.loads(capsys.readouterr().out)["error"]


def test_a_jobs_number_can_name_its_card(run: RunDoor) -> None:
    seen: list[tuple[str, str]] = []

    def work(config: SweepConfig) -> Outcome:
        seen.append((config.draft.name, config.device.name))
        return Outcome(None)

    words = ("-m", "device.name=cuda:${hydra:job.num}", "draft=tiny_good,tiny_small")
    assert run(work, *words, door="sweep") == 0
    assert seen == [("tiny_good", "cuda:0"), ("tiny_small", "cuda:1")]


@pytest.mark.exhaustive
def test_a_launchers_jobs_run_in_other_processes_and_the_worst_status_comes_back(
    door: Door, tmp_path: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    ended = door(
        "breakeven",
        *("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
        *("draft_ms=1,0", "target_ms=10", "k=[1]"),
    )
    assert ended.returncode == 2
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert errors == ["error: draft_ms=0: must be a time above 0"]  # next to progress
    (folder,) = (path.parent for path in tmp_path.glob("results/*/manifest.json"))
    lines = [line for line in ended.stdout.splitlines() if line.startswith("run: ")]
    assert lines == [f"run: {folder.relative_to(tmp_path)}"]
    assert load(folder).config["draft_ms"] == 1


def test_a_status_notes_itself_where_it_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_jobs", [])
    content = pickle.dumps(cli.JobStatus(2))
    assert cli._jobs == []
    assert pickle.loads(content) == cli.JobStatus(2)
    assert cli._jobs == [cli.JobStatus(2)]


# ---- break-even ---------------------------------------------------------------------------------


def test_breakeven_stores_and_prints_a_run_without_torch(tmp_path: Path) -> None:
    line = ["breakeven", "draft_ms=22.09", "target_ms=29.92", "k=[1,4]", "alpha=[0.6,1]"]
    (out,), heavy, err = printed([line], tmp_path)
    assert "pandas" in heavy, "the command did its work"
    assert not {"torch", "transformers"} & {*heavy}
    # What it does, on a machine where that takes a while
    does = r"\d:\d\d:\d\d (breakeven: loading libraries|analysing the run|writing the report)"
    assert all(re.fullmatch(does, said) for said in err.splitlines()), err
    label, folder = out.splitlines()[-1].split(" ", 1)
    assert label == "run:"
    stored = load(tmp_path / folder)
    results = pd.read_csv(tmp_path / folder / "results.csv")
    assert tuple(results.columns) == TABLES["results.csv"].columns
    assert results[["k", "alpha"]].to_numpy().tolist() == [[1, 0.6], [1, 1], [4, 0.6], [4, 1]]
    assert results["source"].unique().tolist() == ["theory"]
    assert results["breakeven_alpha"].round(3).unique().tolist() == [0.738, 0.882]
    assert stored.latency["median_ms"].tolist() == [22.09, 29.92]
    assert stored.manifest.status == "complete"
    assert (tmp_path / folder / "report.md").is_file()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pd.DataFrame]:
    """The rows that a break-even run stores for the settings of the founding post, changed."""
    for name in ("render", "show"):
        monkeypatch.setattr(reporting, name, lambda _: None)

    def of(**changes: Any) -> pd.DataFrame:
        settings = {**POST, "results_root": tmp_path, **changes}
        words = [f"{key}={value}".replace(" ", "") for key, value in settings.items()]
        folder = breakeven.run(compose("breakeven", words)).folder
        assert folder is not None
        return load(folder).results

    return of


def test_a_measured_rate_gets_the_linear_rules_speedup_which_is_exact_for_it(
    rows: Callable[..., pd.DataFrame],
) -> None:
    row = rows(k=[4], alpha=[1.0], acceptance_rate=0.341).iloc[1]
    assert row.speedup == pytest.approx((1 + 4 * 0.341) / (4 * 22.09 / 29.92 + 1))
    assert row.acceptance_rate == 0.341
    assert sum(row.alpha**j for j in range(1, 5)) / 4 == pytest.approx(0.341)
    typed = rows(acceptance_rate="{1:0.5,4:0.3}", k=[1, 2, 4], alpha=[1.0]).iloc[3:]
    assert typed.k.tolist() == [1, 2, 4]
    assert typed.acceptance_rate.tolist() == pytest.approx([0.5, (0.5 + 0.25) / 2, 0.3])


def test_the_verdict_of_a_rate_names_the_best_k_at_its_alpha(tmp_path: Path) -> None:
    typed = ("draft_ms=1", "target_ms=20", "k=[2,4,8]", "acceptance_rate={2:0.9}")
    answer = analyse(ran("breakeven", tmp_path, *typed)).headline
    assert answer is not None
    assert (answer.decision, answer.k) == ("speculate", 8)


def test_a_list_by_position_answers_every_k_up_to_its_length(
    rows: Callable[..., pd.DataFrame],
) -> None:
    positions = [0.605, 0.341, 0.186, 0.099, 0.052, 0.027, 0.014]
    short, long = rows(k=[1, 7, 8], alpha=[1.0], acceptance_by_position=positions).iloc[3:].iloc
    assert (short.k, long.k) == (1, 7)
    assert short.tokens_per_round == pytest.approx(1.605)
    assert long.mean_acceptance_length == pytest.approx(2.324)
    assert long.acceptance_rate == pytest.approx(0.189, abs=5e-4)


def test_verify_times_count_from_one_position_and_no_break_even_is_an_empty_field(
    rows: Callable[..., pd.DataFrame],
) -> None:
    row = rows(k=[2], alpha=[1.0], verify_ms=[30.0, 33.0, 36.0]).iloc[0]
    assert row.ms_per_token == pytest.approx((2 * 22.09 + 36.0) / 3)
    assert row.speedup == pytest.approx(29.92 * 3 / (2 * 22.09 + 36.0))
    row = rows(draft_ms=40.0, k=[1], alpha=[1.0]).iloc[0]
    assert math.isnan(row.breakeven_alpha)
    assert row.speedup < 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"draft_ms": 0.0}, "draft_ms=0"),
        ({"draft_ms": -1.0}, "draft_ms=-1"),
        ({"target_ms": math.nan}, "target_ms=nan"),
        ({"target_ms": math.inf}, "target_ms=inf"),
        ({"verify_ms": [30.0], "k": [1]}, "verify_ms: 1 entries, but k=1"),
        ({"verify_ms": [30.0, 0.0], "k": [1]}, "verify_ms=0"),
        ({"verify_ms": []}, "verify_ms=[]"),
        ({"alpha": [1.01]}, "alpha=1.01"),
        ({"alpha": [-0.1]}, "alpha=-0.1"),
        ({"alpha": [math.nan]}, "alpha=nan"),
        ({"alpha": []}, "alpha=[]"),
        ({"alpha": [0.5, 0.5]}, "alpha: a value is given twice"),
        ({"k": [-1]}, "k: -1"),
        ({"k": []}, "k=[]"),
        ({"acceptance_rate": 0.3, "k": [1, 2]}, "a rate belongs to the K it was measured at"),
        ({"acceptance_rate": {3: 0.3}, "k": [1, 2]}, "3 is not among k=[1, 2]"),
        ({"acceptance_rate": 1.3, "k": [2]}, "acceptance_rate=1.3"),
        ({"acceptance_rate": "high", "k": [2]}, "acceptance_rate=high"),
        ({"acceptance_by_position": [0.3, 0.4]}, "acceptance_by_position: 0.4 follows 0.3"),
        ({"acceptance_by_position": []}, "acceptance_by_position=[]"),
        ({"acceptance_by_position": [1.2]}, "acceptance_by_position=1.2"),
    ],
)
def test_break_even_refuses_what_cannot_be_and_stores_nothing(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    config = BreakevenConfig(**{**POST, "results_root": str(tmp_path), **changes})
    with pytest.raises(UserError) as refused:
        breakeven.run(checked(config))
    assert says in str(refused.value)
    assert list(tmp_path.iterdir()) == []
