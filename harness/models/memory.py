"""Devices and memory: which device, does a model fit it, can it compute the dtype.

Checked before anything is allocated: a model that does not fit fails after minutes of loading, in
the allocator's words, and a dtype that a device lacks fails inside some kernel. What is needed
follows from the architecture. Where memory runs out all the same, `is_out_of_memory` recognises it.
"""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
import pynvml
import torch
from torch.nn import functional as F

from harness.records import UserError
from harness.theory.architecture import Architecture

# Bytes of text per token, to count a prompt's tokens before its tokenizer is loaded
BYTES_PER_TOKEN = 4
# How messages of a plain RuntimeError begin when memory ran out: those of the CPU allocator
# (torch's and the system's), of Apple's, and of CUDA's libraries, which allocate workspaces of
# their own. Other errors also name memory ("an illegal memory access was encountered").
OUT_OF_MEMORY = (
    "defaultcpuallocator: not enough memory",
    "defaultcpuallocator: can't allocate memory",
    "cannot allocate memory",
    "mps backend out of memory",
    "cuda out of memory",
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


@dataclass(frozen=True)
class MemoryNeed:
    """What memory a model takes.

    Attributes:
        key: "model" or "draft", the command line's group.
        name: short name.
        device: where it will live.
        weight_bytes: of its weights.
        kv_bytes_per_token: of its cache.
    """

    key: str
    name: str
    device: torch.device
    weight_bytes: float
    kv_bytes_per_token: float

    @classmethod
    def of(
        cls, shape: Architecture, dtype: torch.dtype, device: torch.device, key: str, name: str
    ) -> "MemoryNeed":
        """Of a model of this shape, whose weights and cache are of one dtype."""
        return cls(
            key=key,
            name=name,
            device=device,
            weight_bytes=float(shape.parameters) * dtype.itemsize,
            kv_bytes_per_token=shape.kv_bytes_read(1, dtype.itemsize),
        )


def resolve_device(name: str) -> torch.device:
    """Turn `device=auto|cuda|cuda:1|mps|cpu` into a device that is there.

    Raises:
        UserError: it is not there, with the reason where it is known.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device={name}: not a device; use auto, cuda, mps or cpu") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an old driver; the error below says more
        present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(device.type, True):
        reason = why_no_cuda() if device.type == "cuda" else None
        if reason:
            raise UserError(f"device={name}: {reason}")
        raise UserError(f"device={name}: this machine has none; use device=auto or device=cpu")
    return device


@dataclass(frozen=True)
class NvidiaDriver:
    """The NVIDIA driver of this machine.

    Attributes:
        version: its own version, such as 550.54.
        cuda: the newest (major, minor) of CUDA that it runs.
        card: the name of the first card; None if there is none.
    """

    version: str
    cuda: tuple[int, int]
    card: str | None


def nvidia_driver() -> NvidiaDriver | None:
    """This machine's NVIDIA driver; None where there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        card = None
        with suppress(pynvml.NVMLError):
            card = _text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
        version = _text(pynvml.nvmlSystemGetDriverVersion())
        return NvidiaDriver(version, (cuda // 1000, cuda % 1000 // 10), card)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def why_no_cuda() -> str | None:
    """Why torch finds no CUDA device on a machine that has a card; None if it has none."""
    driver = nvidia_driver()
    if driver is None or driver.card is None:
        return None
    if torch.version.cuda is None:
        return (
            f"there is a card ({driver.card}), but torch {torch.__version__} is built without "
            "CUDA; install a build of torch for CUDA"
        )
    # A driver runs every CUDA of its major version
    if int(torch.version.cuda.split(".")[0]) > driver.cuda[0]:
        return (
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, the NVIDIA driver "
            f"({driver.version}) supports up to CUDA {driver.cuda[0]}.{driver.cuda[1]}; update the "
            "driver or install a torch built for it"
        )
    return (
        f"there is a card ({driver.card}), but torch {torch.__version__} cannot use it; look at "
        "CUDA_VISIBLE_DEVICES and at what torch.cuda.init() says"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, whichever allocator raised it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def check_fits(
    needs: Sequence[MemoryNeed], cached_tokens: int, *, batch: int = 1, loaded: bool = False
) -> None:
    """Refuse what will not fit: weights, and a cache of `cached_tokens` for `batch` sequences.

    Models on one device share its memory. Where `loaded`, only the caches must fit what is free.

    Raises:
        UserError: with what is needed, part by part, what is free, and what to change.
    """
    for device in dict.fromkeys(need.device for need in needs):
        models = [need for need in needs if need.device == device]
        weights = 0.0 if loaded else sum(need.weight_bytes for need in models)
        cache = sum(need.kv_bytes_per_token for need in models) * cached_tokens * batch
        free = free_bytes(device)
        if free is None or weights + cache <= free:
            continue
        texts = f"{batch} texts of {cached_tokens:,}" if batch > 1 else f"{cached_tokens:,}"
        parts = [] if loaded else [f"{_gb(n.weight_bytes)} for {n.key}={n.name}" for n in models]
        parts.append(f"{_gb(cache)} for the cache of {texts} tokens")
        names = " and ".join(f"{need.key}={need.name}" for need in models)
        raise UserError(
            f"{names}: {_gb(weights + cache)} of memory needed ({', '.join(parts)}), {_gb(free)} "
            f"free on {device}; {_way_out(models, weights > free)}"
        )


def _way_out(models: Sequence[MemoryNeed], weights_alone: bool) -> str:
    if weights_alone:
        key = max(models, key=lambda need: need.weight_bytes).key
        spread = f"{key}.device_map=auto (pretrained weights only)"
        return f"use a smaller model, {key}.dtype=bfloat16, a larger device or {spread}"
    return "lower new_tokens, the batch or the context, or use a smaller model"


def free_bytes(device: torch.device) -> float | None:
    """Memory that can still be allocated on `device`; None where that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds and does not use will be used before more is asked for
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if device.type == "cpu":
        return float(psutil.virtual_memory().available)
    return None


def cached_tokens(texts: Iterable[str], new_tokens: int, max_k: int) -> int:
    """About how many positions the longest generation fills: prompt, answer, last drafts.

    Prompts are counted in bytes, because no tokenizer is loaded yet.
    """
    longest = max((len(text.encode()) for text in texts), default=0)
    return -(-longest // BYTES_PER_TOKEN) + new_tokens + max_k


def check_dtype(dtype: torch.dtype, device: torch.device, key: str) -> None:
    """Refuse a dtype that the device cannot compute in, found by computing a little in it.

    Raises:
        UserError: naming `key`.dtype, and a dtype that works.
    """
    reason = _lacks(dtype, device)
    if reason is None:
        return
    others = (torch.bfloat16, torch.float16, torch.float32)
    works = next((other for other in others if _lacks(other, device) is None), None)
    advice = f"use {key}.dtype={_name(works)}" if works else "use device=cpu"
    raise UserError(f"{key}.dtype={_name(dtype)}: {device} {reason}; {advice}")


def _lacks(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why this device cannot compute in this dtype, or None if it can."""
    try:
        x = torch.ones(1, 1, 4, 4, dtype=dtype, device=device)
        y = F.scaled_dot_product_attention(x, x, x) @ x
        finite = bool(F.silu(y).float().softmax(-1).isfinite().all())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"cannot compute in it ({' '.join(str(error).split())[:100].rstrip('.')})"
    if dtype == torch.bfloat16 and device.type == "cuda":
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                return "only imitates it, slowly"
    return None if finite else "computes nonsense in it"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gb(count: float) -> str:
    return f"{count / 1e9:,.3g} GB" if count >= 1e9 else f"{count / 1e6:,.3g} MB"
