"""Refuse quantized weights that would be run without their scales.

transformers skips a method of quantization that it does not know with a warning, and converts codes
of 8 bits to floating point as if they were the weights. The model then runs, and babbles; as a
draft it loses most of its acceptance. So the method is read from the small files before anything
is loaded, and the stored dtypes and names of the tensors are looked at where the files are here.

Sources: `quantization_config.quant_method` of config.json, and hf_quant_config.json of NVIDIA's
ModelOpt (examples/llm_ptq, `quantization.quant_algo`); the methods that transformers reads are
those of its quantizers/auto.py; names of scales and codes by compressed-tensors, ModelOpt, GPTQ,
AWQ, bitsandbytes and MLX.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from harness.records import UserError

MODELOPT = "hf_quant_config.json"
# What belongs to codes that stand in place of weights. Scales of a KV cache (k_scale) do not.
OF_CODES = re.compile(
    r"(^|[._])(weight_scale(_inv|_2)?|weight_packed|weight_zero_point|qweight|qzeros|SCB"
    r"|weight\.absmax|weight\.quant_map)$"
)
# What belongs to codes where the module has a weight too
BESIDE_CODES = re.compile(r"(.*\.)(w_)?(scales?|zeros?|zero_points?)$")
# As safetensors and torch name them, in lower case without "torch."
CODES = re.compile(r"^(f8_|f6_|f4|float8|float4|i8$|u8$|i4$|u4$|int8$|uint8$|int4$|uint4$)")
ADVICE = (
    "its codes would be run as if they were the weights; give the original or a dequantized copy,"
    " or measure it on an engine that reads it (python -m harness.server engine=vllm)"
)


def check_method(where: str, config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> None:
    """Refuse a method of quantization that transformers does not read.

    Args:
        where: the model in errors.
        config: config.json.
        modelopt: hf_quant_config.json; None where there is none.
    """
    stated = stated_quantization(config)
    method = None if stated is None else _method_in(stated)
    if stated is None and modelopt is not None:
        algorithm = (modelopt.get("quantization") or {}).get("quant_algo")
        method = None if algorithm is None else f"modelopt {algorithm}"
    if method is None or method in AUTO_QUANTIZER_MAPPING:
        return
    algorithm = (stated or {}).get("quant_algo")
    shown = f"{method} {algorithm}" if algorithm else str(method)
    raise UserError(f"{where}: quantized by {shown}, which transformers does not read; {ADVICE}")


def stated_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry of a config.json, or of its text model's, that says how weights are quantized."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for name in ("quantization_config", "quantization"):  # MLX writes the second, or both
            if isinstance(part.get(name), Mapping):
                return part[name]
    return None


def _method_in(stated: Mapping[str, Any]) -> str:
    """The method, as transformers' quantizers/auto.py names it."""
    method = stated.get("quant_method")
    if method in (None, "bitsandbytes"):
        bits = next((bits for bits in (8, 4) if stated.get(f"load_in_{bits}bit")), None)
        if bits is not None:
            return f"bitsandbytes_{bits}bit"
    if method is None and {"bits", "group_size"} <= stated.keys():
        return "MLX or another method that its config.json does not name"
    return str(method or "a method that its config.json does not name")


def check_tensors(where: str, tensors: Iterable[tuple[str, str]]) -> None:
    """Refuse codes among tensors, (name, dtype), of which no config says how they are read."""
    dtypes = dict(tensors)
    for name, dtype in dtypes.items():
        of_weight = name.endswith("weight") and CODES.match(dtype.lower().removeprefix("torch."))
        beside = BESIDE_CODES.fullmatch(name)
        if of_weight or OF_CODES.search(name) or (beside and f"{beside[1]}weight" in dtypes):
            raise UserError(
                f"{where}: {name} ({dtype}) is of quantized weights, and no method that would"
                f" read them is in its config.json; {ADVICE}"
            )


def names_and_dtypes(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Names and dtypes of loaded tensors, for `check_tensors`."""
    return ((name, str(tensor.dtype)) for name, tensor in tensors.items())


def stored_tensors(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and dtypes in the headers of a folder's safetensors files; none of damaged ones."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118  # not a dict
                    yield name, stored.get_slice(name).get_dtype()
        except (SafetensorError, OSError):  # loading says what is wrong with it
            continue
