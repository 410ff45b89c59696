"""The effect of near ties of routers on logits, in a mixture of experts in 16 bits.

A router takes the experts of the highest scores. Where two scores nearly tie, rounding decides
which expert a token gets, and rounding differs with the number of positions in a forward. The
logits then change by more than by rounding in a dense network. That is no fault of a cache, but it
hides one. So `pinned` removes the ties, to compare forwards, and `tie_spread` measures their effect
on the logits after a text.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
# The rounding of a router's input by a forward: 24 layers in bfloat16 come to 3 eps
NOISE_ULPS, DRAWS = 4.0, 8
# The score of the experts that a pinned router takes; that of the others is 0
PINNED_SCORE, RIDGE = 6.0, 1e-2


def routers(network: PreTrainedModel) -> list[nn.Module]:
    """The routers of a mixture in 16 bits, in the order of the layers; empty for others."""
    experts = _expert_count(network)
    if experts is None:
        return []

    def is_router(name: str, module: nn.Module) -> bool:
        weight, kind = getattr(module, "weight", None), type(module).__name__
        # Its own weight, or (GraniteMoE, JetMoE) that of a linear layer in it
        named = {"gate", "router"} & {*name.split(".")[-2:]} or "Router" in kind
        if not named or not isinstance(weight, Tensor):
            return False
        return weight.dim() == 2 and len(weight) == experts

    return [module for name, module in network.named_modules() if is_router(name, module)]


@contextmanager
def pinned(network: PreTrainedModel, tokens: Sequence[int]) -> Iterator[None]:
    """Make routers choose between two groups of experts by a wide margin while the block runs.

    In texts of these tokens a token's id decides its group, so that rounding changes no expert,
    while a faulty cache still changes the logits. The weights of routers are overwritten in place,
    so that every way of running the network uses them, and restored. A network without routers in
    16 bits is not changed.
    """
    network_routers = routers(network)
    if not network_routers:
        yield
        return
    top_k = _first(network.config.get_text_config(), PER_TOKEN) or 1
    signs = torch.tensor([1.0 if token % 2 else -1.0 for token in tokens])
    kept = [router.weight.detach().clone() for router in network_routers]  # type: ignore[operator]

    def pin(router: Any, inputs: tuple[Any, ...]) -> None:
        x = inputs[0].detach().reshape(len(tokens), -1).double()
        ridge = RIDGE * x.square().sum() / len(tokens)
        # x @ direction is nearly the sign of each token: ridge regression, by the smaller system
        if len(tokens) <= x.shape[1]:
            products = x @ x.T
            products.diagonal().add_(ridge)
            direction = x.T @ torch.linalg.solve(products, signs.to(x))
        else:
            products = x.T @ x
            products.diagonal().add_(ridge)
            direction = torch.linalg.solve(products, x.T @ signs.to(x))
        scores = torch.zeros(len(router.weight), device=x.device, dtype=x.dtype)
        order = torch.arange(top_k, device=x.device) / top_k
        scores[-top_k:] = -(PINNED_SCORE + order)
        scores[:top_k] = PINNED_SCORE + order
        router.weight.copy_(scores.unsqueeze(1) * direction)

    try:
        with torch.no_grad(), ExitStack() as hooks:
            for router in network_routers:
                hooks.callback(router.register_forward_pre_hook(pin).remove)
            network(input_ids=torch.tensor([[*tokens]], device=network.device), use_cache=False)
        yield
    finally:
        with torch.no_grad():
            for router, weight in zip(network_routers, kept, strict=True):
                router.weight.copy_(weight)  # type: ignore[operator]


@torch.no_grad()
def tie_spread(network: PreTrainedModel, tokens: Sequence[int], vocab_size: int) -> float | None:
    """The spread of the logits after a text when routers' inputs are rounded at random.

    It is the largest difference, in the logits' units, over `DRAWS` uncached forwards and an
    undisturbed one; 0 for a network that is no mixture in 16 bits, None for one whose routers are
    not found.
    """
    network_routers = routers(network)
    if not network_routers:
        return 0.0 if _expert_count(network) is None else None
    generators: dict[torch.device, torch.Generator] = {}
    relative = NOISE_ULPS * torch.finfo(network.dtype).eps

    def disturb(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = inputs
        if x.device not in generators:
            generators[x.device] = torch.Generator(x.device).manual_seed(0)
        noise = torch.rand(x.shape, generator=generators[x.device], device=x.device) - 0.5
        return ((x.float() * (1.0 + relative * noise)).to(x.dtype), *rest)

    def last() -> Tensor:
        ids = torch.tensor([[*tokens]], device=network.device)
        return network(input_ids=ids, use_cache=False).logits[0, -1, :vocab_size].float()

    rows = [last()]
    with ExitStack() as hooks:
        for router in network_routers:
            hooks.callback(router.register_forward_pre_hook(disturb).remove)
        rows += [last() for _ in range(DRAWS)]
    logits = torch.stack(rows)
    finite = logits[:, logits.isfinite().all(0)]
    return float((finite.amax(0) - finite.amin(0)).max())


def _expert_count(network: PreTrainedModel) -> int | None:
    """The number of experts of a mixture in 16 bits; None for other networks."""
    experts = _first(network.config.get_text_config(), EXPERTS)
    return None if experts is None or torch.finfo(network.dtype).bits > 16 else experts


def _first(config: Any, names: Sequence[str]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 1), None)
