"""One target on several cards: which card is it, what does a token cost there, what would a run."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from runs import FROZEN, outcome_of, ran

from harness.analysis import analyse
from harness.analysis.cards import rank_cards
from harness.cloud.jobs import card_named
from harness.commands.dry_run import all_cards
from harness.records import UserError
from harness.storage import RunFolder, StoredRun, load
from harness.summary import Summary
from harness.theory.roofline import is_card

AUDITION = load(FROZEN / "audition")
SMALL = ["k=[1,4]", "temperature=[0]", "new_tokens=8", "prompts.limit=4", "threads=1"]

pytestmark = pytest.mark.usefixtures("few_samples")


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
def test_a_device_is_distinguished_from_its_relatives_by_name_and_memory(
    card: str, memory_gb: float, device: str | None, gib: float | None, is_it: bool
) -> None:
    memory = None if gib is None else gib * 2**30
    assert is_card(card, memory_gb, device, memory) is is_it


def on(device: str, card: str, price: float, slower: float = 1.0, **config: Any) -> StoredRun:
    """The stored audition as another card would have made it."""
    gpu = {**asdict(card_named("L4")[1]), "name": card, "price_per_hour_usd": price}
    environment = {
        **AUDITION.manifest.environment.entries,
        "device_name": device,
        "device_memory_bytes": 24e9,
    }
    samples = AUDITION.latency_samples.assign(ms=AUDITION.latency_samples["ms"] * slower)
    rounds = [replace(timing, seconds=timing.seconds * slower) for timing in AUDITION.rounds]
    return replace(
        AUDITION,
        config={**AUDITION.config, "gpu": gpu, **config},
        manifest=AUDITION.manifest.updated(environment=environment),
        latency_samples=samples,
        rounds=tuple(rounds),
    )


@pytest.fixture(scope="module")
def l4() -> tuple[StoredRun, Summary]:
    run = on("NVIDIA L4", "l4", price=1.0, slower=2.0)
    return run, analyse(run)


@pytest.fixture(scope="module")
def a10g() -> tuple[StoredRun, Summary]:
    run = on("NVIDIA A10G", "a10g", price=3.0)
    return run, analyse(run)


@pytest.fixture(scope="module")
def upgraded() -> tuple[StoredRun, Summary]:
    run = on("NVIDIA H200", "h100", price=4.0, slower=1.5)
    return run, analyse(run)


Entry = tuple[StoredRun, Summary]


def ranked(*entries: Entry) -> Any:
    return rank_cards([run for run, _ in entries], [summary for _, summary in entries])


def test_cards_are_placed_by_what_a_token_costs(l4: Entry, a10g: Entry) -> None:
    ranking = ranked(a10g, l4)
    first = AUDITION.config["temperature"][0]
    rows = [row for row in ranking.cards if row.temperature == first]
    assert [(row.place, row.card) for row in rows] == [(1, "l4"), (2, "a10g")]
    assert ranking.best == 1
    for row in rows:
        gain = row.speedup if row.decision == "speculate" else 1.0
        assert row.seconds_per_token == pytest.approx(row.plain_s / gain)
        cost = row.seconds_per_token * 1e6 / 3600 * row.price_per_hour_usd
        assert row.usd_per_million_tokens == pytest.approx(cost)
    board = l4[1].leaderboards[0].rows
    assert None in {row.draft for row in board}, "plain decoding is ranked as well"
    assert ranking.cards[0].usd_per_million_tokens == pytest.approx(l4[1].usd_per_million_tokens)


def test_where_a_card_has_no_price_the_faster_one_comes_first(
    l4: Entry, a10g: Entry, upgraded: Entry
) -> None:
    ranking = ranked(l4, upgraded, a10g)
    first = AUDITION.config["temperature"][0]
    names = [row.card for row in ranking.cards if row.temperature == first]
    assert names == ["a10g", "NVIDIA H200", "l4"]
    assert next(row for row in ranking.cards if row.card == "NVIDIA H200").spent_usd is None
    assert upgraded[1].usd_per_million_tokens is None
    assert [caveat.code for caveat in upgraded[1].caveats].count("other_card") == 1


def test_runs_that_are_not_of_one_audition_are_refused(l4: Entry, a10g: Entry) -> None:
    seed, door = {"seed": 7}, a10g[0].manifest.updated(door="sweep")
    combined = a10g[0].manifest.updated(cards=rank_cards([l4[0], a10g[0]], [l4[1], a10g[1]]).cards)
    for other, says in (
        (replace(a10g[0], config={**a10g[0].config, **seed}), "differ in seed"),
        (replace(a10g[0], manifest=door), "was made by sweep, not by audition"),
        (replace(a10g[0], manifest=combined), "is combined already"),
    ):
        with pytest.raises(UserError, match=says):
            rank_cards([l4[0], other], [l4[1], a10g[1]])
    with pytest.raises(UserError, match="ranked no draft"):
        rank_cards([l4[0]], [replace(l4[1], leaderboards=())])
    with pytest.raises(UserError, match="both of l4"):
        ranked(l4, l4, l4)


def audition(root: Path, *overrides: str) -> StoredRun:
    return ran("audition", root, *SMALL, *overrides)


@pytest.fixture(scope="module")
def two_cards(tmp_path_factory: pytest.TempPathFactory) -> tuple[StoredRun, StoredRun]:
    """An audition on one card, and its texts with one more draft on another."""
    root = tmp_path_factory.mktemp("results")
    first = audition(root, "drafts=[tiny_good]", "gpu=l4")
    shared = (f"traces_from={first.folder}", "latency.measure=true")
    second = audition(root, "drafts=[tiny_good,ngram]", "gpu=a10g", *shared)
    for run, name, memory in ((first, "NVIDIA L4", 23.6e9), (second, "NVIDIA A10G", 23.8e9)):
        device = {"device_name": name, "device_memory_bytes": memory}
        environment = {**run.manifest.environment.entries, **device}
        RunFolder(run.folder, run.manifest).note(environment=environment)
    return load(first.folder), load(second.folder)


def test_other_runs_texts_are_used_again_and_the_steps_timed_here(
    two_cards: tuple[StoredRun, StoredRun],
) -> None:
    first, second = two_cards
    assert [t.tokens for t in second.trials] == [t.tokens for t in first.trials]
    assert set(second.latency_samples.model) == {"tiny", "tiny_good", "ngram"}
    assert first.latency_samples.ms.tolist() != second.latency_samples.ms.tolist()
    replayed = [run.results[run.results.draft == "tiny_good"] for run in two_cards]
    assert replayed[0].rounds.tolist() == replayed[1].rounds.tolist()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["latency.measure=true", "traces_from=null"], "latency.measure: with traces_from"),
        (["seed=1"], "made with seed=0"),
        (["new_tokens=9"], "made with new_tokens=8"),
        (["temperature=[1]"], "no texts at temperature=1"),
        (["latency.target_ms=3"], "latency.measure: not with"),
    ],
)
def test_other_texts_than_those_asked_for_are_refused(
    two_cards: tuple[StoredRun, StoredRun], overrides: list[str], says: str, tmp_path: Path
) -> None:
    shared = (f"traces_from={two_cards[0].folder}", "latency.measure=true")
    with pytest.raises(UserError, match=says):
        audition(tmp_path, "drafts=[tiny_good]", *shared, *overrides)
    assert list(tmp_path.iterdir()) == []


def test_cards_are_combined_into_one_run(
    two_cards: tuple[StoredRun, StoredRun], tmp_path: Path
) -> None:
    def combine(*folders: Path) -> StoredRun:
        names = ",".join(map(str, folders))
        return ran("audition", tmp_path, f"combine=[{names}]")

    combined = combine(*(run.folder for run in two_cards))
    assert (combined.door, combined.manifest.status) == ("audition", "complete")
    again = analyse(combined)
    assert {(row.card, row.price_per_hour_usd) for row in again.cards} == {
        *(("l4", 0.7992), ("a10g", 1.1016))
    }
    report = (combined.folder / "report.md").read_text()
    assert "## Which card" in report
    assert "$1.10" in report
    with pytest.raises(UserError, match="is combined already"):
        combine(combined.folder)
    with pytest.raises(UserError, match="not a run folder"):
        combine(tmp_path)


def test_a_dry_run_prints_the_modelled_cost_of_one_card_or_of_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def dry(*overrides: str) -> str:
        outcome_of("sweep", "dry_run=true", *overrides)
        return capsys.readouterr().out

    one = dry("model=qwen3_4b", "draft=qwen3_0_6b", "gpu=a10g")
    assert "Time and cost (modelled)" in one
    assert "a10g" in one
    assert "to 0.8 ms a layer" in one
    assert "h100" not in one
    every = dry("verbose=tables")
    assert all(f"\n{card.name} " in every for card in all_cards())
    assert "does not fit" in dry("model=qwen3_32b", "draft=qwen3_0_6b", "gpu=l4")
    unknown = dry("model=hf", "model.id=org/some", "draft=tiny_good")
    assert "estimated cost: unknown; the sizes of some are not in its config" in unknown
