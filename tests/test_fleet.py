"""One target on several cards: which card is it, what does a token cost there, what would a run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.fleet import card_row, placed
from harness.analysis.priced import other_card, prices
from harness.analysis.setup import is_card
from harness.audition import work
from harness.cli import compose
from harness.commands import sweep, texts
from harness.commands.cost import all_cards
from harness.config import AuditionConfig
from harness.records import UserError, Verdict
from harness.storage import StoredRun, load
from harness.theory.architecture import Architecture
from harness.theory.cost import (
    ModelSize,
)
from harness.theory.roofline import Card
from harness.theory.speedup import StepTimes

SMALL = ["k=[1,4]", "temperature=[0]", "new_tokens=8", "prompts.limit=4", "threads=1"]
CARD = Card("card", bandwidth_gb_s=500.0, bf16_tflops=100.0, memory_gb=24.0, price_per_hour_usd=3.6)
SHAPE = Architecture(10, 64, 4, 2, 16, 128, 1000, tied=True)
MODELS = {"target": ModelSize(SHAPE, 2.0), "draft": ModelSize(SHAPE, 2.0)}


@pytest.mark.parametrize(
    ("card", "memory_gb", "device", "gib", "is_it"),
    [
        ("l4", 24, "NVIDIA L4", 22.0, True),
        ("l4", 24, "NVIDIA L40S", 44.4, False),
        ("l40s", 48, "NVIDIA L40S", 44.4, True),
        ("a10g", 24, "NVIDIA A10G", 22.1, True),
        ("a10g", 24, "NVIDIA A10", 22.1, True),
        ("a10g", 24, "NVIDIA A100-SXM4-40GB", 39.4, False),
        ("a100_40", 40, "NVIDIA A100-SXM4-40GB", 39.4, True),
        ("a100_40", 40, "NVIDIA A100-SXM4-80GB", 79.3, False),
        ("a100_80", 80, "NVIDIA A100 80GB PCIe", 79.3, True),
        ("h100", 80, "NVIDIA H100 80GB HBM3", 79.1, True),
        ("h100", 80, "NVIDIA H200", 139.8, False),
        ("h200", 141, "NVIDIA H200", 139.8, True),
        ("h200", 141, "NVIDIA GH200 480GB", 94.5, False),
        ("l4", 24, None, None, False),
        ("h100", 80, "NVIDIA H100 80GB HBM3", None, True),
    ],
)
def test_a_device_is_told_from_its_relatives_by_name_and_memory(
    card: str, memory_gb: float, device: str | None, gib: float | None, is_it: bool
) -> None:
    memory = None if gib is None else gib * 2**30
    assert is_card(card, memory_gb, device, memory) is is_it


def verdict(decision: Any, speedup: float | None) -> Verdict:
    return Verdict(decision, "draft", 4, 1.0, "all", speedup, None, None, "because")


def test_a_card_serves_with_the_draft_only_where_the_verdict_says_so() -> None:
    pays = card_row("l4", "NVIDIA L4", verdict("speculate", 2.0), 0.010, 3.6)
    assert (pays.ms_per_token, pays.usd_per_million_tokens) == (5.0, 5.0)
    assert (pays.target_step_ms, pays.plain_usd_per_million_tokens) == (10.0, 10.0)
    for decision in ("undecided", "does_not_pay"):
        plain = card_row("l4", "NVIDIA L4", verdict(decision, 1.3), 0.010, 3.6)
        assert (plain.ms_per_token, plain.usd_per_million_tokens) == (10.0, 10.0)
    assert card_row("x", "x", verdict("speculate", 2.0), 0.010, None).usd_per_million_tokens is None


def test_cards_are_placed_by_price_and_by_time_where_one_has_no_price() -> None:
    slow = card_row("slow", "slow", verdict("speculate", 1.5), 0.030, 1.0)
    fast = card_row("fast", "fast", verdict("speculate", 1.5), 0.010, 4.0)
    bare = card_row("bare", "bare", verdict("speculate", 1.5), 0.020, None)
    assert [(row.place, row.card) for row in placed([fast, slow])] == [(1, "slow"), (2, "fast")]
    assert [row.card for row in placed([slow, bare, fast])] == ["fast", "bare", "slow"]


def dry(door: Any, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    door.run(compose("sweep", ["dry_run=true", *overrides]))
    return capsys.readouterr().out


def test_a_dry_run_prints_the_modelled_cost_of_one_card_or_of_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = ("model=qwen3_4b", "draft=qwen3_0_6b")
    one = dry(sweep, capsys, *pair, "gpu=a10g")
    assert "time and cost (modelled)" in one
    assert "a10g" in one
    assert "$1.10" in one
    assert "h100" not in one
    every = dry(sweep, capsys)
    assert all(f" {card.name} " in every for card in all_cards())
    large = dry(sweep, capsys, "model=qwen3_32b", "draft=qwen3_0_6b", "gpu=l4")
    assert "does not fit" in large
    unknown = dry(sweep, capsys, "model=hf", "model.id=org/some", "draft=tiny_good")
    assert "estimated cost: unknown; the sizes of some are not in its config" in unknown


def on_device(run: StoredRun, name: str, memory: float) -> None:
    """Pretends that a stored run was made on another device."""
    file = run.folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["environment"] |= {"device_name": name, "device_memory_bytes": memory}
    file.write_text(json.dumps(manifest))


def audition(root: Path, *overrides: str) -> StoredRun:
    config = compose("audition", [f"results_root={root}", *SMALL, *overrides])
    outcome = work(config)
    assert outcome.folder is not None
    return load(outcome.folder)


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> tuple[StoredRun, StoredRun]:
    """An audition on one card, and its texts with one more draft on another."""
    root = tmp_path_factory.mktemp("results")
    patch = pytest.MonkeyPatch()
    patch.setattr("harness.measurement.step_times.REPETITIONS", 5)
    first = audition(root, "drafts=[tiny_good]", "gpu=l4")
    patch.setattr(texts, "generate_texts", lambda _, wanted, **__: wanted and pytest.fail("texts"))
    shared = (f"traces_from={first.folder}", "latency.measure=true")
    second = audition(root, "drafts=[tiny_good,ngram]", "gpu=a10g", *shared)
    patch.undo()
    on_device(first, "NVIDIA L4", 23.6e9)
    on_device(second, "NVIDIA A10G", 23.8e9)
    return first, second


def test_other_runs_texts_are_taken_over_and_the_steps_timed_here(
    cards: tuple[StoredRun, StoredRun],
) -> None:
    first, second = cards
    assert [t.tokens for t in second.trials] == [t.tokens for t in first.trials]
    assert set(second.latency_samples.model) == {"tiny", "tiny_good", "ngram"}
    assert first.latency_samples.ms.tolist() != second.latency_samples.ms.tolist()
    replayed = [run.results[run.results.draft == "tiny_good"] for run in cards]
    assert replayed[0].rounds.tolist() == replayed[1].rounds.tolist()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["latency.measure=true", "traces_from=null"], "latency.measure: with traces_from"),
        (["seed=1"], "made with seed=0"),
        (["new_tokens=9"], "made with new_tokens=8"),
        (["temperature=[1]"], "made with temperature"),
        (["latency.target_ms=3"], "latency.measure: not with"),
    ],
)
def test_other_texts_than_those_asked_for_are_refused(
    cards: tuple[StoredRun, StoredRun], overrides: list[str], says: str, tmp_path: Path
) -> None:
    shared = (f"traces_from={cards[0].folder}", "latency.measure=true")
    with pytest.raises(UserError, match=says):
        audition(tmp_path, "drafts=[tiny_good]", *shared, *overrides)
    assert list(tmp_path.iterdir()) == []


def combine(root: Path, *folders: Path) -> StoredRun:
    outcome = work(AuditionConfig(results_root=str(root), combine=[str(name) for name in folders]))
    assert outcome.folder is not None
    return load(outcome.folder)


def test_cards_are_combined_into_one_ranking_with_their_prices(
    cards: tuple[StoredRun, StoredRun], tmp_path: Path
) -> None:
    combined = combine(tmp_path, *(run.folder for run in cards))
    assert (combined.door, combined.manifest["status"]) == ("audition", "complete")
    assert combined.summary is not None
    rows = combined.summary["cards"]
    assert {(row["card"], row["price_per_hour_usd"]) for row in rows} == {
        *(("l4", 0.7992), ("a10g", 1.1016))
    }
    for row in rows:
        cost = row["usd_per_million_tokens"]
        assert cost == pytest.approx(row["ms_per_token"] * row["price_per_hour_usd"] / 3.6)
    assert [row["place"] for row in rows] == [1, 2]
    assert rows[0]["usd_per_million_tokens"] <= rows[1]["usd_per_million_tokens"]
    assert {(row["card"], row["draft"]) for row in combined.summary["card_drafts"]} == {
        *(("l4", "tiny_good"), ("l4", None)),
        *(("a10g", "tiny_good"), ("a10g", "ngram"), ("a10g", None)),
    }
    assert f"the verdict is for {rows[0]['card']}" in combined.summary["caveats"][0]
    report = (combined.folder / "report.md").read_text()
    assert "## Which card" in report
    assert "$1.10" in report
    with pytest.raises(UserError, match="is combined already"):
        combine(tmp_path, combined.folder)


def test_another_card_than_was_asked_for_is_flagged_and_has_no_price(
    cards: tuple[StoredRun, StoredRun], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(cards[0].folder, tmp_path / "copy"))
    on_device(load(copy), "NVIDIA H200", 150e9)
    combined = combine(tmp_path / "results", copy, cards[1].folder)
    assert combined.summary is not None
    row = next(row for row in combined.summary["cards"] if row["card"] == "NVIDIA H200")
    assert row["usd_per_million_tokens"] is None
    flagged = [text for text in combined.summary["caveats"] if "NVIDIA H200" in text]
    assert any(text.startswith("gpu=l4 is not the device") for text in flagged)


def test_runs_that_are_not_parts_of_one_audition_are_refused(
    cards: tuple[StoredRun, StoredRun], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(cards[1].folder, tmp_path / "copy"))
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("seed: 0", "seed: 7"))
    (copy / "checksums.json").unlink()
    with pytest.raises(UserError, match="differ in seed"):
        combine(tmp_path, cards[0].folder, copy)
    with pytest.raises(UserError, match="not a run folder"):
        combine(tmp_path, tmp_path)


def test_a_sweeps_run_says_what_a_token_costs_only_on_the_card_that_was_asked_for() -> None:
    gpu = {"name": "l4", "memory_gb": 24, "price_per_hour_usd": 3.6}
    times = StepTimes(0.001, 0.010)

    def stored(device: str, gpu: dict[str, Any] | None) -> StoredRun:
        manifest = {"environment": {"device_name": device}}
        empty: Any = None
        return StoredRun(Path(), {"gpu": gpu}, manifest, empty, empty, empty, (), None)

    there = stored("NVIDIA L4", gpu)
    assert other_card(there) is None
    assert prices(there, verdict("speculate", 2.0), times) == {
        "price_per_hour_usd": 3.6,
        "plain_usd_per_million_tokens": 10.0,
        "usd_per_million_tokens": 5.0,
    }
    upgraded = stored("NVIDIA L40S", gpu)
    assert "gpu=l4 was asked for and NVIDIA L40S ran" in str(other_card(upgraded))
    assert prices(upgraded, verdict("speculate", 2.0), times) == {}
    assert other_card(stored("NVIDIA L40S", None)) is None
