"""Run the loop against the clock: generations in, `Trial`s out.

Decode time starts when every prefill is done and ends with the last token; only emitted tokens are
counted, by the same code for the baseline and for speculation. A generation that runs out of memory
or meets logits that are not finite is a record with an error, not the end of the sweep.

Other work disturbs a machine for 50 to 200 ms, as long as a generation of a small model. So what is
compared is generated side by side: plain decoding and every K of one prompt, each with caches of
its own, and always the one that has emitted the fewest tokens goes on, for a slice of at least
SLICE tokens. A disturbance then slows all of them alike. The first plain token of a slice reads
weights that the others have displaced from the processor's caches: it is emitted and not timed.
Where a number of rounds is asked for, the share of them that is done counts, so that all end at
about the same time.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import psutil
import torch

from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import autoregressive_rounds, speculative_rounds
from harness.decoding.protocols import CausalModel, Drafter, Generation, StopRule, uniforms_needed
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
    """Everything that determines a generation."""

    cell: str  # hash of the rest, for resume
    prompt_set: str
    prompt: str
    category: str | None
    tokens: tuple[int, ...]  # of the prompt, at least one id
    sampling: SamplingParameters
    budget: int  # tokens to emit at most
    repetition: int  # and `seed`: with the prompt's name, the key of the uniforms
    seed: int
    eos: frozenset[int]  # ids that end the text; the one that does is emitted
    model: str
    draft: str | None = None
    k: int = 0  # num_draft_tokens; 0 decodes plainly
    rule: Rule = "ratio"
    # Synthetic acceptance: the chance of each drafted position given those before it
    synthetic: tuple[float, ...] | None = None
    stop_below: float | None = None  # the draft's probability that ends a round's draft (`p_min`)
    stop: StopRule | None = None  # ends the text for other reasons than its last token's id
    turn: int = 1
    rounds: int | None = None  # to run of a text that would go on (tokens, where k is 0)
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
# The target and the draft of a generation
Models = tuple[CausalModel, Draft | None]

# Tokens that a generation emits before another one goes on, at least
SLICE = 4


def run_trial(request: Request, target: CausalModel, draft: Draft | None) -> Trial:
    """Generate once and time it; `failed` where memory ran out or logits were not finite.

    The draft is not used where request.k is 0.
    """
    return run_side_by_side([request], [(target, draft)])[0]


@torch.inference_mode()
def run_side_by_side(requests: Sequence[Request], models: Sequence[Models]) -> list[Trial]:
    """Generate several texts in turns and time each; as `run_trial` where there is one.

    `models` are of each request, with caches that no other has.
    """
    generations = [_Generating(*each) for each in zip(requests, models, strict=True)]
    with undisturbed():
        # Plain decoding last, for it keeps no states of the prompt
        for each in sorted(generations, key=lambda each: each.request.k == 0):
            each.begin(next(filter(each.has_the_prompt_of, generations), None))
        while running := [each for each in generations if each.running]:
            behind = min(running, key=lambda each: each.share)
            behind.go_on(SLICE if len(running) > 1 else None)
    trials = [each.trial() for each in generations]
    alone = [at for at, each in enumerate(generations) if each.out_of_memory]
    if alone and len(requests) > 1:  # the others' caches took a part of the memory
        for each in generations:
            each.release()
        for at in alone:
            (trials[at],) = run_side_by_side([requests[at]], [models[at]])
    return trials


class _Generating:
    """A generation that goes on slice by slice, while it is `running`."""

    def __init__(self, request: Request, models: Models) -> None:
        self.request, (self._target, draft) = request, models
        self._cached = self._target if isinstance(self._target, CachedModel) else None
        self._draft = draft if request.k else None
        self._clock = Clock(*_models(self._target, self._draft), kind=request.clock)
        self._error: str | None = None
        self._done: list[Round] = []
        self._prefills_s: dict[str, float | None] = {}
        self._first_s = 0.0
        # Seconds and tokens that count, and seconds of first tokens of slices, which do not
        self._seconds, self._timed, self._untimed_s = 0.0, 0, 0.0
        self.running, self.emitted, self.out_of_memory = True, 0, False

    @property
    def share(self) -> float:
        """The share of its budget, or of the rounds that are asked for, that is done."""
        rounds = self.request.rounds
        done = len(self._done) / rounds if rounds else 0.0
        return max(self.emitted / self.request.budget, done)

    def has_the_prompt_of(self, other: "_Generating") -> bool:
        """True where another generation has read this one's prompt, with the same network."""
        return (
            bool(other._prefills_s)
            and self.request.tokens == other.request.tokens
            and self._cached is not None
            and other._cached is not None
            and self._cached.network is other._cached.network
        )

    def begin(self, other: "_Generating | None" = None) -> None:
        """Fill the caches with the prompt, the target's with what another one has read of it."""
        request, target, clock = self.request, self._target, self._clock
        with self._watched():
            if target.device.type == "cuda":
                for card in range(torch.cuda.device_count()):
                    torch.cuda.reset_peak_memory_stats(card)
            drafter = None if self._draft is None else drafter_of(request, self._draft)
            generation = request.generation(target.device)
            begin = clock.now()
            if other is None or self._cached is None or other._cached is None:
                target.prefill(request.tokens[:-1])
                prefill_s = clock.now() - begin
            else:
                self._cached.read_as(other._cached)
                prefill_s = other._prefills_s["prefill_s"]
            prefilled = clock.now()
            draft_s = None
            if drafter is None:
                rounds = autoregressive_rounds(target, generation)
            else:
                drafter.begin(request.tokens)
                draft_s = clock.now() - prefilled
                rounds = speculative_rounds(target, drafter, generation)
            self._rounds = islice(rounds, request.rounds)
            self._prefills_s = {"prefill_s": prefill_s, "draft_prefill_s": draft_s}

    def go_on(self, tokens: int | None) -> None:
        """Emit at least so many tokens that are timed; None: to the end of the text."""
        warms = tokens is not None and self.request.k == 0
        timed = 0
        with self._watched():
            begin = self._clock.now()
            while tokens is None or timed < tokens:
                entry = next(self._rounds, None)
                if entry is None:
                    self.running = False
                    break
                self._done.append(entry)
                self.emitted += len(entry.tokens)
                if len(self._done) == 1:
                    self._first_s = self._clock.now() - begin
                if warms:
                    now = self._clock.now()
                    self._untimed_s += now - begin
                    begin, warms = now, False
                else:
                    timed += len(entry.tokens)
            if timed:
                self._seconds += self._clock.now() - begin
                self._timed += timed

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Do a part of the work; what a generation can meet ends it with an error."""
        request = self.request
        own_work = nullcontext()
        if request.k == 0 and self._cached is not None:
            own_work = self._cached.keeping_no_states()
        try:
            with own_work:
                yield
        except BrokenLogitsError as error:
            names = {"target": f"model={request.model}", "draft": f"draft={request.draft}"}
            self._error = str(BrokenLogitsError(names[error.who], error.position))
            self.running = False
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.release()
            self._error = f"out of memory: {first_line(error, 285)}"
            self.running, self.out_of_memory = False, True

    def release(self) -> None:
        """Free what its models have cached."""
        for model in _models(self._target, self._draft):
            model.prefill([])
        torch.cuda.empty_cache()

    @property
    def _decode_s(self) -> float:
        """Seconds of all tokens, those that were not timed at the mean of those that were."""
        if self._untimed_s and self._timed:
            return self._seconds * self.emitted / self._timed
        return self._seconds or self._untimed_s

    def trial(self) -> Trial:
        """The line of trials.jsonl."""
        request, rounds = self.request, self._done
        if self._error is not None:
            return request.as_trial(status="failed", error=self._error)
        tokens = tuple(token for entry in rounds for token in entry.tokens)
        return request.as_trial(
            status="ok",
            new_tokens=len(tokens),
            tokens=tokens,
            stop_reason=stop_reason(tokens, request.eos, request.stop),
            peak_memory_bytes=_peak_bytes(self._target.device),
            **self._prefills_s,
            first_token_s=self._first_s,
            decode_s=self._decode_s,
            **(round_counts(rounds, request.k) if request.k else {}),
        )


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
    lengths = [0] * (k + 1)
    for entry in rounds:
        lengths[entry.accepted] += 1
    outcomes = [entry.outcome for entry in rounds]
    return {
        "rounds": len(rounds),
        "drafted": sum(entry.drafted for entry in rounds),
        "accepted": sum(entry.accepted for entry in rounds),
        "rejected": outcomes.count("rejected"),
        "bonus": outcomes.count("bonus"),
        "cut": outcomes.count("cut"),
        "accepted_lengths": tuple(lengths),
    }


def _peak_bytes(device: torch.device) -> int:
    """Peak of the allocator, the sum of all cards'; on the CPU what the process holds now."""
    if device.type == "cuda":
        cards = range(torch.cuda.device_count())
        return sum(int(torch.cuda.max_memory_allocated(card)) for card in cards)
    if device.type == "mps":
        return int(torch.mps.current_allocated_memory())
    return int(psutil.Process().memory_info().rss)
