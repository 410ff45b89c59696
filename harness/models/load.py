"""Load a model and its tokenizer by hub id, local folder or `embedded:<name>`, or make a dummy.

`check_tokenizers` checks that two models can be target and draft.
"""

import copy
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    TorchAoConfig,
)
from transformers.utils.import_utils import is_accelerate_available

from harness import PACKAGE
from harness.config import ModelConf, ModelKeys
from harness.models import dummy
from harness.models.cached import output_weight
from harness.models.checkpoint import (
    check_complete,
    check_has_tokenizer,
    check_quantized,
    check_source,
    explained,
    other_name,
    quiet_transformers,
    without_warm_up,
)
from harness.models.device import check_dtype, computes_at_speed, resolve_device
from harness.models.embedded import EMBEDDED, folder_of
from harness.models.gguf_file import GgufTokenizer, read_model
from harness.models.memory import (
    MemoryNeed,
    check_fits,
    context_tokens,
    is_out_of_memory,
    model_sizes,
    shape_of,
)
from harness.models.tokenizer import has_thinking_mode, special_difference, tokenizer_difference
from harness.records import UserError
from harness.theory.architecture import Architecture, architecture_of

# Entries of a checkpoint's generation_config that change which tokens a server emits
GENERATION_SETTINGS = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "top_h"),
    *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size"),
    *("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens"),
    *("exponential_decay_length_penalty", "stop_strings", "guidance_scale", "watermarking_config"),
)
# Numbers of each parameter for `sampled_hash`
HASHED_NUMBERS = 256


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a model, which may be on a server, and every id that ends a text (`eos`)."""

    keys: ModelKeys
    name: str
    tokenizer: Any
    eos: frozenset[int]
    context_tokens: int | None

    @property
    def shown(self) -> str:
        return self.keys.named(self.name)


@dataclass(frozen=True)
class LoadedModel(Vocabulary):
    """A network in eval mode, on its device, with its tokenizer.

    Attributes:
        weights: pretrained, dummy (random) or embedded (small ones that ship with the package).
        shared: whether the weights are another loaded model's, so that they take no memory.
        stored_dtype: the dtype of the checkpoint, where dtype=auto chose another one.
    """

    network: PreTrainedModel
    weights: str = "pretrained"
    shared: bool = False
    stored_dtype: str | None = None

    @property
    def vocab_size(self) -> int:
        """The width of its logits, with padding."""
        return int(output_weight(self.network).shape[0])

    @property
    def memory_need(self) -> MemoryNeed | None:
        """Its memory; None for an architecture that the theory does not count."""
        shape, network = shape_of(self.network.config), self.network
        if shape is None:
            return None
        cards = tuple(device for device in self.devices if device.type == "cuda")
        where = (network.device, self.keys, self.name, cards if len(cards) > 1 else ())
        return MemoryNeed.of(shape, network.dtype, *where)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of its weights, in the order of its layers; "meta" for offloaded ones."""
        return tuple(dict.fromkeys(tensor.device for tensor in self.network.parameters()))

    def describe(self) -> dict[str, Any]:
        parameters, config = list(self.network.parameters()), self.network.config
        stored = [part for tensor in parameters for part in stored_parts(tensor)]
        weights_bytes = sum(part.numel() * part.element_size() for part in stored)
        return {
            "name": self.name,
            "weights": self.weights,
            "architecture": type(self.network).__name__,
            "dtype": str(self.network.dtype).removeprefix("torch."),
            **({"stored_dtype": self.stored_dtype} if self.stored_dtype else {}),
            "attention": getattr(config.get_text_config(), "_attn_implementation", None),
            "parameters": sum(tensor.numel() for tensor in parameters),
            "weights_bytes": 0 if self.shared else weights_bytes,
            **model_sizes(config),
            "bytes_per_parameter": self.network.dtype.itemsize,
            **({"devices": list(map(str, self.devices))} if len(self.devices) > 1 else {}),
            "vocab": self.vocab_size,
            "context_tokens": self.context_tokens,
            "chat_template": bool(getattr(self.tokenizer, "chat_template", None)),
            "thinking_mode": has_thinking_mode(self.tokenizer),
            "commit": getattr(config, "_commit_hash", None),
            "weights_sample_sha256": None if self.weights == "dummy" else sampled_hash(stored),
            "generation_config": generation_settings(self.network),
        }


def stored_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors of a parameter: itself, or the codes and scales of a quantized one."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in stored_parts(getattr(tensor, name))]


def sampled_hash(parameters: Sequence[Tensor]) -> str:
    """A hash of some numbers of every parameter, which differs for other weights."""
    digest = hashlib.sha256()
    for tensor in parameters:
        if not tensor.is_meta and tensor.numel():  # offloaded parts are not in memory
            values = tensor.detach().reshape(-1)[:: -(-tensor.numel() // HASHED_NUMBERS)]
            digest.update(values.cpu().double().numpy().tobytes())
    return digest.hexdigest()[:16]


def load(
    conf: ModelConf,
    device: torch.device,
    *,
    expect: Callable[[int], None] = lambda _: None,
    tick: Callable[[], None] = lambda: None,
) -> LoadedModel:
    """Load what `conf` names onto `device`, unless it names a device or device_map itself."""
    wanted = memory_need(conf, device)
    if wanted is not None:
        check_fits([wanted], 0)
    if conf.weights == "dummy":
        return _dummy(conf, _device(conf, device), expect, tick)
    source = source_of(conf)
    options = _options(conf, device)
    with quiet_transformers(), explained(conf), without_warm_up():
        check_has_tokenizer(conf, source)
        tokenizer = AutoTokenizer.from_pretrained(source, **_hub(conf))
        config: Any = AutoConfig.from_pretrained(source, **_hub(conf))
        stored, dtype = getattr(config, "dtype", None), _resolved_dtype(conf, device, config)
        options["dtype"] = dtype or "auto"
        if name := other_name(conf, source):
            config.transformers_weights, options["config"] = name, config
        # With this, tensors of wrong sizes are returned by name instead of raised without a name
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, **_hub(conf), **options, output_loading_info=True, ignore_mismatched_sizes=True
        )
        network, info = loaded
        check_complete(conf, network, info)
        check_quantized(conf, source, config.to_dict())  # of the hub's files, which are here now
        if "device_map" not in options:
            network.to(_device(conf, device))
        eos = _eos(network.generation_config, tokenizer)
    network.eval()
    return LoadedModel(
        keys=conf.keys,
        name=conf.name,
        network=network,
        tokenizer=tokenizer,
        eos=eos,
        context_tokens=context_tokens(network.config),
        weights="embedded" if conf.id.startswith("embedded:") else "pretrained",
        stored_dtype=(
            str(stored).removeprefix("torch.") if conf.dtype == "auto" and stored != dtype else None
        ),
    )


def load_vocabulary(conf: ModelConf, *, fetch: bool = True) -> Vocabulary:
    """The tokenizer without weights; without `fetch` only of files that are cached."""
    if conf.is_file:
        header = read_model(Path(conf.id), conf.where)
        context = header.size("context_length")
        return Vocabulary(conf.keys, conf.name, GgufTokenizer(header), header.ends, context)
    if conf.weights == "dummy":
        raise UserError(
            f"{conf.keys.of('weights', 'dummy')}: random weights are on no server; leave it out"
        )
    source = source_of(conf)
    options = {**_hub(conf), "local_files_only": not fetch}
    with quiet_transformers(), explained(conf):
        if fetch or Path(source).exists():
            check_source(conf, source)
        config: Any = AutoConfig.from_pretrained(source, **options)
        check_has_tokenizer(conf, source)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        try:
            generation = GenerationConfig.from_pretrained(
                source, revision=conf.revision or "main", local_files_only=not fetch
            )
        except OSError:  # a model may have none
            generation = GenerationConfig.from_model_config(config)
        eos = _eos(generation, tokenizer)
    return Vocabulary(conf.keys, conf.name, tokenizer, eos, context_tokens(config))


class NotEligible(UserError):
    """A draft that cannot be used with this target, with the reason."""


def check_tokenizers(target: Vocabulary, draft: Vocabulary) -> None:
    """Refuse a draft model that reads other ordinary text from the target's ids, or lacks some.

    Embeddings padded to different widths are fine: no tokenizer id lies in the padding. So are
    other special tokens (`special_difference`): ids are compared as engines compare them, and the
    draft's rows beyond the target's are cut off.
    """
    difference = tokenizer_difference(target.tokenizer, draft.tokenizer)
    rows = draft.vocab_size if isinstance(draft, LoadedModel) else None
    if isinstance(draft.tokenizer, GgufTokenizer):
        rows = draft.tokenizer.rows
    if not difference and rows is not None:
        ids = target.tokenizer.get_vocab()
        last = max(ids, key=ids.__getitem__, default=None)
        if last is not None and ids[last] >= rows:
            difference = (
                f"token {last!r} is {ids[last]} in the target's vocabulary, beyond the "
                f"{rows} rows of the draft's embedding"
            )
    if difference:
        raise NotEligible(
            f"{draft.shown}: another tokenizer than {target.shown} ({difference}); "
            "choose a draft to which the target's ids are the same tokens"
        )


def token_note(target: Vocabulary, draft: Vocabulary) -> str | None:
    """The special tokens in which a draft differs that `check_tokenizers` lets pass; or None."""
    differences = [special_difference(target.tokenizer, draft.tokenizer)]
    if target.eos != draft.eos:
        ends = [", ".join(map(str, sorted(each.eos))) or "none" for each in (target, draft)]
        differences.append(
            f"ids that end a text are {ends[0]} in the target and {ends[1]} in the draft"
        )
    said = "; ".join(difference for difference in differences if difference)
    if not said:
        return None
    return (
        f"{draft.shown}: ordinary tokens are those of {target.shown}, others are not ({said}); "
        "tokens are compared by id, and a text ends where the target's does"
    )


def memory_need(conf: ModelConf, device: torch.device) -> MemoryNeed | None:
    """The memory of a model by its config; None of an unknown architecture or quantized weights."""
    device, cards = _device(conf, device), ()
    if conf.device_map is not None:
        device, cards = _mapped(conf.device_map, device)
    if conf.weights != "dummy":
        with quiet_transformers():
            check_source(conf, source_of(conf))
    if conf.quantization is not None:
        return None
    if conf.weights == "dummy":
        dtype = _dummy_dtype(conf, device)
        shape: Architecture | None = architecture_of(
            conf.architecture or {}, conf.keys.of("architecture")
        )
    else:
        with quiet_transformers(), explained(conf):
            config: Any = AutoConfig.from_pretrained(source_of(conf), **_hub(conf))
            shape = shape_of(config)
        dtype = _resolved_dtype(conf, device, config) or torch.float32
    check_dtype(dtype, device, conf.keys)
    return (
        None if shape is None else MemoryNeed.of(shape, dtype, device, conf.keys, conf.name, cards)
    )


def _mapped(
    device_map: str, default: torch.device
) -> tuple[torch.device, tuple[torch.device, ...]]:
    """The first device of a model with a `device_map`, and all that transformers may choose."""
    if device_map not in ("auto", "balanced", "balanced_low_0", "sequential"):
        try:
            return torch.device(device_map), ()
        except RuntimeError:  # transformers reports the error when it loads
            return default, ()
    if not torch.cuda.is_available():
        return default, (default,)
    cards = tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return cards[0], cards


def _dummy_dtype(conf: ModelConf, device: torch.device) -> torch.dtype:
    return _dtype(conf) or (torch.float32 if device.type == "cpu" else torch.bfloat16)


def _dummy(
    conf: ModelConf, device: torch.device, expect: Callable[[int], None], tick: Callable[[], None]
) -> LoadedModel:
    try:
        with quiet_transformers():
            network = dummy.build(
                conf.architecture or {},
                _dummy_dtype(conf, device),
                device,
                key=conf.keys.of("architecture"),
                attention=_attention(conf),
                expect=expect,
                tick=tick,
            )
    except (ImportError, ValueError) as error:  # an attention that is not installed, or not there
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise UserError(f"{conf.keys.of('attention', conf.attention)}: {reason}") from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"{conf.shown}: does not fit the memory of {device}; use a smaller model"
        ) from error
    return LoadedModel(
        keys=conf.keys,
        name=conf.name,
        network=network,
        tokenizer=dummy.StandInTokenizer(),
        eos=frozenset(),
        context_tokens=context_tokens(network.config),
        weights="dummy",
    )


def _device(conf: ModelConf, default: torch.device) -> torch.device:
    return resolve_device(conf.device) if conf.device else default


# The names of the documents' commands
PLACEHOLDERS = frozenset(("ORG/TARGET", "ORG/DRAFT", "ORG/NAME", "ORG/NAME_OR_FOLDER"))


def source_of(conf: ModelConf) -> str:
    """A model's hub id or folder."""
    folder = folder_of(conf.id)
    if folder is None:
        if conf.id in PLACEHOLDERS:
            raise UserError(f"{conf.where}: stands for a model of yours; give its hub id or folder")
        # A hub id is a name, or an owner and a name
        if re.match(r"[./~]|[^/]+/[^/]+/", conf.id) and not Path(conf.id).exists():
            raise UserError(f"{conf.where}: no such folder; give one that is there, or a hub id")
        return conf.id
    if not folder.is_dir():
        shipped = sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))
        raise UserError(f"{conf.where}: no such embedded model; there are {shipped}")
    return str(folder)


def _hub(conf: ModelConf) -> dict[str, Any]:
    return {"revision": conf.revision, "trust_remote_code": conf.trust_remote_code}


def _options(conf: ModelConf, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {
        "attn_implementation": _attention(conf),
        # None: safetensors where there are any, otherwise pickled weights
        "use_safetensors": None if conf.allow_pickle else True,
    }
    where = _device(conf, device)
    if conf.device_map is not None:
        _require(conf.keys.of("device_map", conf.device_map), "accelerate", "accelerate")
        options["device_map"] = conf.device_map
    elif where.type == "cuda" and is_accelerate_available():
        # Weights go to the card tensor by tensor; otherwise the host would hold the whole model
        options["device_map"] = {"": where}
    if conf.quantization is not None:
        options["quantization_config"] = _quantization(conf)
    return options


def _attention(conf: ModelConf) -> str | None:
    """The attn_implementation for transformers; None lets it choose sdpa, or eager without it."""
    return None if conf.attention == "auto" else conf.attention


def _dtype(conf: ModelConf) -> torch.dtype | None:
    return None if conf.dtype == "auto" else getattr(torch, conf.dtype)


def _resolved_dtype(conf: ModelConf, device: torch.device, config: Any) -> torch.dtype | None:
    """The configured dtype; for `auto` the checkpoint's, or float32 where a CPU is slow in it.

    None where the checkpoint does not name its dtype: transformers then takes that of the weights.
    """
    dtype = _dtype(conf) or getattr(config, "dtype", None)
    if conf.dtype != "auto" or dtype is None or _device(conf, device).type != "cpu":
        return dtype
    return dtype if computes_at_speed(dtype) else torch.float32


def _quantization(conf: ModelConf) -> TorchAoConfig:
    """The quantization of linear layers: int8 with a scale a row, or int4 with one for 32 weights.

    Activations stay in the dtype, and both kinds take a byte per weight here: the acceptance is
    that of a quantized model, but the speed is not that of an engine's kernels.
    """
    _require(conf.keys.of("quantization", conf.quantization), "quantization", "torchao")
    torchao: Any = import_module("torchao.quantization")
    if conf.quantization == "int8":
        return TorchAoConfig(torchao.Int8WeightOnlyConfig())
    four_bits = getattr(torch, str(conf.quantization))
    return TorchAoConfig(torchao.IntxWeightOnlyConfig(four_bits, torchao.PerGroup(32)))


def _require(setting: str, extra: str, *packages: str) -> None:
    """Refuse a setting whose optional packages are missing, before anything is loaded."""
    if any(find_spec(package) is None for package in packages):
        raise UserError(f"{setting}: needs `pip install {PACKAGE}[{extra}]`")


def generation_settings(network: PreTrainedModel) -> dict[str, Any]:
    """The sampling settings that the checkpoint's generation_config sets; no defaults."""
    given: dict[str, Any] = network.generation_config.to_diff_dict()
    return {key: given[key] for key in GENERATION_SETTINGS if given.get(key) is not None}


def _eos(generation: GenerationConfig | None, tokenizer: Any) -> frozenset[int]:
    named = getattr(generation, "eos_token_id", None)
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return frozenset(int(token) for token in ids if token is not None)


# ---- the target's first layers -------------------------------------------------------------------


def early_exit(conf: ModelConf, target: LoadedModel) -> LoadedModel:
    """A draft of the target's first layers, with its last norm and head, which shares its weights.

    (Elhoushi et al. 2024, "LayerSkip", section 4.3, where the target is trained for it; other
    targets accept little.) The draft has its own cache for its layers, so the loop and replay treat
    it as any draft model. An engine could share that cache with the target's, and save the draft's
    prefill. Where `conf.layers` is None it has a quarter of the layers, and at least one.
    """
    check_on_one_device(conf, target)
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


def check_on_one_device(conf: ModelConf, target: LoadedModel) -> None:
    """Refuse to make a draft of modules that accelerate has placed on several devices."""
    if len(target.devices) > 1:
        raise UserError(
            f"{conf.shown}: it is made of {target.shown}'s own modules, which are spread over "
            f"{', '.join(map(str, target.devices))}; leave this draft out, or use one device"
        )


def _with_modules(module: Any, changed: dict[str, Any]) -> Any:
    """A copy of a module with some of its children replaced; the parameters are shared."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {**module._modules, **changed}
    return twin
