"""Load a model and its tokenizer by hub id, local folder or `embedded:<name>`."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from harness.config import ModelConf
from harness.models.cached import output_weight
from harness.records import UserError

EMBEDDED = Path(__file__).parent / "embedded"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class LoadedModel:
    """A network with its tokenizer.

    Attributes:
        key: the command-line group it came from, "model" or "draft"; errors name it.
        name: the short name of the config.
        network: in eval mode, on its device.
        tokenizer: transformers' tokenizer.
        eos: every id that ends a text.
        context_tokens: positions the model was made for, or None if the config does not say.
    """

    key: str
    name: str
    network: PreTrainedModel
    tokenizer: Any
    eos: frozenset[int]
    context_tokens: int | None

    @property
    def vocab_size(self) -> int:
        """Width of its logits, padding included."""
        return int(output_weight(self.network).shape[0])

    def describe(self) -> dict[str, Any]:
        """What the manifest says of it."""
        config = self.network.config.get_text_config()
        parameters = list(self.network.parameters())
        return {
            "name": self.name,
            "architecture": type(self.network).__name__,
            "dtype": str(self.network.dtype).removeprefix("torch."),
            "parameters": sum(tensor.numel() for tensor in parameters),
            "weights_bytes": sum(tensor.numel() * tensor.element_size() for tensor in parameters),
            "layers": getattr(config, "num_hidden_layers", None),
            "hidden": getattr(config, "hidden_size", None),
            "heads": getattr(config, "num_attention_heads", None),
            "kv_heads": getattr(config, "num_key_value_heads", None),
            "head_dim": getattr(config, "head_dim", None),
            "ffn": getattr(config, "intermediate_size", None),
            "tied": getattr(config, "tie_word_embeddings", None),
            "experts": getattr(config, "num_experts", None),
            "experts_per_token": getattr(config, "num_experts_per_tok", None),
            "moe_ffn": getattr(config, "moe_intermediate_size", None),
            "bytes_per_parameter": self.network.dtype.itemsize,
            "vocab": self.vocab_size,
            "context_tokens": self.context_tokens,
            "chat_template": bool(getattr(self.tokenizer, "chat_template", None)),
            "commit": getattr(self.network.config, "_commit_hash", None),
        }


def resolve_device(name: str) -> torch.device:
    """Turn `device=auto|cuda|cuda:1|mps|cpu` into a device that is there.

    Raises:
        UserError: asked for one that is not.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device={name}: not a device; use auto, cuda, mps or cpu") from error
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(device.type, True):
        raise UserError(f"device={name}: this machine has none; use device=auto or device=cpu")
    return device


def load(conf: ModelConf, key: str, device: torch.device) -> LoadedModel:
    """Load what `conf` names onto `device` (or the device or device_map it names itself).

    Args:
        conf: one of the model or draft group.
        key: "model" or "draft", for error messages.
        device: where it goes by default.

    Raises:
        UserError: no such model, no network, an unknown dtype, or a missing optional package.
    """
    source = _source(conf, key)
    options = _options(conf, key, device)
    with quiet_transformers(), _explained(conf, key):
        tokenizer = AutoTokenizer.from_pretrained(source, **_hub(conf))
        network: Any = AutoModelForCausalLM.from_pretrained(source, **_hub(conf), **options)
        if conf.device_map is None and conf.quantization is None:
            network.to(resolve_device(conf.device) if conf.device else device)
    network.eval()
    return LoadedModel(
        key=key,
        name=conf.name,
        network=network,
        tokenizer=tokenizer,
        eos=_eos(network, tokenizer),
        context_tokens=getattr(network.config.get_text_config(), "max_position_embeddings", None),
    )


def context_limit(conf: ModelConf, key: str) -> int | None:
    """Read a model's context length from its config alone, without its weights."""
    with quiet_transformers(), _explained(conf, key):
        config = AutoConfig.from_pretrained(_source(conf, key), **_hub(conf))
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _source(conf: ModelConf, key: str) -> str:
    if not conf.id.startswith("embedded:"):
        return conf.id
    folder = EMBEDDED / conf.id.removeprefix("embedded:")
    if not folder.is_dir():
        shipped = sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))
        raise UserError(f"{key}.id={conf.id}: no such embedded model; there are {shipped}")
    return str(folder)


def _hub(conf: ModelConf) -> dict[str, Any]:
    return {"revision": conf.revision, "trust_remote_code": conf.trust_remote_code}


def _options(conf: ModelConf, key: str, device: torch.device) -> dict[str, Any]:
    if conf.dtype != "auto" and conf.dtype not in DTYPES:
        raise UserError(f"{key}.dtype={conf.dtype}: use auto, {', '.join(DTYPES)}")
    options: dict[str, Any] = {
        "dtype": DTYPES.get(conf.dtype, "auto"),
        "attn_implementation": conf.attention,
    }
    if conf.device_map is not None:
        options["device_map"] = conf.device_map
    if conf.quantization is not None:
        options["quantization_config"] = _quantization(conf, key)
        options.setdefault("device_map", {"": device})
    return options


def _quantization(conf: ModelConf, key: str) -> Any:
    from transformers import BitsAndBytesConfig

    kinds: dict[str, dict[str, Any]] = {
        "int8": {"load_in_8bit": True},
        "int4": {"load_in_4bit": True},
    }
    if conf.quantization not in kinds:
        raise UserError(f"{key}.quantization={conf.quantization}: use int8, int4 or null")
    try:
        return BitsAndBytesConfig(**kinds[conf.quantization])
    except ImportError as error:
        raise UserError(
            f"{key}.quantization={conf.quantization}: needs `pip install "
            "draft-model-harness[quantization]`"
        ) from error


def _eos(network: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    named = getattr(network.generation_config, "eos_token_id", None)
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return frozenset(int(token) for token in ids if token is not None)


@contextmanager
def _explained(conf: ModelConf, key: str) -> Iterator[None]:
    """Turn what transformers and the hub raise into one line that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{key}.id={conf.id}: does not fit the device's memory; use a smaller model, "
            f"{key}.dtype=bfloat16, {key}.quantization=int4 or {key}.device_map=auto"
        ) from error
    except ImportError as error:
        raise UserError(f"{key}.id={conf.id}: {_first_line(error)}") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"{key}.id={conf.id}: cannot be loaded ({_first_line(error)}); give a local folder "
            f"({key}.id=/path/to/model), a hub id that exists and is reachable, or fill the hub "
            f"cache where there is network (hf download {conf.id}) and set HF_HUB_OFFLINE=1"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' and the hub's own progress bars and advice off the screen."""
    before = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(before)
        hub.setLevel(hub_level)
        if bars:
            hf_logging.enable_progress_bar()
