"""min_p, repetition_penalty, stop_strings: the same text with a draft and without; refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import qwen3, save
from runs import assert_replay_is_exact, ran
from transformers import GenerationConfig

from harness import prompts as prompt_sets
from harness.analysis import analyse
from harness.cli import compose
from harness.decoding.sampling import (
    SamplingParameters,
    penalised,
    sampler_for,
    seen_along,
    seen_tokens,
)
from harness.models.load import load
from harness.models.tokenizer import StopStrings, stop_rule
from harness.reporting.content import content_of

pytestmark = pytest.mark.usefixtures("few_samples")
CPU = torch.device("cpu")


SMALL = ("prompts.limit=2", "new_tokens=16", "k=[1,4]", "threads=1")


def test_a_penalty_divides_positive_logits_and_multiplies_negative_ones_of_seen_tokens() -> None:
    logits = torch.tensor([[2.0, -1.0, 3.0, -4.0]])
    seen = seen_tokens([0, 1, 1], 4, CPU)
    assert penalised(logits, seen, 2.0).tolist() == [[1.0, -2.0, 3.0, -4.0]]
    assert penalised(logits, seen, None) is logits


def test_each_row_of_a_verify_has_seen_the_drafted_tokens_before_it() -> None:
    seen = seen_tokens([3], 5, CPU)
    rows = seen_along(seen, torch.tensor([1, 1, 4]))
    assert [row.nonzero().squeeze(1).tolist() for row in rows] == [[3], [1, 3], [1, 3], [1, 3, 4]]
    assert seen.sum() == 1


def test_min_p_drops_what_is_less_likely_than_its_share_of_the_best() -> None:
    probs = sampler_for(SamplingParameters(1.0, min_p=0.4))(torch.tensor([[0.5, 0.3, 0.2]]).log())
    assert probs[0].tolist() == pytest.approx([0.625, 0.375, 0.0])


def generated(config: Any, **more: Any) -> dict[tuple[str, str], tuple[int, ...]]:
    """The greedy texts after the prompts of a configuration, by transformers' own generation."""
    loaded = load(config.model, CPU)
    network: Any = loaded.network
    ends = {"eos_token_id": sorted(loaded.eos), "pad_token_id": 0}
    settings = GenerationConfig(max_new_tokens=16, do_sample=False, **ends, **more)
    texts: dict[tuple[str, str], tuple[int, ...]] = {}
    for prompt in prompt_sets.load(config.prompts):
        ids = torch.tensor([loaded.tokenizer(prompt.turns[0])["input_ids"]])
        text = network.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )
        texts[prompt.prompt_set, prompt.id] = tuple(text[0, ids.shape[1] :].tolist())
    return texts


def test_a_penalised_greedy_text_is_transformers_own_and_the_same_at_every_k(
    tmp_path: Path,
) -> None:
    stored = ran(
        "sweep", tmp_path, *SMALL, "temperature=[0]", "decode.repetition_penalty=1.3", "until=all"
    )
    texts = generated(compose("sweep", list(SMALL)), repetition_penalty=1.3)
    for trial in stored.trials:
        assert trial.tokens == texts[trial.prompt_set, trial.prompt]
    assert_replay_is_exact(stored)


def test_texts_end_with_the_token_that_completes_a_stop_string(tmp_path: Path) -> None:
    words = (*SMALL, "temperature=[0]", "until=all")
    stopped = ran("sweep", tmp_path, *words, "decode.stop_strings=['a','. ']")
    config = compose("sweep", list(SMALL))
    tokenizer, texts = load(config.model, CPU).tokenizer, generated(config)
    reasons: set[str | None] = set()
    for trial in stopped.trials:
        text = texts[trial.prompt_set, trial.prompt]
        decoded = [tokenizer.decode(text[:n]) for n in range(1, len(text) + 1)]
        ends = (n for n, start in enumerate(decoded, 1) if "a" in start or ". " in start)
        assert trial.tokens == text[: next(ends, len(text))]
        reasons.add(trial.stop_reason)
    assert "stop_string" in reasons
    assert_replay_is_exact(stopped)


def test_a_stop_string_across_many_tokens_is_found_where_it_is_completed() -> None:
    tokenizer = load(compose("sweep").model, CPU).tokenizer
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


def test_what_generation_config_asks_for_and_the_run_did_not_do_is_a_caveat(tmp_path: Path) -> None:
    network = qwen3()
    network.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, repetition_penalty=1.05, suppress_tokens=[3]
    )
    folder = save(network, tmp_path / "model")
    words = [f"model.id={folder}", f"draft.id={folder}", "model=hf", "draft=hf", "draft.name=copy"]
    short = [*words, "prompts.limit=1", "new_tokens=4", "k=[1]", "threads=1"]

    def caveat(*overrides: str) -> str:
        stored = ran("sweep", tmp_path / "runs", *short, "until=all", *overrides)
        caveats = content_of(analyse(stored)).caveats
        return " ".join(line for line in caveats if "a server applies" in line.lower())

    both = caveat("temperature=[0.0,1.0]")
    assert "temperature=0.6, top_k=20, repetition_penalty=1.05, suppress_tokens=[3]" in both
    assert "decode.top_k=20 decode.repetition_penalty=1.05" in both
    greedy = caveat("temperature=[0]", "decode.repetition_penalty=1.05")
    assert "applies suppress_tokens=[3] unless" in greedy


def test_groups_and_mappings_of_the_users_own_may_still_be_added() -> None:
    config = compose("sweep", ["experiment=temperature_demo", "prompts.weights={easy:1,hard:2}"])
    assert config.prompts.weights == {"easy": 1, "hard": 2}
