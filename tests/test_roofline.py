"""Bytes, floors, bounds and costs: against published sizes and floors, and by hand."""

# Floors that a row may lack, and K that may be 0
# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportArgumentType=false

from dataclasses import replace

import pytest

from harness.records import LatencyRow, UserError
from harness.theory.architecture import Architecture, ModelBytes, experts_touched, memory_view
from harness.theory.cost import (
    LOAD_BYTES_PER_S,
    SECONDS_PER_LAYER,
    START_S,
    Forwards,
    ModelSize,
    estimate,
    money,
    pair_forwards,
    text_forwards,
    usd_per_million_tokens,
)
from harness.theory.roofline import (
    Card,
    ReadingModel,
    bandwidth_utilisation,
    forward_floor,
    memory_floor_s,
    shortest_context,
    step_bounds,
    with_floors,
)


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


H200 = Card("h200", 4800, 989, 141, 4.5)
TINY = Architecture(2, 8, 2, 1, 4, 16, 10, tied=True)


def printed(value, text):
    return value == pytest.approx(float(text), abs=0.505 * 10.0 ** -len(text.partition(".")[2]))


# What a forward reads and computes


@pytest.mark.parametrize("name", QWEN3)
def test_bytes_read_and_memory_floors_are_those_published(name):
    read = QWEN3[name].bytes_read()
    assert printed(read / 1e9, GB_READ[name])
    for card, floor in FLOORS[name].items():
        assert printed(1e3 * memory_floor_s(read, BANDWIDTH[card]), floor)


def test_a_small_model_counted_by_hand():
    attention = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8
    layer = attention + 3 * 8 * 16 + 2 * 8 + 2 * 4
    assert TINY.parameters == 2 * layer + 10 * 8 + 8
    assert TINY.weight_bytes_read(bytes_per_parameter=4) == 4 * TINY.parameters
    untied = replace(TINY, tied=False)
    assert untied.parameters == TINY.parameters + 80
    assert untied.bytes_read() == TINY.bytes_read()
    assert TINY.kv_bytes_read(100) == 2 * 2 * 1 * 4 * 100 * 2
    more = TINY.bytes_read(context_tokens=100, batch=3, bytes_per_parameter=1)
    assert more == TINY.bytes_read() / 2 + 3 * 1600


def test_only_a_mixture_of_experts_reads_more_for_more_positions():
    dense, moe = QWEN3["4B"], QWEN3["30B-A3B"]
    assert dense.bytes_read(tokens=9) == dense.bytes_read()
    more = moe.bytes_read(tokens=5) - moe.bytes_read()
    assert more == pytest.approx(48 * moe.expert_parameters * 2 * (experts_touched(128, 8, 5) - 8))
    assert moe.bytes_read(tokens=5) == moe.bytes_read(batch=5)
    assert experts_touched(128, 8, 1) == pytest.approx(8.0)
    assert experts_touched(128, 8, 2) == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert experts_touched(128, 8, 10_000) == pytest.approx(128.0)


def test_a_position_costs_two_operations_per_parameter_that_it_uses():
    dense, moe = QWEN3["4B"], QWEN3["30B-A3B"]
    assert dense.flops() == pytest.approx(2 * dense.parameters, rel=1e-3)
    assert moe.flops(tokens=3) == pytest.approx(3 * moe.flops(), rel=1e-3)
    assert moe.flops() < 0.25 * 2 * moe.parameters
    # A position attends to those before it, in one forward as in several
    steps = [dense.flops(context_tokens=10 + n) for n in range(1000)]
    assert dense.flops(tokens=1000, context_tokens=10) == pytest.approx(sum(steps))


def test_a_step_waits_for_memory_and_a_large_batch_for_arithmetic():
    one = forward_floor(QWEN3["4B"], H200)
    assert one == pytest.approx(1.68e-3, abs=5e-6)
    many = forward_floor(QWEN3["4B"], H200, batch=1024)
    assert many == pytest.approx(QWEN3["4B"].flops(batch=1024) / 989e12)


SMALL = ModelBytes(1e6, 1e3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        *(
            (lambda name=name: replace(QWEN3["4B"], **{name: 0}), rf"^architecture\.{name}=0: must")
            for name in ("layers", "hidden", "ffn", "vocab", "heads", "kv_heads")
        ),
        (lambda: replace(QWEN3["30B-A3B"], moe_ffn=0), "moe_ffn=0"),
        (lambda: replace(QWEN3["30B-A3B"], experts_per_token=129), "must not exceed experts=128"),
        (lambda: memory_floor_s(1e9, float("nan")), "bandwidth_gb_s"),
        (lambda: bandwidth_utilisation(1e9, 0.0, 600), "step_s"),
        (lambda: replace(H200, memory_gb=0), "memory_gb"),
        (lambda: memory_view("a", SMALL, SMALL, 0.0, context_tokens=1), "memory_bytes"),
        (lambda: memory_view("a", SMALL, SMALL, 1e9, context_tokens=0), "context_tokens"),
        (lambda: usd_per_million_tokens(0.0, 1.0), "must be above 0"),
        (lambda: usd_per_million_tokens(1.0, -1.0), "must be 0 or more"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(call, says):
    with pytest.raises(UserError, match=says):
        call()


# What holds a measured step back


def curve(step_ms, widest_ms, role="target", context=100):
    def row(kind, tokens, ms):
        return LatencyRow(role, role, kind, tokens, context, 1, ms, ms, ms, 5)

    return [row("step", 1, step_ms), row("verify", 9, widest_ms)]


def model(name="4B"):
    return ReadingModel(QWEN3[name], 2.0, 600.0, "measured")


def bound_of(step_ms, widest_ms):
    (bound,) = step_bounds(with_floors(curve(step_ms, widest_ms), {"target": model()}))
    return bound


def test_a_row_is_given_the_floor_of_its_weights_and_cache():
    rows = [*curve(26.8, 30.0, context=1000), *curve(5.0, 6.0, "draft")]
    rows.append(replace(rows[0], kind="prefill", tokens=1000))
    step, _, *unknown = with_floors(rows, {"target": model()})
    kv = 2 * 36 * 8 * 128 * 1000 * 2
    assert step.floor_ms == pytest.approx((QWEN3["4B"].bytes_read() + kv) / 600e6)
    assert step.mbu == pytest.approx(step.floor_ms / 26.8)
    assert step.bandwidth_source == "measured"
    assert unknown == rows[2:]


@pytest.mark.parametrize(
    ("step_ms", "widest_ms", "bound", "launch_bound"),
    [  # 4B on an A10G: floor 13.4 ms
        (14.0, 14.1, "memory", False),
        (29.92, 30.5, "overhead", False),
        (60.0, 61.0, "overhead", True),
        (60.0, 540.0, "arithmetic", False),
    ],
)
def test_a_step_is_launch_bound_only_far_above_its_floor(step_ms, widest_ms, bound, launch_bound):
    bounds = bound_of(step_ms, widest_ms)
    assert (bounds.bound, bounds.launch_bound) == (bound, launch_bound)
    assert bounds.mbu == pytest.approx(13.41 / step_ms, rel=2e-3)


def test_arithmetic_is_at_most_what_reading_leaves_of_a_step():
    """A position of a forward over nine that costs 2.25 steps is computed by other kernels."""
    bounds = bound_of(60.0, 60.0 + 8 * 2.25 * 60.0)
    assert bounds.arithmetic_share == pytest.approx(1.0 - bounds.mbu)
    assert bounds.overhead_share == 0.0
    assert (bounds.bound, bounds.launch_bound) == ("arithmetic", False)


def test_the_founding_pair_is_launch_bound():
    """Its step ratio .74 is the ratio of layer counts; by the memory floor c would be .15."""
    floors = [memory_floor_s(QWEN3[name].bytes_read(), 600) for name in ("0.6B", "4B")]
    assert floors[0] / floors[1] == pytest.approx(0.148, abs=5e-4)
    assert pytest.approx(28 / 36, rel=0.06) == 22.09 / 29.92
    rows = [*curve(29.92, 30.5), *curve(22.09, 22.2, "draft", 50)]
    bounds = step_bounds(with_floors(rows, {"target": model(), "draft": model("0.6B")}))
    assert [bound.role for bound in shortest_context(bounds)] == ["target", "draft"]
    assert shortest_context(bounds)[1].launch_bound


def test_bytes_that_further_positions_read_are_not_arithmetic():
    step, verify = with_floors(curve(12.0, 12.0), {"target": model("30B-A3B")})
    assert verify.floor_ms > 4 * step.floor_ms
    grown = replace(verify, median_ms=12.0 + verify.floor_ms - step.floor_ms)
    (bound,) = step_bounds([step, grown])
    assert bound.arithmetic_share == pytest.approx(0.0, abs=1e-9)


# Memory


def test_a_draft_costs_context_and_sequences():
    target, draft = QWEN3["32B"], QWEN3["0.6B"]
    of_target, of_draft = (
        ModelBytes(2.0 * each.parameters, each.kv_bytes_read(1)) for each in (target, draft)
    )
    small, ngram = (
        memory_view(name, each, of_target, 80e9, context_tokens=8192)
        for name, each in (("small", of_draft), ("ngram", ModelBytes()))
    )
    assert (ngram.context_tokens_lost, ngram.sequences_lost) == (0, 0)
    left = 72e9 - 2 * target.parameters
    alone = int(left // (2 * 2 * 64 * 8 * 128))
    both = int((left - 2 * draft.parameters) // (2 * 2 * (64 + 28) * 8 * 128))
    assert small.context_tokens_lost == alone - both
    assert small.sequences_lost == alone // 8192 - both // 8192 > 0
    none = memory_view("small", of_draft, of_target, 24e9, context_tokens=8192)
    assert (none.context_tokens_lost, none.sequences_lost) == (0, 0)  # the target does not fit


# What a run takes and costs

SHAPE = Architecture(10, 64, 4, 2, 16, 128, 1000, tied=True)
CARD = Card("card", bandwidth_gb_s=500.0, bf16_tflops=100.0, memory_gb=24.0, price_per_hour_usd=3.6)
MODELS = {"target": ModelSize(SHAPE, 2.0), "draft": ModelSize(SHAPE, 2.0)}


def test_money_is_time_at_the_price_of_an_hour():
    assert money(90.0, 4.0) == pytest.approx(0.1)
    assert usd_per_million_tokens(0.036, 2.0) == pytest.approx(20.0)


def test_a_forward_takes_its_floor_or_so_much_a_layer():
    work = [Forwards("target", 100.0), Forwards("ngram", 1e9)]
    run = estimate(work, MODELS, CARD, context_tokens=50)
    start = START_S + 2 * 2.0 * SHAPE.parameters / LOAD_BYTES_PER_S
    assert run.start_s == pytest.approx(start)
    assert run.low_s == pytest.approx(start + 100 * SHAPE.bytes_read(context_tokens=50) / 500e9)
    assert run.high_s == pytest.approx(start + 100 * 10 * SECONDS_PER_LAYER)
    assert run.low_usd == pytest.approx(run.low_s / 1000)
    many = estimate([Forwards("target", 1.0, 10**6)], MODELS, CARD, 0)
    assert many.low_s - start == pytest.approx(SHAPE.flops(tokens=10**6) / 100e12)


def test_weights_beyond_the_memory_do_not_fit_but_drafts_are_loaded_one_by_one():
    models = 2 * SHAPE.parameters / 1e9 / 0.9
    three = {**MODELS, "another": MODELS["draft"]}
    assert estimate([], three, replace(CARD, memory_gb=2.5 * models), 0).fits
    assert not estimate([], MODELS, replace(CARD, memory_gb=1.5 * models), 0).fits


def test_a_sweep_is_plain_decoding_and_rounds_of_every_k():
    work = pair_forwards([0, 4], generations=3, new_tokens=10, alpha=1.0)
    assert work == [
        Forwards("target", 30),
        Forwards("draft", 4 * 6.0),
        Forwards("target", 6.0, 5),
    ]
    batches = [(entry.count, entry.batch) for entry in text_forwards(70, 5, 32)]
    assert batches == [(5, 32), (5, 32), (5, 6)]
