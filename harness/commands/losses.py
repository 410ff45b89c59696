"""Where the drafts of a stored run lose rounds: its traces, and the tokenizer of its target."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from harness import prompts as prompt_sets
from harness.analysis.head_training import accuracy_gap
from harness.analysis.losses import KnownTexts, Losses, losses_of
from harness.analysis.setup import Setup
from harness.commands.progress import progress
from harness.config import ModelConf, PromptsConf
from harness.records import Prompt, TextTrace, UserError
from harness.reporting import losses as page
from harness.reporting.html import LOSSES_FILE
from harness.storage import StoredRun, files
from harness.storage.training_log import read_training_log


def written(stored: StoredRun, training_log: str | None = None) -> Losses:
    """What a run's traces say of the losses of its drafts; writes the page into its folder.

    Args:
        training_log: a trainer's log, FILE of the best head or NAME@FILE; target and head are then
            loaded, to tell whether the head reads something else than in training.

    Raises:
        UserError: the run has no traces or times, its target's tokenizer or the log cannot be
            read, or the log is of no head of the run.
    """
    log = None
    if training_log is not None:
        name, _, file = training_log.rpartition("@")
        log = name or None, read_training_log(file)
    with progress("replaying the losses") as bar:
        setup, traces = Setup(stored), stored.traces
        known = known_texts(stored, traces) if traces else NOTHING
        losses = losses_of(setup, known)
        if log is not None:
            gap = accuracy_gap(setup, log[1], log[0])
            from harness.commands.head_causes import with_cause  # torch

            bar.say("scoring the head without one cause at a time")
            losses = replace(losses, accuracy=with_cause(stored, known, gap))
        with files.writing(stored.folder):
            files.write(stored.folder / LOSSES_FILE, page.html_of(losses).encode())
    return losses


NOTHING = KnownTexts({}, {})


def known_texts(stored: StoredRun, traces: Sequence[TextTrace]) -> KnownTexts:
    """The text of every id, and the prompts as the target read them, where these are still there.

    Raises:
        UserError: the tokenizer of the target cannot be loaded.
    """
    from harness.models.load import load_vocabulary  # transformers takes seconds

    conf = conf_of(ModelConf, stored.config.get("model") or {})
    tokenizer: Any = load_vocabulary(conf).tokenizer
    read = [trace.tokens for trace in traces]
    read += [trace.draft_token for trace in traces if trace.draft_token is not None]
    ids = sorted({int(each) for tokens in read for each in np.unique(tokens[~np.isnan(tokens)])})
    special = {*tokenizer.all_special_ids}
    pieces = {
        token: "" if token in special else _piece(tokenizer, token, written)
        for token, written in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)
    }
    lengths = {(trace.prompt_set, trace.prompt): trace.prompt_tokens for trace in traces}
    return KnownTexts(pieces, dict(_prompts(stored, tokenizer, lengths)))


def _piece(tokenizer: Any, token: int, written: str) -> str:
    """What a token adds to a text; a vocabulary marks its leading space, which decoding strips."""
    text = str(tokenizer.decode([token]))
    return f" {text}" if written.startswith("\u2581") and not text.startswith(" ") else text


def _prompts(
    stored: StoredRun, tokenizer: Any, lengths: Mapping[tuple[str, str], int]
) -> Iterator[tuple[tuple[str, str], tuple[int, ...]]]:
    """The ids of those prompts that are as long as when the run read them."""
    from harness.models.tokenizer import encode

    conf = conf_of(PromptsConf, stored.config.get("prompts") or {})
    try:
        conversations = prompt_sets.load(conf)
        for prompt in conversations:
            for turn in readable_turns(prompt):
                ids = encode(tokenizer, turn, conf)
                if lengths.get((turn.prompt_set, turn.id)) == len(ids):
                    yield (turn.prompt_set, turn.id), ids
    except UserError:  # files that are not there any more; the page says that prompts are unknown
        return


def readable_turns(prompt: Prompt) -> Iterator[Prompt]:
    """The turns that follow no answer of the target's own."""
    missing = prompt_sets.missing_answers(prompt)
    for turn in prompt.answered:
        if not missing or turn <= missing[0]:
            yield prompt.up_to(turn, [answer or "" for answer in prompt.answers])


def conf_of(kind: type[Any], stored: Mapping[str, Any]) -> Any:
    """A group of a stored configuration, without keys that this version does not have."""
    known = {entry.name for entry in fields(kind)}
    return kind(**{name: value for name, value in stored.items() if name in known})
