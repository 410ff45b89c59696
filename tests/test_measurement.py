"""Timed generations and steps: what is counted, and that nothing timed is lost."""

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_models import qwen3
from runs import sample
from stubs import REQUEST, TableModel

from harness.analysis.round_costs import latency_rows, step_times
from harness.decoding.lookups import NgramDrafter
from harness.decoding.sampling import SamplingParameters
from harness.measurement import environment
from harness.measurement.clock import Clock
from harness.measurement.generations import Request, run_trial
from harness.measurement.lossless import chi_square, compare_texts, distribution_tests
from harness.measurement.step_times import LEAST_REPETITIONS, TimedModel, time_forwards
from harness.models.lean.model import LeanModel
from harness.records import RULES, MachineLoad, Rule, StepTiming, UserError
from harness.summary import TextCheck

PROMPT = (3, 1, 4, 1, 5)
CHECK = TextCheck("easy", "p", 0, 4, "OPEN")


def request(k: int, *, temperature: float = 0.0, budget: int = 30, eos: int = -1) -> Request:
    return replace(
        REQUEST,
        category="facts",
        tokens=PROMPT,
        k=k,
        sampling=SamplingParameters(temperature),
        budget=budget,
        eos=frozenset({eos}),
        draft="draft" if k else None,
    )


def test_counts_and_times_of_a_trial_add_up() -> None:
    trial: Any = run_trial(request(4), TableModel(), TableModel(strangeness=0.3))
    assert (trial.status, trial.new_tokens) == ("ok", 30)
    assert trial.rounds == trial.rejected + trial.bonus + trial.cut
    assert trial.drafted == 4 * trial.rounds
    assert trial.new_tokens == trial.accepted + trial.rejected + trial.bonus
    assert sum(trial.accepted_lengths) == trial.rounds
    assert sum(j * count for j, count in enumerate(trial.accepted_lengths)) == trial.accepted
    assert 0.0 < trial.first_token_s < trial.decode_s
    assert min(trial.prefill_s, trial.draft_prefill_s) > 0.0
    plain: Any = run_trial(request(0), TableModel(), None)
    assert (plain.new_tokens, plain.rounds, plain.drafted, plain.rule) == (30, None, None, None)
    assert plain.draft_prefill_s is None
    ended: Any = run_trial(
        request(4, eos=plain.tokens[7]), TableModel(), TableModel(strangeness=0.3)
    )
    assert (ended.stop_reason, ended.tokens[-1]) == ("eos", plain.tokens[7])


def test_rounds_are_counted_by_the_text_left_to_them() -> None:
    """A self-draft with K = 4 and 12 tokens: rounds of 5, 5 and 2."""
    trial = run_trial(request(4, budget=12), TableModel(), TableModel())
    assert trial.accepted_lengths == (0, 0, 1, 0, 2)
    assert (trial.bonus, trial.cut, trial.stop_reason) == (2, 1, "budget")


class Failing(TableModel):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: tried 9 bytes"),
        MemoryError(),
    ],
)
def test_running_out_of_memory_is_a_record_not_a_crash(error: Exception) -> None:
    target = Failing(error)
    trial: Any = run_trial(request(4), target, TableModel())
    assert trial.status == "failed"
    assert trial.error.startswith("out of memory")
    assert "\n" not in trial.error
    assert target.cache == []
    with pytest.raises(RuntimeError, match="index out of range"):  # any other error is not
        run_trial(request(4), Failing(RuntimeError("index out of range")), TableModel())


def test_every_step_verify_and_prefill_is_timed_as_often_as_asked() -> None:
    target, draft = TableModel(), TableModel(strangeness=0.3)
    models = TimedModel("target", "big", target), TimedModel("draft", "small", draft)
    context = [1, 2, 3, 4, 5, 6]
    timings = time_forwards(models, 4, context=context, prefills=[2, 9], repetitions=5)
    assert {(t.role, t.kind, t.tokens) for t in timings} == {
        *((role, "prefill", length) for role in ("target", "draft") for length in (2, 9)),
        *((role, "step", 1) for role in ("target", "draft")),
        *(("target", "verify", count) for count in range(1, 6)),
    }
    assert {(t.kind == "prefill", len(t.samples_s)) for t in timings} == {(True, 2), (False, 5)}
    assert all(min(t.samples_s) > 0 for t in timings)
    assert all(t.context_tokens == (0 if t.kind == "prefill" else 6) for t in timings)
    assert target.cache == draft.cache == [1, 2, 3, 4, 5, 6]
    rows = {(row.role, row.kind, row.tokens): row for row in latency_rows(timings)}
    times = step_times(timings)
    assert times.target_s * 1e3 == pytest.approx(rows["target", "step", 1].median_ms)
    assert times.draft_s * 1e3 == pytest.approx(rows["draft", "step", 1].median_ms)
    assert times.verify_s[4] * 1e3 == pytest.approx(rows["target", "verify", 5].median_ms)
    assert all(row.p10_ms <= row.median_ms <= row.p90_ms for row in rows.values())


def test_steps_of_slow_models_are_timed_for_some_seconds_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a clock that goes on by 30 s whenever it is read."""
    now = iter(range(0, 30000, 30))
    monkeypatch.setattr("harness.measurement.step_times.perf_counter", lambda: float(next(now)))
    models = [TimedModel("target", "big", TableModel()), TimedModel("draft", "small", TableModel())]
    doubted: list[int] = []

    def doubtful(timings: Any) -> bool:
        doubted.append(len(timings))
        return True

    timings = time_forwards(models, 2, context=[1, 2], prefills=[2], doubtful=doubtful)
    steps = {len(t.samples_s) for t in timings if t.kind != "prefill"}
    assert steps == {LEAST_REPETITIONS}
    assert {len(t.samples_s) for t in timings if t.kind == "prefill"} == {1}
    assert not doubted, "nor are they timed again"


def test_a_clock_that_stands_still_in_most_steps_gives_their_mean() -> None:
    def timed(*draft_s: float) -> list[StepTiming]:
        step = StepTiming("target", "big", "step", 1, 6, 1, (0.02, 0.02, 0.02))
        return [step, StepTiming("draft", "small", "step", 1, 6, 1, draft_s)]

    times = timed(0.0, 0.0, 0.01)
    assert step_times(times).draft_s == pytest.approx(0.01 / 3)
    assert [row.median_ms for row in latency_rows(times)] == pytest.approx([20.0, 10 / 3])
    with pytest.raises(UserError, match=r"too coarse for a draft step .* clock=wall"):
        step_times(timed(0.0, 0.0, 0.0))


@pytest.mark.parametrize("recorded", [False, True])
def test_draft_steps_are_timed_in_a_row_as_the_loop_runs_them(
    recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock, which waits for the device, is read once before and once after K steps."""
    between: list[int] = []

    class Counting(TableModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            between[-1] += 1
            return super().forward(tokens)

    class Recording(Counting):
        @property
        def recorder(self) -> "Recording":
            return self

        def recorded(self, _key: object, work: Any, *inputs: Any) -> Any:
            launches.append(work)
            return work(*inputs)

    launches: list[object] = []
    now = Clock.now

    def reading(self: Clock) -> float:
        between.append(0)
        return now(self)

    monkeypatch.setattr(Clock, "now", reading)
    draft = Recording() if recorded else Counting()
    timings = time_forwards([TimedModel("draft", "small", draft)], 4, context=[1, 2], repetitions=2)
    assert {(t.kind, len(t.samples_s)) for t in timings} == {("step", 2)}
    assert set(between) == {0, 4}
    assert len(launches) == (between.count(4) if recorded else 0)
    assert draft.cache == [1, 2]


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "threads"),
    [
        ({1: 1.0, 2: 0.95, 4: 0.93}, 1),  # a gain that noise gives too
        ({1: 1.0, 2: 0.6, 4: 0.58}, 2),
        ({1: 1.0, 2: 0.6, 4: 0.4}, 4),
        ({1: 1.0, 2: 9.0, 4: 20.0}, 1),
    ],
)
@pytest.mark.usefixtures("threads_restored")
def test_more_threads_are_taken_for_a_clear_gain_alone(
    seconds: dict[int, float], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.psutil, "cpu_count", lambda **_: 4)
    monkeypatch.setattr(environment, "_step_seconds", lambda *_: seconds)
    assert environment.settle_threads("auto", [TableModel()], [1, 2]) == threads


@pytest.mark.usefixtures("threads_restored")
def test_threads_are_what_was_asked_for_or_no_more_than_there_are_free_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = environment.settle_threads("auto", [TableModel()], [1, 2])
    assert chosen == torch.get_num_threads()
    others = environment.OtherLoad()
    monkeypatch.setattr(environment.psutil, "cpu_count", lambda **_: 4)
    monkeypatch.setattr(
        environment, "_step_seconds", lambda counts, *_: {count: 1.0 / count for count in counts}
    )
    for asked, models, load, threads in (
        ("auto", [TableModel()], 1.9, 2),
        ("auto", [TableModel()], 3.9, 1),
        ("auto", [], 3.9, 1),
        ("auto", [TableModel()], 0.2, 4),
        (2, [TableModel()], 3.9, 2),
        (1, [TableModel()], 0.2, 1),
    ):
        monkeypatch.setattr(others, "so_far", lambda load=load: MachineLoad(load, 4))
        assert environment.settle_threads(asked, models, [1, 2], others=others) == threads
        assert torch.get_num_threads() == threads


def test_other_work_on_the_machine_is_counted_apart_from_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 2 x 10 s, 8 were idle, 2 waited for a disk and 4 were ours: others kept 0.6 of 2 busy."""
    machine = namedtuple("machine", ["user", "system", "idle", "iowait", "guest"])
    process = namedtuple("process", ["user", "system", "children_user", "children_system"])
    now = [machine(100.0, 10.0, 50.0, 5.0, 30.0), process(7.0, 1.0, 0.0, 0.0)]
    monkeypatch.setattr(environment.psutil, "cpu_times", lambda: now[0])
    monkeypatch.setattr(environment.psutil, "cpu_count", lambda: 2)
    ours = SimpleNamespace(cpu_times=lambda: now[1])
    monkeypatch.setattr(environment.psutil, "Process", lambda: ours)
    load = environment.OtherLoad()
    assert load.so_far() == MachineLoad(0.0, 2)
    now[:] = machine(107.0, 13.0, 58.0, 7.0, 31.0), process(9.0, 2.0, 0.5, 0.5)
    assert asdict(load.so_far()) == pytest.approx({"load": 0.6, "processors": 2})


def test_equal_texts_pass_and_a_wide_margin_fails() -> None:
    target = TableModel()
    plain = list(run_trial(request(0, budget=10), target, None).tokens or ())
    assert compare_texts(target, PROMPT, plain, plain, CHECK).result == "PASS"
    wrong = [*plain[:6], (plain[6] + 1) % 11, *plain[7:]]
    failed = compare_texts(target, PROMPT, plain, wrong, CHECK)
    assert (failed.result, failed.first_difference) == ("FAIL", 6)
    assert failed.rounding == 0.0
    shorter = compare_texts(target, PROMPT, plain, plain[:4], CHECK)
    assert (shorter.result, shorter.first_difference) == ("FAIL", 4)


class Close(TableModel):
    """The two best tokens nearly tie; a verify may round by more, or be another function."""

    def __init__(self, rounding: float, *, stateless: bool = False) -> None:
        super().__init__()
        self.rounding, self.stateless = rounding, stateless

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.stateless:  # looks no further back than the tokens it is fed
            self.cache = []
        logits = super().forward(tokens)
        first, second = logits.topk(2).indices.T
        rows = torch.arange(len(logits))
        above = self.rounding if len(tokens) > 1 and not self.stateless else -self.rounding
        logits[rows, second] = logits[rows, first] + above
        return logits


def test_a_difference_within_rounding_is_a_tie() -> None:
    target = Close(1e-3)
    plain = list(run_trial(request(0, budget=10), target, None).tokens or ())
    second = int(target.logits((*PROMPT, *plain[:3])).topk(2).indices[1])
    assert compare_texts(target, PROMPT, plain, [*plain[:3], second], CHECK).result == "TIE"
    third = next(token for token in range(11) if token not in (plain[3], second))
    assert compare_texts(target, PROMPT, plain, [*plain[:3], third], CHECK).result == "FAIL"


def test_a_difference_as_small_as_an_engines_own_tokens_are_off_is_a_tie() -> None:
    target = TableModel()
    plain = list(run_trial(request(0, budget=10), target, None).tokens or ())
    logits = target.logits((*PROMPT, *plain[:3]))
    other = int(logits.argmin())
    gap = float(logits.max() - logits[other])
    for noise, result in ((None, "FAIL"), (gap, "TIE"), (gap / 3, "FAIL")):
        compared = compare_texts(target, PROMPT, plain, [*plain[:3], other], CHECK, noise=noise)
        assert (compared.result, compared.noise) == (result, noise)


def test_a_difference_that_no_rounding_makes_excuses_nothing() -> None:
    target = Close(1e-9, stateless=True)
    plain = list(run_trial(request(0, budget=10), target, None).tokens or ())
    second = int(target.forward(torch.tensor(plain[2:3]))[0].topk(2).indices[1])
    failed = compare_texts(target, PROMPT, plain, [*plain[:3], second], CHECK)
    assert failed.result == "FAIL"
    assert failed.rounding is not None
    assert failed.rounding > 0.1


@pytest.mark.parametrize("draft", [TableModel(6, strangeness=0.6), NgramDrafter(())])
@pytest.mark.parametrize("rule", sample(RULES, "ratio", "block"))
def test_the_production_verification_passes_the_distribution_test(
    rule: Rule, draft: TableModel | NgramDrafter
) -> None:
    tests = distribution_tests(
        TableModel(6),
        draft,
        [(*PROMPT, *PROMPT)],
        num_draft_tokens=2,
        sampling=SamplingParameters(1.0),
        rule=rule,
        draws=1500,
        seed=3,
    )
    assert [test.offset for test in tests] == [1, 2, 3]
    assert all(test.bins > 1 and test.p_value > 1e-4 for test in tests)


@pytest.mark.parametrize(
    ("drawn", "distribution", "bins", "p_value"),
    [
        ([0] * 2500 + [1] * 1500 + [2] * 1000, [0.5, 0.3, 0.2], 3, 1.0),
        ([0] * 2500 + [1] * 1500 + [2] * 1000, [0.45, 0.35, 0.2], 3, 0.0),
        ([0] * 99 + [1], [1.0, 0.0], 1, 0.0),  # outside the support
        ([0] * 100, [1.0, 0.0], 1, 1.0),  # certain: nothing to test
        ([0] * 900 + list(range(1, 101)), [0.9, *[0.001] * 100], 2, 1.0),  # rare ones pooled
        ([0] * 600 + [1] * 398 + [2, 3], [0.6, 0.398, 0.001, 0.001], 2, 1.0),
    ],
)
def test_draws_are_tested_against_a_distribution_in_cells_of_at_least_five(
    drawn: list[int], distribution: list[float], bins: int, p_value: float
) -> None:
    found, _, probability = chi_square(drawn, torch.tensor(distribution))
    assert found == bins
    assert probability == pytest.approx(p_value, abs=1e-6)


SIXTEEN_BITS = [(torch.bfloat16, 8, 2, 0), (torch.bfloat16, 8, 1, 2), (torch.float16, 8, 1, 1)]
MANY = [
    (dtype, layers, 6, seed)
    for dtype, layers in ((torch.bfloat16, 2), (torch.bfloat16, 8), (torch.float16, 8))
    for seed in range(4)
]


@pytest.mark.parametrize(
    ("dtype", "layers", "prompts", "seed"),
    [*SIXTEEN_BITS, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MANY)],
)
def test_texts_of_a_sound_16_bit_model_are_never_a_fail(
    dtype: torch.dtype, layers: int, prompts: int, seed: int
) -> None:
    network: Any = qwen3(seed, layers=layers, hidden_size=64, initializer_range=0.1)
    network.to(dtype)
    model, draft = LeanModel(network, 1024), LeanModel(network, 1024)
    random = torch.Generator().manual_seed(seed)
    results: list[str] = []
    for _ in range(prompts):
        prompt = tuple(torch.randint(1024, (12,), generator=random).tolist())
        texts = {
            k: run_trial(replace(request(k, budget=48), tokens=prompt), model, draft).tokens or ()
            for k in (0, 4, 8)
        }
        for k in (4, 8):
            check = replace(CHECK, k=k)
            comparison = compare_texts(model, prompt, texts[0], texts[k], check, dtype)
            results.append(comparison.result)
            if texts[0] == texts[k]:
                continue
            # Another token in the same place is no tie
            place = comparison.first_difference or 0
            other = (texts[0][place] + 1) % 1024
            wrong = [*texts[0][:place], other]
            assert compare_texts(model, prompt, texts[0], wrong, check, dtype).result == "FAIL"
    assert "FAIL" not in results
