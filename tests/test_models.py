"""Loading, tokenizer checks, and caches that can be rewound."""

import tomllib
import warnings
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from random_models import qwen3, random_model, save
from transformers import (
    BertConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Mamba2Config,
    MistralConfig,
    OpenAIGPTConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

from harness.config import ModelConf, PromptsConf
from harness.models.architecture import model_sizes
from harness.models.backbone import SplitNetwork, split_network
from harness.models.cached import CachedModel, SnapshotModel
from harness.models.lean.model import LeanModel
from harness.models.load import LoadedModel, load, open_pair, resolve_device, tokenizer_difference
from harness.models.probe import cache_error, cached_model, rewind_error
from harness.models.tokenizer import encode
from harness.records import Prompt, UserError

CPU = torch.device("cpu")


def conf(name: str, **more: Any) -> ModelConf:
    return ModelConf(**{"name": name, "id": f"embedded:{name}", **more})


def hybrid() -> PreTrainedModel:
    """Gated delta rule layers with a recurrent state, and one attention layer."""
    return random_model(
        Qwen3NextConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            linear_num_value_heads=2,
            linear_num_key_heads=1,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            initializer_range=0.3,
        )
    )


def sliding() -> PreTrainedModel:
    return random_model(
        MistralConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=8,
            initializer_range=0.3,
        )
    )


def loaded(network: PreTrainedModel, tokenizer: Any, name: str = "x") -> LoadedModel:
    return LoadedModel("draft", name, network, tokenizer, frozenset(), 256)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load(conf("tiny"), "model", CPU)


def test_prefill_then_forward_equals_one_forward_over_everything() -> None:
    network = qwen3()
    model = CachedModel(network, 1024)
    tokens = [5, 9, 77, 3, 12, 40]
    model.prefill(tokens[:3])
    logits = model.forward(torch.tensor(tokens[3:]))
    whole = network(torch.tensor([tokens])).logits[0, 3:]
    assert torch.allclose(logits, whole, atol=1e-4)
    assert model.cached_tokens == 6


def test_rewind_forgets_exactly_that_many() -> None:
    model = CachedModel(qwen3(), 1024)
    model.prefill([5, 9, 77])
    expected = model.forward(torch.tensor([8]))
    model.rewind(1)
    model.forward(torch.tensor([4, 4, 4]))
    model.rewind(3)
    model.rewind(0)
    assert torch.allclose(model.forward(torch.tensor([8])), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "rewinding"), [(qwen3, "crop"), (sliding, "crop"), (hybrid, "snapshot")]
)
def test_each_kind_of_cache_gets_the_rewinding_that_works(build: Any, rewinding: str) -> None:
    model = cached_model(build(), 100, "x")
    assert model.rewinding == rewinding
    assert rewind_error(model) < 1e-3


def test_a_sliding_window_is_rewound_past_its_window() -> None:
    model = cached_model(sliding(), 128, "x")
    prompt = [(7 * index) % 100 for index in range(30)]
    model.prefill(prompt)
    expected = model.forward(torch.tensor([3]))
    model.rewind(1)
    model.forward(torch.tensor([9] * 12))
    model.rewind(12)
    assert torch.allclose(model.forward(torch.tensor([3])), expected, atol=1e-4)


def test_the_probe_notices_a_rewind_that_does_nothing() -> None:
    class Forgetful(CachedModel):
        def rewind(self, count: int) -> None:
            """Claims to."""

    assert rewind_error(Forgetful(qwen3(), 1024)) > 1e-2


def test_the_probe_notices_a_recurrent_state_that_is_only_cropped() -> None:
    class Cropped(SnapshotModel):
        def rewind(self, count: int) -> None:
            self._saved, self._fed = None, []
            CachedModel.rewind(self, count)

    try:
        error = rewind_error(Cropped(hybrid(), 100))
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return
    assert error > 1e-3


def test_the_probe_notices_a_forward_that_ignores_its_cache() -> None:
    class Stateless(CachedModel):
        def _run_batch(self, tokens: torch.Tensor, logits_to_keep: int = 0) -> torch.Tensor:
            self._clear()
            return super()._run_batch(tokens, logits_to_keep)

    assert rewind_error(Stateless(qwen3(), 1024)) > 1e-2
    assert cache_error(CachedModel(qwen3(), 1024)) < 1e-4


def test_the_probe_counts_a_difference_that_is_not_a_number() -> None:
    class Broken(CachedModel):
        def _run_batch(self, tokens: torch.Tensor, logits_to_keep: int = 0) -> torch.Tensor:
            logits = super()._run_batch(tokens, logits_to_keep)
            return logits * float("nan") if self.cached_tokens > tokens.shape[1] else logits

    assert not cache_error(Broken(qwen3(), 1024)) <= 1.0


def test_a_model_without_a_cache_is_refused_by_name() -> None:
    config = OpenAIGPTConfig(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    with pytest.raises(UserError, match=r"model=x: OpenAIGPTLMHeadModel keeps no cache"):
        cached_model(random_model(config), 128, "model=x")


def test_a_model_that_sees_the_future_is_refused() -> None:
    config = BertConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        is_decoder=False,
    )
    with pytest.raises(UserError, match=r"model=x: BertLMHeadModel is no causal model"):
        cached_model(random_model(config), 128, "model=x")


def test_a_model_whose_logits_are_not_finite_is_refused() -> None:
    network: Any = qwen3()
    network.model.norm.weight.data[3] = float("nan")
    with pytest.raises(UserError, match=r"draft=x: its logits are not finite"):
        cached_model(network, 1024, "draft=x")


def test_a_state_of_its_own_is_carried_and_rewound() -> None:
    config = Mamba2Config(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=1,
        chunk_size=8,
        initializer_range=0.3,
    )
    network = random_model(config)
    model = cached_model(network, 128, "x")
    assert model.rewinding == "snapshot"
    tokens = [(7 * index) % 100 for index in range(30)]
    whole = network(torch.tensor([tokens]), use_cache=False).logits[0]
    model.prefill(tokens[:20])
    model.forward(torch.tensor([9] * 5))
    model.rewind(5)
    assert torch.allclose(model.forward(torch.tensor(tokens[20:])), whole[20:], atol=1e-4)


def test_the_attention_is_chosen_where_none_is_named(tmp_path: Path) -> None:
    sinks = GptOssConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    for network, chosen in ((qwen3(), "sdpa"), (random_model(sinks), "eager")):
        folder = save(network, tmp_path / chosen)
        found = load(ModelConf(name=chosen, id=str(folder)), "model", CPU)
        assert found.describe()["attention"] == chosen
    asked = ModelConf(name="x", id=str(tmp_path / "sdpa"), attention="eager")
    assert load(asked, "model", CPU).describe()["attention"] == "eager"


def test_a_size_that_differs_between_layers_is_no_figure() -> None:
    found = model_sizes(Gemma4TextConfig())
    assert found["head_dim"] is None
    assert found["hidden"] == 2304


def test_a_model_that_cannot_be_rewound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (CachedModel, LeanModel):
        monkeypatch.setattr(kind, "rewind", lambda _self, _count: None)
    monkeypatch.setattr(SnapshotModel, "rewind", lambda _self, _count: None)
    with pytest.raises(UserError, match=r"draft=x: .* after a rewind.*crop.*snapshot"):
        cached_model(qwen3(), 1024, "draft=x")


def test_the_embedded_target_loads_with_its_end_token(tiny: LoadedModel) -> None:
    assert tiny.eos == {tiny.tokenizer.eos_token_id}
    assert tiny.network.dtype == torch.float32
    assert not tiny.network.training
    assert tiny.describe()["parameters"] > 500_000


def test_siblings_with_padded_embeddings_share_the_narrower_width(tiny: LoadedModel) -> None:
    padded = loaded(qwen3(vocab=1088), tiny.tokenizer)
    target, draft = open_pair(tiny, padded)
    target.prefill([])
    draft.prefill([])
    width = min(tiny.vocab_size, 1088)
    assert target.forward(torch.tensor([5])).shape[-1] == width
    assert draft.forward(torch.tensor([5])).shape[-1] == width


def test_other_vocabularies_are_refused_by_name(tiny: LoadedModel, tmp_path: Path) -> None:
    folder = save(qwen3(), tmp_path / "other")
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = tiny.tokenizer.get_vocab()
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    one, two = words[-2], words[-3]
    swapped = (
        text.replace(f'"{one}": {vocabulary[one]}', f'"{one}": {vocabulary[two]}', 1)
        if f'"{one}": {vocabulary[one]}' in text
        else text.replace(f'"{one}":{vocabulary[one]}', f'"{one}":{vocabulary[two]}', 1)
    )
    assert swapped != text
    (folder / "tokenizer.json").write_text(swapped, encoding="utf-8")
    other = load(ModelConf(name="other", id=str(folder)), "draft", CPU)
    assert tokenizer_difference(tiny.tokenizer, other.tokenizer) is not None
    with pytest.raises(UserError, match="draft=other: another tokenizer than model=tiny"):
        open_pair(tiny, other)


def test_equal_maps_that_encode_differently_are_refused(tiny: LoadedModel) -> None:
    class Spelling:
        bos_token_id = tiny.tokenizer.bos_token_id
        eos_token_id = tiny.tokenizer.eos_token_id

        def get_vocab(self) -> dict[str, int]:
            return tiny.tokenizer.get_vocab()

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1] * len(text)}

    difference = tokenizer_difference(tiny.tokenizer, Spelling())
    assert difference is not None
    assert "encoded differently" in difference


def test_another_end_token_is_refused(tiny: LoadedModel) -> None:
    class Ending:
        bos_token_id = tiny.tokenizer.bos_token_id
        eos_token_id = 7

        def get_vocab(self) -> dict[str, int]:
            return tiny.tokenizer.get_vocab()

    assert "eos_token_id" in str(tokenizer_difference(tiny.tokenizer, Ending()))


def test_an_unknown_hub_id_names_the_ways_out() -> None:
    missing = ModelConf(name="gone", id="no-such-org/no-such-model")
    with pytest.raises(UserError) as caught:
        load(missing, "model", CPU)
    line = str(caught.value)
    assert line.startswith("model.id=no-such-org/no-such-model: ")
    assert "local folder" in line
    assert "HF_HUB_OFFLINE=1" in line
    assert "\n" not in line


def test_an_unknown_embedded_model_lists_those_there_are() -> None:
    with pytest.raises(UserError, match="tiny_good"):
        load(ModelConf(name="x", id="embedded:huge"), "draft", CPU)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UserError, match=r"draft\.dtype=int3"):
        load(conf("tiny_good", dtype="int3"), "draft", CPU)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="device=nonsense"):
        resolve_device("nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device=cuda"):
            resolve_device("cuda")
    assert resolve_device("cpu") == CPU


class Nvml:
    """A driver as pynvml tells of it."""

    def __init__(self, cuda: int = 12_040, *, cards: int = 1, driver: bool = True) -> None:
        self.cuda, self.cards, self.driver = cuda, cards, driver
        self.open = 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"550.54"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= self.cards:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetName(self, _handle: int) -> str:
        return "NVIDIA A10G"


def warned() -> bool:
    """As torch answers where the driver is too old."""
    warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=1)
    return False


@pytest.mark.parametrize(
    ("built_for", "driver", "said"),
    [
        (
            "13.0",
            Nvml(12_040),
            r"is built for CUDA 13\.0, the NVIDIA driver \(550\.54\) supports up to CUDA 12\.4; "
            "update the driver or install a torch built for it",
        ),
        (None, Nvml(), r"there is a card \(NVIDIA A10G\), but torch .* is built without CUDA"),
        # A driver for 12.4 runs what is built for 12.8
        ("12.8", Nvml(12_040), r"there is a card .* cannot use it; look at CUDA_VISIBLE_DEVICES"),
        ("13.0", Nvml(cards=0), "this machine has none; use device=auto or device=cpu"),
        (None, Nvml(driver=False), "this machine has none; use device=auto or device=cpu"),
    ],
)
def test_a_card_that_torch_cannot_use_is_told_from_none(
    built_for: str | None, driver: Nvml, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in vars(Nvml):
        if name.startswith("nvml"):
            monkeypatch.setattr(pynvml, name, getattr(driver, name))
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", warned)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(UserError, match=f"^device={name}: .*{said}") as raised:
            resolve_device(name)
        assert "\n" not in str(raised.value)
    assert driver.open == 0
    assert resolve_device("cpu") == CPU


@pytest.mark.parametrize(
    ("setting", "extra"),
    [({"quantization": "int4"}, "quantization"), ({"device_map": "auto"}, "accelerate")],
)
def test_a_missing_optional_package_is_named_as_pip_knows_it(
    setting: dict[str, str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.models.load.find_spec", lambda _package: None)
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())[
        "project"
    ]
    assert extra in project["optional-dependencies"]
    ((key, value),) = setting.items()
    with pytest.raises(UserError) as raised:
        load(conf("tiny", **setting), "model", CPU)
    assert (
        str(raised.value) == f"model.{key}={value}: needs `pip install {project['name']}[{extra}]`"
    )


def test_prompts_without_a_template_are_encoded_as_they_are(tiny: LoadedModel) -> None:
    prompt = Prompt("easy", "one", ("What is the capital of France?",))
    ids = encode(tiny.tokenizer, prompt, PromptsConf())
    assert tiny.tokenizer.decode(ids) == prompt.turns[0]
    with pytest.raises(UserError, match=r"chat_template=always"):
        encode(tiny.tokenizer, prompt, PromptsConf(chat_template="always"))


def test_a_chat_template_is_used_where_there_is_one(tmp_path: Path) -> None:
    folder = save(qwen3(), tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chatty = load(ModelConf(name="chatty", id=str(folder)), "model", CPU)
    prompt = Prompt("easy", "one", ("Hi",))
    text = chatty.tokenizer.decode(encode(chatty.tokenizer, prompt, PromptsConf()))
    assert text == "<user>Hi<assistant>"
    raw = encode(chatty.tokenizer, prompt, PromptsConf(chat_template="never"))
    assert chatty.tokenizer.decode(raw) == "Hi"


def test_a_prompt_of_no_tokens_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(UserError, match=r"prompt easy/void: it has no tokens"):
        encode(tiny.tokenizer, Prompt("easy", "void", ("",)), PromptsConf())


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no user turn') }}", "{{ 1 // 0 }}", "{% for %}"]
)
def test_a_chat_template_that_raises_is_one_line_with_the_prompt_and_the_model(
    tmp_path: Path, template: str
) -> None:
    folder = save(qwen3(), tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text(template)
    chatty = load(ModelConf(name="chatty", id=str(folder)), "model", CPU)
    prompt = Prompt("easy", "one", ("Hi",))
    line = (
        rf"prompt easy/one: the chat template of {folder} cannot render it \(.*chat_template=never"
    )
    with pytest.raises(UserError, match=line) as caught:
        encode(chatty.tokenizer, prompt, PromptsConf())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [ValueError("x"), IndexError("x"), KeyError("x"), RuntimeError("x")]
)
def test_a_network_that_cannot_be_taken_apart_is_used_whole(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    model = CachedModel(qwen3(), 1024)
    assert split_network(model, [5, 9, 77]) is not None
    monkeypatch.setattr(SplitNetwork, "hidden", refuse)
    assert split_network(model, [5, 9, 77]) is None
