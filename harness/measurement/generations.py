"""Run the loop against the clock: one generation in, one `Trial` out.

Decode time starts when every prefill is done and ends with the last token; only emitted tokens are
counted, by the same code for the baseline and for speculation. A generation that runs out of memory
or meets logits that are not finite is a record with an error, not the end of the sweep.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import psutil
import torch

from harness.decoding.loops import autoregressive_rounds, speculative_rounds
from harness.decoding.model_drafter import ModelDrafter
from harness.decoding.protocols import (
    CausalModel,
    Drafter,
    Generation,
    StopRule,
    uniforms_needed,
)
from harness.decoding.sampling import SamplingParameters, Uniforms
from harness.engines.protocol import Asked
from harness.measurement.clock import Clock, undisturbed
from harness.models.cached import CachedModel
from harness.models.memory import is_out_of_memory
from harness.records import (
    BrokenLogitsError,
    LoopClock,
    Round,
    Rule,
    StopReason,
    TextKey,
    Trial,
    first_line,
)


@dataclass(frozen=True)
class Request:
    """Everything that determines a generation.

    Attributes:
        cell: hash of the rest, for resume.
        prompt_set, prompt, category, turn: which prompt.
        tokens: its ids, at least one.
        budget: tokens to emit at most.
        repetition, seed: with the prompt's name, the key of the uniforms.
        eos: ids that end the text; the one that does is emitted.
        model, draft: names; no draft where k is 0.
        k: num_draft_tokens; 0 decodes plainly.
        synthetic: synthetic acceptance, the chance of each drafted position given those before it.
        stop_below: adaptive drafting, the draft's probability below which a round drafts no more.
        stop: ends the text for other reasons than its last token's id.
        rounds: how many rounds (tokens, where k is 0) are run of a text that would go on.
        clock: whose seconds it takes.
    """

    cell: str
    prompt_set: str
    prompt: str
    category: str | None
    tokens: tuple[int, ...]
    sampling: SamplingParameters
    budget: int
    repetition: int
    seed: int
    eos: frozenset[int]
    model: str
    draft: str | None = None
    k: int = 0
    rule: Rule = "ratio"
    synthetic: tuple[float, ...] | None = None
    stop_below: float | None = None
    stop: StopRule | None = None
    turn: int = 1
    rounds: int | None = None
    clock: LoopClock = "wall"

    @property
    def key(self) -> TextKey:
        """The text's key, the same for every K."""
        return TextKey(self.prompt_set, self.prompt, self.repetition, self.sampling.temperature)

    @property
    def asked(self) -> Asked:
        """The request as a server is asked."""
        return Asked(self.tokens, self.sampling, self.seed, self.budget)

    @property
    def text_name(self) -> str:
        """The prompt, as the uniforms are keyed by it."""
        return f"{self.prompt_set}/{self.prompt}"

    def generation(self, device: torch.device) -> Generation:
        """The request as the loop takes it, with its uniforms on the target's device."""
        needed = uniforms_needed(self.budget, self.k, self.rule)
        return Generation(
            prompt=self.tokens,
            budget=self.budget,
            sampling=self.sampling,
            uniforms=Uniforms.keyed(self.seed, self.text_name, self.repetition, needed, device),
            num_draft_tokens=self.k,
            eos=self.eos,
            stop=self.stop,
            rule=self.rule,
            synthetic=self.synthetic,
        )

    def as_trial(self, **measured: Any) -> Trial:
        """The line of trials.jsonl, with what was measured; counts of a draft only where k > 0."""
        return Trial(
            cell=self.cell,
            prompt_set=self.prompt_set,
            prompt=self.prompt,
            repetition=self.repetition,
            k=self.k,
            temperature=self.sampling.temperature,
            rule=self.rule if self.k else None,
            model=self.model,
            draft=self.draft if self.k else None,
            category=self.category,
            prompt_tokens=len(self.tokens),
            turn=self.turn,
            **measured,
        )


# A draft model, or whatever makes the drafter of a request that needs no model.
Draft = CausalModel | Callable[[Request], Drafter]


@torch.inference_mode()
def run_trial(request: Request, target: CausalModel, draft: Draft | None) -> Trial:
    """Generate once and time it; `failed` where memory ran out or logits were not finite.

    The draft is not used where request.k is 0.
    """
    if target.device.type == "cuda":
        for card in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(card)
    own_work = nullcontext()
    if request.k == 0 and isinstance(target, CachedModel):
        own_work = target.keeping_no_states()
    try:
        with undisturbed(), own_work:
            rounds, seconds = _generate(request, target, draft)
    except BrokenLogitsError as error:
        names = {"target": f"model={request.model}", "draft": f"draft={request.draft}"}
        named = BrokenLogitsError(names[error.who], error.position)
        return request.as_trial(status="failed", error=str(named))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        for model in _models(target, draft):
            model.prefill([])  # frees what the failed generation kept
        torch.cuda.empty_cache()
        reason = f"out of memory: {first_line(error, 285)}"
        return request.as_trial(status="failed", error=reason)
    tokens = tuple(token for entry in rounds for token in entry.tokens)
    return request.as_trial(
        status="ok",
        new_tokens=len(tokens),
        tokens=tokens,
        stop_reason=stop_reason(tokens, request.eos, request.stop),
        peak_memory_bytes=_peak_bytes(target.device),
        **seconds,
        **(round_counts(rounds, request.k) if request.k else {}),
    )


def _generate(
    request: Request, target: CausalModel, draft: Draft | None
) -> tuple[list[Round], dict[str, float | None]]:
    """The rounds, and the seconds of a `Trial` by their names."""
    drafter = drafter_of(request, draft) if request.k and draft is not None else None
    generation = request.generation(target.device)
    clock = Clock(*_models(target, draft if drafter else None), kind=request.clock)
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
    done: list[Round] = []
    first = 0.0
    for entry in islice(rounds, request.rounds):
        done.append(entry)
        if len(done) == 1:
            first = clock.now()
    end = clock.now()
    return done, {
        "prefill_s": prefilled - begin,
        "draft_prefill_s": None if drafter is None else draft_prefilled - prefilled,
        "first_token_s": first - draft_prefilled,
        "decode_s": end - draft_prefilled,
    }


def drafter_of(request: Request, draft: Draft) -> Drafter:
    """The drafter of a request, ready to begin."""
    if callable(draft):
        return draft(request)
    drafter = ModelDrafter(draft, request.sampling, request.rule, request.stop_below or 0.0)
    if request.stop_below is None:
        drafter.prepare(request.k)
    return drafter


def _models(target: CausalModel, draft: Draft | None) -> tuple[CausalModel, ...]:
    return (target,) if draft is None or callable(draft) else (target, draft)


def stop_reason(tokens: Sequence[int], eos: Collection[int], stop: StopRule | None) -> StopReason:
    """The reason why a text ends where it does."""
    if tokens[-1] in eos:
        return "eos"
    stopped = stop is not None and stop(tokens[:-1], tokens[-1:]) is not None
    return "stop_string" if stopped else "budget"


def round_counts(rounds: Sequence[Round], k: int) -> dict[str, Any]:
    """The counts of a speculative `Trial`."""
    lengths, positions_left = [0] * (k + 1), [0] * k
    left = sum(len(entry.tokens) for entry in rounds)
    for entry in rounds:
        lengths[entry.accepted] += 1
        for offset in range(min(k, left)):
            positions_left[offset] += 1
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
        "room": tuple(positions_left),
    }


def _peak_bytes(device: torch.device) -> int:
    """Peak of the allocator, the sum of all cards'; on the CPU what the process holds now."""
    if device.type == "cuda":
        cards = range(torch.cuda.device_count())
        return sum(int(torch.cuda.max_memory_allocated(card)) for card in cards)
    if device.type == "mps":
        return int(torch.mps.current_allocated_memory())
    return int(psutil.Process().memory_info().rss)
