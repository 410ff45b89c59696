"""Folders that hold no whole causal language model: one clear line each, at every door."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_models import qwen3, save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, Qwen3Config

from harness.cli import compose, draft_conf
from harness.commands import audition, profile, snapshot, sweep
from harness.config import ModelConf
from harness.models.load import load
from harness.records import UserError

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"

Change = Callable[[Path], None]


def whole(folder: Path, *, tied: bool = False) -> Path:
    return save(qwen3(tie_word_embeddings=tied), folder)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def configure(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def without_one_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def without_a_head(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    configure(folder, architectures=["Qwen3Model"])


def without_embedding_and_tied_head(folder: Path) -> None:
    configure(folder, tie_word_embeddings=True)
    rewrite(
        folder,
        lambda tensors: (tensors.pop("lm_head.weight"), tensors.pop("model.embed_tokens.weight")),
    )


def reward_model(folder: Path) -> None:
    config = Qwen3Config.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def unnamed_reward_model(folder: Path) -> None:
    reward_model(folder)
    configure(folder, architectures=None)


def eagle_1(folder: Path) -> None:
    """One layer, an fc over token and hidden state, no head; config.json says LlamaForCausalLM."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        layer = {k.removeprefix("model."): v for k, v in tensors.items() if ".layers.0." in k}
        tensors.clear()
        tensors |= {**layer, "fc.weight": torch.zeros(32, 64)}

    rewrite(folder, change)
    configure(folder, num_hidden_layers=1, layer_types=["full_attention"])


def eagle_3(folder: Path) -> None:
    configure(folder, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=512)


def speculators(folder: Path) -> None:
    config = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
    (folder / "config.json").write_text(json.dumps(config))


def lora(folder: Path) -> None:
    for name in (WEIGHTS, "config.json"):
        (folder / name).unlink()
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def lora_beside_its_base(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))


def gguf(folder: Path) -> None:
    for name in (WEIGHTS, "config.json"):
        (folder / name).unlink()
    (folder / "model-q4_k_m.gguf").write_bytes(b"GGUF")


def truncated(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:5000])


def inconsistent_config(folder: Path) -> None:
    configure(folder, num_hidden_layers=1)


def other_sizes(folder: Path) -> None:
    configure(folder, intermediate_size=64)


BROKEN: list[tuple[Change, str]] = [
    (
        without_one_tensor,
        r"it lacks 1 of 25 tensors \(model\.layers\.1\.mlp\.up_proj\.weight\).*"
        "an incomplete checkpoint",
    ),
    (without_a_head, r"\(lm_head\.weight\).*a base model without its output head"),
    (without_embedding_and_tied_head, r"it lacks 2 of 25 tensors \(lm_head"),
    (reward_model, "a reward model or classifier"),
    (unnamed_reward_model, r"\(lm_head\.weight\).*a reward model or classifier"),
    (eagle_1, r"it lacks 3 of 14 tensors.*a head for speculative decoding"),
    (eagle_3, "a head for speculative decoding"),
    (speculators, "a head for speculative decoding"),
    (lora, "a LoRA adapter of org/base, not a whole model; merge"),
    (lora_beside_its_base, "a LoRA adapter of its base model"),
    (gguf, "weights in GGUF"),
    (truncated, "damaged or cut short.*download or save it again"),
    (inconsistent_config, r"config\.json cannot be used \(`num_hidden_layers` \(1\) must be equal"),
    (other_sizes, r"6 of 25 tensors have another shape.*another architecture or size"),
]


@pytest.mark.parametrize(
    ("change", "line"), BROKEN, ids=lambda entry: getattr(entry, "__name__", "")
)
def test_a_folder_that_is_no_whole_causal_model_is_refused_by_what_it_is(
    change: Change, line: str, tmp_path: Path
) -> None:
    folder = whole(tmp_path / "x")
    change(folder)
    with pytest.raises(UserError, match=line) as caught:
        load(ModelConf(name="x", id=str(folder)), "draft", CPU)
    assert str(caught.value).startswith(f"draft.id={folder}: ")
    assert "\n" not in str(caught.value)


def test_a_single_file_is_refused_by_what_to_give_instead(tmp_path: Path) -> None:
    folder = whole(tmp_path / "x")
    with pytest.raises(UserError, match="a file; give the folder"):
        load(ModelConf(name="x", id=str(folder / WEIGHTS)), "draft", CPU)


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_loads_with_its_own_weights_tied_head_or_not(
    tmp_path: Path, tied: bool
) -> None:
    made = qwen3(tie_word_embeddings=tied)
    folder = save(made, tmp_path / "x")
    assert ("lm_head.weight" in load_file(folder / WEIGHTS)) is not tied
    loaded = load(ModelConf(name="x", id=str(folder)), "draft", CPU).network
    ids = torch.tensor([[5, 9, 77, 3]])
    assert torch.equal(loaded(ids).logits, made(ids).logits)


def test_left_over_tensors_alone_are_no_reason_to_refuse(tmp_path: Path) -> None:
    """Checkpoints carry layers for multi-token prediction that a causal model does not have."""
    folder = whole(tmp_path / "x")
    rewrite(folder, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(2, 2)}))
    load(ModelConf(name="x", id=str(folder)), "draft", CPU)


def test_every_door_that_loads_refuses_an_incomplete_checkpoint(tmp_path: Path) -> None:
    folder = whole(tmp_path / "x")
    without_one_tensor(folder)
    few = [f"results_root={tmp_path}/results", "prompts.limit=1", "new_tokens=4", "threads=1"]
    line = r"draft\.id=.*: it lacks 1 of 25 tensors"
    for door, run in (("sweep", sweep.run), ("snapshot", snapshot.run), ("profile", profile.run)):
        with pytest.raises(UserError, match=line):
            run(compose(door, [*few, "draft=hf", f"draft.id={folder}", "draft.name=x"]))
    target = ["model=hf", f"model.id={folder}", "model.name=x"]
    with pytest.raises(UserError, match=r"model\.id=.*: it lacks 1 of 25 tensors"):
        audition.run(compose("audition", [*few, *target]), [draft_conf("tiny_good")])


@pytest.mark.parametrize(
    ("setting", "extra"), [("quantization", "quantization"), ("device_map", "accelerate")]
)
def test_a_setting_without_its_package_names_the_extra(
    setting: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.models.load.find_spec", lambda _name: None)
    folder = whole(tmp_path / "x")
    values = {"quantization": "int8", "device_map": "auto"}
    conf = replace(ModelConf(name="x", id=str(folder)), **{setting: values[setting]})
    line = (
        rf"draft\.{setting}={values[setting]}: needs .*`pip install speculation-harness\[{extra}\]`"
    )
    with pytest.raises(UserError, match=line):
        load(conf, "draft", CPU)


def test_pickled_weights_are_read_only_where_that_is_allowed(tmp_path: Path) -> None:
    folder = save(qwen3(), tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    conf = ModelConf(name="pickled", id=str(folder))
    with pytest.raises(UserError, match=r"no \*.safetensors there; .* model.allow_pickle=true"):
        load(conf, "model", torch.device("cpu"))
    allowed = load(replace(conf, allow_pickle=True), "model", torch.device("cpu"))
    assert allowed.vocab_size == 1024
