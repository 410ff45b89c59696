"""What a card does while it is measured, and models that are spread over several cards."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from runs import FROZEN, analysed
from stubs import REQUEST, TableModel

from harness.analysis import analyse
from harness.cli import compose
from harness.commands.run_lifecycle import measuring
from harness.config import ModelKeys
from harness.measurement import environment, generations
from harness.measurement.generations import run_trial
from harness.models import device as devices
from harness.models import load as loading
from harness.models import memory
from harness.models.dummy import config_of
from harness.models.load import load
from harness.records import CardReadings, Round, Spread, UserError
from harness.reporting.sentences.run import caveats as sentences_of
from harness.storage import RunFolder
from harness.storage import load as load_run
from harness.summary import Summary

CUDA = torch.device("cuda")
# As an A100 answers that runs at full clocks; power in milliwatts
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetClockInfo": lambda _, clock: {1: 1410, 2: 1593}[clock],
    "nvmlDeviceGetMaxClockInfo": lambda _, clock: {1: 1410, 2: 1593}[clock],
    "nvmlDeviceGetEnforcedPowerLimit": lambda _: 400_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda _: 400_000,
    "nvmlDeviceGetTemperature": lambda *_: 61,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda _: 0,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0,
    "nvmlDeviceGetComputeRunningProcesses": lambda _: [object()],
}


def unknown(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a card here whose NVML answers as ANSWERS, with changes."""
    monkeypatch.setattr(environment, "CARD_READ_EVERY_S", 1e-3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1", total_memory=8)
    )
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)

    def answer(**changes: Any) -> None:
        for name, function in {**ANSWERS, **changes}.items():
            monkeypatch.setattr(pynvml, name, function)

    return answer


def measured(tmp_path: Path, readings: int = 4) -> tuple[CardReadings, ...]:
    """The readings of a run that measured until the card was read so often."""
    folder = RunFolder.create(tmp_path, "sweep", ["tiny"], {})
    read = []
    state = devices.card_state

    def counted(handle: Any) -> Any:
        read.append(handle)
        return state(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "card_state", counted)
        with measuring(folder, CUDA):
            while len(read) < readings:
                pass
    return load_run(folder.path).manifest.card_readings


def throttled_by(*readings: CardReadings) -> tuple[str | None, str]:
    """A small frozen sweep, had its card done that: the reason that is said, and the sentence."""
    run = load_run(FROZEN / "sweep_small")
    manifest = run.manifest.updated(card_readings=readings)
    found = [
        entry
        for entry in analyse(replace(run, manifest=manifest)).caveats
        if entry.code == "throttled_card"
    ]
    if not found:
        return None, ""
    (entry,) = found
    (sentence,) = sentences_of(Summary(analysed("sweep_small").run, caveats=(entry,)))
    return str(entry.values["reason"]), sentence


def test_a_cards_clock_power_limit_and_temperature_are_read_while_it_is_measured(
    card: Callable[..., None], tmp_path: Path
) -> None:
    clocks = iter([1410, 1200, 900])
    card(nvmlDeviceGetClockInfo=lambda _, clock: next(clocks, 1000) if clock == 1 else 1593)
    (entry,) = measured(tmp_path)
    assert entry.samples >= 4
    assert entry.busy == entry.samples
    assert entry.sm_mhz is not None
    assert (entry.sm_mhz.lowest, entry.sm_mhz.highest) == (900, 1410)
    assert (entry.max_sm_mhz, entry.power_limit_w) == (1410, 400.0)
    assert entry.temperature_c == Spread(61, 61, 61)
    assert entry.throttled == {}
    assert throttled_by(entry) == (None, "")


def test_what_a_driver_does_not_tell_is_none_and_a_run_without_nvml_is_measured_all_the_same(
    card: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(**dict.fromkeys(ANSWERS, unknown))
    (entry,) = measured(tmp_path / "silent")
    numbers = {name for name, value in vars(entry).items() if value is not None}
    assert numbers == {"samples", "busy", "device"}
    assert throttled_by(entry) == (None, "")
    monkeypatch.setattr(pynvml, "nvmlInit", unknown)
    folder = RunFolder.create(tmp_path / "none", "sweep", ["tiny"], {})
    with measuring(folder, CUDA):
        pass
    assert load_run(folder.path).manifest.card_readings == ()


@pytest.mark.parametrize(
    ("bits", "clock", "limit", "reason", "text"),
    [
        (0x40, 900, 400, "hw_thermal", "heat (the hardware's slowdown)"),
        # Hardware's slowdown is set along with its cause
        (0x48, 900, 400, "hw_thermal", "heat (the hardware's slowdown) in "),
        (0x20, 1300, 400, "sw_thermal", "heat (the driver's slowdown)"),
        (0x80, 700, 400, "power_brake", "the board's power brake"),
        (0x08, 700, 400, "hw_slowdown", "the hardware's slowdown (heat or power)"),
        (0x04, 1200, 300, "power_cap", "its power limit"),
        (0x04, 800, 400, None, ""),  # as an L4 or A10G runs under load, and that is the card
        (0x04, 1350, 300, None, ""),  # as most cards do under load
        (0x02, 1350, 400, None, ""),  # clocks that the user has set
        (0x01, 210, 400, None, ""),  # idle
    ],
)
def test_a_card_that_throttled_is_a_caveat_by_its_reason(
    card: Callable[..., None],
    tmp_path: Path,
    bits: int,
    clock: int,
    limit: int,
    reason: str | None,
    text: str,
) -> None:
    card(
        nvmlDeviceGetClockInfo=lambda _, kind: clock if kind == 1 else 1593,
        nvmlDeviceGetEnforcedPowerLimit=lambda _: 1000 * limit,
        # By the older name, as older drivers have it
        nvmlDeviceGetCurrentClocksEventReasons=unknown,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: bits,
    )
    said, sentence = throttled_by(*measured(tmp_path))
    assert said == reason
    assert text in sentence


def test_readings_of_a_card_that_idles_count_for_nothing_and_those_of_a_resumed_run_are_added(
    card: Callable[..., None], tmp_path: Path
) -> None:
    """Between servers a card idles at its lowest clock."""
    states = iter([(210, 0x1), (1410, 0x0), (1200, 0x40), (210, 0x1)])
    now = [(0, 0)]

    def reasons(_: Any) -> int:
        now[0] = next(states, (210, 0x1))
        return now[0][1]

    card(
        nvmlDeviceGetCurrentClocksEventReasons=reasons,
        nvmlDeviceGetClockInfo=lambda _, kind: now[0][0] if kind == 1 else 1593,
    )
    (entry,) = measured(tmp_path, 4)
    assert entry.busy == 2
    assert entry.sm_mhz == Spread(1200, 1305, 1410)
    assert entry.throttled == {"hw_thermal": 1}
    assert "in 2 of 4 readings" in throttled_by(entry, entry)[1]


def test_the_second_of_two_cards_is_read_too_and_named_where_it_throttled(
    card: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers, or a tensor-parallel server, are as slow as the slowest of their cards."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda each: SimpleNamespace(uuid=each.index)
    )
    # The third idles
    bits = {b"GPU-0": 0x0, b"GPU-1": 0x40, b"GPU-2": 0x1}
    card(nvmlDeviceGetCurrentClocksEventReasons=bits.__getitem__)
    readings = measured(tmp_path, 12)
    assert [each.device for each in readings] == ["cuda:0", "cuda:1"]
    reason, sentence = throttled_by(*readings)
    assert reason == "hw_thermal"
    assert "card cuda:1 was slowed by heat" in sentence


@pytest.mark.parametrize(("readings", "reason"), [(99, "hw_thermal"), (101, None)])
def test_a_reason_of_fewer_than_one_reading_in_a_hundred_is_no_caveat(
    card: Callable[..., None], tmp_path: Path, readings: int, reason: str | None
) -> None:
    first = iter([0x40])
    card(nvmlDeviceGetCurrentClocksEventReasons=lambda _: next(first, 0x0))
    (entry,) = measured(tmp_path, 4)
    assert entry.throttled == {"hw_thermal": 1}
    assert throttled_by(replace(entry, samples=readings, busy=readings))[0] == reason


# ---- several cards -------------------------------------------------------------------------------


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Two cards with so many GB free, as far as loading asks them anything."""

    def put(first: float, second: float, count: int = 2) -> None:
        free = {torch.device("cuda", 0): first * 1e9, torch.device("cuda", 1): second * 1e9}
        monkeypatch.setattr(memory, "free_bytes", lambda device: free.get(device, 64e9))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(loading, "check_dtype", lambda *_: None)

    return put


class LoadedError(BaseException):  # which no damage of a checkpoint raises
    """In place of weights: what was checked before was passed."""


@pytest.mark.parametrize(
    ("device_map", "cards", "first", "second", "refused"),
    [
        ("auto", 2, 40, 30, None),
        ("balanced", 2, 40, 30, None),
        ("auto", 2, 40, 20, "65.5 GB of memory needed .* 60 GB free on 2 cards; .* larger cards"),
        ("auto", 2, 66, 0.1, None),
        (
            "cuda:1",
            2,
            80,
            40,
            "65.5 GB of memory needed .* 40 GB free on cuda:1; .*device_map=auto",
        ),
        (
            "auto",
            1,
            40,
            0,
            "40 GB free on cuda:0, .* larger cards: what device_map leaves elsewhere",
        ),
        # transformers fills 90 % of a single card, and would put the rest elsewhere
        ("auto", 1, 70, 0, "70 GB free on cuda:0, of which device_map fills 90% with weights; use"),
        ("auto", 1, 74, 0, None),
        ("cuda:0", 1, 70, 0, None),
    ],
)
def test_a_model_spread_over_cards_needs_the_memory_of_all_of_them(
    two_cards: Callable[..., None],
    device_map: str,
    cards: int,
    first: float,
    second: float,
    refused: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_cards(first, second, cards)
    conf = compose("sweep", ["model=qwen3_32b", f"model.device_map={device_map}"]).model
    config = config_of(conf.architecture)
    config.dtype = torch.bfloat16
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    conf.id = str(tmp_path)

    def from_pretrained(*_: Any, **__: Any) -> Any:
        raise LoadedError

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(LoadedError if refused is None else UserError, match=refused):
        load(conf, CUDA)


def test_a_layer_must_fit_one_card_and_a_draft_on_one_takes_part_of_what_the_target_may(
    two_cards: Callable[..., None],
) -> None:
    two_cards(40, 30)
    cards = (torch.device("cuda", 0), torch.device("cuda", 1))
    shape = loading.architecture_of(compose("sweep", ["model=qwen3_32b"]).model.architecture, "m")
    target = memory.MemoryNeed.of(shape, torch.bfloat16, CUDA, ModelKeys("model"), "big", cards)
    draft = replace(target, keys=ModelKeys("draft"), cards=(), device=CUDA, weight_bytes=4e9)
    memory.check_fits([target, draft], 0)
    with pytest.raises(UserError, match=r"model=big and draft=big: 73\.5 GB .* 70 GB free on 2"):
        memory.check_fits([target, replace(draft, weight_bytes=8e9)], 0)
    # Refused on its own card before that
    with pytest.raises(UserError, match=r"draft=big: 41 GB .* 40 GB free on cuda:0"):
        memory.check_fits([replace(draft, weight_bytes=41e9), target], 0)
    # Layers of 0.98 GB, and an embedding of 1.56
    two_cards(1.2, 70)
    memory.check_fits([target], 0)
    with pytest.raises(UserError, match=r"one card must hold 80 GB, a layer or the embedding"):
        memory.check_fits([replace(target, largest_bytes=80e9, weight_bytes=1e9)], 0)


def test_peaks_are_summed_over_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCard(TableModel):
        device = CUDA

    reset: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda card: 10 ** (card + 1))
    # A generation without a card
    rounds = [Round((3,), 0, 0, "step")]
    monkeypatch.setattr(generations, "autoregressive_rounds", lambda *_: iter(rounds))
    monkeypatch.setattr(generations.Request, "generation", lambda *_: None)
    monkeypatch.setattr(generations.Clock, "now", lambda _: 0.0)
    trial = run_trial(replace(REQUEST, tokens=(1, 2), budget=1), OnCard(), None)
    assert trial.peak_memory_bytes == 110
    assert reset == [0, 1]


def test_a_model_spread_over_cards_says_what_it_is() -> None:
    loaded = load(compose("sweep", ["model=tiny"]).model, torch.device("cpu"))
    assert "devices" not in loaded.describe()
    loaded.network.model.layers[1].to("meta")
    assert loaded.describe()["devices"] == ["cpu", "meta"]
    run = load_run(FROZEN / "sweep_small")

    def said(devices: list[str] | None) -> list[str]:
        models = run.manifest.models
        target = {**models["target"].entries, **({"devices": devices} if devices else {})}
        manifest = run.manifest.updated(models={**models, "target": target})
        summary = analyse(replace(run, manifest=manifest))
        entries = tuple(c for c in summary.caveats if c.code == "spread_over_cards")
        return [*sentences_of(replace(summary, caveats=entries, comparison=None))]

    assert said(None) == []
    (line,) = said(["cuda:0", "cuda:1"])
    for part in ("Target", "2 cards", "one group after the other"):
        assert part in line
    assert "on no card" not in line
    assert "on no card" in said(["cuda:0", "cuda:1", "meta"])[0]
