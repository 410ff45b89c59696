"""Networks with random weights, for timing any model without downloading it.

A step's time depends on the shapes of the weights and hardly on their values, so a network built
from the sizes in `conf/model/*.yaml` is as slow as the released one. Its text has no meaning:
latencies are real, acceptances are not.

A random network has the latencies of a trained one for three reasons:

- It has the released architecture in everything that takes time: head size, rotary base and
  scaling, norms, whether the head is tied to the embedding, how many experts a token uses.
- Its activations stay of the size of one through all layers. Every matrix has standard deviation
  fan_in^-1/2, those that write to the residual stream a further (2 layers)^-1/2 (Radford et al.,
  2019, "Language Models are Unsupervised Multitask Learners", section 2.3). A wider spread
  overflows 16 bits in deep networks, a narrower one leaves all logits equal.
- An embedding that is not tied has size one, so that tokens differ and a mixture of experts routes
  each differently, as a trained one does. (A tied embedding must be small; otherwise every token's
  likeliest successor is itself.)

It is made on its device, in its dtype, from one seeded generator there: nothing passes through the
CPU. (Making it on `meta` first would be simpler and wrong: `to_empty` leaves the rotary tables
unfilled and unties the head.)
"""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from harness.models.memory import NAMES
from harness.records import BYTES_PER_TOKEN, UserError
from harness.theory.architecture import Architecture, architecture_of

SEED = 20_000
# Released values for entries that the architecture lacks: rotary base, norm epsilon, positions
RELEASED: dict[str, tuple[float, float, int]] = {
    "qwen3": (1e6, 1e-6, 40_960),
    "qwen3_moe": (1e6, 1e-6, 40_960),
    "llama": (5e5, 1e-5, 131_072),
    "qwen2": (1e6, 1e-6, 32_768),
}
# Kinds of rotary scaling, and the entries that each needs
SCALINGS = {
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
# The matrices whose results are added to the residual stream
WRITERS = ("o_proj", "down_proj")
# Parameters that are filled between two ticks of progress
PER_TICK = 10_000_000
# Tokens of the stand-in tokenizer
VOCABULARY = 256


def build(
    architecture: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    key: str = "model.architecture",
    attention: str | None = None,
    seed: int = SEED,
    expect: Callable[[int], None] = lambda _: None,
    tick: Callable[[], None] = lambda: None,
) -> PreTrainedModel:
    """A causal language model with random weights, in eval mode, made on `device` itself.

    On the device `meta` nothing is allocated, for counting parameters. The same architecture (as in
    conf/model) and seed give the same network. For progress, `expect` is called with the number of
    ticks to come, `tick` as weights are filled. `harness.models.memory` checks beforehand that it
    fits.
    """
    config = config_of(architecture, key)
    with torch.device(device), no_init_weights():
        network: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    network.tie_weights()
    if device.type != "meta":
        _fill(network, torch.Generator(device).manual_seed(seed), expect, tick)
    network.requires_grad_(False)
    return network.eval()


def config_of(architecture: Mapping[str, Any], key: str = "model.architecture") -> PreTrainedConfig:
    """The transformers config of an architecture, with the released values of its family."""
    shape = architecture_of(architecture, key)
    if shape.vocab < VOCABULARY:
        raise UserError(
            f"{key}.vocab={shape.vocab}: random weights come with a stand-in tokenizer of "
            f"{VOCABULARY} tokens; give that many or more"
        )
    family = str(architecture["family"])
    theta, eps, positions = RELEASED[family]
    settings: dict[str, Any] = {
        **_sizes(shape),
        "max_position_embeddings": architecture.get("max_positions", positions),
        "rms_norm_eps": architecture.get("norm_eps", eps),
        "rope_parameters": {
            "rope_theta": architecture.get("rope_theta", theta),
            **_scaling(architecture.get("rope_scaling"), key),
        },
        # A dummy's text never ends by itself: every generation runs its whole budget
        "bos_token_id": None,
        "eos_token_id": None,
    }
    try:
        return AutoConfig.for_model(family, **settings)
    except (StrictDataclassError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{key}: not a {family} network ({reason[:200]})") from error


def _scaling(conf: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    """The kind of rotary scaling with its factors, under transformers' names."""
    if conf is None:
        return {"rope_type": "default"}
    kind = str(conf.get("rope_type"))
    missing = sorted(SCALINGS.get(kind, frozenset()) - conf.keys())
    if kind not in SCALINGS or missing:
        fault = f"{missing[0]}: missing" if kind in SCALINGS else f"rope_type={kind}: unknown"
        raise UserError(f"{key}.rope_scaling.{fault}; write it as the model's config.json does")
    return dict(conf)


def _sizes(shape: Architecture) -> dict[str, Any]:
    of_experts = {"experts", "experts_per_token", "moe_ffn"} if not shape.experts else set[str]()
    sizes = {
        names if isinstance(names, str) else names[0]: getattr(shape, name)
        for name, names in NAMES.items()
        if name not in of_experts
    }
    # The released mixtures normalise; the config class does not by default
    normalised = {"norm_topk_prob": True} if shape.experts else {}
    return {"vocab_size": shape.vocab, **sizes, **normalised}


@torch.no_grad()
def _fill(
    network: PreTrainedModel,
    generator: torch.Generator,
    expect: Callable[[int], None],
    tick: Callable[[], None],
) -> None:
    config: Any = network.config
    filled, matrices = 0, [tensor for tensor in network.parameters() if tensor.ndim > 1]
    expect(sum(tensor.numel() for tensor in matrices) // PER_TICK)
    depth = math.sqrt(2 * config.num_hidden_layers)
    embedding = network.get_input_embeddings().weight
    for name, tensor in network.named_parameters():
        if tensor.ndim == 1:
            tensor.fill_(1.0 if "norm" in name else 0.0)
            continue
        spread = tensor.shape[-1] ** -0.5
        if tensor is embedding and not config.tie_word_embeddings:
            spread = 1.0
        if any(writer in name for writer in WRITERS):
            spread /= depth
        tensor.normal_(0.0, spread, generator=generator)
        before, filled = filled, filled + tensor.numel()
        for _ in range(before // PER_TICK, filled // PER_TICK):
            tick()


class StandInTokenizer:
    """Text to ids, the same for every dummy, so that any two can be paired: four bytes a token.

    Its ids cannot be turned back into text: `decode` writes them as numbers.
    """

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    chat_template: str | None = None

    def get_vocab(self) -> dict[str, int]:
        return {f"<{token}>": token for token in range(VOCABULARY)}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        data = text.encode()
        starts = range(0, len(data), BYTES_PER_TOKEN)
        pieces = (data[start : start + BYTES_PER_TOKEN] for start in starts)
        return {"input_ids": [zlib.crc32(piece) % VOCABULARY for piece in pieces]}

    def decode(self, tokens: "Iterable[int] | Tensor", **_: Any) -> str:
        return "".join(f"<{int(token)}>" for token in tokens)
