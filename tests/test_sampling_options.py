"""min_p, repetition_penalty, stop_strings: the same text with a draft and without; refusals."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import qwen3, save
from transformers import GenerationConfig

from harness import audition, snapshot, sweep
from harness import prompts as prompt_sets
from harness.cli import compose
from harness.commands.outcome import Outcome
from harness.decoding.sampling import (
    SamplingParameters,
    penalised,
    sampler_for,
    seen_along,
    seen_tokens,
)
from harness.models.load import load
from harness.models.tokenizer import StopStrings, stop_rule
from harness.records import UserError
from harness.storage import load as load_run


def run(door, tmp_path: Path, *overrides: str) -> Outcome:
    words = [f"results_root={tmp_path}", "threads=1", *overrides]
    return door.work(compose(door.__name__.rpartition(".")[2], words))


SMALL = ("prompts.limit=4", "new_tokens=24", "k=[1,4]")


def test_a_penalty_divides_positive_logits_and_multiplies_negative_ones_of_seen_tokens() -> None:
    logits = torch.tensor([[2.0, -1.0, 3.0, -4.0]])
    seen = seen_tokens([0, 1, 1], 4, torch.device("cpu"))
    assert penalised(logits, seen, 2.0).tolist() == [[1.0, -2.0, 3.0, -4.0]]
    assert penalised(logits, seen, None) is logits


def test_each_row_of_a_verify_has_seen_the_drafted_tokens_before_it() -> None:
    seen = seen_tokens([3], 5, torch.device("cpu"))
    rows = seen_along(seen, torch.tensor([1, 1, 4]))
    assert [row.nonzero().squeeze(1).tolist() for row in rows] == [[3], [1, 3], [1, 3], [1, 3, 4]]
    assert seen.sum() == 1


def test_min_p_drops_what_is_less_likely_than_its_share_of_the_best() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    probs = sampler_for(SamplingParameters(1.0, min_p=0.4))(logits)
    assert probs[0].tolist() == pytest.approx([0.625, 0.375, 0.0, 0.0])


def test_a_penalised_greedy_text_is_transformers_own_and_the_same_at_every_k(
    tmp_path: Path,
) -> None:
    outcome = run(sweep, tmp_path, *SMALL, "temperature=[0]", "decode.repetition_penalty=1.3")
    assert outcome.status == 0
    assert outcome.folder is not None
    stored = load_run(outcome.folder)
    texts: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for trial in stored.trials:
        texts.setdefault((trial.prompt_set, trial.prompt), set()).add(trial.tokens or ())
    assert all(len(own) == 1 for own in texts.values())

    config = compose("sweep", list(SMALL))
    loaded = load(config.model, "model", torch.device("cpu"))
    settings = GenerationConfig(
        max_new_tokens=24,
        repetition_penalty=1.3,
        do_sample=False,
        eos_token_id=sorted(loaded.eos),
        pad_token_id=0,
    )
    for prompt in prompt_sets.load(config.prompts):
        ids = torch.tensor([loaded.tokenizer(prompt.turns[0])["input_ids"]])
        network: Any = loaded.network
        whole = network.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )
        (own,) = texts[prompt.prompt_set, prompt.id]
        assert tuple(whole[0, ids.shape[1] :].tolist()) == own


@pytest.mark.parametrize("door", [sweep, audition])
def test_replay_knows_the_penalty_and_the_stop_strings(tmp_path: Path, door) -> None:
    options = ("decode.repetition_penalty=1.2", "decode.min_p=0.02", "decode.stop_strings=[' the']")
    loop = run(sweep, tmp_path / "loop", *SMALL, "temperature=[0]", *options)
    replayed = ["mode=replay"] if door is sweep else ["drafts=[tiny_good]"]
    replay = run(door, tmp_path / "replay", *SMALL, "temperature=[0]", *options, *replayed)
    assert loop.folder is not None
    assert replay.folder is not None
    measured = load_run(loop.folder).results.query("k > 0 and source == 'measured'")
    counted = load_run(replay.folder).results.query("k > 0 and source == 'replayed'")
    rounds = {(row.prompt_set, row.k): row.rounds for row in measured.itertuples()}
    assert rounds
    for row in counted.itertuples():
        assert row.rounds == pytest.approx(rounds[row.prompt_set, row.k])


def test_sampled_tokens_follow_the_penalised_distribution(tmp_path: Path) -> None:
    outcome = run(
        snapshot,
        tmp_path,
        *("k=[2]", "temperature=[2.0]", "prompts.sets=[hard]", "prompts.limit=6"),
        *("decode.repetition_penalty=1.2", "decode.min_p=0.002"),
    )
    assert outcome.status == 0


def test_a_draft_that_is_the_target_is_always_accepted_under_a_penalty(tmp_path: Path) -> None:
    outcome = run(
        sweep,
        tmp_path,
        *("draft=tiny", "draft.name=copy", "k=[3]", "temperature=[1.0]", "prompts.limit=3"),
        *("new_tokens=24", "decode.repetition_penalty=1.4", "decode.top_k=40"),
    )
    assert outcome.folder is not None
    trials = [trial for trial in load_run(outcome.folder).trials if trial.k]
    assert sum(trial.rejected or 0 for trial in trials) == 0


def test_texts_end_with_the_token_that_completes_a_stop_string(tmp_path: Path) -> None:
    plain = run(sweep, tmp_path, *SMALL, "temperature=[0]")
    stopped = run(sweep, tmp_path, *SMALL, "temperature=[0]", "decode.stop_strings=['a','. ']")
    assert plain.folder is not None
    assert stopped.folder is not None
    tokenizer = load(compose("sweep").model, "model", torch.device("cpu")).tokenizer
    whole = {
        (t.prompt_set, t.prompt): t.tokens or () for t in load_run(plain.folder).trials if t.k == 0
    }
    reasons: Counter[str | None] = Counter()
    for trial in load_run(stopped.folder).trials:
        text = whole[trial.prompt_set, trial.prompt]
        ends = (n for n in range(1, len(text) + 1) if _holds(tokenizer.decode(text[:n])))
        assert trial.tokens == text[: next(ends, len(text))]
        reasons[trial.stop_reason] += 1
    assert reasons["stop_string"] > 0


def _holds(text: str) -> bool:
    return "a" in text or ". " in text


def test_a_stop_string_across_many_tokens_is_found_where_it_is_completed() -> None:
    tokenizer = load(compose("sweep").model, "model", torch.device("cpu")).tokenizer
    ids = tokenizer("Some words, then a long sentence that ends here. And more.")["input_ids"]
    rule = StopStrings(tokenizer, ["long sentence that ends"])
    expected = next(
        n for n in range(1, len(ids) + 1) if "long sentence that ends" in tokenizer.decode(ids[:n])
    )
    for cut in range(expected):
        kept = rule(ids[:cut], ids[cut:])
        assert kept == expected - cut
    assert rule(ids[: expected - 1], ()) is None
    assert stop_rule(tokenizer, []) is None


def test_an_older_run_keeps_its_keys_where_no_new_option_is_used(tmp_path: Path) -> None:
    outcome = run(sweep, tmp_path, "prompts.limit=1", "new_tokens=4", "k=[1]", "temperature=[0]")
    assert outcome.folder is not None
    cells = {trial.cell for trial in load_run(outcome.folder).trials}
    same = run(
        sweep,
        tmp_path,
        *("prompts.limit=1", "new_tokens=4", "k=[1]", "temperature=[0]"),
        "decode.repetition_penalty=1.0",
    )
    assert same.folder is not None
    assert {trial.cell for trial in load_run(same.folder).trials} == cells
    manifest = json.loads((same.folder / "manifest.json").read_text())
    assert manifest["status"] == "complete"


def test_what_generation_config_asks_for_and_the_run_did_not_do_is_a_caveat(tmp_path: Path) -> None:
    network = qwen3()
    network.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, repetition_penalty=1.05, suppress_tokens=[3]
    )
    folder = save(network, tmp_path / "model")
    words = [f"model.id={folder}", f"draft.id={folder}", "model=hf", "draft=hf", "draft.name=copy"]
    short = [*words, "prompts.limit=1", "new_tokens=4", "k=[1]"]

    def caveat(*overrides: str) -> str:
        outcome = run(sweep, tmp_path / "runs", *short, *overrides)
        assert outcome.folder is not None
        notes = json.loads((outcome.folder / "summary.json").read_text())["caveats"]
        return " ".join(note for note in notes if "generation_config" in note)

    both = caveat("temperature=[0.0,1.0]")
    assert "temperature=0.6, top_k=20, repetition_penalty=1.05, suppress_tokens=[3]" in both
    assert "decode.top_k=20 decode.repetition_penalty=1.05" in both
    greedy = caveat("temperature=[0]", "decode.repetition_penalty=1.05")
    assert "sets suppress_tokens=[3]:" in greedy


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("+decode.min_q=0.1", "decode.min_q: there is no such key; similar names: decode.min_p"),
        ("+new_token=5", "new_token: there is no such key; similar names: new_tokens"),
        ("++prompts.wieghts={easy:1}", "similar names: prompts.weights"),
        ("+decode.presence_penalty=1", "similar names: decode.repetition_penalty"),
        ("+zzz=1", "zzz: there is no such key; it takes: "),
        (
            "temperature=[1e-39]",
            "temperature: 1e-39 is not 0 (greedy) or a number of at least 0.01",
        ),
        ("threads=100000", "threads: 100000 is not auto or a whole number"),
        ("k=[1000000]", "k: 1000000 is not a whole number of at least 0 and at most 1024"),
        (
            "repetitions=1000000000",
            "repetitions: 1000000000 is not a whole number of at least 1 and at most 10000",
        ),
        ("decode.min_p=1.5", "decode.min_p: 1.5 is not a number above 0 and at most 1"),
        ("decode.repetition_penalty=0", "decode.repetition_penalty: 0.0 is not a number"),
        ("decode.stop_strings=['']", "decode.stop_strings: an empty string"),
        (r"decode.stop_strings=['\n']", "holds a backslash and an n, not a line break"),
    ],
)
def test_a_key_or_value_that_makes_no_sense_is_refused_by_name(override: str, named: str) -> None:
    with pytest.raises(UserError) as refusal:
        compose("sweep", [override])
    assert named in str(refusal.value)


def test_so_many_draws_that_memory_runs_out_are_refused() -> None:
    with pytest.raises(UserError, match="draws: 1000000000 is not a whole number of at least 5000"):
        compose("snapshot", ["draws=1000000000"])


def test_a_profile_takes_no_penalty_since_its_parts_are_timed_without() -> None:
    with pytest.raises(UserError, match=r"decode.repetition_penalty: a profile times"):
        compose("profile", ["decode.repetition_penalty=1.2"])


def test_groups_and_mappings_of_the_users_own_may_still_be_added() -> None:
    config = compose("sweep", ["experiment=temperature_demo", "prompts.weights={easy:1,hard:2}"])
    assert config.prompts.weights == {"easy": 1, "hard": 2}
