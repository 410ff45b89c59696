"""Early exit: the target's own first layers, with its last norm and head, as the draft.

No further weights are needed (Elhoushi et al. 2024, "LayerSkip", section 4.3, where the target is
trained for it; a target that is not accepts little). The draft keeps a cache of its own for its
layers, so the loop and replay treat it as any draft model: its distribution depends on the text
alone. An engine could share that cache with the target's, and save the draft's prefill.
"""

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from harness.config import ModelConf
from harness.models.load import LoadedModel
from harness.records import UserError


def early_exit(conf: ModelConf, target: LoadedModel) -> LoadedModel:
    """A model of the target's first layers, which shares its weights.

    Where `conf.layers` is None they are a quarter, and at least one.

    Raises:
        UserError: not fewer layers than the target has, or a network that does not keep them in one
            list.
    """
    network: Any = target.network
    backbone: Any = network.base_model
    all_layers = getattr(backbone, "layers", None)
    if backbone is network or not isinstance(all_layers, nn.ModuleList):
        raise UserError(
            f"{conf.shown}: {type(network).__name__} does not keep its layers in one list, so its "
            "first ones cannot be taken; leave early exit out"
        )
    kept = max(1, len(all_layers) // 4) if conf.layers is None else conf.layers
    if kept >= len(all_layers):
        raise UserError(
            f"{conf.shown}: layers={kept}, and {target.shown} has {len(all_layers)}; give fewer"
        )
    config: Any = copy.deepcopy(network.config)
    config.num_hidden_layers = kept
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:kept]
    first = _with_modules(backbone, {"layers": all_layers[:kept]})
    twin = _with_modules(network, {network.base_model_prefix: first})
    for module in (first, twin):
        module.config = config
    return replace(target, keys=conf.keys, name=conf.name, network=twin, shared=True)


def _with_modules(module: Any, changed: dict[str, Any]) -> Any:
    """The same module with some of its children replaced; the parameters are shared."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {**module._modules, **changed}
    return twin
