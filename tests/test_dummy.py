"""Random weights in a released architecture's shape, and what is refused before they are made."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from runs import outcome_of
from transformers import PreTrainedModel

from harness.cli import compose
from harness.commands import sweep
from harness.config import CONF_DIR, DraftConf, ModelConf, ModelKeys, like_target
from harness.models import device, dummy, memory
from harness.models.device import check_dtype
from harness.models.dummy import StandInTokenizer, build, config_of
from harness.models.load import check_tokenizers, load, memory_need
from harness.models.memory import check_fits
from harness.records import UserError
from harness.storage import load as load_run
from harness.theory.architecture import architecture_of, experts_touched

pytestmark = pytest.mark.usefixtures("few_samples")
CPU, META = torch.device("cpu"), torch.device("meta")
SMALL = {
    "family": "qwen3",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 96,
    "vocab": 512,
    "tied_embeddings": True,
}
MIXTURE = {
    **SMALL,
    "family": "qwen3_moe",
    "layers": 4,
    "ffn": 32,
    "experts": 64,
    "experts_per_token": 4,
    "tied_embeddings": False,
}
SHIPPED = {
    path.stem: shipped["architecture"]
    for path in sorted((CONF_DIR / "model").glob("*.yaml"))
    if "architecture" in (shipped := yaml.safe_load(path.read_text(encoding="utf-8")))
}
# Parameters as the releases' names round them
BILLIONS = {
    "qwen3_235b_a22b": 235.1, "qwen3_30b_a3b": 30.5, "llama3_1_8b": 8.03, "llama3_1_70b": 70.55,
    "llama3_2_1b": 1.236, "llama3_2_3b": 3.213,
}  # fmt: skip


def conf(name: str = "big", **architecture: Any) -> ModelConf:
    return ModelConf(
        name=name, id=f"nowhere/{name}", weights="dummy", architecture={**SMALL, **architecture}
    )


def counted(network: PreTrainedModel) -> int:
    return sum(tensor.numel() for tensor in network.parameters())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_dummy_has_the_parameters_that_the_theory_counts(name: str) -> None:
    theory = architecture_of(SHIPPED[name]).parameters
    # Llama has no norms of queries and keys, which the theory counts: 128 or so in a layer
    allowed = 3e-6 if name.startswith("llama") else 0.0
    network = build(SHIPPED[name], torch.bfloat16, META)
    assert counted(network) == pytest.approx(theory, rel=allowed)
    if name in BILLIONS:
        assert counted(network) / 1e9 == pytest.approx(BILLIONS[name], rel=2e-3)


def test_the_released_values_that_config_classes_do_not_default_to_are_set() -> None:
    mixture: Any = config_of(SHIPPED["qwen3_30b_a3b"])
    assert (mixture.head_dim, mixture.norm_topk_prob, mixture.num_experts_per_tok) == (128, True, 8)
    assert (mixture.rope_parameters["rope_theta"], mixture.max_position_embeddings) == (1e6, 40_960)
    llama: Any = config_of(SHIPPED["llama3_2_1b"])
    assert (llama.rope_parameters["rope_type"], llama.rope_parameters["factor"]) == ("llama3", 32)
    assert (llama.rms_norm_eps, llama.head_dim, llama.eos_token_id) == (1e-5, 64, None)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama", "qwen2"])
def test_logits_stay_finite_and_of_size_one_through_64_layers_in_16_bits(
    family: str, *, tied: bool
) -> None:
    experts = {"experts": 8, "experts_per_token": 2} if family == "qwen3_moe" else {}
    shape = {**SMALL, **experts, "family": family, "layers": 64, "tied_embeddings": tied}
    network: Any = build(shape, torch.bfloat16, CPU)
    with torch.inference_mode():
        logits = network(torch.arange(32)[None]).logits.float()
    assert logits.isfinite().all()
    assert 0.5 < float(logits.std()) < 2.0
    assert (network.lm_head.weight is network.model.embed_tokens.weight) == tied
    assert {tensor.dtype for tensor in network.parameters()} == {torch.bfloat16}
    assert not network.training


def test_rotary_tables_hold_the_released_frequencies() -> None:
    def frequencies(**more: Any) -> torch.Tensor:
        network: Any = build({**SMALL, **more}, torch.float32, CPU)
        return network.model.rotary_emb.inv_freq

    expected = 1e6 ** -(torch.arange(0, 16, 2) / 16)
    assert torch.allclose(frequencies(rope_theta=1e6), expected)
    scaling = SHIPPED["llama3_2_1b"]["rope_scaling"]
    llama = {"family": "llama", "rope_theta": 5e5}
    ratio = frequencies(**llama) / frequencies(**llama, rope_scaling=scaling)
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(scaling["factor"])


def test_a_network_depends_on_its_seed_alone_and_leaves_the_global_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    networks: list[Any] = [build(SMALL, torch.float32, CPU, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(4), expected)
    weights = [network.lm_head.weight for network in networks]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_filling_a_network_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy, "PER_TICK", 1000)
    expected, ticks = list[int](), list[None]()
    network = build(
        SMALL, torch.float32, CPU, expect=expected.append, tick=lambda: ticks.append(None)
    )
    assert expected == [len(ticks)]
    assert len(ticks) == pytest.approx(counted(network) / 1000, rel=0.02)


def test_tokens_of_a_mixture_are_routed_apart_as_uniform_routing_would() -> None:
    network: Any = build(MIXTURE, torch.float32, CPU)
    seen: list[int] = []
    for layer in network.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda _module, _inputs, output: seen.append(len(output[-1][-8:].unique()))
        )
    with torch.inference_mode():
        for start in range(0, 480, 40):
            network(torch.arange(start, start + 24)[None])
    assert sum(seen) / len(seen) == pytest.approx(experts_touched(64, 4, 8), rel=0.1)


def test_two_dummies_pair_whatever_their_widths_and_never_end_a_text() -> None:
    target = load(conf("big"), CPU)
    draft = load(conf("small", vocab=640, layers=1), CPU)
    check_tokenizers(target, draft)
    assert (target.vocab_size, draft.vocab_size) == (512, 640)
    assert target.eos == draft.eos == frozenset()
    assert target.context_tokens == 40_960
    assert target.network.dtype == torch.float32
    assert target.describe()["weights"] == "dummy"
    assert load(replace(conf(), dtype="bfloat16"), CPU).network.dtype == torch.bfloat16


def test_the_stand_in_tokenizer_maps_four_bytes_to_one_id_the_same_way_always() -> None:
    tokenizer = StandInTokenizer()
    ids = tokenizer("What is the capital of France?")["input_ids"]
    assert len(ids) == 8
    assert ids == StandInTokenizer()("What is the capital of France?")["input_ids"]
    assert set(ids) <= set(tokenizer.get_vocab().values())
    assert tokenizer.decode(torch.tensor([7, 500])) == "<7><500>"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"family": "gpt"}, r"model\.architecture\.family=gpt: use one of qwen3"),
        ({"layers": 0}, r"model\.architecture\.layers=0: must be 1 or more"),
        ({"layers": None}, r"model\.architecture\.layers: missing"),
        ({"hidden": 64.5}, r"model\.architecture\.hidden=64\.5: give a whole number"),
        ({"kv_heads": 3}, r"model\.architecture\.kv_heads=3: must divide heads=4"),
        ({"width": 3}, r"model\.architecture\.width: no such entry"),
        ({"experts": 8}, r"model\.architecture\.experts: family=qwen3 has none"),
        ({"vocab": 100}, r"model\.architecture\.vocab=100: .*256"),
        ({"family": "llama", "heads": 6}, r"model\.architecture: not a llama network"),
        ({"rope_scaling": {"rope_type": "odd"}}, r"architecture\.rope_scaling\.rope_type=odd"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor: missing"),
    ],
)
def test_an_architecture_that_cannot_be_is_refused_by_its_key(
    change: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line) as refused:
        build({**SMALL, **change}, torch.float32, CPU)
    assert "\n" not in str(refused.value)


def test_auditioned_drafts_have_the_targets_kind_of_weights() -> None:
    target, draft = conf("big"), replace(conf("small"), weights="pretrained")
    assert like_target(target, draft).weights == "dummy"
    assert like_target(replace(target, weights="pretrained"), draft) is draft
    ngram = DraftConf(name="ngram", kind="ngram", id="ngram")
    assert like_target(target, ngram) is ngram
    with pytest.raises(UserError, match=r"^drafts: plain has no architecture"):
        like_target(target, ModelConf(name="plain", id="some/folder"))


def test_what_does_not_fit_is_refused_with_its_parts_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 20e9)
    monkeypatch.setattr(dummy, "build", lambda *_args, **_more: pytest.fail("it was made"))
    large = ModelConf("qwen3_32b", "x", weights="dummy", architecture=SHIPPED["qwen3_32b"])
    with pytest.raises(UserError, match=r"131 GB for model=qwen3_32b.* 20 GB free on cpu"):
        load(large, CPU)
    pair = conf("big", vocab=512), conf("small")
    needs = [need for wanted in pair if (need := memory_need(wanted, CPU))]
    # 2 layers x 2 kv heads x 16 values x keys and values x 4 bytes = 512 bytes, of two models
    check_fits(needs, 19_000_000)
    with pytest.raises(UserError, match=r"20\.5 GB for the cache of 20,000,000 tokens.*new_tokens"):
        check_fits(needs, 20_000_000)
    with pytest.raises(UserError, match=r"4 texts of 10,000,000 tokens"):
        check_fits(needs, 10_000_000, batch=4, loaded=True)
    # Models on different devices do not share memory
    check_fits([needs[0], replace(needs[1], device=torch.device("cuda:1"))], 38_000_000)


def test_a_dummy_takes_the_memory_that_was_computed_for_it() -> None:
    assert (memory.free_bytes(CPU) or 0) > 1e8
    loaded, need = load(conf(), CPU), memory_need(conf(), CPU)
    assert need == loaded.memory_need
    assert need is not None
    assert need.weight_bytes == loaded.describe()["weights_bytes"]


def test_a_dtype_that_the_device_cannot_compute_in_is_named_with_one_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_dtype(torch.float32, CPU, ModelKeys("model"))
    computing = device.F.scaled_dot_product_attention

    def lacking(x: torch.Tensor, *more: Any) -> torch.Tensor:
        if x.dtype == torch.bfloat16:
            raise TypeError("Cannot convert to a dtype\nthat this device has not")
        return computing(x, *more)

    monkeypatch.setattr(device.F, "scaled_dot_product_attention", lacking)
    line = r"^draft\.dtype=bfloat16: cpu cannot.*use draft\.dtype=float\d+$"
    with pytest.raises(UserError, match=line):
        load(DraftConf(**{**vars(conf()), "dtype": "bfloat16"}), CPU)


def test_a_plan_of_the_largest_mixture_allocates_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dummy, "build", lambda *_args, **_more: pytest.fail("it was made"))
    pair = ["model=qwen3_235b_a22b", "draft=qwen3_0_6b"]
    random = ["model.weights=dummy", "draft.weights=dummy", "dry_run=true"]
    assert outcome_of("sweep", *pair, *random).folder is None
    assert "qwen3_235b_a22b (dummy weights, 470 GB in bfloat16)" in capsys.readouterr().out


def test_every_output_of_a_run_with_dummies_begins_with_a_warning(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose(
        "sweep",
        ["k=[1]", "temperature=[0]", "new_tokens=4", "prompts.limit=1", "threads=1", "until=all"],
    )
    config.results_root = str(tmp_path)
    config.model, config.draft = conf("big"), conf("small", layers=1, vocab=640)
    folder = sweep.run(config).folder
    assert folder is not None
    report = (folder / "report.md").read_text(encoding="utf-8")
    for text in (capsys.readouterr().out, report):
        lines = [line for line in text.splitlines() if line.strip()]
        assert "LATENCIES ARE REAL, ACCEPTANCES ARE NOT" in lines[1]
        assert "Not a recommendation (dummy weights): " in text
    stored = load_run(folder)
    assert stored.summary is not None
    assert stored.summary.run.dummies == ("big", "small")
    assert [trial.new_tokens for trial in stored.trials] == [4] * 4
