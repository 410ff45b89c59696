"""Run the loop against the clock: one generation in, one `Trial` out.

Decode time starts when every prefill is done and ends with the last token; only emitted tokens are
counted, by the same code for the baseline and for speculation. A generation that runs out of memory
or meets logits that are not finite is a record with an error, not the end of the sweep.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from harness.decoding.autoregressive import autoregressive_rounds
from harness.decoding.drafters import ModelDrafter, ThresholdDrafter
from harness.decoding.protocols import CausalModel, Drafter, Generation, StopRule
from harness.decoding.sampling import SamplingParameters, Uniforms
from harness.decoding.speculative import speculative_rounds
from harness.measurement.clock import Clock
from harness.models.memory import is_out_of_memory
from harness.records import BrokenLogitsError, Round, Rule, StopReason, Trial, first_line


@dataclass(frozen=True)
class Request:
    """Everything that determines a generation.

    Attributes:
        cell: hash of the rest, for resume.
        prompt_set, prompt, category, turn: which prompt.
        tokens: its ids, at least one.
        k: num_draft_tokens; 0 decodes plainly.
        sampling, rule: how tokens are drawn and kept.
        budget: tokens to emit at most.
        repetition, seed: with the prompt's name, the key of the uniforms.
        eos: ids that end the text.
        synthetic: synthetic acceptance, the chance of each drafted position given those before it.
        stop_below: adaptive drafting, the draft's probability below which a round drafts no more.
        stop: ends the text for other reasons than its last token's id.
    """

    cell: str
    prompt_set: str
    prompt: str
    category: str | None
    tokens: tuple[int, ...]
    k: int
    sampling: SamplingParameters
    rule: Rule
    budget: int
    repetition: int
    seed: int
    eos: frozenset[int]
    model: str
    draft: str | None
    synthetic: tuple[float, ...] | None = None
    stop_below: float | None = None
    stop: StopRule | None = None
    turn: int = 1

    def generation(self, device: torch.device) -> Generation:
        """What the loop needs of it, with its uniforms on the target's device."""
        name, positions = f"{self.prompt_set}/{self.prompt}", self.budget + self.k + 1
        return Generation(
            prompt=self.tokens,
            budget=self.budget,
            sampling=self.sampling,
            uniforms=Uniforms.keyed(self.seed, name, self.repetition, positions, device),
            num_draft_tokens=self.k,
            eos=self.eos,
            stop=self.stop,
            rule=self.rule,
            synthetic=self.synthetic,
        )


# A draft model, or whatever makes the drafter of a request that needs no model.
Draft = CausalModel | Callable[[Request], Drafter]


@torch.inference_mode()
def run_trial(request: Request, target: CausalModel, draft: Draft | None) -> Trial:
    """Generate once and time it.

    Args:
        request: what to generate.
        target: the model whose text it is.
        draft: the draft model, or a function that makes the drafter; not used where request.k is 0.

    Returns:
        The trial; `failed` with the error where memory ran out or logits were not finite.
    """
    empty = _empty_trial(request)
    _reset_peak(target.device)
    try:
        timed = _generate(request, target, draft)
    except BrokenLogitsError as error:
        names = {"target": f"model={request.model}", "draft": f"draft={request.draft}"}
        named = BrokenLogitsError(names[error.who], error.position)
        return replace(empty, status="failed", error=str(named))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return _out_of_memory(empty, error, target, draft)
    return _with_counts(empty, request, timed, _peak_bytes(target.device))


@dataclass(frozen=True)
class _Timed:
    rounds: tuple[Round, ...]
    prefill_s: float
    draft_prefill_s: float | None
    first_token_s: float
    decode_s: float


def _generate(request: Request, target: CausalModel, draft: Draft | None) -> _Timed:
    drafter = _drafter(request, draft) if request.k and draft is not None else None
    generation = request.generation(target.device)
    clock = Clock(*_models(target, draft if drafter else None))
    begin = clock.now()
    target.prefill(request.tokens[:-1])
    prefilled = clock.now()
    if drafter is None:
        draft_prefilled = prefilled
        rounds = autoregressive_rounds(target, generation)
    else:
        drafter.begin(request.tokens)
        draft_prefilled = clock.now()
        rounds = speculative_rounds(target, drafter, generation)
    done, first, end = _drain(rounds, clock)
    return _Timed(
        rounds=done,
        prefill_s=prefilled - begin,
        draft_prefill_s=None if drafter is None else draft_prefilled - prefilled,
        first_token_s=first - draft_prefilled,
        decode_s=end - draft_prefilled,
    )


def _drafter(request: Request, draft: Draft) -> Drafter:
    if callable(draft):
        return draft(request)
    if request.stop_below is not None:
        return ThresholdDrafter(draft, request.sampling, request.rule, request.stop_below)
    drafter = ModelDrafter(draft, request.sampling, request.rule)
    drafter.prepare(request.k)
    return drafter


def _models(target: CausalModel, draft: Draft | None) -> tuple[CausalModel, ...]:
    """The models among target and draft."""
    return (target,) if draft is None or callable(draft) else (target, draft)


def _drain(rounds: Iterable[Round], clock: Clock) -> tuple[tuple[Round, ...], float, float]:
    """Run a loop to its end; return its rounds and when its first and its last was there."""
    done: list[Round] = []
    first = 0.0
    for entry in rounds:
        done.append(entry)
        if len(done) == 1:
            first = clock.now()
    return tuple(done), first, clock.now()


def _empty_trial(request: Request) -> Trial:
    return Trial(
        cell=request.cell,
        prompt_set=request.prompt_set,
        prompt=request.prompt,
        repetition=request.repetition,
        k=request.k,
        temperature=request.sampling.temperature,
        rule=request.rule if request.k else None,
        status="ok",
        model=request.model,
        draft=request.draft if request.k else None,
        category=request.category,
        prompt_tokens=len(request.tokens),
        turn=request.turn,
    )


def _out_of_memory(
    trial: Trial, error: BaseException, target: CausalModel, draft: Draft | None
) -> Trial:
    """Free what the failed generation held and say what happened in one line."""
    for model in _models(target, draft):
        model.prefill([])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return replace(trial, status="failed", error=f"out of memory: {first_line(error, 285)}")


def _with_counts(trial: Trial, request: Request, timed: _Timed, peak: int) -> Trial:
    tokens = tuple(token for entry in timed.rounds for token in entry.tokens)
    trial = replace(
        trial,
        new_tokens=len(tokens),
        tokens=tokens,
        from_draft=tuple(int(flag) for entry in timed.rounds for flag in entry.from_draft),
        prefill_s=timed.prefill_s,
        draft_prefill_s=timed.draft_prefill_s,
        first_token_s=timed.first_token_s,
        decode_s=timed.decode_s,
        stop_reason=stop_reason(tokens, request.eos, request.stop),
        peak_memory_bytes=peak,
    )
    return replace(trial, **_round_counts(timed.rounds, request.k)) if request.k else trial


def stop_reason(tokens: Sequence[int], eos: Collection[int], stop: StopRule | None) -> StopReason:
    """Why a text ends where it does."""
    if tokens[-1] in eos:
        return "eos"
    stopped = stop is not None and stop(tokens[:-1], tokens[-1:]) is not None
    return "stop_string" if stopped else "budget"


def _round_counts(rounds: Sequence[Round], k: int) -> dict[str, object]:
    lengths = [0] * (k + 1)
    room = [0] * k
    left = sum(len(entry.tokens) for entry in rounds)
    for entry in rounds:
        lengths[entry.accepted] += 1
        for offset in range(min(k, left)):
            room[offset] += 1
        left -= len(entry.tokens)
    outcomes = [entry.outcome for entry in rounds]
    return {
        "rounds": len(rounds),
        "drafted": sum(entry.drafted for entry in rounds),
        "accepted": sum(entry.accepted for entry in rounds),
        "rejected": outcomes.count("rejected"),
        "bonus": outcomes.count("bonus"),
        "cut": outcomes.count("cut"),
        "accepted_lengths": tuple(lengths),
        "room": tuple(room),
    }


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int:
    """Peak of the device's allocator; on the CPU what the process holds resident now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.current_allocated_memory())
    return int(psutil.Process().memory_info().rss)
