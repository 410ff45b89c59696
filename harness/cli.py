"""The command line of all commands: compose the configuration, run, turn errors into statuses.

The contract: a command that made a run prints `run: <folder>` as its last line. What the user can
fix is one line on standard error, `error: ...`, and status 2, a full or read-only disk included.
Cells that failed give 1. Hydra's own composition errors keep Hydra's text and its status 1. SIGINT,
SIGTERM and SIGHUP end a command with one line as well, and with 128 + the signal's number.

Hydra drops what a job returns, and an exception inside a job would end the other jobs of a multirun
(`-m`) or print a line of Hydra's. So the worst status is kept here, and the process exits with it
after Hydra has returned. A launcher (joblib, Slurm) runs jobs in other processes: what a job
returns is pickled and comes back, so a `JobStatus` notes itself where it is unpickled.

Nothing in this module imports torch: `--help` must answer at once, so a command imports its
implementation when its configuration has been read.
"""

import codecs
import difflib
import gc
import io
import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any, NoReturn, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness import PACKAGE
from harness.command_words import as_typed, of_hydra
from harness.command_words import command as command_line
from harness.commands.keys import help_of_keys, with_keys_of_run
from harness.commands.progress import next_command, progress
from harness.commands.run_lifecycle import Interrupted, Outcome
from harness.config import (
    AUTO_DRAFTS,
    CONF_DIR,
    DRAFT_KEYS,
    OWN_DRAFT,
    SCHEMAS,
    AuditionConfig,
    DraftConf,
    DraftsEntry,
    checked,
    group_of,
    is_list,
    keys_of,
    register,
    split_draft,
)
from harness.engine_facts.draft_kinds import DRAFTS
from harness.models.gguf_file import HUB_NAME, hub_file
from harness.records import UserError
from harness.storage import files

OK, CELLS_FAILED, USER_ERROR, SIGNALLED = 0, 1, 2, 128
FULL_ERROR = "HYDRA_FULL_ERROR"
HELP = {"--help", "-h"}
JSON = re.compile(r"\+{0,2}json=true", re.IGNORECASE)
MOST_CHARACTERS = 300
# Keys that there were, and names of a group as `draft=NAME`: what does their work now
REMOVED = {
    "alpha": "python -m harness.breakeven latency_from=RUN tabulates alpha=",
    "confidences_from": "a plan is for no draft, one K, and K by load, which read no confidences",
    "decode.acceptance_from": "decode.acceptance= takes rates by position",
    "decode.stop": "p_min=[0,0.5,0.75,0.9] compares thresholds, next to K",
    "decode.stop_threshold": "p_min=[0,0.5,0.75,0.9] compares thresholds, next to K",
    "draft=ngram_cache": "of llama.cpp's look-ups ngram_simple and ngram_mod are measured",
    "draft=ngram_map_k": "of llama.cpp's look-ups ngram_simple and ngram_mod are measured",
    "draft=ngram_map_k4v": "of llama.cpp's look-ups ngram_simple and ngram_mod are measured",
    "draft=suffix": "draft=ngram looks tokens up",
    "flash_attention": 'flags=["--flash-attn","off"] turns it off in llama.cpp',
    "interval_s": "the counters of a server are scraped twice, a minute apart",
    "kv_type": 'flags=["--cache-type-k","f32","--cache-type-v","f32"] sets it in llama.cpp',
    "kv_unified": 'flags=["--no-kv-unified"] gives each slot of llama.cpp a cache of its own',
    "latency_from": "a server run is priced by its own requests; an audition and a sweep take it",
    "linear": "the iid model takes an alpha, and acceptance_rate= a measured rate",
    "log": "python -m harness.server url=[PLAIN,SPECULATIVE] measures what a server's rounds cost",
    "lookup": "one kind of draft is measured at a time, draft=ngram_simple say",
    "losses": "nothing takes its place; report run= says which draft and K pay",
    "own_loop": "python -m harness.sweep times the harness's loop; report runs=[A,B] compares",
    "plan": "dry_run=true prices a run on a card; what is gained there is measured",
    "port": "servers listen on free ports; url= names servers that run",
    "prompts.answer_tokens": "answers to earlier turns have new_tokens= at most",
    "prompts.reasoning_end": "nothing takes its place; answers of a server are not checked",
    "prompts.sample_seed": "a log has one sample of each size, prompts.sample=",
    "prompts.schema": "nothing takes its place; answers of a server are not checked",
    "prompts.tools": "write each prompt's tools into its entry, as docs/prompts.md has it",
    "scores_from": "drafts= takes a draft's folder, and scores it; traces_from= a run's scores",
    "show": "trials.jsonl has the texts; the checks name the first token that differs",
    "together": "arrivals=FILE takes the bursts of a log",
    "training_log": "nothing takes its place; audition the head, which measures what is accepted",
    "tpot_ms": "a plan meets a goal, python -m harness.plan run=SERVER_RUN rate=... tpot_ms=...",
    "ttft_ms": "a plan meets a goal, python -m harness.plan run=SERVER_RUN rate=... ttft_ms=...",
    "watch": "the counters of a server are scraped twice; call report metrics= again later",
}
# What OmegaConf says of a value of another type, and its types
UNCONVERTED = re.compile(r"Value '(?P<value>.*?)' of .*could not be converted to (?P<type>\w+)")
TYPES = {"Integer": "a whole number", "Float": "a number"}
# Of a word that Hydra cannot parse: what to type instead
QUOTING = (
    "a value with a comma, bracket or quote is quoted for the shell and once more, as"
    f" {as_typed('prompts.files', ['my prompts (1).jsonl'])}"
)
# Of a path, or of a draft's folder in name@~/folder
_HOME = re.compile(r"(?:^|(?<=@))~[^/@]*")
# transformers imports torchao where it is installed, which warns of kernels for other machines
NOISY_ON_IMPORT = ("torchao", "torch.utils._pytree")


# This command's jobs, those that ran in other processes included
_jobs: list["JobStatus"] = []
# Lines of standard error on what failed, for `json=true`
_errors: list[str] = []
# Numbers of the signals that asked this command to end
_received: list[int] = []


@dataclass(frozen=True)
class JobStatus:
    """The result of a job for Hydra; the process that waits notes it when it unpickles it."""

    status: int
    folder: str | None = None
    words: tuple[str, ...] = ()  # of the command line, for this job

    def __reduce__(self) -> tuple[Callable[..., "JobStatus"], tuple[object, ...]]:
        return note, (self.status, self.folder, self.words)


def note(status: int, folder: str | None = None, words: tuple[str, ...] = ()) -> JobStatus:
    _jobs.append(JobStatus(status, folder, words))
    return _jobs[-1]


def work(command: str, config: Any) -> Outcome:
    """Do a command's work.

    What does it, harness.commands.<command>, is imported after a line has said what is done: with
    torch that takes seconds.
    """
    if _jobs:
        next_command()
    with progress(f"{config.doing(command)}: loading libraries"):
        gc.disable()  # collections look at what is imported again and again: a sixth of the time
        try:
            implementation = import_module(f"harness.commands.{command}")
        finally:
            gc.enable()
    if isinstance(config, AuditionConfig):
        return implementation.run(config, draft_confs(config))
    return implementation.run(config)


def run_app(command: str) -> NoReturn:
    """Runs a command, conf/<command>.yaml, as a Hydra app; exits with its jobs' worst status."""
    as_far_as_encoded()
    if "--version" in sys.argv[1:]:
        print(f"{PACKAGE} {version(PACKAGE)}")
        sys.exit(OK)
    register(command)
    OmegaConf.register_new_resolver("keys", help_of_keys, replace=True)
    for kept in (_jobs, _errors, _received):
        kept.clear()
    for name in NOISY_ON_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)

    def job(config: DictConfig) -> JobStatus:
        words = HydraConfig.get().overrides.task
        status, folder = _run_job(command, config, words)
        return note(status, folder, tuple(words))

    as_json = any(JSON.fullmatch(word) for word in sys.argv[1:])
    app = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=command)(job)
    before = os.environ.get(FULL_ERROR)
    shows_all, status = before == "1", OK
    os.environ[FULL_ERROR] = "1"  # otherwise Hydra prints a traceback of its own for some errors
    try:
        with _signals():
            words = as_hydra_takes(command, sys.argv[1:])
            options = {word for word in words if word.startswith("-")}
            if options and options <= HELP:
                _print_help(command, [word for word in words if word not in HELP])
            else:
                sys.argv[1:] = words
                app()
        status = max((each.status for each in _jobs), default=OK)
        if len(_jobs) > 1 and not as_json:
            _print_jobs()
    except UserError as error:
        _say(f"error: {_one_line(str(error))}")
        status = USER_ERROR
    except (HydraException, OmegaConfBaseException) as error:
        if shows_all:
            raise
        status = _report_composition(command, error)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        # Hydra's parser raises these for some command lines, with no error type of its own
        if shows_all:
            raise
        reason = str(error) or "it is nested too deeply"
        _say(f"error: the command line cannot be read: {_one_line(reason)[:MOST_CHARACTERS]}")
        status = USER_ERROR
    except KeyboardInterrupt as stop:
        # The traceback keeps the run folder, and so its lock, until this block is left
        status = _report_interruption(command, stop)
    finally:
        if not _jobs and _errors and as_json:
            with suppress(OSError):  # `_flush` says so
                print(_document(command, status))
        os.environ.pop(FULL_ERROR)
        os.environ |= {} if before is None else {FULL_ERROR: before}
    sys.exit(status if status >= SIGNALLED else max(status, _flush()))


def as_far_as_encoded() -> None:
    """Let the standard streams take every text: what their encoding lacks is escaped.

    Bytes of a file name that are no text (a locale other than the disk's) are written as they are.
    """
    codecs.register_error("escaped", _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="escaped")


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":
        return bytes([ord(character) - 0xDC00]), error.start + 1
    one = UnicodeEncodeError(
        error.encoding, error.object, error.start, error.start + 1, error.reason
    )
    return codecs.backslashreplace_errors(one)


def _report_composition(command: str, error: Exception) -> int:
    """Say why no configuration can be composed; the status."""
    cause, misspelt = error.__cause__, _no_such_entry(error)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        misspelt = _no_such_key(SCHEMAS[command], cause.full_key)
    if misspelt is not None:
        _say(f"error: {misspelt}")
        return USER_ERROR
    if isinstance(error, OverrideParseException):
        reason = f"the command line cannot be read: {_first_line(error)}; {QUOTING}"
    else:
        key = getattr(cause, "full_key", None)
        reason = _one_line(str(error))
        if cause and key:
            reason = f"{key.partition('[')[0]}: {_first_line(cause)}"
    _say(f"error: {reason}")
    return USER_ERROR


def _first_line(error: BaseException) -> str:
    line = str(error).strip().split("\n")[0][:MOST_CHARACTERS]
    if found := UNCONVERTED.match(line):
        return f"'{found['value']}' is not {TYPES.get(found['type'], found['type'])}"
    return line


def _report_interruption(command: str, stop: KeyboardInterrupt) -> int:
    number = stop.number if isinstance(stop, Interrupted) else signal.SIGINT
    folder = next(reversed(files.held()), None)
    consequence = "no run had begun"
    if folder is not None:
        consequence = (
            "finished generations are stored, and this continues the run:"
            f" {command_line(command, as_typed('resume', folder))}"
        )
    _say(f"error: interrupted by {signal.Signals(number).name}; {consequence}")
    return SIGNALLED + number


def _print_help(command: str, overrides: Sequence[str]) -> None:
    """Print Hydra's help, without the lists of all groups that it would make first."""
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        config = hydra.compose(command, [*overrides], return_hydra_config=True)
        print(Template(config.hydra.help.template).substitute())


@contextmanager
def _signals() -> Iterator[None]:
    """Raise `Interrupted` when a signal asks the process to end; ignored signals stay ignored."""

    def interrupt(number: int, _: object) -> NoReturn:
        _received.append(number)
        raise Interrupted(number)

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # the last one not on every system
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupt)
    try:
        with _interruption_first():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _interruption_first() -> Iterator[None]:
    """Raise `Interrupted` again where a library lost it.

    An error in a library's own clean-up takes its place, and one that is raised while an object is
    freed is dropped.
    """
    if _received:
        raise Interrupted(_received[0])
    try:
        yield
    except Exception as error:
        if _received:
            raise Interrupted(_received[0]) from error
        raise


def _flush() -> int:
    try:
        sys.stdout.flush()
    except OSError as error:
        _say(f"error: standard output cannot be written ({error.strerror})")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return USER_ERROR
    return OK


def _run_job(command: str, config: DictConfig, words: Sequence[str]) -> tuple[int, str | None]:
    """Runs one job, prints its `run:` line or its `error:` lines; its status and its folder.

    With `json=true` nothing but one JSON document goes to standard output.
    """
    _errors.clear()
    as_json = False
    with suppress(OmegaConfBaseException):
        as_json = config.get("json") is True
    printed = io.StringIO()
    with redirect_stdout(printed) if as_json else nullcontext():
        status, outcome = _outcome(command, config, words)
    try:
        if as_json:
            print(_document(command, status, outcome, printed.getvalue()), flush=True)
        elif outcome is not None and outcome.folder is not None:
            print(f"run: {outcome.folder}", flush=True)
    except OSError as error:
        status = _report(error, USER_ERROR, config, f"standard output: {error.strerror}")
    return status, outcome and outcome.folder and str(outcome.folder)


def _document(command: str, status: int, outcome: Outcome | None = None, printed: str = "") -> str:
    from harness.reporting import document

    return document(
        command,
        status,
        summary=outcome and outcome.summary,
        folder=outcome and outcome.folder,
        errors=[line.removeprefix("error: ") for line in _errors],
        printed=printed if outcome else "",
    )


def _print_jobs() -> None:
    from harness.reporting.console import print_table, standard_output
    from harness.reporting.index import jobs_tables

    common = set.intersection(*({*each.words} for each in _jobs))
    jobs = [
        (" ".join(word for word in each.words if word not in common), each.folder, each.status)
        for each in _jobs
    ]
    for table in jobs_tables(jobs):
        print_table(table, standard_output())


def _outcome(command: str, config: DictConfig, words: Sequence[str]) -> tuple[int, Outcome | None]:
    try:
        with _interruption_first():
            outcome = work(command, to_dataclass(config, words))
    except UserError as error:
        return _report(error, USER_ERROR, config, *error.lines), None
    except OSError as error:
        if error.errno not in files.DISK_ERRORS:
            return _report(error, CELLS_FAILED, config, _unexpected(error)), None
        where = error.filename or "standard output or a temporary file"
        return _report(error, USER_ERROR, config, f"{where}: {error.strerror}"), None
    except Exception as error:  # whatever it is, it is reported, and the status says so
        return _report(error, CELLS_FAILED, config, _unexpected(error)), None
    if outcome.error is not None:
        text = (
            f"{outcome.reason}; what was measured is stored, and this renders it again: "
            f"{command_line('report', as_typed('run', outcome.folder))}"
        )
        _report(outcome.error, outcome.status, config, text)
    return outcome.status, outcome


def as_hydra_takes(command: str, words: Sequence[str]) -> list[str]:
    """The words of a command line in full.

    k=4 is k=[4], model=ORG/NAME or a folder is model=hf model.id=ORG/NAME, and model.id=X alone has
    model=hf, as draft.id=X has draft=hf: another model than the default has another name.

    Raises:
        UserError: a word is no key=value, a key has several values and -m is not there, a key of a
            group is set and none of that group is chosen, or Hydra is told where its own files go,
            which are not wanted.
    """
    if any(word.lstrip("+~").partition("=")[0] == "hydra.run.dir" for word in words):
        raise UserError(
            "hydra.run.dir: a run makes its own folder in results_root; give results_root=FOLDER"
        )
    _refuse_undecoded(words)
    words = _each_target(words)
    schema = SCHEMAS[command]
    names = {
        name: bool(entry.metadata.get("auto")) for name, entry in keys_of(schema) if is_list(entry)
    }
    known = {part for name, _ in keys_of(schema) for part in (name, name.partition(".")[0])}
    for word in words:
        key = word.lstrip("-").partition("=")[0].replace("-", "_")
        if word.startswith("--") and key in known:
            raise UserError(f"{word[:MOST_CHARACTERS]}: keys have no dashes; write {key}=VALUE")
    several = bool({"-m", "--multirun"} & {*words})
    parser = OverridesParser.create()
    full: list[str] = []
    for before, word in pairwise(["", *words]):
        if word.startswith("-") or ("=" not in word and before.startswith("-")):
            full.append(word)  # an option of Hydra's, or its value
            continue
        if "=" not in word and not word.startswith("~"):
            key, _, begun = before.partition("=")
            whole = as_typed(key, f"{begun} {word}"[:MOST_CHARACTERS])
            quoted = f"; a value with a space is quoted: {whole}" if before else ""
            raise UserError(f"{word[:MOST_CHARACTERS]!r}: not of the form key=value{quoted}")
        _refuse_unreadable(word, parser)
        full += [_as_list(part, names, parser, several=several) for part in _in_group(word)]
    keys = [word.partition("=")[0].lstrip("+") for word in full]
    for group in ("model", "draft"):
        # Next to an experiment or another run, model.id says where the model chosen there lies
        if f"{group}.id" in keys and not {group, "experiment", "resume", "traces_from"} & {*keys}:
            full.append(f"{group}={OWN_DRAFT}")
            keys.append(group)
    for group in (e.name for e in fields(schema) if group_of(e) and e.default is None):
        key = next((key for key in keys if key.startswith(f"{group}.")), None)
        if key is not None and group not in keys:
            if group != "draft":
                raise UserError(f"{key}: no {group} is chosen; choose one, {group}=...")
            full.insert(keys.index(key), f"draft={OWN_DRAFT}")
    return full


def _refuse_undecoded(words: Sequence[str]) -> None:
    """Refuse a word whose bytes are no text in this locale: no report could name its folder."""
    for word in words:
        if any("\udc80" <= character <= "\udcff" for character in word):
            raise UserError(
                f"{word}: it is no text in this locale ({sys.getfilesystemencoding()}); set"
                " PYTHONUTF8=1, or a locale such as LC_ALL=C.UTF-8"
            )


def _refuse_unreadable(word: str, parser: OverridesParser) -> None:
    """Refuse a value that Hydra's grammar cannot read, with the word as it can be typed.

    Where quotes or brackets are open, what is meant is not known, and Hydra says what it expects.
    """
    key, _, text = word.partition("=")
    if not text or text[0] in "'\"" or _is_read(word, parser):
        return
    inside = text.removeprefix("[").removesuffix("]")
    listed = len(inside) == len(text) - 2
    if text[0] in "[{" and (not listed or set(inside) & set("[]{}'\"")):
        return
    quoted = as_typed(key, [entry.strip() for entry in inside.split(",")] if listed else text)
    if _is_read(shlex.split(quoted)[0], parser):
        shown = text if len(text) <= MOST_CHARACTERS else "..."
        quoted = quoted if len(quoted) <= MOST_CHARACTERS else as_typed(key, "...")
        raise UserError(
            f"{key}: {shown} cannot be read as it stands; it is quoted for the shell and once more:"
            f" {quoted}"
        )


def _is_read(word: str, parser: OverridesParser) -> bool:
    try:
        parser.parse_override(word)
    except HydraException:
        return False
    return True


def _each_target(words: Sequence[str]) -> list[str]:
    """models=[A,B] as one run of each: -m model=A,B."""
    made: list[str] = []
    for word in words:
        key, _, listed = word.partition("=")
        if key != "models" or not listed.startswith("["):
            made.append(word)
            continue
        targets = [each.strip() for each in listed.strip("[]").split(",") if each.strip()]
        if not targets or any(each.startswith("resume=") for each in words):
            raise UserError(
                f"{word}: a list of targets, each a run of its own; give for example"
                " models=[A.gguf,B.gguf], and resume= one run with the keys it has"
            )
        made.append(f"model={','.join(targets)}")
    several = made != [*words] and not {"-m", "--multirun"} & {*words}
    return ["-m", *made] if several else made


def _in_group(word: str) -> list[str]:
    """A model that is named by its hub id or folder, as the group's entry for any model."""
    group, _, value = word.partition("=")
    if group not in ("model", "draft") or value[:1] in ("", "[", "{", "$"):
        return [word]
    entries = [entry.strip("'\"") for entry in value.split(",")]
    ships = any(os.path.isfile(CONF_DIR / group / f"{entry}.yaml") for entry in entries)
    if ships or not all(
        "/" in entry or entry.endswith(".gguf") or os.path.isdir(entry) for entry in entries
    ):
        return [word]
    if len(entries) == 1 and HUB_NAME.fullmatch(entries[0]) and not os.path.exists(entries[0]):
        value = of_hydra(str(hub_file(entries[0])))
    return [f"{group}={OWN_DRAFT}", f"{group}.id={value}"]


def _as_list(
    word: str, names: Mapping[str, bool], parser: OverridesParser, *, several: bool
) -> str:
    key, _, text = word.partition("=")
    listed = key.lstrip("+") in names
    if listed and text.lstrip()[:1] in ("[", "$"):
        return word
    try:
        override = parser.parse_override(word)
    except HydraException:  # raised again, with its explanation, when the command line is composed
        return word
    if override.is_sweep_override():  # one job each, with -m
        if not several:
            shown = text if len(text) <= MOST_CHARACTERS else "..."
            one = f"{as_typed(key, shown)} is one value"
            one = f"{key}=[{shown}] is one run with all of them" if listed else one
            raise UserError(f"{key}={shown}: several values; {one}, -m makes one run of each")
        if not listed:
            return word
        entries = [str(entry) for entry in override.sweep_string_iterator()]
        return f"{key}={','.join(e if e.startswith('[') else f'[{e}]' for e in entries)}"
    if not listed:
        return word
    value = override.value()
    kept = value is None or isinstance(value, dict) or (value == "auto" and names[key.lstrip("+")])
    return word if kept else f"{key}=[{text}]"


def to_dataclass(config: DictConfig, words: Sequence[str] = ()) -> Any:
    """The composed configuration as its command's dataclass, checked, interpolations resolved.

    Raises:
        UserError: a key that the command does not have was added with `+`, a key without a default
            was not given, an interpolation leads nowhere, or a value cannot be used.
    """
    for key in _added_keys(config):
        error = _no_such_key(OmegaConf.get_type(config), key)
        raise error or UserError(f"{key}: there is no such key")
    try:
        _expand_home(config)
        _read_mappings(config)
        if any(config.get(key) is not None for key in ("resume", "traces_from")):
            config = with_keys_of_run(config, words)
        if missing := sorted(OmegaConf.missing_keys(config)):
            give = " ".join(f"{key}=..." for key in missing)
            raise UserError(f"{missing[0]}: no value and no default; give {give}")
        _refuse_files_of_no_model(words)
        resolved = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(_one_line(str(error))) from error
    return checked(resolved)


def _expand_home(config: DictConfig) -> None:
    """Put the home folder for the ~ that a path begins with, which a shell leaves in key=~/..."""
    home, schema = os.path.expanduser, cast("type[Any]", OmegaConf.get_type(config))
    for name, entry in keys_of(schema):
        value = OmegaConf.select(config, name) if entry.metadata.get("path") else None
        if isinstance(value, str) and value.startswith("~"):
            OmegaConf.update(config, name, home(value))
        elif value is not None and any("~" in str(each) for each in value):
            paths = [_HOME.sub(lambda at: home(at[0]), str(each)) for each in value]
            OmegaConf.update(config, name, paths)


def _read_mappings(config: DictConfig) -> None:
    """Put mappings for those given as JSON, which may have any name; a number as a name is text."""
    for name, entry in keys_of(cast("type[Any]", OmegaConf.get_type(config))):
        if entry.metadata.get("form") is not dict:
            continue
        value = OmegaConf.select(config, name)
        if isinstance(value, str):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        if isinstance(value, Mapping):
            named = {str(each): value[each] for each in value}
            OmegaConf.update(config, name, named, merge=False)


def _refuse_files_of_no_model(words: Sequence[str]) -> None:
    """Refuse a GGUF file next to the model that a command has by default."""
    typed = {word.partition("=")[0].lstrip("+") for word in words}
    for role in ("model", "draft"):
        if f"{role}.gguf" in typed and not typed & {role, f"{role}.id", "experiment"}:
            raise UserError(
                f"{role}.gguf: of which model? give {role}=ORG/NAME_OR_FOLDER too, whose tokenizer"
                " and weights the run reads"
            )


def _added_keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    schema: Any = OmegaConf.get_type(config)
    # What is no schema is a mapping of the user's own, such as prompts.weights
    for key in map(str, config) if is_dataclass(schema) else ():
        node = config._get_node(key)
        if key not in schema.__dataclass_fields__:
            yield f"{prefix}{key}"
        elif isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            yield from _added_keys(node, f"{prefix}{key}.")


def _no_such_key(schema: Any, full_key: str) -> UserError | None:
    """The error for a key that a schema does not have; None where it has no such group."""
    group, dot, key = full_key.rpartition(".")
    names = [name for name, _ in keys_of(schema)]
    inside = [name.removeprefix(group + dot) for name in names if name.startswith(group + dot)]
    known = list(dict.fromkeys(name.partition(".")[0] for name in inside))
    if not known:
        return None
    if full_key in REMOVED:
        return _removed(full_key)
    elsewhere = [name for name in names if not group and name.endswith(f".{key}")]
    similar = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    near = elsewhere or [f"{group}{dot}{name}" for name in similar]
    shown = ", ".join(near or [f"{group}{dot}{name}" for name in known])
    heading = "similar names" if near else "it takes"
    return UserError(f"{full_key}: there is no such key; {heading}: {shown}")


def _removed(key: str) -> UserError:
    return UserError(f"{key}: was removed; {REMOVED[key]}")


def _no_such_entry(error: Exception) -> UserError | None:
    """The error for a name that a group of conf/ does not have; None where that is not the cause.

    A short list of names is given whole where none is similar.
    """
    if not isinstance(error, MissingConfigException) or not error.options:
        return None
    group, _, name = str(error.missing_cfg_file).partition("/")
    if f"{group}={name}" in REMOVED:
        return _removed(f"{group}={name}")
    near = difflib.get_close_matches(name, error.options, n=3, cutoff=0.5)
    named = f"similar names: {', '.join(near)}" if near else f"it takes {', '.join(error.options)}"
    if group in ("model", "draft"):
        more = f"any other model is {group}=ORG/NAME_OR_FOLDER"
        named = f"{named}; {more}" if near else f"{more}; python -m harness.sweep --help lists them"
    return UserError(f"{group}={name}: there is no such name; {named}")


def draft_conf(entry: str) -> DraftsEntry:
    """The configuration of one entry of `drafts=[...]`.

    Args:
        entry: a name of the draft group, another@name for one of the group under another name, or
            name@folder-or-hub-id for any other model, the name being the draft's kind where that is
            no model (eagle3@folder); each may be followed by @key:value pairs.

    Raises:
        UserError: no such name in the group, or a key or value that a draft cannot have.
    """
    draft = split_draft(entry)
    if not draft.name or draft.id == "":
        raise UserError(f"drafts: {entry!r} is not name@folder-or-hub-id")
    if draft.id is None:
        conf = _group_draft(draft.name)
    elif (CONF_DIR / "draft" / f"{draft.id}.yaml").is_file() and not Path(draft.id).is_dir():
        conf = replace(_group_draft(draft.id), name=draft.name)  # half@early_exit, four@int4
    else:
        # The one or the other says its kind: a@copy, eagle3@folder
        kind = next((name for name in (draft.id, draft.name) if name in DRAFTS), "model")
        conf = DraftsEntry(name=draft.name, id=draft.id, kind=kind)
    for key, value in draft.settings.items():
        if key not in DRAFT_KEYS:
            raise UserError(
                f"drafts: {entry!r} sets {key!r}; a draft may set {', '.join(DRAFT_KEYS)}"
            )
        flag = isinstance(getattr(conf, key), bool)
        if flag and value not in ("true", "false"):
            raise UserError(f"drafts: {entry!r}: {key} is true or false")
        number = key in ("layers", "block") and value.isdigit()
        setattr(conf, key, value == "true" if flag else int(value) if number else value)
    return checked(conf)


def draft_confs(config: AuditionConfig) -> list[DraftConf]:
    """The configurations of an audition's drafts; that of `draft` for the entry that means it.

    The entry `auto` stands for the shipped drafts that can serve the target and are not named.
    """
    typed, entries = config.draft, config.drafts or []
    named: list[DraftConf] = [
        typed if typed is not None and entry in (OWN_DRAFT, typed.name) else draft_conf(entry)
        for entry in entries
        if entry != AUTO_DRAFTS
    ]
    if AUTO_DRAFTS not in entries:
        return named
    from harness.commands.eligible_drafts import eligible_drafts

    names = {conf.name for conf in named}
    found = eligible_drafts(config.model, config.gpu)
    return [*named, *(conf for conf in found if conf.name not in names)]


def _group_draft(name: str) -> DraftsEntry:
    """The configuration of one name of the draft group, whatever the target is."""
    from harness.commands.eligible_drafts import draft_files, shipped_draft

    if f"draft={name}" in REMOVED:
        raise _removed(f"draft={name}")
    file = draft_files().get(name)
    if file is None:
        raise UserError(
            f"drafts: no draft named {name!r}; there are {', '.join(draft_files())}; "
            "or give name@folder-or-hub-id"
        )
    conf = shipped_draft(file)
    if conf is None:
        raise UserError(f"drafts=[{name}]: whose? give drafts=[{name}@folder-or-hub-id]")
    return conf


def compose(command: str, overrides: Sequence[str] = ()) -> Any:
    """A command's configuration as its dataclass, without a command line (for tests, other apps).

    Raises:
        UserError: a key without a default was not given.
        hydra.errors.HydraException: an override does not fit.
    """
    register(command)
    words = as_hydra_takes(command, overrides)
    return to_dataclass(_composed(command, words), words)


def _composed(command: str, words: Sequence[str]) -> DictConfig:
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return hydra.compose(config_name=command, overrides=list(words))


def _report(error: Exception, status: int, config: DictConfig, *lines: str) -> int:
    with suppress(OmegaConfBaseException):  # debug=${...} may be what the error is about
        if config.get("debug", False):
            traceback.print_exception(error)
    for line in lines:
        _say(f"error: {_one_line(line)}")
    return status


def _unexpected(error: Exception) -> str:
    return f"{type(error).__name__}: {error} (run again with debug=true for the traceback)"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _say(line: str) -> None:
    if line.startswith("error: "):
        _errors.append(line)
    print(line, file=sys.stderr, flush=True)
