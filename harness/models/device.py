"""Devices: their choice, the NVIDIA driver, the dtypes that they compute, and CUDA's kernels."""

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

import pynvml
import torch
from torch.nn import functional as F

from harness.config import ModelKeys
from harness.records import CardState, ThrottleReason, UserError

# NVML's reasons for lower clocks (nvmlClocksEventReasons in nvml.h)
THROTTLE_BITS: dict[ThrottleReason, int] = {
    "hw_thermal": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "sw_thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "power_brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "power_cap": pynvml.nvmlClocksThrottleReasonSwPowerCap,
}


def release_memory() -> None:
    """Return the memory of freed weights to the system: of the card, and of glibc's allocator."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library has no such call
            ctypes.CDLL(None).malloc_trim(0)


def resolve_device(name: str) -> torch.device:
    """The device of `device=auto|cuda|cuda:1|mps|cpu`; raises UserError where it is not there."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device={name}: not a device; use auto, cuda, mps or cpu") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch on an old driver; the error below is clearer
        present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(device.type, True):
        reason = why_no_cuda() if device.type == "cuda" else None
        if reason:
            raise UserError(f"device={name}: {reason}")
        raise UserError(f"device={name}: this machine has none; use device=auto or device=cpu")
    return device


@dataclass(frozen=True)
class NvidiaDriver:
    """The driver: its own version, the newest (major, minor) of CUDA that it runs, a first card."""

    version: str  # such as 550.54
    cuda: tuple[int, int]
    card: str | None


@contextmanager
def _nvml() -> Iterator[bool]:
    """Open NVML; False where there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def nvidia_driver() -> NvidiaDriver | None:
    with _nvml() as there, suppress(pynvml.NVMLError):
        if there:
            cuda, card = pynvml.nvmlSystemGetCudaDriverVersion_v2(), None
            with suppress(pynvml.NVMLError):
                card = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
            version = pynvml.nvmlSystemGetDriverVersion()
            return NvidiaDriver(version, (cuda // 1000, cuda % 1000 // 10), card)
    return None


def other_gpu_processes(device: torch.device) -> int | None:
    """The number of other processes on a card now; None where the driver does not report it."""
    with card_handle(device) as card:
        running = (
            None if card is None else _answer(pynvml.nvmlDeviceGetComputeRunningProcesses, card)
        )
    # Process ids differ in a container, so one is subtracted for this process
    return None if running is None else max(0, len(running) - 1)


@contextmanager
def card_handle(device: torch.device) -> Iterator[Any]:
    """NVML's handle of a CUDA device; None for other devices, and where NVML does not have it."""
    if device.type != "cuda":
        yield None
        return
    with _nvml() as there:
        handle = None
        if there:
            with suppress(pynvml.NVMLError, AttributeError):
                uuid = str(torch.cuda.get_device_properties(device).uuid)
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        yield handle


def card_state(card: Any) -> CardState:
    """The state of a card now, by its handle; None for what it or its driver does not report."""
    reasons = _answer(pynvml.nvmlDeviceGetCurrentClocksEventReasons, card)
    if reasons is None:  # older drivers have only its older name
        reasons = _answer(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, card)

    def watts(ask: Callable[..., Any]) -> float | None:
        milliwatts = _answer(ask, card)
        return None if milliwatts is None else milliwatts / 1e3

    return CardState(
        sm_mhz=_answer(pynvml.nvmlDeviceGetClockInfo, card, pynvml.NVML_CLOCK_SM),
        max_sm_mhz=_answer(pynvml.nvmlDeviceGetMaxClockInfo, card, pynvml.NVML_CLOCK_SM),
        power_limit_w=watts(pynvml.nvmlDeviceGetEnforcedPowerLimit),
        default_power_limit_w=watts(pynvml.nvmlDeviceGetPowerManagementDefaultLimit),
        temperature_c=_answer(pynvml.nvmlDeviceGetTemperature, card, pynvml.NVML_TEMPERATURE_GPU),
        throttled=None
        if reasons is None
        else tuple(reason for reason, bit in THROTTLE_BITS.items() if reasons & bit),
        idle=None if reasons is None else bool(reasons & pynvml.nvmlClocksThrottleReasonGpuIdle),
    )


def _answer(ask: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return ask(*arguments)
    except (pynvml.NVMLError, AttributeError):
        return None


def why_no_cuda() -> str | None:
    """The reason why torch finds no CUDA device on a machine with a card; None without a card."""
    driver = nvidia_driver()
    if driver is None or driver.card is None:
        return None
    if torch.version.cuda is None:
        return (
            f"there is a card ({driver.card}), but torch {torch.__version__} is built without "
            "CUDA; install a build of torch for CUDA"
        )
    # A driver runs every CUDA release of its major version
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


def check_dtype(dtype: torch.dtype, device: torch.device, keys: ModelKeys) -> None:
    """Refuse a dtype that the device cannot compute in, by a small computation in it."""
    reason = _lacks(dtype, device)
    if reason is None:
        return
    others = (torch.bfloat16, torch.float16, torch.float32)
    works = next((other for other in others if _lacks(other, device) is None), None)
    advice = f"use {keys.of('dtype', _name(works))}" if works else "use device=cpu"
    raise UserError(f"{keys.of('dtype', _name(dtype))}: {device} {reason}; {advice}")


def _lacks(dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why this device cannot compute in this dtype; None if it can."""
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


# A verify is such a product. A processor without instructions for a dtype of 16 bits takes several
# times as long as in float32, one with them half as long or less
SPEED_ROWS, SPEED_WIDTH, SPEED_SAMPLES, AT_SPEED = 8, 1024, 7, 1.5


@cache
def computes_at_speed(dtype: torch.dtype) -> bool:
    """True where this processor, measured once, is about as fast in a dtype as in float32."""
    if dtype.itemsize >= torch.float32.itemsize:
        return True
    if _lacks(dtype, torch.device("cpu")) is not None:
        return False
    shapes = (SPEED_ROWS, SPEED_WIDTH), (SPEED_WIDTH, SPEED_WIDTH)
    both = {
        each: [torch.ones(shape, dtype=each) for shape in shapes] for each in (dtype, torch.float32)
    }
    seconds: dict[torch.dtype, list[float]] = {each: [] for each in both}
    for _ in range(SPEED_SAMPLES):
        for each, (rows, weight) in both.items():
            start = perf_counter()
            F.linear(rows, weight)
            seconds[each].append(perf_counter() - start)
    return min(seconds[dtype]) <= AT_SPEED * min(seconds[torch.float32])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def settle_kernels() -> None:
    """Switch cuDNN attention and reduced-precision sums off, once per process.

    Two of torch's defaults make timings or texts worse here, and neither matters on the CPU:

    - From Hopper on, scaled_dot_product_attention prefers cuDNN, which builds a plan for every pair
      of query and key length. Decoding has a new key length in every step, so the tens of
      milliseconds that a plan takes would be counted as part of the step.
    - A matrix product in bfloat16 or float16 may add its partial sums in that dtype. Verifying n
      positions splits the sums differently from a step of one, so near ties fall differently.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def kernel_settings() -> dict[str, bool]:
    matmul = torch.backends.cuda.matmul
    return {
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "bf16_reduced_precision_sums": bool(matmul.allow_bf16_reduced_precision_reduction),
        "fp16_reduced_precision_sums": bool(matmul.allow_fp16_reduced_precision_reduction),
    }
