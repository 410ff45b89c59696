"""The embedded models are what the rest of the harness takes them for."""

import hashlib
import json
from collections import Counter
from itertools import islice

import pytest
import torch

from tools.train_embedded.corpus import TASKS, documents, find_task
from tools.train_embedded.measure import (
    continue_prompt,
    load,
    load_tokenizer,
    measure_acceptance,
    read_prompts,
)
from tools.train_embedded.recipes import (
    DRAFTS,
    FAMILY_DIR,
    GOOD,
    PROMPT_SETS_DIR,
    RECIPES,
    SMALL,
    TARGET,
    UNRELATED,
)
from tools.train_embedded.tasks import Document
from tools.train_embedded.vocabulary import END_TOKEN, PAD_TOKEN

FAMILY_LIMIT_BYTES = 8_000_000
PROMPTS_MEASURED = 8


@pytest.fixture(scope="module")
def acceptance():
    """Sampled and greedy acceptance by (draft, kind), over the first prompts of each set."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    target, *drafts = [load(recipe) for recipe in RECIPES]
    tokenizer = load_tokenizer(TARGET)
    found = {}
    for kind in ("easy", "hard"):
        prompts = read_prompts(kind)[:PROMPTS_MEASURED]
        measured = measure_acceptance(target, drafts, tokenizer, prompts, samples=4, seed=7)
        found |= {(draft.name, kind): value for draft, value in zip(DRAFTS, measured, strict=True)}
    torch.set_num_threads(threads)
    return found


def test_the_models_are_small_and_share_one_tokenizer() -> None:
    files = [path for path in FAMILY_DIR.glob("*/*") if path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) <= FAMILY_LIMIT_BYTES
    assert {(recipe.folder / "model.safetensors").is_file() for recipe in RECIPES} == {True}
    assert len({(recipe.folder / "tokenizer.json").read_bytes() for recipe in RECIPES}) == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_model_agrees_with_its_tokenizer_and_sets_no_sampling_defaults(recipe) -> None:
    tokenizer, model = load_tokenizer(recipe), load(recipe)
    assert len(tokenizer) == model.config.vocab_size <= 1024
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END_TOKEN, PAD_TOKEN)
    assert tokenizer.chat_template is None
    assert model.config.model_type == "qwen3"
    assert model.config.tie_word_embeddings
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == tokenizer.eos_token_id
    settings = json.loads((recipe.folder / "generation_config.json").read_text())
    assert settings.pop("eos_token_id") == tokenizer.eos_token_id
    assert set(settings) <= {"_from_model_config", "pad_token_id", "transformers_version"}


def test_tokenizer_decodes_any_text_back_to_itself():
    tokenizer = load_tokenizer(TARGET)
    for text in ("Count from 12 to 40.", "Größe: 10 €\n\ttab", "  two  spaces ", "猫"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_prompt_encodes_to_the_start_of_its_document():
    tokenizer = load_tokenizer(TARGET)
    for kind in TASKS:
        for document in islice(documents({kind: 1.0}, seed=3), 100):
            prompt_ids = tokenizer(document.prompt).input_ids
            assert tokenizer(document.text).input_ids[: len(prompt_ids)] == prompt_ids


def test_the_same_seed_gives_the_same_corpus_and_another_seed_another():
    def first(seed: int) -> list[Document]:
        return list(islice(documents({"easy": 0.5, "hard": 0.4, "unrelated": 0.1}, seed), 50))

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_the_corpus_is_the_one_the_weights_were_trained_on():
    text = "\n\n".join(
        document.text for kind in TASKS for document in islice(documents({kind: 1.0}, seed=1), 200)
    )
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "fa9518deb92ea121"


@pytest.mark.parametrize("kind", ["easy", "hard"])
def test_every_task_accepts_the_prompts_it_makes(kind):
    for task in TASKS[kind]:
        for document in islice(documents({kind: 1.0}, seed=5), 100):
            found = find_task(document.prompt, kind)
            assert found is not None
            assert found.category == document.category
        assert not task.accepts("Write a haiku about rain.")


@pytest.mark.parametrize("kind", ["easy", "hard"])
def test_shipped_prompts_are_unique_and_instances_of_the_corpus_templates(kind):
    lines = (PROMPT_SETS_DIR / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) >= 24
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        task = find_task(row["prompt"], kind)
        assert task is not None
        assert task.category == row["category"]
    expected = {task.category for task in TASKS[kind]}
    assert set(Counter(row["category"] for row in rows)) == expected


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (
            "What is the capital of France? Answer in one sentence.",
            "The capital of France is Paris.",
        ),
        ("What is 4 plus 5? Answer with one short sentence.", "4 plus 5 is 9."),
    ],
)
def test_the_target_answers_and_stops(prompt, answer):
    target, tokenizer = load(TARGET), load_tokenizer(TARGET)
    texts = continue_prompt(target, tokenizer(prompt).input_ids, 0, torch.Generator())
    written = texts.ids[0, texts.prompt_tokens :][texts.kept[0]]
    assert tokenizer.decode(written) == f"\n{answer}{END_TOKEN}"


def test_the_good_draft_pays_on_easy_text_and_not_on_hard_text(acceptance):
    assert acceptance[GOOD.name, "easy"].sampled >= 0.75
    assert acceptance[GOOD.name, "hard"].sampled <= 0.72
    assert acceptance[GOOD.name, "easy"].greedy > acceptance[GOOD.name, "hard"].greedy + 0.1


@pytest.mark.parametrize("kind", ["easy", "hard"])
def test_the_small_draft_is_worse_and_the_unrelated_one_useless(acceptance, kind):
    good, small = acceptance[GOOD.name, kind].sampled, acceptance[SMALL.name, kind].sampled
    assert small <= good - 0.05
    assert acceptance[UNRELATED.name, kind].sampled < 0.30
