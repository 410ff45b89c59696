"""The machine of a run, recorded because a latency means nothing without it.

Only what needs a device imports torch: breakeven and report describe their host without it.
"""

import math
import os
import platform
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import psutil

from harness.records import CardReadings, CardState, CopyBandwidth, MachineLoad, Spread

if TYPE_CHECKING:
    import torch

    from harness.decoding.protocols import CausalModel

PACKAGES = ("torch", "transformers", "numpy", "scipy", "pandas", "hydra-core", "modal")
# Variables whose values are secrets, and secrets that show by their form
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)
SECRETS = re.compile(r"\b(?:hf_|sk-|ghp_|xox[a-z]-)[\w-]{12,}|(?<=://)[^/@\s]+:[^/@\s]+(?=@)")
SHORTEST_SECRET = 6
# Steps of each model with each number of threads: as many as this time allows, within two bounds;
# after a short context, for a prefill takes far longer and says no more
LEAST_THREAD_STEPS, MOST_THREAD_STEPS, THREAD_S = 5, 15, 0.5
THREAD_CONTEXT = 16
# By how much more threads must be faster to be taken: next to other work they lose far more
THREAD_GAIN = 0.2
# A processor of which others take no more than this is free
ALMOST_FREE = 0.25
# Well beyond the caches, two of them: 50 MB on an H200, some 100 MB on large server processors
BUFFER_BYTES = {"cuda": 2 * 1024**3, "mps": 512 * 1024**2, "cpu": 256 * 1024**2}
SHARE_OF_FREE = 1 / 16
# Samples of the bandwidth: as many as fit into so many seconds
LEAST_SAMPLES, MOST_SAMPLES, SAMPLING_S = 3, 9, 0.2
LEAST_SAMPLE_BYTES = 64 * 1024**2
# Between two readings of a card, which take about a millisecond
CARD_READ_EVERY_S = 5.0


def describe(device: "torch.device") -> dict[str, Any]:
    """The host and the device: everything that a reader of the numbers may ask for."""
    import torch

    from harness.models.device import (
        card_handle,
        card_state,
        kernel_settings,
        nvidia_driver,
        why_no_cuda,
    )

    driver = nvidia_driver()
    with card_handle(device) as card:
        state = {} if card is None else {"card": asdict(card_state(card))}
    return {
        **describe_host(),
        "device": device.type,
        "device_name": device_name(device),
        "device_memory_bytes": (
            torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        ),
        "cuda": torch.version.cuda,
        "driver": driver.version if driver else None,
        "kernels": kernel_settings(),
        "unused_card": why_no_cuda() if device.type == "cpu" else None,
        "threads": torch.get_num_threads(),
        **state,
    }


def describe_host() -> dict[str, Any]:
    """The command line, the software and the machine, for the manifest.

    No environment variable is stored, and secrets that were typed are left out: runs are sent on.
    """
    argv = sys.argv[1:]
    return {
        "command": ["python", "-m", f"harness.{Path(sys.argv[0]).stem}", *map(_public, argv)],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "git": _git(),
    }


def device_name(device: "torch.device") -> str:
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return cpu_name() if device.type == "cpu" else f"{device.type} ({cpu_name()})"


def cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _public(word: str) -> str:
    """A word of the command line without the secrets in it."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST_SECRET and SECRET_NAMES.search(name):
            word = word.replace(value, f"${name}")
    return SECRETS.sub("***", word)


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _git() -> dict[str, Any] | None:
    """The checkout's commit and whether it has uncommitted changes; None outside one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None

    def ask(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    return None


class OtherLoad:
    """The share of the machine that other work takes, from when this is made."""

    def __init__(self) -> None:
        self._begin = self._seconds()

    def so_far(self) -> MachineLoad:
        busy, all_processors = (
            now - before for now, before in zip(self._seconds(), self._begin, strict=True)
        )
        processors = psutil.cpu_count() or 1
        share = busy / all_processors if all_processors > 0 else 0.0
        return MachineLoad(max(0.0, share) * processors, processors)

    @staticmethod
    def _seconds() -> tuple[float, float]:
        """Seconds of all processors: those that were not idle and not this process's, and all."""
        times, own = psutil.cpu_times(), psutil.Process().cpu_times()
        # A guest's time is part of the user's, see man 5 proc
        spent = {name: getattr(times, name) for name in times._fields if "guest" not in name}
        total = sum(spent.values())
        idle = sum(spent.get(name, 0.0) for name in ("idle", "iowait"))
        return total - idle - sum(own[:4]), total


@contextmanager
def watched_cards(device: "torch.device", readings: list[CardReadings]) -> Iterator[None]:
    """Reads cards while a block runs: at its begin, every few seconds, and at its end.

    Clocks that fall while a run measures, by heat or by a power limit, are in its times; which of
    its rounds or requests they hit does not matter, so a thread reads them beside whatever runs.
    All visible cards are read: layers, or a server, may be spread over them.

    In the end `readings` has those of each card that was busy, or of all; none where NVML has none,
    and none of a device of another kind.
    """
    import torch

    from harness.models.device import card_handle, card_state

    ended, states = Event(), dict[str, list[CardState]]()
    number = torch.cuda.device_count() if device.type == "cuda" else 0
    watched = [torch.device("cuda", index) for index in range(number)] or [device]
    with ExitStack() as opened:
        cards = {str(each): opened.enter_context(card_handle(each)) for each in watched}

        def read() -> None:
            for name, card in cards.items():
                if card is not None:
                    states.setdefault(name, []).append(card_state(card))

        def watch() -> None:
            while not ended.wait(CARD_READ_EVERY_S):
                read()

        read()
        thread = Thread(target=watch, daemon=True)
        if states:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if states:
                thread.join()
                read()
            each = [_readings(name, of_card) for name, of_card in states.items()]
            readings += [one for one in each if one.busy] or each


def _readings(device: str, states: Sequence[CardState]) -> CardReadings:
    """Readings of one card, from its states one after the other."""
    busy = [state for state in states if not state.idle]
    counted = busy or states

    def values_of(name: str, of: Sequence[CardState] = counted) -> list[Any]:
        values = (getattr(state, name) for state in of)
        return [value for value in values if value is not None]

    def spread(name: str) -> Spread | None:
        values = values_of(name)
        return Spread(min(values), statistics.median(values), max(values)) if values else None

    known = values_of("throttled")
    capped = values_of("sm_mhz", [s for s in counted if "power_cap" in (s.throttled or ())])
    return CardReadings(
        samples=len(states),
        busy=len(busy),
        sm_mhz=spread("sm_mhz"),
        temperature_c=spread("temperature_c"),
        max_sm_mhz=min(values_of("max_sm_mhz"), default=None),
        power_limit_w=min(values_of("power_limit_w"), default=None),
        throttled=dict(Counter(one for reasons in known for one in reasons)) if known else None,
        capped_sm_mhz=statistics.median(capped) if capped else None,
        default_power_limit_w=min(values_of("default_power_limit_w"), default=None),
        device=device,
    )


def settle_threads(
    setting: Any,
    models: "Sequence[CausalModel]",
    context: Sequence[int],
    *,
    others: OtherLoad | None = None,
    expect: Callable[[int], None] = lambda _: None,
    tick: Callable[[], None] = lambda: None,
) -> int:
    """Set torch's CPU threads: the number given, or the fewest that make these models' steps fast.

    More threads are not faster as a matter of course: an oversubscribed machine ran a 1M-parameter
    model twenty times slower with two than with one. So more are taken only for a clear gain, and
    no more than there are free processors. Returns the number that is now in force.

    Args:
        setting: "auto" or a positive integer.
        models: none to begin with as many threads as there are free processors at most.
        context: token ids; the first few fill the caches.
        others: the load of other work, since some seconds.
        expect, tick: called with the number of measurements, and after each.
    """
    import torch

    if setting != "auto":
        torch.set_num_threads(setting)
        return setting
    if models and all(model.device.type != "cpu" for model in models):
        return torch.get_num_threads()
    free = cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if others is not None:
        free = max(1, math.floor(cores - others.so_far().load + ALMOST_FREE))
    if not models:
        torch.set_num_threads(min(torch.get_num_threads(), free))
        return torch.get_num_threads()
    powers = {2**power for power in range(7)}
    candidates = [count for count in sorted({*powers, cores}) if count <= min(cores, free)]
    expect(len(models))
    times = dict.fromkeys(candidates, 0.0)
    for model in models:
        seconds = _step_seconds(candidates, model, context[:THREAD_CONTEXT])
        times = {count: times[count] + seconds[count] for count in candidates}
        tick()
    best = fewest_threads(times)
    torch.set_num_threads(best)
    return best


def fewest_threads(seconds: Mapping[int, float]) -> int:
    """The smallest number of threads whose time is within `THREAD_GAIN` of the best."""
    enough = (1.0 + THREAD_GAIN) * min(seconds.values())
    return min(count for count, taken in seconds.items() if taken <= enough)


def _step_seconds(
    candidates: Sequence[int], model: "CausalModel", context: Sequence[int]
) -> dict[int, float]:
    """Seconds of a step with each number of threads, taking turns: the medians of a few.

    Not the best of them: threads that wait for one another lose most where other work runs, and a
    machine that is busy now may stay so.
    """
    import torch

    from harness.measurement.clock import Clock

    if len(candidates) == 1:
        return dict.fromkeys(candidates, 1.0)
    clock = Clock(model)
    model.prefill(context)
    token = torch.tensor(context[-1:], device=model.device)
    durations: dict[int, list[float]] = {count: [] for count in candidates}

    def step() -> float:
        start = clock.now()
        model.forward(token)
        seconds = clock.now() - start
        model.rewind(1)
        return seconds

    begin = clock.now()
    for number in range(MOST_THREAD_STEPS):
        if number >= LEAST_THREAD_STEPS and clock.now() - begin > THREAD_S * len(candidates):
            break
        for count in candidates:
            torch.set_num_threads(count)
            step()  # threads start
            durations[count].append(step())
    return {count: statistics.median(each) for count, each in durations.items()}


def copy_bandwidth(device: "torch.device", buffer_bytes: int | None = None) -> CopyBandwidth:
    """The bandwidth of copying memory, which every step time of the same run is held against.

    A copy reads as much as it writes, so its traffic is twice the buffer. A data sheet's bandwidth
    is never reached, by a copy no more than by a model; compared with a copy, a step that is bound
    by memory comes close to 1. (On a processor a plain store also reads the line it overwrites,
    which is not counted, so a step, which only reads, may come out a little above 1.)

    Args:
        device: whose memory; with the threads now in force.
        buffer_bytes: of one buffer; by default well beyond the device's caches, but never more than
            a sixteenth of what is free. A small one that stays in the caches shows how fast a small
            model can be read.
    """
    import torch

    from harness.measurement.clock import Clock
    from harness.models.memory import free_bytes

    wanted = BUFFER_BYTES.get(device.type, BUFFER_BYTES["cpu"])
    if buffer_bytes is not None:
        wanted = buffer_bytes
    elif (free := free_bytes(device)) is not None:
        wanted = min(wanted, int(free * SHARE_OF_FREE))
    size = max(1, wanted // 4)
    # Both are written first: memory that was never touched is not there yet
    source, copy = (torch.full((size,), value, device=device) for value in (1.0, 0.0))
    clock, repeats = Clock(source), max(1, LEAST_SAMPLE_BYTES // (4 * size))
    copy.copy_(source)
    seconds: list[float] = []
    while len(seconds) < LEAST_SAMPLES or (
        len(seconds) < MOST_SAMPLES and repeats * sum(seconds) < SAMPLING_S
    ):
        start = clock.now()
        for _ in range(repeats):
            copy.copy_(source)
        seconds.append((clock.now() - start) / repeats)
    return CopyBandwidth(2 * 4 * size / statistics.median(seconds) / 1e9, 4 * size, len(seconds))
