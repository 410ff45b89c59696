"""The target's own completions, generated without any draft, many prompts in a batch.

Replay needs each text once per (temperature, top-k, top-p), whatever drafts and K are compared on
it, so this is the expensive part of an audition and it is batched: rows sorted by length, padded on
the left, texts of several temperatures in one batch. A row's tokens are decided by the same
position-keyed uniforms as in plain decoding (`decoding.sampling.Uniforms`), so that a text does not
depend on the batch it was in, but for rounding.

How texts can share a batch is tried on the loaded model first: padded rows, else rows of equal
lengths, else every text alone, by the model's own cached steps (`settle_batches`). Models whose
positions padding shifts (RoBERTa) and recurrent states cannot be padded.

A network is taken apart where that gives the same logits: the body's final hidden states are kept
(on the host, `hidden` numbers per token rather than a vocabulary of them), and scoring later needs
the output head alone, no second pass through the target.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from harness.decoding.sampling import (
    SamplingParameters,
    inverse_cdf,
    penalised,
    sampler_for,
    seen_tokens,
)
from harness.measurement.generations import Request, stop_reason
from harness.models.cached import CachedModel, SplitNetwork, split_network, takes
from harness.models.memory import is_out_of_memory
from harness.models.probe import allowed_error, difference, probe_tokens, uncached_logits
from harness.records import BrokenLogitsError, StopReason, UserError, first_line, grouped

Item = TypeVar("Item")
Result = TypeVar("Result")

# Prompt lengths of the texts that a way of batching is tried on
PADDED, EQUAL = (20, 11), (16, 16)
TRIED_TOKENS = 4


@dataclass(frozen=True, eq=False)
class GeneratedText:
    """A completion that the target generated."""

    request: Request
    tokens: tuple[int, ...]
    stop_reason: StopReason
    # [n, hidden] final hidden states that the tokens' distributions come from, on the host; None
    # where the network could not be taken apart, or for a text read from a file
    hidden: Tensor | None = None
    # [n] under the target, where a server returned the text and was asked for them
    logprobs: tuple[float, ...] | None = None


@torch.inference_mode()
def generate_texts(
    target: CachedModel,
    requests: Sequence[Request],
    *,
    name: str,
    batch: int = 32,
    states: bool = True,
    tick: Callable[[int], None] = lambda _: None,
    keep: Callable[[GeneratedText], None] = lambda _: None,
) -> list[GeneratedText]:
    """Generate every text, in the order of the requests, which may be in any mixture.

    Args:
        target: its logits are cut to its `vocab_size`.
        name: what errors call the target, such as "model=tiny".
        batch: texts in a batch at most; halved for good whenever memory runs out.
        states: whether texts keep their hidden states, which scores need.
        tick: called with how many tokens are generated; those that a text leaves of its budget
            count when it ends.
        keep: called with each text of a batch when the batch is finished.

    Raises:
        BrokenLogitsError: the target's logits are not finite.
        UserError: one text alone runs out of memory.
    """
    if not requests:
        return []
    split = split_network(target, requests[0].tokens)
    way = settle_batches(target, split, requests[0])

    def work(some: Sequence[Request]) -> list[GeneratedText]:
        if way == "one by one":
            rows: _Rows = _OwnSteps(target, None, some, name)
        else:
            rows = _Rows(target, split, some, name)
        while rows.alive:
            tick(rows.step())
        texts = [
            GeneratedText(
                request=request,
                tokens=tuple(tokens),
                stop_reason=stop_reason(tokens, request.eos, request.stop),
                hidden=rows.hidden[index, : len(tokens)]
                if states and rows.hidden is not None
                else None,
            )
            for index, (request, tokens) in enumerate(zip(some, rows.tokens, strict=True))
        ]
        for text in texts:
            keep(text)
        return texts

    return in_batches(
        requests,
        1 if way == "one by one" else batch,
        lambda a, b: way == "padded" or len(a.tokens) == len(b.tokens),
        work,
        name,
        key=lambda request: -len(request.tokens),
    )


def settle_batches(target: CachedModel, split: SplitNetwork | None, request: Request) -> str:
    """The way in which texts of `target` share a batch; tried once, stored for the manifest.

    A few given tokens are fed in a batch whose rows end at different steps, and the logits are
    compared with those of each text alone, without a cache. `request` is any.

    Returns:
        "padded", "equal lengths" or "one by one".
    """
    known = target.text_batches.get("generation")
    if known is not None:
        return known.split(":")[0]
    # Padding on the left needs positions, and no recurrent state
    pads = target.rewinding == "crop" and takes(target.network, "position_ids")
    refused: list[str] = []
    for way, lengths in (("padded", PADDED), ("equal lengths", EQUAL)):
        if way == "padded" and not pads:
            refused.append(f"{way} needs position_ids and a cache that is cropped")
            continue
        reason = batch_refusal(target, partial(_batch_error, target, split, lengths, request))
        if reason is None:
            break
        refused.append(f"{way} {reason}")
    else:
        way = "one by one"
    target.text_batches["generation"] = f"{way}: {'; '.join(refused)}" if refused else way
    return way


def batch_refusal(model: CachedModel, error: Callable[[], float]) -> str | None:
    """The reason why texts may not share a batch; None where they may.

    `error` gives how far batched logits are from those of each text alone, relative to the largest.
    """
    if model.makes_state:
        return "needs a cache that can be batched"
    try:
        off = error()
    except Exception as problem:  # whatever a model's own code raises when it is used like this
        return f"fails ({type(problem).__name__}: {first_line(problem, 120)})"
    return (
        None if off <= allowed_error(model.network) else f"is off by {off:.2g} of the logits' range"
    )


def _batch_error(
    target: CachedModel, split: SplitNetwork | None, lengths: Sequence[int], request: Request
) -> float:
    tokens = probe_tokens(target.network, target.vocab_size)
    greedy = replace(request, sampling=SamplingParameters(0.0), eos=frozenset(), stop=None)
    requests = [
        replace(greedy, tokens=tuple(tokens[row : row + length]), budget=TRIED_TOKENS - row % 2)
        for row, length in enumerate(lengths)
    ]
    rows = _GivenRows(target, split, requests, "")
    rows.given, rows.logits = tokens[::-1], []
    while rows.alive:
        rows.step()
    batched: list[Tensor] = []
    alone: list[Tensor] = []
    for index, request in enumerate(requests):
        emitted = rows.tokens[index]
        fed = [*request.tokens, *emitted[:-1]]
        logits = uncached_logits(target.network, fed, target.vocab_size)
        alone.append(logits[len(request.tokens) - 1 :])
        batched += [step[index] for step in rows.logits[: len(emitted)]]
    return difference(torch.stack(batched), torch.cat(alone))


class _Rows:
    """A batch of texts in the making; finished rows leave it where the cache allows that."""

    def __init__(
        self,
        target: CachedModel,
        split: SplitNetwork | None,
        requests: Sequence[Request],
        name: str,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.hidden: Tensor | None = None
        self._target, self._split, self._requests, self._name = target, split, requests, name
        # Which request each row of the batch belongs to; fewer and fewer of them
        self._order = list(range(len(requests)))
        self.alive = set(self._order)
        self._cache: Any = None
        self._cached = 0
        self._position = 0
        device = target.network.device
        width = max(len(request.tokens) for request in requests)
        padding = [width - len(request.tokens) for request in requests]
        ids = [[0] * pad + list(r.tokens) for pad, r in zip(padding, requests, strict=True)]
        self._feed = torch.tensor(ids, device=device)
        self._padding = torch.tensor(padding, device=device).unsqueeze(1)
        self._padded = any(padding)
        self._generations = [request.generation(target.device) for request in requests]
        self._uniforms = pad_sequence(
            [generation.uniforms.resample for generation in self._generations], batch_first=True
        )
        self._groups = self._grouped()
        # What a repetition penalty applies to, [vocab] per request that has one
        self._seen = {
            index: seen_tokens(request.tokens, target.vocab_size, target.device)
            for index, request in enumerate(requests)
            if request.sampling.repetition_penalty is not None
        }

    def step(self) -> int:
        """Generate a token of every text; how many tokens of the budgets that settles."""
        settled = 0
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
            if index in self._seen:
                self._seen[index][tokens[row]] = True
            settled += 1
            if self._generations[index].ends(self.tokens[index], tokens[row : row + 1]):
                self.alive.discard(index)
                settled += self._requests[index].budget - len(self.tokens[index]) - 1
            self.tokens[index].append(tokens[row])
        self._position += 1
        self._feed = chosen.to(self._feed.device).unsqueeze(1)
        if self._target.rewinding == "crop" and 0 < len(self.alive) < len(self._order):
            self._drop_finished()
        return settled

    def _forward(self) -> Tensor:
        """Logits [rows, vocab] after the tokens to feed."""
        if self._cache is None:
            self._cache = self._target.new_cache()
        inputs = {
            "input_ids": self._feed,
            self._target.cache_argument: self._cache,
            "use_cache": True,
            **self._places(),
        }
        if self._split is None:
            if takes(self._target.network, "logits_to_keep"):
                inputs["logits_to_keep"] = 1
            output = self._target.network(**inputs)
            return output.logits[:, -1, : self._target.vocab_size]
        last = self._split.hidden(**inputs)[:, -1]
        if self.hidden is None:
            self.hidden = torch.empty((*self._uniforms.shape, last.shape[-1]), dtype=last.dtype)
        self.hidden[self._order, self._position] = last.cpu()
        return self._split.logits(last)

    def _places(self) -> dict[str, Tensor]:
        """Mask and positions; without padding no mask is needed, and mostly no positions."""
        cached, fed = self._cached, self._feed.shape[1]
        self._cached += fed
        places = torch.arange(cached + fed, device=self._feed.device)
        if not self._padded:
            positions = {"position_ids": places[cached:].expand(self._feed.shape)}
            return positions if self._target.positions else {}
        return {
            "attention_mask": (places >= self._padding).long(),
            "position_ids": (places[cached:] - self._padding).clamp_min(0),
        }

    def _choose(self, logits: Tensor) -> Tensor:
        """Each row's next token from its own distribution, as plain decoding draws it."""
        uniforms = self._uniforms[:, self._position]
        chosen = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        for sampling, rows in self._groups.items():
            of_group, seen = logits[rows], None
            if sampling.repetition_penalty is not None:
                seen = torch.stack([self._seen[self._order[row]] for row in rows])
            of_group = penalised(of_group, seen, sampling.repetition_penalty)
            chosen[rows] = (
                of_group.argmax(-1)
                if sampling.greedy
                else inverse_cdf(sampler_for(sampling)(of_group), uniforms[rows])
            )
        return chosen

    def _grouped(self) -> dict[SamplingParameters, list[int]]:
        return grouped(
            range(len(self._order)), lambda row: self._requests[self._order[row]].sampling
        )

    def _drop_finished(self) -> None:
        rows = [row for row, index in enumerate(self._order) if index in self.alive]
        kept = torch.tensor(rows, device=self._feed.device)
        self._cache.batch_select_indices(kept)
        self._feed, self._padding = self._feed[kept], self._padding[kept]
        self._uniforms = self._uniforms[rows]
        self._order = [self._order[row] for row in rows]
        self._groups = self._grouped()


class _OwnSteps(_Rows):
    """A single text, by the model's own cached steps."""

    def _forward(self) -> Tensor:
        """Logits [1, vocab] after the token to feed."""
        if self._position == 0:
            self._target.prefill(self._requests[0].tokens[:-1])
        logits = self._target.forward(self._feed[0, -1:].to(self._target.device))
        self._target.rewind(0)
        return logits


class _GivenRows(_Rows):
    """Rows whose tokens are `given`, and whose logits [requests, vocab] of every step are kept."""

    given: Sequence[int]
    logits: list[Tensor]

    def _choose(self, logits: Tensor) -> Tensor:
        """The next given token in every row."""
        shape = (len(self._requests), logits.shape[-1])
        kept = torch.full(shape, float("nan"), dtype=logits.dtype, device=logits.device)
        kept[self._order] = logits
        self.logits.append(kept)
        token = self.given[self._position]
        return torch.full((len(logits),), token, dtype=torch.long, device=logits.device)


def broken_logits(name: str, request: Request, position: int) -> BrokenLogitsError:
    """The error that names model, prompt and text position of logits that are not finite."""
    return BrokenLogitsError(name, position, f"prompt {request.text_name}")


def in_batches(
    items: Sequence[Item],
    size: int,
    together: Callable[[Item, Item], bool],
    work: Callable[[Sequence[Item]], list[Result]],
    name: str,
    *,
    key: Callable[[Item], Any] = lambda _: 0,
) -> list[Result]:
    """Do `work` on batches of items, halving the batch whenever memory runs out.

    Args:
        items: of any order, in which the results are returned.
        together: whether an item may be in one batch with the batch's first.
        work: one result per item; it is called again with fewer items where memory ran out.
        key: what items are sorted by before they are batched.

    Raises:
        UserError: a single item runs out of memory.
    """
    order = sorted(range(len(items)), key=lambda index: key(items[index]))
    results: dict[int, Result] = {}
    while len(results) < len(items):
        indices = order[len(results) : len(results) + size]
        some = [items[index] for index in indices]
        count = next((i for i, item in enumerate(some) if not together(some[0], item)), len(some))
        done = _attempt(work, some[:count])
        if done is not None:
            results.update(zip(indices[:count], done, strict=True))
        elif count == 1:
            raise UserError(
                f"{name}: out of memory with a single text; lower new_tokens or prompts.limit, or "
                "use a smaller dtype"
            )
        else:
            size = count // 2
    return [results[index] for index in range(len(items))]


def _attempt(
    work: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]
) -> list[Result] | None:
    """The results, or None where memory ran out (and what the attempt held is free again)."""
    try:
        return work(items)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return None
