"""Compare a model's cached logits with uncached ones: a model that fails is refused before timing.

transformers reports some caches as croppable that are not, some models ignore the argument for the
cache, and some count positions from zero at every forward. In all these cases logits differ from
those of one forward over the same tokens with use_cache=False. Every way of running a model is
compared with that, also transformers' own.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.models.cached import (
    CACHE_ARGUMENTS,
    CachedModel,
    SnapshotModel,
    SteppedModel,
    cache_argument,
    makes_state,
    takes,
)
from harness.models.device import settle_kernels
from harness.models.lean.model import LeanModel
from harness.models.lean.static import StaticModel
from harness.models.lean.weights import unsupported
from harness.models.memory import is_out_of_memory
from harness.models.routing import pinned
from harness.records import BrokenLogitsError, UserError, first_line

Model = TypeVar("Model", bound=CachedModel)

# Allowed differences of logits, relative to the largest: rounding stays far below these, a state
# that was not rewound is far above
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
COARSE_TOLERANCE = 6e-2
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
CONTEXT, VERIFIED, KEPT = 20, 6, 2
# Only the beginning of longer texts is compared; effects of the length show before that
LONGEST_CHECKED, PIECE = 8192, 64
# A text cut off here must have the same logits as within the longer text
BEGINNINGS = (7, 13, 20)
# Larger logits mask tokens out, and are left out of the comparison
MASKED = 1e30
STEPS_REASON = (
    "transformers' forward of several tokens starts from an empty state, so a verify runs as "
    "K + 1 steps"
)


def cached_model(
    network: PreTrainedModel,
    vocab_size: int,
    name: str,
    backend: str = "eager",
    eager_because: str | None = None,
) -> CachedModel:
    """The network with the fastest forward that agrees with its own and can be rewound.

    CUDA graphs (`backend` cuda_graphs, or auto on CUDA) fall back to eager where they are not
    possible (`engine_reason`), or `eager_because` says why not to use them. `name` is for errors.
    """
    settle_kernels()  # here because every timed model is opened by this function
    with ExitStack() as stack:
        with _runs_on_ids(network, name):
            stack.enter_context(pinned(network, probe_tokens(network, vocab_size)))
        return _probed(network, vocab_size, name, backend, eager_because)


def _probed(
    network: PreTrainedModel, vocab_size: int, name: str, backend: str, eager_because: str | None
) -> CachedModel:
    reference = check_causal(network, vocab_size, name)
    no_graphs = None
    device = next(network.parameters()).device
    if wants_graphs(backend, device.type):
        check_graphs(device, name)
        if eager_because is None:
            graphed, no_graphs = graphed_model(network, vocab_size, reference)
            if graphed is not None:
                return graphed
        else:
            no_graphs = f"no CUDA graphs, {eager_because}"
    lean, why_not = lean_model(network, vocab_size, reference)
    why_not = no_graphs or why_not
    if lean is not None:
        lean.engine_reason = why_not
        return lean
    if cache_argument(network) is None:
        raise UserError(
            f"{name}: {type(network).__name__} keeps no cache between forwards (its forward takes "
            f"none of {', '.join(CACHE_ARGUMENTS)}), so it cannot take part in speculative decoding"
        )
    reasons: dict[str, list[str]] = {}
    for kind, positions in _candidates(network):
        how = kind.rewinding + (" with position_ids" if positions else "")
        make = partial(kind, network, vocab_size, positions=positions)
        model, fault = _agreeing(make, reference)
        if model is not None:
            model.engine_reason = STEPS_REASON if kind is SteppedModel else why_not
            return model
        reasons.setdefault(fault, []).append(how)
    tried = "; ".join(f"{', '.join(ways)}: {reason}" for reason, ways in reasons.items())
    raise UserError(
        f"{name}: its logits with a cache, before or after a rewind, differ from those without "
        f"one, so it cannot take part in speculative decoding ({tried})"
    )


def allowed_error(network: PreTrainedModel) -> float:
    """The allowed difference of logits of two forwards, relative to the largest logit."""
    return TOLERANCE.get(network.dtype, COARSE_TOLERANCE)


def _agreeing(make: Callable[[], Model], reference: Tensor | None) -> tuple[Model | None, str]:
    """A model whose cached logits agree with uncached ones; else None and the reason."""
    try:
        model = make()
        error = cache_error(model, reference)
    # All errors: a model's own code may raise anything, and so may a compiler (no C compiler, a
    # Triton error, a timeout)
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        return None, f"{type(problem).__name__}: {first_line(problem, 300)}"
    if error <= allowed_error(model.network):  # NaN is an error too
        return model, ""
    return None, f"logits are off by {error:.2g} of their range"


def lean_model(
    network: PreTrainedModel, vocab_size: int, reference: Tensor | None = None
) -> tuple[LeanModel | None, str | None]:
    """The lean forward for `network`; else None and the reason."""
    reason = unsupported(network)
    if reason is not None:
        return None, reason
    model, fault = _agreeing(partial(LeanModel, network, vocab_size), reference)
    return model, None if model else f"the lean forward does not fit it ({fault})"


def graphed_model(
    network: PreTrainedModel, vocab_size: int, reference: Tensor | None = None
) -> tuple[StaticModel | None, str | None]:
    """The lean forward as CUDA graphs, uncompiled if compiling fails; else None and the reason."""
    reason = unsupported(network)
    if reason is not None:
        return None, f"no CUDA graphs, {reason}"
    fault, uncompiled_because = "", None
    for compiled in (True, False):
        make = partial(StaticModel, network, vocab_size, compiled=compiled)
        model, fault = _agreeing(make, reference)
        if model is not None:
            model.engine_reason = uncompiled_because
            return model, None
        uncompiled_because = f"compiling failed ({fault}): graphs of uncompiled kernels"
    return None, f"no CUDA graphs, {fault}"


def wants_graphs(backend: str, device_type: str) -> bool:
    """True where a model is to run as CUDA graphs if possible."""
    return backend == "cuda_graphs" or (backend == "auto" and device_type == "cuda")


def check_graphs(device: torch.device, name: str) -> None:
    if device.type != "cuda":
        raise UserError(
            f"backend=cuda_graphs: {name} is on {device.type}, and graphs need device=cuda; "
            "use backend=eager"
        )


def cache_error(model: CachedModel, reference: Tensor | None = None) -> float:
    """The larger of `forward_error` and `rewind_error`; NaN if either is."""
    reference = _probe_logits(model) if reference is None else reference
    errors = torch.tensor([forward_error(model, reference), rewind_error(model, reference)])
    return float(errors.max())


@torch.inference_mode()
def uncached_logits(network: PreTrainedModel, tokens: list[int], vocab_size: int) -> Tensor:
    """The logits [n, vocab] after each token, from one forward without a cache."""
    output = network(input_ids=torch.tensor([tokens], device=network.device), use_cache=False)
    return output.logits[0, :, :vocab_size]


def check_causal(network: PreTrainedModel, vocab_size: int, name: str) -> Tensor:
    """The uncached logits [n, vocab] of `probe_tokens`, the reference.

    Raises:
        BrokenLogitsError: its logits are NaN or infinite (-inf alone is allowed: it masks tokens).
        UserError: its forward fails on token ids alone, or its logits depend on later tokens.
    """
    tokens = probe_tokens(network, vocab_size)
    kind = type(network).__name__
    with _runs_on_ids(network, name):
        reference = uncached_logits(network, tokens, vocab_size)
        parts = [uncached_logits(network, tokens[:end], vocab_size) for end in BEGINNINGS]
    broken = (~reference.amax(-1).isfinite()).nonzero()
    if len(broken):
        raise BrokenLogitsError(name, int(broken[0]), "the probe's text")
    error = difference(torch.cat(parts), torch.cat([reference[:end] for end in BEGINNINGS]))
    # In 16 bits the rounding of a deep mixture of experts comes near the tolerance, so four times
    # the tolerance is allowed; a model that attends to later tokens is far above that
    allowed = allowed_error(network) * (1 if network.dtype in TOLERANCE else 4)
    if not error <= allowed:
        raise UserError(
            f"{name}: {kind} is no causal model as it is configured: its logits at a position "
            f"change by {error:.2g} of their range with the tokens that follow"
        )
    return reference


@contextmanager
def _runs_on_ids(network: PreTrainedModel, name: str) -> Iterator[None]:
    """Turn every error of a model's own code in a forward of token ids into one line."""
    try:
        yield
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        raise UserError(
            f"{name}: {type(network).__name__} cannot be run on token ids alone "
            f"({type(problem).__name__}: {first_line(problem)})"
        ) from problem


@torch.inference_mode()
def check_length(model: CachedModel, tokens: int, name: str) -> None:
    """Refuse a model whose cached logits differ from uncached ones in a text of `tokens` tokens.

    This is so with a rotary embedding that changes with the length (Phi-3's longrope beyond
    original_max_position_embeddings): cached keys keep their old angles. The lean forward does not
    support such models, so it is not compared. The cache is empty afterwards.
    """
    network, count = model.network, min(tokens, LONGEST_CHECKED)
    if model.engine != "transformers" or count <= CONTEXT:
        return
    some = probe_tokens(network, model.vocab_size)
    ids = [some[place % len(some)] for place in range(count)]
    kept = {"logits_to_keep": PIECE} if takes(network, "logits_to_keep") else {}
    inputs = torch.tensor([ids], device=network.device)
    with pinned(network, ids):
        output = network(input_ids=inputs, use_cache=False, **kept)
        reference = output.logits[0, :, : model.vocab_size]
        model.prefill(ids[:CONTEXT])
        logits = reference
        for piece in torch.tensor(ids[CONTEXT:]).split(PIECE):
            logits = model.forward(piece)
            model.rewind(0)
        model.prefill([])
    error = difference(logits, reference[-len(logits) :])
    allowed = allowed_error(network) * (1 if network.dtype in TOLERANCE else 4)
    if not error <= allowed:
        raise UserError(
            f"{name}: in a text of {count} tokens its cached logits differ from uncached ones by "
            f"{error:.2g} of their range, as where a rotary embedding changes with the length; "
            "lower new_tokens or leave out the longest prompts"
        )


def difference(logits: Tensor, reference: Tensor) -> float:
    """The largest difference, relative to the largest; NaN if other entries are masked."""
    logits, reference = logits.float(), reference.float().to(logits.device)
    masked = reference < -MASKED
    if bool((masked != (logits < -MASKED)).any()):
        return float("nan")
    logits, reference = (values.masked_fill(masked, 0.0) for values in (logits, reference))
    return float((logits - reference).abs().max() / reference.abs().max().clamp_min(1e-9))


def probe_tokens(network: PreTrainedModel, vocab_size: int) -> list[int]:
    """Arbitrary token ids, some repeated, without the padding id, which some models skip."""
    padding = getattr(network.config.get_text_config(), "pad_token_id", None)
    places = [index if index % 3 else index % 10 for index in range(CONTEXT + KEPT + 3)]
    ids = [(37 * place + 11) % min(vocab_size, 997) for place in places]
    return [(token + 1) % vocab_size if token == padding else token for token in ids]


def _probe_logits(model: CachedModel) -> Tensor:
    tokens = probe_tokens(model.network, model.vocab_size)
    return uncached_logits(model.network, tokens, model.vocab_size)


def forward_error(model: CachedModel, reference: Tensor | None = None) -> float:
    """The difference of a model's logits from those without a cache, relative to the largest."""
    reference = _probe_logits(model) if reference is None else reference
    tokens = probe_tokens(model.network, model.vocab_size)[:CONTEXT]
    model.prefill([])
    logits = model.forward(torch.tensor(tokens))
    model.prefill(tokens[:-1])
    last = model.forward(torch.tensor(tokens[-1:]))
    model.prefill([])
    expected = torch.cat([reference[:CONTEXT], reference[CONTEXT - 1 : CONTEXT]])
    return difference(torch.cat([logits, last]), expected)


def rewind_error(model: CachedModel, reference: Tensor | None = None) -> float:
    """The difference of logits after rewinds from those without a cache, relative likewise."""
    reference = _probe_logits(model) if reference is None else reference
    tokens = probe_tokens(model.network, model.vocab_size)
    wrong = [tokens[index - 1] for index in range(VERIFIED)]
    kept = tokens[CONTEXT : CONTEXT + KEPT]
    model.prefill(tokens[:CONTEXT])
    verified = model.forward(torch.tensor([*kept, *wrong[: VERIFIED - KEPT]]))[:KEPT]
    model.rewind(VERIFIED - KEPT)
    model.forward(torch.tensor(wrong[:1]))
    model.rewind(1)
    several = model.forward(torch.tensor(tokens[CONTEXT + KEPT : -1]))
    model.rewind(0)
    single = model.forward(torch.tensor(tokens[-1:]))
    model.prefill([])
    return difference(torch.cat([verified, several, single]), reference[CONTEXT:])


def _candidates(network: PreTrainedModel) -> list[tuple[type[CachedModel], bool]]:
    """The classes that may run a network, with and without position_ids, cheapest first."""
    kinds: list[type[CachedModel]] = [SnapshotModel, SteppedModel]
    layers = getattr(network.config.get_text_config(), "layer_types", None)
    if not makes_state(network) and set(layers or ()) <= ATTENTION_KINDS:
        kinds = [CachedModel, *kinds]
    choices = (False, True) if takes(network, "position_ids") else (False,)
    return [(kind, positions) for kind in kinds for positions in choices]
