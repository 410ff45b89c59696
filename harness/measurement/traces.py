"""The target's own text, generated without any draft, many prompts side by side.

Replay needs each text once per (temperature, top-k, top-p), whatever drafts and K are compared on
it, so this is the expensive part of an audition and it is batched: rows sorted by length, padded on
the left, texts of several temperatures in one batch. A row's tokens are decided by the same
position-keyed uniforms as in plain decoding (`decoding.sampling.Noise`), so that a text does not
depend on the batch it was in, but for rounding.

A network is taken apart where that gives the same logits: the body's final hidden states are kept
(on the host, `hidden` numbers per token rather than a vocabulary of them), and scoring later needs
the output head alone, no second pass through the target.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.decoding.protocols import StopRule
from harness.decoding.sampling import (
    Noise,
    Warping,
    inverse_cdf,
    penalised,
    sampler_for,
    seen_tokens,
)
from harness.measurement.batches import in_batches
from harness.measurement.clock import Clock
from harness.measurement.trials import stop_reason
from harness.models.cached import CachedModel
from harness.models.halves import Halves, new_cache, take_apart
from harness.records import BrokenLogitsError, StopReason


@dataclass(frozen=True)
class TextRequest:
    """Everything that determines a text of the target.

    Attributes:
        prompt_set, prompt, category, turn: which prompt.
        tokens: its ids, at least one.
        repetition, seed: with the prompt's name, the key of the noise.
        warping: the law of the text.
        budget: tokens to emit at most.
        eos: ids that end the text; the one that does is emitted.
        stop: ends the text for other reasons than its last token's id.
    """

    prompt_set: str
    prompt: str
    category: str | None
    tokens: tuple[int, ...]
    repetition: int
    warping: Warping
    budget: int
    seed: int
    eos: frozenset[int]
    stop: StopRule | None = None
    turn: int = 1


@dataclass(frozen=True, eq=False)
class GeneratedText:
    """A text that the target wrote.

    Attributes:
        request: what was asked for.
        tokens: n emitted ids.
        stop_reason: how it ended.
        batch_s: seconds that the whole batch took, prefill included.
        batch_texts: texts in that batch.
        hidden: [n, hidden] final hidden states that the laws of the tokens come from, on the host;
            None where the network could not be taken apart, or for a text read from a file.
    """

    request: TextRequest
    tokens: tuple[int, ...]
    stop_reason: StopReason
    batch_s: float
    batch_texts: int
    hidden: Tensor | None = None


@torch.inference_mode()
def generate_texts(
    target: CachedModel,
    requests: Sequence[TextRequest],
    *,
    name: str,
    batch: int = 32,
    tick: Callable[[], None] = lambda: None,
) -> list[GeneratedText]:
    """Generate every text, in the order of the requests.

    Args:
        target: the model whose texts they are; its logits are cut to its `vocab_size`.
        requests: prompts, temperatures, repetitions in any order and mixture.
        name: what errors call the target, such as "model=tiny".
        batch: texts side by side at most; halved for good whenever memory runs out.
        tick: called once per finished text.

    Raises:
        BrokenLogitsError: the target's logits are not finite.
        UserError: one text alone runs out of memory.
    """
    if not requests:
        return []
    halves = take_apart(target, requests[0].tokens)
    padded = _pads(target)

    def work(some: Sequence[TextRequest]) -> list[GeneratedText]:
        texts = _generate(target, halves, some, name)
        for _ in texts:
            tick()
        return texts

    order = sorted(range(len(requests)), key=lambda index: -len(requests[index].tokens))
    texts = in_batches(
        [requests[index] for index in order],
        batch,
        lambda a, b: padded or len(a.tokens) == len(b.tokens),
        work,
        name,
    )
    placed = dict(zip(order, texts, strict=True))
    return [placed[index] for index in range(len(requests))]


def _pads(model: CachedModel) -> bool:
    """Whether rows of different lengths may share a batch.

    Padding on the left needs a model that is told its positions, and no recurrent state.
    """
    parameters = inspect.signature(model.network.forward).parameters
    return model.rewinding == "crop" and "position_ids" in parameters


def _generate(
    target: CachedModel, halves: Halves | None, requests: Sequence[TextRequest], name: str
) -> list[GeneratedText]:
    """Generate one batch."""
    clock = Clock(target)
    begin = clock.now()
    rows = _Rows(target, halves, requests, name)
    while rows.alive:
        rows.step()
    seconds = clock.now() - begin
    return [
        GeneratedText(
            request=request,
            tokens=tuple(tokens),
            stop_reason=stop_reason(tokens, request.eos, request.stop),
            batch_s=seconds,
            batch_texts=len(requests),
            hidden=None if rows.hidden is None else rows.hidden[index, : len(tokens)],
        )
        for index, (request, tokens) in enumerate(zip(requests, rows.tokens, strict=True))
    ]


class _Rows:
    """A batch of texts in the making; finished rows leave it where the cache allows that."""

    def __init__(
        self,
        target: CachedModel,
        halves: Halves | None,
        requests: Sequence[TextRequest],
        name: str,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.hidden: Tensor | None = None
        self._target, self._halves, self._requests, self._name = target, halves, requests, name
        # Which request each row of the batch belongs to; fewer and fewer of them
        self._order = list(range(len(requests)))
        self.alive = set(self._order)
        self._cache = new_cache(target)
        self._position = 0
        self._budget = max(request.budget for request in requests)
        device = target.network.device
        width = max(len(request.tokens) for request in requests)
        padding = [width - len(request.tokens) for request in requests]
        ids = [[0] * pad + list(r.tokens) for pad, r in zip(padding, requests, strict=True)]
        self._feed = torch.tensor(ids, device=device)
        self._padding = torch.tensor(padding, device=device).unsqueeze(1)
        self._padded = any(padding)
        self._noise = torch.stack([_uniforms(r, self._budget, target.device) for r in requests])
        self._groups = self._grouped()
        # What a repetition penalty applies to, [vocab] per request that has one
        self._seen = {
            index: seen_tokens(request.tokens, target.vocab_size, target.device)
            for index, request in enumerate(requests)
            if request.warping.repetition_penalty is not None
        }
        self._laws = {
            request.warping: None if request.warping.greedy else sampler_for(request.warping)
            for request in requests
        }

    def step(self) -> None:
        """Emit one token per row."""
        logits = self._forward()
        chosen = self._choose(logits)
        finite = logits.amax(-1).isfinite().long()
        # The step's one host read
        tokens, sound = torch.stack([chosen, finite]).tolist()
        for row, index in enumerate(self._order):
            if index not in self.alive:
                continue
            if not sound[row]:
                raise broken_logits(self._name, self._requests[index], self._position)
            self.tokens[index].append(tokens[row])
            if index in self._seen:
                self._seen[index][tokens[row]] = True
            request, text = self._requests[index], self.tokens[index]
            over = tokens[row] in request.eos or len(text) >= request.budget
            stop = request.stop
            if over or (stop is not None and stop(text[:-1], text[-1:]) is not None):
                self.alive.discard(index)
        self._position += 1
        self._feed = chosen.to(self._feed.device).unsqueeze(1)
        if self._target.rewinding == "crop" and 0 < len(self.alive) < len(self._order):
            self._drop_finished()

    def _forward(self) -> Tensor:
        """Logits [rows, vocab] after the tokens to feed."""
        inputs = {
            "input_ids": self._feed,
            "past_key_values": self._cache,
            "use_cache": True,
            **self._places(),
        }
        if self._halves is None:
            output = self._target.network(**inputs, logits_to_keep=1)
            return output.logits[:, -1, : self._target.vocab_size]
        last = self._halves.hidden(**inputs)[:, -1]
        self._keep(last)
        return self._halves.logits(last)

    def _places(self) -> dict[str, Tensor]:
        """Mask and positions; a batch without padding needs neither."""
        if not self._padded:
            return {}
        cached = int(self._cache.get_seq_length())
        places = torch.arange(cached + self._feed.shape[1], device=self._feed.device)
        return {
            "attention_mask": (places >= self._padding).long(),
            "position_ids": (places[cached:] - self._padding).clamp_min(0),
        }

    def _keep(self, last: Tensor) -> None:
        """Store this position's hidden states on the host."""
        if self.hidden is None:
            shape = (len(self._requests), self._budget, last.shape[-1])
            self.hidden = torch.empty(shape, dtype=last.dtype)
        self.hidden[self._order, self._position] = last.cpu()

    def _choose(self, logits: Tensor) -> Tensor:
        """Each row's next token by its own law, as plain decoding draws it."""
        uniforms = self._noise[:, self._position]
        chosen = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        for warping, rows in self._groups.items():
            law = self._laws[warping]
            own = self._penalised(logits[rows], warping, rows)
            chosen[rows] = own.argmax(-1) if law is None else inverse_cdf(law(own), uniforms[rows])
        return chosen

    def _penalised(self, logits: Tensor, warping: Warping, rows: Sequence[int]) -> Tensor:
        if warping.repetition_penalty is None:
            return logits
        seen = torch.stack([self._seen[self._order[row]] for row in rows])
        return penalised(logits, seen, warping.repetition_penalty)

    def _grouped(self) -> dict[Warping, list[int]]:
        groups: dict[Warping, list[int]] = {}
        for row, index in enumerate(self._order):
            groups.setdefault(self._requests[index].warping, []).append(row)
        return groups

    def _drop_finished(self) -> None:
        rows = [row for row, index in enumerate(self._order) if index in self.alive]
        kept = torch.tensor(rows, device=self._feed.device)
        self._cache.batch_select_indices(kept)
        self._feed, self._padding = self._feed[kept], self._padding[kept]
        self._noise = self._noise[rows]
        self._order = [self._order[row] for row in rows]
        self._groups = self._grouped()


def _uniforms(request: TextRequest, positions: int, device: torch.device) -> Tensor:
    """The uniforms that decide the target's own token at each position."""
    key = f"{request.prompt_set}/{request.prompt}"
    return Noise.keyed(request.seed, key, request.repetition, positions, device).resample


def broken_logits(name: str, request: TextRequest, position: int) -> BrokenLogitsError:
    """The error that names model, prompt and text position of logits that are not finite."""
    return BrokenLogitsError(name, position, f"prompt {request.prompt_set}/{request.prompt}")
