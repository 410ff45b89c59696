"""Stored answers of a server, as the records of a server run.

An entry is one JSON object per request, recognised by its fields:

- vLLM's answer: `usage`, and `metrics` with its times (`--enable-per-request-metrics`) and counts
  (`--per-request-spec-decode-metrics summary` or `detailed`).
- SGLang's answer: `meta_info`, with the names of release 0.5.11 or of earlier ones. It has no
  separate time of decoding.
- llama.cpp's answer: `timings`. The number of rounds is not in it and follows from its counts.
- counts of rounds of any engine: `per_step_accepted`, with `k` (docs/keys.md).

An answer may be inside an object `{"request": ..., "response": ...}`; its request then has the
temperature and the prompt. It may be inside the `body` of a response, as OpenAI's batch files and
vLLM's run-batch have it, with its `custom_id` for the prompt. Entries become the records of a
server run, which are analysed as any other: one trial per request, of the tokens that rounds
emitted.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, NamedTuple

from harness.engine_facts.engines import spec_of
from harness.engines import llamacpp, sglang, vllm
from harness.engines.protocol import Completion, failure_of
from harness.prompts.entries import request_in
from harness.records import MOST_K, ServingEngine, Trial, UserError

# One prompt set for all entries, since they have no category
PROMPT_SET = "requests"
# The prefill gives the first token, in every engine whose answers are read here
FIRST_POSITION = 1
PROMPT_FIELDS = ("prompt", "messages", "input_ids", "text")
# The field by which an answer says that it was drafted for, and the release that writes it
COUNTED_IN = {
    "vllm": "metrics.speculative_decoding, which vLLM 0.29 or later writes with"
    " --per-request-spec-decode-metrics summary",
    "sglang": "meta_info.spec_verify_ct, which SGLang writes where it drafted",
    "llamacpp": "timings.draft_n, which llama.cpp b4990 or later writes where it drafted",
}
# The fields of a record that its trial takes over
OF_TRIAL = (
    *("rounds", "drafted", "accepted", "accepted_lengths"),
    *("prefill_s", "decode_s", "stop_reason"),
)


@dataclass(frozen=True)
class Imported:
    """The records of a server run."""

    engine: ServingEngine
    model: str  # the target's name
    temperature: float  # of every request
    trials: tuple[Trial, ...]


# ---- one entry -----------------------------------------------------------------------------------


class FailedAnswerError(UserError):
    """An entry has an error in place of an answer."""


def record_of(entry: Mapping[str, Any] | str, where: str) -> Completion:
    """The record of one entry; `where` is its file and place, for errors.

    Raises:
        FailedAnswerError: the request failed.
        UserError: the entry is of no known kind, or lacks a field of its kind.
    """
    parts = _parts(entry)
    # The body of a response says more than its status
    failure = next(filter(None, map(failure_of, (entry, *reversed(parts[1:])))), None)
    if failure is not None:
        raise FailedAnswerError(f"{where}: the request failed: {failure}")
    assert isinstance(entry, Mapping)
    answer = parts[-1]
    _check_fields(entry, where)
    try:
        (choice, *_) = answer.get("choices") or [{}]
        if answer.get("meta_info") or choice.get("meta_info"):
            record = sglang.parse(answer)
        elif isinstance(answer.get("timings"), Mapping):
            record = llamacpp.parse(answer)
        elif isinstance(answer.get("usage"), Mapping):
            record = vllm.parse(answer)
        elif answer.get("per_step_accepted") is not None:
            record = _record_of_counts(answer)
        elif "response" not in entry and request_in(entry) is not entry:
            raise UserError(f"{where}: a request without its answer; give the file of the answers")
        else:
            raise UserError(
                f"{where}: no record that is known here; give answers of vLLM, SGLang or llama.cpp,"
                " or per_step_accepted, one JSON object per request"
            )
    except KeyError as error:
        raise UserError(f"{where}: has no field {error}") from error
    except (TypeError, AttributeError) as error:
        raise UserError(f"{where}: its fields are not those of an answer of its kind") from error
    except ValueError as error:
        raise UserError(f"{where}: cannot be read: {error}") from error
    request = request_in(request_in(entry))
    request = {} if request is entry else request
    sampling = request.get("sampling_params") or request
    custom = entry.get("custom_id")
    named = None if custom is None else str(custom)
    return replace(
        record,
        prompt=record.prompt or _prompt_name(request, choice) or named,
        temperature=sampling.get("temperature", record.temperature),
    )


def _parts(entry: Any) -> list[Any]:
    """An entry, its `response` and the `body` of that, as far as it has them; the last answers."""
    if not isinstance(entry, Mapping) or "response" not in entry:
        return [entry]
    response = entry["response"]
    has_body = isinstance(response, Mapping) and "body" in response
    return [entry, response, *([response["body"]] if has_body else [])]


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < math.inf


def _is_count(value: Any) -> bool:
    return _is_number(value) and value % 1 == 0


# The check of a field's value by its description in an error, and the fields at any depth
CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "a whole number from 0": _is_count,
    "a list of whole numbers from 0": lambda value: (
        isinstance(value, list) and all(map(_is_count, value))
    ),
    "a number from 0": _is_number,
    "an object": lambda value: isinstance(value, Mapping),
}
FIELDS: Mapping[str, Sequence[str]] = {
    "a whole number from 0": (
        *("k", "completion_tokens", "num_spec_tokens", "num_spec_steps", "num_draft_tokens"),
        *("num_accepted_draft_tokens", "spec_verify_ct", *sglang.DRAFTED, *sglang.ACCEPTED),
        *("predicted_n", "draft_n", "draft_n_accepted"),
    ),
    "a list of whole numbers from 0": (
        *("per_step_accepted", "per_step_drafted", "acceptance_histogram", *sglang.LENGTHS),
    ),
    "a number from 0": (
        *("time_to_first_token_ms", "generation_time_ms", "prompt_ms", "predicted_ms"),
        "temperature",
    ),
    "an object": (
        *("usage", "metrics", "speculative_decoding", "meta_info", "timings"),
        *("generation_settings", "sampling_params"),
    ),
}


def _check_fields(fields: Mapping[str, Any], where: str) -> None:
    """Refuse the first field, at any depth, whose value is neither null nor valid."""
    for name, value in fields.items():
        for wanted in (each for each, names in FIELDS.items() if name in names):
            if value is not None and not CHECKS[wanted](value):
                shown = json.dumps(value)[:80]
                raise UserError(f"{where}: field {name} is {shown}; it must be {wanted}")
        parts = value if name == "choices" and isinstance(value, list) else [value]
        for part in parts:
            if isinstance(part, dict):
                _check_fields(part, where)


def _prompt_name(request: Mapping[str, Any], choice: Mapping[str, Any]) -> str | None:
    """A short hash of the prompt, where the request or the answer has it."""
    candidates = (choice.get("prompt_token_ids"), *(request.get(name) for name in PROMPT_FIELDS))
    prompt = next(filter(None, candidates), None)
    if prompt is None:
        return None
    return hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest()[:8]


def _record_of_counts(entry: Mapping[str, Any]) -> Completion:
    """The record of a request of which only the tokens accepted in each round are known."""
    counts = vllm.counts({"num_spec_tokens": entry.get("k"), **entry})
    if entry.get("k") is None and not entry.get("per_step_drafted"):
        counts |= {"k": None, "drafted": None}  # K cannot be inferred: no round may have accepted K
    return Completion(
        engine=str(entry.get("engine") or "vllm"),
        counted=FIRST_POSITION + counts["rounds"] + counts["accepted"],
        model=entry.get("model"),
        prompt=entry.get("prompt"),
        temperature=entry.get("temperature"),
        **counts,
    )


# ---- a run ---------------------------------------------------------------------------------------


def imported(
    files: Mapping[str, Sequence[Completion]],
    ks: Sequence[int] | None,
    temperature: float | None,
) -> Imported:
    """The records of a server run, from files with the records of one server each.

    Requests of two files have the same prompt if their records name the same one. `ks` are the K of
    each file's server, and `temperature` is that of all requests, where records do not have them.

    Raises:
        UserError: the files are of several engines, no file drafts, or a K or temperature is not
            known or contradicts the records.
    """
    if ks is not None and len(ks) != len(files):
        raise UserError(f"k: {len(ks)} entries for {len(files)} files of records; give one each")
    known = [record for records in files.values() for record in records]
    for file, records in files.items():
        stored = {r.temperature for r in records if r.temperature is not None}
        if temperature is not None and stored - {temperature}:
            other = max(stored - {temperature})
            raise UserError(
                f"temperature={temperature:g}: {file} says that its requests ran at {other:g};"
                " leave temperature= out"
            )
    spec = spec_of(_common("engines", {record.engine for record in known}))
    stated = {record.temperature for record in known} - {None}
    if temperature is None and not stated:
        raise UserError("records: they do not say their temperature; give temperature=")
    temperature = float(_common("temperatures", stated) if temperature is None else temperature)
    trials: list[Trial] = []
    for place, (file, records) in enumerate(files.items()):
        k = _k_of(file, records, None if ks is None else ks[place])
        trials += _trials(file, [_counted(record, k) for record in records], k, temperature)
    if not any(trial.k for trial in trials):
        raise UserError(
            f"records: no file drafts: no answer has {COUNTED_IN[spec.name]}; add the records of a"
            " server that drafts, or give k=[...] where one drafted and did not count"
        )
    models = sorted({record.model for record in known if record.model})
    return Imported(
        engine=ServingEngine(
            name=spec.name,
            version="unknown",
            rule=spec.rule,
            first_position=FIRST_POSITION,
            shortens_last_draft=spec.counting is not None and spec.counting.shortens_last_draft,
        ),
        # A hub id, or a path on the server's machine
        model=PurePath(models[0]).name.removesuffix(".gguf") if models else "target",
        temperature=temperature,
        trials=tuple(trials),
    )


def _common(what: str, values: set[Any]) -> Any:
    if len(values) != 1:
        listed = ", ".join(map(str, sorted(values)))
        raise UserError(
            f"records: of {len(values)} {what} ({listed}); give files that can be compared"
        )
    return next(iter(values))


def _k_of(file: str, records: Sequence[Completion], given: int | None) -> int:
    stated = {record.k for record in records if record.k is not None}
    sums = [
        _Sums(record.drafted, rounds, record.returned - FIRST_POSITION)
        for record in records
        if record.k is None and record.drafted and (rounds := _rounds(record))
    ]
    inferred = [math.ceil(each.drafted_per_round) for each in sums]
    if given is not None:
        # Drafts may end early, so an inferred K is a lower bound
        least = [*inferred, *(len(r.accepted_lengths or (0,)) - 1 for r in records if r.k is None)]
        contradicted = (stated - {0, given}) | {k for k in least if k > given}
        if not given and any(record.drafted for record in records):
            contradicted |= {max(*stated, *inferred, 1)}
        if contradicted:
            drafted = max(contradicted)
            raise UserError(
                f"k={given}: {file} says that its server drafted {drafted} tokens per round; give"
                " the K of each file in their order, or leave k= out"
            )
        return given
    if sums:
        stated |= {_k_of_sums(file, sums, records[0].engine)}
    # A request that is too short for a draft looks like plain decoding
    drafting = stated - {0}
    if len(drafting) > 1 or (not stated and records):
        known = f"{sorted(drafting)}" if drafting else "none"
        raise UserError(f"{file}: K is not known ({known} in its records); give k=[...], one each")
    return max(stated, default=0)


class _Sums(NamedTuple):
    """The counts of a request whose answer does not say K; `tokens` are those of its rounds."""

    drafted: int
    rounds: int
    tokens: int

    @property
    def drafted_per_round(self) -> float:
        return self.drafted / self.rounds

    def fit(self, k: int, *, shortens: bool) -> bool:
        """True where rounds of K = k can have drafted this many tokens.

        Where an engine `shortens` drafts near the budget, the round that begins with `left` tokens
        to go drafts min(k, left - 1), and only the last rounds begin with k or fewer.
        """
        before = max(0, math.ceil((self.tokens - k) / (k + 1)))
        last = max(0, min(k, self.rounds - before)) if shortens else 0
        missing = k * self.rounds - self.drafted
        return 0 <= missing <= last * (k + 1) - last * (last + 1) // 2


def _k_of_sums(file: str, sums: Sequence[_Sums], engine: str) -> int:
    """The only K that can have drafted these sums; refused where there are several, or none."""
    counting = spec_of(engine).counting
    shortens = counting is not None and counting.shortens_last_draft
    least = max(math.ceil(each.drafted_per_round) for each in sums)
    fitting = [
        k for k in range(least, MOST_K + 1) if all(each.fit(k, shortens=shortens) for each in sums)
    ]
    # The sums of one answer may fit by chance, as 88 tokens in 20 rounds fit K=5
    if len(fitting) == 1 and (len(sums) > 1 or not shortens):
        return fitting[0]
    if len(fitting) == 1:
        why = "one answer does not tell full drafts from drafts that ended early"
    elif fitting:
        why = f"its answers are too short to tell K={fitting[0]} from K={fitting[1]}"
    else:
        means = [each.drafted_per_round for each in sums]
        why = (
            f"its rounds drafted {min(means):.1f} to {max(means):.1f} tokens in the mean of a"
            " request, so drafts ended early (a threshold, a look-up, an adaptive K)"
        )
    raise UserError(
        f"{file}: K is not known: {why}; give k=[...], what the server drafts at most, one of each"
        " file"
    )


def _rounds(record: Completion) -> int | None:
    """The rounds of a request: as counted, or those of one that ended at its budget.

    There each round emits one token of the target's.
    """
    if record.rounds:
        return record.rounds
    if record.stop_reason != "budget" or record.accepted is None:
        return None
    return record.returned - FIRST_POSITION - record.accepted


def _counted(record: Completion, k: int) -> Completion:
    """A record with the number of rounds, where it follows from the other counts.

    In a text that ended early, no draft is assumed to be shortened.
    """
    if not k:
        return replace(record, rounds=None, drafted=None, accepted=None, accepted_lengths=None)
    if record.rounds is not None and record.drafted is None:
        lengths = record.accepted_lengths
        if lengths:
            lengths = (*lengths, *(0,) * (k + 1 - len(lengths)))
        return replace(record, drafted=k * record.rounds, accepted_lengths=lengths)
    if record.rounds is not None or record.drafted is None or record.accepted is None:
        return record
    rounds = _rounds(record)
    if rounds is None:
        own = record.returned - FIRST_POSITION - record.accepted
        rounds = llamacpp.rounds_at_eos(own, record.drafted, k, left=k, drafts=None)
    return replace(record, rounds=rounds)


def _trials(
    file: str, records: Sequence[Completion], k: int, temperature: float
) -> Iterator[Trial]:
    seen = Counter[str]()
    for place, record in enumerate(records, start=1):
        prompt = str(record.prompt)
        repetition = seen[prompt]
        seen[prompt] += 1
        yield Trial(
            cell=f"{file}:{place}",
            prompt_set=PROMPT_SET,
            prompt=prompt,
            repetition=repetition,
            k=k,
            temperature=temperature,
            rule=spec_of(record.engine).rule if k else None,
            status="ok",
            model=record.model,
            new_tokens=max(0, record.returned - FIRST_POSITION),
            first_token_s=None if record.prefill_s is None else 0.0,
            tokens=record.tokens or None,
            **{name: getattr(record, name) for name in OF_TRIAL},
        )
