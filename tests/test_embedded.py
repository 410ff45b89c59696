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
from tools.train_embedded.vocabulary import END_TOKEN, PAD_TOKEN

FAMILY_LIMIT_BYTES = 8_400_000
PROMPTS_MEASURED = 8


@pytest.fixture(scope="module")
def acceptance():
    """Sampled and greedy acceptance by (draft, kind), over the first prompts of each set."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    target, *drafts = [load(recipe) for recipe in RECIPES]
    tokenizer = load_tokenizer(TARGET)
    acceptances = {}
    for kind in ("easy", "hard"):
        prompts = read_prompts(kind)[:PROMPTS_MEASURED]
        measured = measure_acceptance(target, drafts, tokenizer, prompts, samples=4, seed=7)
        acceptances |= {
            (draft.name, kind): value for draft, value in zip(DRAFTS, measured, strict=True)
        }
    torch.set_num_threads(threads)
    return acceptances


def test_the_models_are_small_and_share_one_tokenizer() -> None:
    files = [path for path in FAMILY_DIR.glob("*/*") if path.suffix != ".pyc"]
    for of_llamacpp in (False, True):
        some = (path for path in files if (path.suffix == ".gguf") == of_llamacpp)
        assert sum(path.stat().st_size for path in some) <= FAMILY_LIMIT_BYTES
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


def test_the_tokenizer_decodes_any_text_and_encodes_a_prompt_as_the_start_of_its_document():
    tokenizer = load_tokenizer(TARGET)
    for text in ("Count from 12 to 40.", "Größe: 10 €\n\ttab", "  two  spaces ", "猫"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    for kind in TASKS:
        for document in islice(documents({kind: 1.0}, seed=3), 100):
            prompt_ids = tokenizer(document.prompt).input_ids
            assert tokenizer(document.text).input_ids[: len(prompt_ids)] == prompt_ids


def test_the_corpus_is_the_one_the_weights_were_trained_on():
    text = "\n\n".join(
        document.text for kind in TASKS for document in islice(documents({kind: 1.0}, seed=1), 200)
    )
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "fa9518deb92ea121"


@pytest.mark.parametrize("kind", ["easy", "hard"])
def test_shipped_prompts_are_unique_and_instances_of_the_corpus_templates(kind):
    lines = (PROMPT_SETS_DIR / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) >= 24
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({row["prompt"] for row in rows}) == len(rows)
    other = []
    for row in rows:
        task = find_task(row["prompt"], kind)
        if task is None:
            other.append(row["category"])
        else:
            assert task.category == row["category"]
    assert other == (["lists"] * 5 if kind == "easy" else []), "the corpus has few lists"
    assert not any(task.accepts("Write a haiku about rain.") for task in TASKS[kind])
    expected = {task.category for task in TASKS[kind]}
    assert set(Counter(row["category"] for row in rows)) == expected


@pytest.mark.parametrize("kind", ["easy", "hard"])
def test_no_shipped_prompt_is_a_near_copy(kind):
    """The second 32 of a set ask each for something that no other prompt of their task asks for."""
    lines = (PROMPT_SETS_DIR / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    asked = {row["id"]: (find_task(row["prompt"], kind), row["prompt"]) for row in rows}
    for name, (task, prompt) in asked.items():
        if task is None or int(name.rpartition("-")[2]) <= 32:
            continue
        values = task.values(prompt) or {}
        for other, (of, same) in asked.items():
            if of is task and other != name:
                common = sum(
                    values[blank] == value for blank, value in (task.values(same) or {}).items()
                )
                assert 3 * common <= len(values), f"{name} is nearly {other}"


def test_the_target_answers_and_stops():
    target, tokenizer = load(TARGET), load_tokenizer(TARGET)
    prompt = tokenizer("What is the capital of France? Answer in one sentence.").input_ids
    texts = continue_prompt(target, prompt, 0, torch.Generator())
    completion = texts.ids[0, texts.prompt_tokens :][texts.kept[0]]
    assert tokenizer.decode(completion) == f"\nThe capital of France is Paris.{END_TOKEN}"


@pytest.mark.exhaustive
def test_the_good_draft_pays_on_easy_text_and_not_on_hard_text(acceptance):
    assert acceptance[GOOD.name, "easy"].sampled >= 0.75
    assert acceptance[GOOD.name, "hard"].sampled <= 0.72
    assert acceptance[GOOD.name, "easy"].greedy > acceptance[GOOD.name, "hard"].greedy + 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["easy", "hard"])
def test_the_small_draft_is_worse_and_the_unrelated_one_useless(acceptance, kind):
    good, small = acceptance[GOOD.name, kind].sampled, acceptance[SMALL.name, kind].sampled
    assert small <= good - 0.05
    assert acceptance[UNRELATED.name, kind].sampled < 0.30
