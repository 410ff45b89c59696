"""Rewind, then compare with a fresh forward: a model that fails is refused before any timing.

transformers says of some caches that they can be cropped when they cannot, and some models ignore
the argument that carries the cache altogether. Both show as logits that differ from those of a
forward that never went astray.
"""

import torch
from transformers import PreTrainedModel

from harness.models.cached import CachedModel, SnapshotModel
from harness.models.kernels import settle_kernels
from harness.models.lean.model import LeanModel
from harness.models.lean.static import StaticModel
from harness.models.lean.weights import unsupported
from harness.models.room import is_out_of_memory
from harness.records import BrokenLogitsError, UserError

# Logits of two orders of the same sums, relative to the largest: rounding stays far below these,
# a state that was not rewound is far above.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
COARSE_TOLERANCE = 6e-2
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
CONTEXT, VERIFIED, KEPT = 20, 6, 2


def cached_model(
    network: PreTrainedModel, vocab_size: int, name: str, backend: str = "eager"
) -> CachedModel:
    """Wrap `network` in the fastest forward that says the same as its own and can be rewound.

    Args:
        network: transformers' model.
        vocab_size: logits are cut to it.
        name: its key and name, for errors.
        backend: eager, or cuda_graphs, which falls back to eager for a model that cannot; the
            model's `engine_reason` says why. auto: cuda_graphs on CUDA, else eager.

    Raises:
        UserError: its logits are not finite, graphs are asked for without a CUDA device, or nothing
            rewinds it.
    """
    settle_kernels()  # every model that a door or a benchmark times comes this way
    _check_logits(network, vocab_size, name)
    reasons: list[str] = []
    no_graphs = None
    on_cuda = next(network.parameters()).device.type == "cuda"
    if backend == "cuda_graphs" or (backend == "auto" and on_cuda):
        graphed, no_graphs = graphed_model(network, vocab_size, name)
        if graphed is not None:
            return graphed
    lean, why_not = lean_model(network, vocab_size)
    why_not = no_graphs or why_not
    if lean is not None:
        lean.engine_reason = why_not
        return lean
    for kind in _candidates(network):
        try:
            model = kind(network, vocab_size)
            error = rewind_error(model)
        except (AttributeError, IndexError, NotImplementedError, TypeError, ValueError) as problem:
            reasons.append(f"{kind.rewinding}: {type(problem).__name__}: {problem}")
            continue
        if error <= allowed_error(network):
            model.engine_reason = why_not
            return model
        reasons.append(f"{kind.rewinding}: logits off by {error:.2g} of their range")
    raise UserError(
        f"{name}: its cache cannot be rewound, so it cannot take part in speculative decoding "
        f"({'; '.join(reasons)})"
    )


def allowed_error(network: PreTrainedModel) -> float:
    """How far two orders of the same sums may be apart, relative to the largest logit."""
    return TOLERANCE.get(network.dtype, COARSE_TOLERANCE)


def lean_model(network: PreTrainedModel, vocab_size: int) -> tuple[LeanModel | None, str | None]:
    """The lean forward for `network` if it can have one, or why not.

    It must say the same as transformers' forward, and rewind as well.
    """
    reason = unsupported(network)
    if reason is not None:
        return None, reason
    try:
        model = LeanModel(network, vocab_size)
        error = _worst(forward_error(model), rewind_error(model))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as problem:
        if is_out_of_memory(problem):
            raise
        return None, f"the lean forward does not fit it ({type(problem).__name__}: {problem})"
    if not error <= allowed_error(network):  # NaN is neither below nor above
        return None, f"the lean forward's logits are off by {error:.2g} of their range"
    return model, None


def graphed_model(
    network: PreTrainedModel, vocab_size: int, name: str
) -> tuple[StaticModel | None, str | None]:
    """The lean forward as CUDA graphs, or why not; of uncompiled kernels where compiling fails.

    The model's `engine_reason` then says what failed.

    Raises:
        UserError: the model is not on a CUDA device.
    """
    check_graphs(next(network.parameters()).device, name)
    reason = unsupported(network)
    if reason is not None:
        return None, f"no CUDA graphs, {reason}"
    uncompiled_because: str | None = None
    found = ""
    for compiled in (True, False):
        try:
            model = StaticModel(network, vocab_size, compiled=compiled)
            error = _worst(forward_error(model), rewind_error(model))
        # A compiler fails in too many ways to list: no C compiler, a Triton error, a timeout
        except Exception as problem:
            if is_out_of_memory(problem):
                raise
            first = (str(problem).splitlines() or [""])[0]
            found = f"{type(problem).__name__}: {first}"[:300]
        else:
            if error <= allowed_error(network):
                model.engine_reason = uncompiled_because
                return model, None
            found = f"logits are off by {error:.2g} of their range"
        uncompiled_because = f"compiling failed ({found}): graphs of uncompiled kernels"
    return None, f"no CUDA graphs, {found}"


def check_graphs(device: torch.device, name: str) -> None:
    """Refuse CUDA graphs for a model that is not on a CUDA device.

    Raises:
        UserError: it is not.
    """
    if device.type != "cuda":
        raise UserError(
            f"backend=cuda_graphs: {name} is on {device.type}, and graphs need device=cuda; "
            "use backend=eager"
        )


@torch.inference_mode()
def _check_logits(network: PreTrainedModel, vocab_size: int, name: str) -> None:
    """Refuse a model that computes NaN at once; later ones are noticed where they turn up.

    Raises:
        BrokenLogitsError: its logits are not finite.
    """
    tokens = [(37 * index + 11) % min(vocab_size, 997) for index in range(CONTEXT)]
    try:
        ids = torch.tensor([tokens], device=network.device)
        peaks = network(input_ids=ids, use_cache=False).logits[0].amax(-1)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as problem:
        if is_out_of_memory(problem):
            raise
        return  # it wants other arguments; what is tried next says what is the matter
    broken = (~peaks.isfinite()).nonzero()
    if len(broken):
        raise BrokenLogitsError(name, int(broken[0]), "the probe's text")


def forward_error(model: CachedModel) -> float:
    """How far a model's logits are from transformers' own forward, relative to the largest."""
    tokens = [(37 * index + 11) % min(model.vocab_size, 997) for index in range(CONTEXT)]
    reference = CachedModel(model.network, model.vocab_size).forward(torch.tensor(tokens))
    model.prefill([])
    logits = model.forward(torch.tensor(tokens))
    model.prefill(tokens[:-1])
    last = model.forward(torch.tensor(tokens[-1:]))
    model.prefill([])
    error = torch.maximum((logits - reference).abs().max(), (last - reference[-1:]).abs().max())
    return float(error / reference.abs().max().clamp_min(1e-9))


def rewind_error(model: CachedModel) -> float:
    """How far logits after a rewind are from a fresh forward's, relative to the largest logit."""
    tokens = [(37 * index + 11) % min(model.vocab_size, 997) for index in range(CONTEXT + KEPT + 3)]
    wrong = [(token + 5) % min(model.vocab_size, 997) for token in tokens]
    kept = tokens[CONTEXT : CONTEXT + KEPT]
    model.prefill(tokens)
    fresh = model.forward(torch.tensor(tokens[-1:]))
    model.prefill(tokens[:CONTEXT])
    model.forward(torch.tensor([*kept, *wrong[: VERIFIED - KEPT]]))
    model.rewind(VERIFIED - KEPT)
    model.forward(torch.tensor(wrong[:1]))
    model.rewind(1)
    model.forward(torch.tensor(tokens[CONTEXT + KEPT :]))
    model.rewind(0)
    again = model.forward(torch.tensor(tokens[-1:]))
    model.prefill([])
    return float((fresh - again).abs().max() / fresh.abs().max().clamp_min(1e-9))


def _worst(*errors: float) -> float:
    """The largest, and NaN where any is NaN, which Python's `max` may pass over."""
    return float(torch.tensor(errors).max())


def _candidates(network: PreTrainedModel) -> list[type[CachedModel]]:
    """Cropping first, unless the config names a layer kind that is known not to crop."""
    kinds = getattr(network.config.get_text_config(), "layer_types", None)
    if kinds is not None and not set(kinds) <= ATTENTION_KINDS:
        return [SnapshotModel]
    return [CachedModel, SnapshotModel]
