"""Bytes per step and memory floors, against the Qwen3 sizes and by hand."""

from dataclasses import replace

import pytest

from harness.records import UserError
from harness.theory.architecture import Architecture, experts_touched
from harness.theory.roofline import bandwidth_utilisation, memory_floor_s


def qwen3(layers, hidden, heads, kv_heads, ffn, *, tied, **experts):
    return Architecture(layers, hidden, heads, kv_heads, 128, ffn, 151_936, tied, **experts)


QWEN3 = {
    "0.6B": qwen3(28, 1024, 16, 8, 3072, tied=True),
    "1.7B": qwen3(28, 2048, 16, 8, 6144, tied=True),
    "4B": qwen3(36, 2560, 32, 8, 9728, tied=True),
    "8B": qwen3(36, 4096, 32, 8, 12288, tied=False),
    "14B": qwen3(40, 5120, 40, 8, 17408, tied=False),
    "32B": qwen3(64, 5120, 64, 8, 25600, tied=False),
    "30B-A3B": qwen3(48, 2048, 32, 4, 0, tied=False, experts=128, experts_per_token=8, moe_ffn=768),
}
# GB read per token, bf16, weights only, and the floors in ms, as published to these digits.
GB_READ = {
    "0.6B": "1.19", "1.7B": "3.44", "4B": "8.04", "8B": "15.1", "14B": "28.0", "32B": "64.0",
    "30B-A3B": "6.1",
}  # fmt: skip
BANDWIDTH = {"L4": 300, "A10G": 600, "A100-80": 2039, "H100": 3350, "H200": 4800}
FLOORS = {
    "0.6B": {"L4": "3.97", "A10G": "1.99", "A100-80": ".58", "H100": ".36", "H200": ".25"},
    "1.7B": {"L4": "11.5", "A10G": "5.74", "A100-80": "1.69", "H100": "1.03", "H200": ".72"},
    "4B": {"L4": "26.8", "A10G": "13.4", "A100-80": "3.95", "H100": "2.40", "H200": "1.68"},
    "8B": {"L4": "50.5", "A10G": "25.2", "A100-80": "7.42", "H100": "4.52", "H200": "3.15"},
    "14B": {"A100-80": "13.7", "H100": "8.35", "H200": "5.83"},
    "32B": {"A100-80": "31.4", "H100": "19.1", "H200": "13.3"},
    "30B-A3B": {"A100-80": "2.98", "H100": "1.82", "H200": "1.27"},
}


def half_digit(printed):
    return 0.505 * 10.0 ** -len(printed.partition(".")[2])


@pytest.mark.parametrize("name", QWEN3)
def test_the_bytes_read_are_those_published(name):
    printed = GB_READ[name]
    assert QWEN3[name].bytes_read() / 1e9 == pytest.approx(float(printed), abs=half_digit(printed))


@pytest.mark.parametrize(
    ("name", "card", "printed"),
    [(name, card, printed) for name, row in FLOORS.items() for card, printed in row.items()],
)
def test_the_memory_floors_are_those_published(name, card, printed):
    floor = 1e3 * memory_floor_s(QWEN3[name].bytes_read(), BANDWIDTH[card])
    assert floor == pytest.approx(float(printed), abs=half_digit(printed))


def test_the_parameters_are_those_of_the_released_models():
    assert QWEN3["0.6B"].parameters == 596_049_920
    assert QWEN3["4B"].parameters == 4_022_468_096
    assert QWEN3["8B"].parameters == 8_190_735_360
    assert QWEN3["30B-A3B"].parameters == 30_532_122_624


def test_the_founding_pair_is_launch_bound():
    """Its step ratio .74 is the ratio of layer counts; by the memory floor c would be .15."""
    floors = {
        name: memory_floor_s(QWEN3[name].bytes_read(), BANDWIDTH["A10G"]) for name in ("0.6B", "4B")
    }
    assert floors["0.6B"] / floors["4B"] == pytest.approx(0.148, abs=5e-4)
    step_ratio, layer_ratio = 22.09 / 29.92, 28 / 36
    assert step_ratio == pytest.approx(layer_ratio, rel=0.06)
    assert bandwidth_utilisation(QWEN3["0.6B"].bytes_read(), 0.02209, 600) < 0.1


def test_a_small_model_counted_by_hand():
    tiny = Architecture(2, 8, 2, 1, 4, 16, 10, tied=True)
    attention = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8
    layer = attention + 3 * 8 * 16 + 2 * 8 + 2 * 4
    assert tiny.parameters == 2 * layer + 10 * 8 + 8
    assert tiny.weight_bytes_read(bytes_per_parameter=4) == 4 * tiny.parameters
    untied = replace(tiny, tied=False)
    assert untied.parameters == tiny.parameters + 80
    assert untied.bytes_read() == tiny.bytes_read()


def test_the_cache_adds_its_keys_and_values_for_every_sequence():
    tiny = Architecture(2, 8, 2, 1, 4, 16, 10, tied=True)
    assert tiny.kv_bytes_read(100) == 2 * 2 * 1 * 4 * 100 * 2
    more = tiny.bytes_read(context_tokens=100, batch=3, bytes_per_value=1)
    assert more == tiny.bytes_read() + 3 * 1600


def test_a_dense_verify_reads_what_a_step_reads():
    dense = QWEN3["4B"]
    assert dense.bytes_read(tokens=9) == dense.bytes_read(tokens=1)


def test_a_mixture_of_experts_reads_more_for_more_positions():
    moe = QWEN3["30B-A3B"]
    expert_bytes = 48 * moe.expert_parameters * 2
    more = moe.bytes_read(tokens=5) - moe.bytes_read(tokens=1)
    assert more == pytest.approx(expert_bytes * (experts_touched(128, 8, 5) - 8))
    assert moe.bytes_read(tokens=5) == moe.bytes_read(tokens=1, batch=5)
    assert moe.bytes_read(tokens=9) / moe.bytes_read() > 4


def test_the_experts_touched_follow_the_chance_that_one_is_missed():
    assert experts_touched(128, 8, 1) == pytest.approx(8.0)
    assert experts_touched(128, 8, 2) == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert experts_touched(128, 8, 10_000) == pytest.approx(128.0)
    assert experts_touched(4, 4, 1) == 4.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 0), ("hidden", -1), ("ffn", 0), ("vocab", 0), ("heads", 0), ("kv_heads", 0)],
)
def test_sizes_that_cannot_be_are_refused_by_name(field, value):
    with pytest.raises(UserError, match=rf"^architecture\.{field}={value}: must be 1 or more"):
        replace(QWEN3["4B"], **{field: value})


def test_experts_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="moe_ffn=0"):
        replace(QWEN3["30B-A3B"], moe_ffn=0)
    with pytest.raises(UserError, match="must not exceed experts=128"):
        replace(QWEN3["30B-A3B"], experts_per_token=129)


def test_times_and_bandwidths_that_cannot_be_are_refused():
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="bandwidth_gb_s"):
            memory_floor_s(1e9, value)
        with pytest.raises(UserError, match="step_s"):
            bandwidth_utilisation(1e9, value, 600)
    assert bandwidth_utilisation(6e9, 0.020, 600) == pytest.approx(0.5)
