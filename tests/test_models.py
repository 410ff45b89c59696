"""Loading, tokenizer checks, and caches that can be rewound."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from random_models import copy_tokenizer, hybrid, qwen3, save, sliding, small
from transformers import (
    AutoTokenizer,
    BertConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Mamba2Config,
    OpenAIGPTConfig,
    PreTrainedModel,
)

from harness.config import DraftConf, ModelConf, ModelKeys, PromptsConf
from harness.models import device, probe
from harness.models.cached import CachedModel, SnapshotModel, SplitNetwork, split_network
from harness.models.device import resolve_device
from harness.models.lean.model import LeanModel
from harness.models.load import (
    LoadedModel,
    check_tokenizers,
    load,
    load_vocabulary,
    memory_need,
)
from harness.models.memory import model_sizes
from harness.models.probe import cache_error, cached_model, rewind_error
from harness.models.tokenizer import encode, special_difference, tokenizer_difference
from harness.records import Prompt, UserError

CPU = torch.device("cpu")
TEXT = [(7 * index) % 100 for index in range(30)]


def conf(name: str, **more: Any) -> ModelConf:
    return ModelConf(**{"name": name, "id": f"embedded:{name}", **more})


def recurrent() -> PreTrainedModel:
    sizes = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    return small(Mamba2Config, initializer_range=0.3, **sizes)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load(conf("tiny"), CPU)


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_takes_the_stored_dtype_where_the_processor_is_fast_in_it(
    fast: bool, dtype: str, tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = load(conf("tiny", dtype="bfloat16"), CPU)
    stored.network.save_pretrained(tmp_path)
    stored.tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("harness.models.load.computes_at_speed", lambda _: fast)
    saved = ModelConf(name="saved", id=str(tmp_path))
    loaded = load(saved, CPU)
    assert loaded.describe()["dtype"] == dtype
    assert loaded.describe().get("stored_dtype") == (None if fast else "bfloat16")
    need = memory_need(saved, CPU)
    assert need is not None
    assert need.dtype == loaded.network.dtype
    assert load(replace(saved, dtype="bfloat16"), CPU).describe()["dtype"] == "bfloat16"
    assert "stored_dtype" not in tiny.describe()


def test_a_processor_is_fast_in_float32_and_what_is_slower_by_far_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert device.computes_at_speed(torch.float32)

    def slow_in_16_bits(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if rows.dtype != torch.float32:
            for _ in range(3):
                torch.mm(rows.float(), weight.float())
        return torch.mm(rows.float(), weight.float())

    monkeypatch.setattr(device.F, "linear", slow_in_16_bits)
    device.computes_at_speed.cache_clear()
    assert not device.computes_at_speed(torch.bfloat16)
    device.computes_at_speed.cache_clear()


# Caches and the probe


@pytest.mark.parametrize(
    ("build", "rewinding"),
    [(qwen3, "crop"), (sliding, "crop"), (hybrid, "snapshot"), (recurrent, "snapshot")],
)
def test_each_kind_of_cache_gets_the_rewinding_that_works(
    build: Callable[[], PreTrainedModel], rewinding: str
) -> None:
    """Past a sliding window of 8, and with a state of the model's own."""
    network = build()
    model = cached_model(network, 100, "x")
    assert model.rewinding == rewinding
    assert rewind_error(model) < 1e-3
    reference = network(torch.tensor([TEXT]), use_cache=False).logits[0, :, :100]
    model.prefill(TEXT[:20])
    model.forward(torch.tensor([9] * 12))
    model.rewind(12)
    model.rewind(0)
    assert model.cached_tokens == 20
    logits = model.forward(torch.tensor(TEXT[20:]))
    assert torch.allclose(logits, reference[20:], atol=1e-4, rtol=1e-3)


class Forgetful(CachedModel):
    def rewind(self, count: int) -> None:
        """Claims to."""


class Stateless(CachedModel):
    def _run_batch(self, tokens: torch.Tensor, logits_to_keep: int = 0) -> torch.Tensor:
        self._clear()
        return super()._run_batch(tokens, logits_to_keep)


class NotANumber(CachedModel):
    def _run_batch(self, tokens: torch.Tensor, logits_to_keep: int = 0) -> torch.Tensor:
        logits = super()._run_batch(tokens, logits_to_keep)
        return logits * float("nan") if self.cached_tokens > tokens.shape[1] else logits


class Cropped(SnapshotModel):
    def rewind(self, count: int) -> None:
        self._saved, self._fed = None, []
        CachedModel.rewind(self, count)


@pytest.mark.parametrize("kind", [Forgetful, Stateless, NotANumber])
def test_the_probe_notices_a_cache_that_is_wrong(kind: type[CachedModel]) -> None:
    assert cache_error(CachedModel(qwen3(), 100)) < 1e-4
    assert not cache_error(kind(qwen3(), 100)) <= 1e-3  # NaN is no agreement either


@pytest.mark.parametrize("build", [qwen3, hybrid])
def test_the_probe_computes_its_uncached_reference_once(
    build: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ways of running the network are compared with it."""
    uncached, lengths = probe.uncached_logits, list[int]()

    def counted(network: PreTrainedModel, tokens: list[int], vocab_size: int) -> torch.Tensor:
        lengths.append(len(tokens))
        return uncached(network, tokens, vocab_size)

    monkeypatch.setattr(probe, "uncached_logits", counted)
    cached_model(build(), 100, "x")
    assert sorted(lengths) == [*probe.BEGINNINGS, probe.CONTEXT + probe.KEPT + 3]


def test_a_recurrent_cache_that_is_cropped_is_refused_by_the_cache_itself() -> None:
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache_error(Cropped(hybrid(), 100))


def broken() -> PreTrainedModel:
    network: Any = qwen3()
    network.model.norm.weight.data[3] = float("nan")
    return network


def without_a_cache() -> PreTrainedModel:
    return small(OpenAIGPTConfig, n_embd=32, n_layer=2, n_head=2, n_positions=64)


def not_causal() -> PreTrainedModel:
    return small(BertConfig, is_decoder=False, initializer_range=0.3)


@pytest.mark.parametrize(
    ("build", "line", "without_rewind"),
    [
        (without_a_cache, "OpenAIGPTLMHeadModel keeps no cache", ()),
        (not_causal, "BertLMHeadModel is no causal model", ()),
        (broken, "its logits are not finite", ()),
        (qwen3, r".* after a rewind.*crop.*snapshot", (CachedModel, LeanModel, SnapshotModel)),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_by_name(
    build: Callable[[], PreTrainedModel],
    line: str,
    without_rewind: tuple[type[CachedModel], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in without_rewind:
        monkeypatch.setattr(kind, "rewind", lambda _self, _count: None)
    with pytest.raises(UserError, match=f"model=x: {line}"):
        cached_model(build(), 128, "model=x")


def test_a_network_whose_backbone_cannot_be_used_alone_is_not_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = CachedModel(qwen3(), 1024)
    assert split_network(model, [5, 9, 77]) is not None
    monkeypatch.setattr(SplitNetwork, "hidden", lambda *_, **__: {}["last_hidden_state"])
    assert split_network(model, [5, 9, 77]) is None


# Loading


def test_the_embedded_target_loads_with_its_end_token(tiny: LoadedModel) -> None:
    assert tiny.eos == {tiny.tokenizer.eos_token_id}
    assert tiny.network.dtype == torch.float32
    assert not tiny.network.training
    assert tiny.describe()["parameters"] > 500_000


def test_the_attention_is_chosen_where_none_is_named(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    sinks = small(GptOssConfig, vocab_size=1024, rope_parameters=rope, **experts)
    for network, chosen in ((qwen3(), "sdpa"), (sinks, "eager")):
        folder = save(network, tmp_path / chosen)
        loaded = load(ModelConf(name=chosen, id=str(folder)), CPU)
        assert loaded.describe()["attention"] == chosen
    eager = ModelConf(name="x", id=str(tmp_path / "sdpa"), attention="eager")
    assert load(eager, CPU).describe()["attention"] == "eager"


def test_a_size_that_differs_between_layers_is_left_out() -> None:
    sizes = model_sizes(Gemma4TextConfig())
    assert sizes["head_dim"] is None
    assert sizes["hidden"] == 2304


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        (
            DraftConf(name="gone", id="no-such-org/no-such-model"),
            r"^draft\.id=no-such-org/no-such-model: .*local folder.*HF_HUB_OFFLINE=1$",
        ),
        (ModelConf(name="x", id="embedded:huge"), "tiny_good"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(wanted: ModelConf, line: str) -> None:
    with pytest.raises(UserError, match=line) as raised:
        load(wanted, CPU)
    assert "\n" not in str(raised.value)


def nvml(cuda: int = 12_040, *, cards: int = 1, driver: bool = True) -> SimpleNamespace:
    """A driver as pynvml reports it."""

    def init() -> None:
        if not driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def handle(index: int) -> int:
        if index >= cards:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    return SimpleNamespace(
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetCudaDriverVersion_v2=lambda: cuda,
        nvmlSystemGetDriverVersion=lambda: "550.54",
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetName=lambda _handle: "NVIDIA A10G",
    )


def no_cuda_with_a_warning() -> bool:
    """As torch answers where the driver is too old."""
    warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=1)
    return False


@pytest.mark.parametrize(
    ("built_for", "driver", "reason"),
    [
        (
            "13.0",
            nvml(12_040),
            r"is built for CUDA 13\.0, the NVIDIA driver \(550\.54\) supports up to CUDA 12\.4; "
            "update the driver or install a torch built for it",
        ),
        (None, nvml(), r"there is a card \(NVIDIA A10G\), but torch .* is built without CUDA"),
        # A driver for 12.4 runs what is built for 12.8
        ("12.8", nvml(12_040), r"there is a card .* cannot use it; look at CUDA_VISIBLE_DEVICES"),
        ("13.0", nvml(cards=0), "this machine has none; use device=auto or device=cpu"),
        (None, nvml(driver=False), "this machine has none; use device=auto or device=cpu"),
    ],
)
def test_a_device_that_torch_cannot_use_is_refused_with_the_reason(
    built_for: str | None, driver: SimpleNamespace, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, function in vars(driver).items():
        monkeypatch.setattr(pynvml, name, function)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", no_cuda_with_a_warning)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(UserError, match=f"^device={name}: .*{reason}") as raised:
            resolve_device(name)
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="device=nonsense"):
        resolve_device("nonsense")
    assert resolve_device("cpu") == CPU


# Tokenizers and pairs


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"get_vocab": dict}, "in the target's vocabulary and absent in the draft's"),
        ({}, "encoded differently"),
    ],
)
def test_a_draft_with_another_tokenizer_is_refused_by_name(
    change: dict[str, Any], difference: str, tiny: LoadedModel
) -> None:
    class Other:
        eos_token_id = tiny.tokenizer.eos_token_id
        get_vocab = staticmethod(tiny.tokenizer.get_vocab)

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [1] * len(text)}

    other = Other()
    vars(other).update(change)
    draft = LoadedModel(ModelKeys("draft"), "other", other, frozenset(), 256, qwen3())
    line = f"draft=other: another tokenizer than model=tiny .*{difference}"
    with pytest.raises(UserError, match=line):
        check_tokenizers(tiny, draft)


def test_a_draft_may_put_another_begin_of_text_id_before_a_text() -> None:
    """It is given the target's ids, and encodes none."""

    class Named:
        def __init__(self, *begins: int) -> None:
            self._begins = begins

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [*(self._begins if add_special_tokens else ()), *text.encode()]}

    assert tokenizer_difference(Named(7), Named()) is None


def tokenizer_of(folder: Path, *added: str, special: bool = False) -> Any:
    """The embedded tokenizer with more tokens after its end."""
    folder.mkdir()
    copy_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(added), special_tokens=special)
    return tokenizer


@pytest.mark.parametrize(
    ("target", "draft", "difference"),
    [
        (["<think>"], [], None),
        ([], ["<think>"], None),
        (["<think>"], ["<tool>", "<think>"], None),
        (["    "], [], "token '    ' is 1024 in the target's vocabulary and absent"),
        (["    ", "<think>"], ["    "], None),
    ],
)
def test_tokens_added_after_the_end_may_differ_unless_they_are_white_space(
    target: list[str], draft: list[str], difference: str | None, tmp_path: Path
) -> None:
    """Models emit white space in ordinary text, as GPT-NeoX does with its added tokens."""
    one, other = tokenizer_of(tmp_path / "a", *target), tokenizer_of(tmp_path / "b", *draft)
    said = tokenizer_difference(one, other)
    assert (said is None) == (difference is None)
    assert (difference or "") in (said or "")
    assert special_difference(one, other) is not None


def test_a_token_that_one_of_two_tokenizers_ends_a_text_with_is_the_same_token(
    tmp_path: Path,
) -> None:
    one, other = tokenizer_of(tmp_path / "a"), tokenizer_of(tmp_path / "b", "a", special=True)
    other.eos_token = "a"
    assert one.eos_token_id != other.eos_token_id
    assert one("a cat")["input_ids"] != other("a cat")["input_ids"]
    assert tokenizer_difference(one, other) is None
    assert special_difference(one, other) is None


@pytest.mark.parametrize("own_settings", [True, False])
def test_a_vocabulary_is_read_without_the_weights(own_settings: bool, tmp_path: Path) -> None:
    network = qwen3()
    assert network.generation_config is not None
    network.generation_config.eos_token_id = [5, 7]
    folder = save(network, tmp_path / "model")
    if not own_settings:  # then those of config.json count
        (folder / "generation_config.json").unlink()
    loaded = load(ModelConf(name="mine", id=str(folder)), CPU)
    (folder / "model.safetensors").unlink()
    read = load_vocabulary(ModelConf(name="mine", id=str(folder)))
    assert not isinstance(read, LoadedModel)
    assert read.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    assert (read.eos, read.context_tokens) == (loaded.eos, loaded.context_tokens)
    assert ({5, 7} <= read.eos) == own_settings
    with pytest.raises(UserError, match=r"model\.weights=dummy: random weights are on no server"):
        load_vocabulary(ModelConf(name="mine", id=str(folder), weights="dummy"))


HI = Prompt("easy", "one", ("Hi",))


def test_without_a_chat_template_a_text_is_encoded_as_it_is(tiny: LoadedModel) -> None:
    assert tiny.tokenizer.decode(encode(tiny.tokenizer, HI, PromptsConf())) == "Hi"
    with pytest.raises(UserError, match=r"chat_template=always"):
        encode(tiny.tokenizer, HI, PromptsConf(chat_template="always"))
    with pytest.raises(UserError, match=r"prompt easy/void: it has no tokens"):
        encode(tiny.tokenizer, Prompt("easy", "void", ("",)), PromptsConf())


def test_a_folder_that_holds_no_model_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json in this folder") as refused:
        load(conf("mine", id=str(tmp_path)), CPU)
    assert "hf download" not in str(refused.value)
