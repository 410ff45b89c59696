"""EAGLE-3 heads: read in both layouts, lossless in the loop, and scored as the loop runs them."""

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks_of_heads import (
    LAYERS,
    PROMPTS,
    SAMPLED,
    VOCABULARY,
    FolderContract,
    Tokens,
    asked,
    assert_replay_counts_the_loops_rounds,
    enumerate_all,
    keeping,
    number_of,
    random_target,
    stored_otherwise,
)
from runs import assert_replay_is_exact, ran, sample
from safetensors.torch import load_file, save_file
from stubs import CPU, GREEDY, FunctionModel, decoded, text_of
from test_traces import assert_same
from test_verification import random_distribution
from torch import Tensor
from transformers import LlamaConfig

from harness import prompts as prompt_sets
from harness.analysis import analyse
from harness.cli import compose, draft_conf
from harness.commands.pair import open_pair
from harness.config import DraftConf, ModelConf
from harness.decoding.drafters import HeadDrafter
from harness.decoding.sampling import SamplingParameters
from harness.measurement.draft_scores import score_with_head
from harness.measurement.generations import run_trial
from harness.measurement.target_texts import generate_texts
from harness.models import memory, probe
from harness.models.cached import CachedModel, SnapshotModel, output_weight
from harness.models.heads.decoder_layer import LayerHead
from harness.models.heads.dflash import load_dflash
from harness.models.heads.eagle3 import Eagle3Network, load_eagle3
from harness.models.heads.files import head_memory_need
from harness.models.heads.medusa import load_medusa
from harness.models.lean.layers import compiled_pieces
from harness.models.lean.model import LeanModel
from harness.models.load import LoadedModel
from harness.records import RULES, RoundTiming, Rule, UserError
from harness.reporting.sentences.run import caveats
from harness.storage import RunFolder, StoredRun, load_traces
from harness.summary import Summary
from harness.theory.cost import usd_per_million_tokens
from tools.train_embedded.head_files import Layout, save_head

DRAFTED = 12
LAYOUTS: tuple[Layout, ...] = ("specforge", "speculators")


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return random_target()


def random_head(
    *,
    norm_before_residual: bool = False,
    layers: Sequence[int] = (1, 3, 5),
    drafted: int = DRAFTED,
) -> Eagle3Network:
    """A head of the target's width that can draft three quarters of the tokens."""
    torch.manual_seed(4)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        num_hidden_layers=1,
        rms_norm_eps=1e-6,
        max_position_embeddings=256,
    )
    network = Eagle3Network(
        config,
        target_hidden=32,
        layers=layers,
        draft_vocabulary=drafted,
        vocabulary=VOCABULARY,
        norm_before_residual=norm_before_residual,
    )
    for weight in network.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.25)
    kept = torch.randperm(VOCABULARY)[:drafted].sort().values
    network.d2t.copy_(kept - torch.arange(drafted))
    network.t2d.copy_(torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, kept, True))
    return network


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A head in each layout; the two have another residual by default."""
    made = {layout: tmp_path_factory.mktemp("head") for layout in LAYOUTS}
    for layout, folder in made.items():
        network = random_head(norm_before_residual=layout == "speculators")
        save_head(network, folder, layout, "target")
    return made


@pytest.fixture(scope="module", params=sample(LAYOUTS, "specforge"))
def head(
    request: pytest.FixtureRequest, target: LoadedModel, folders: dict[str, Path]
) -> LayerHead:
    return LayerHead(read(folders[request.param], target), VOCABULARY)


def read(folder: Path, target: LoadedModel) -> Eagle3Network:
    conf = DraftConf(name="head", kind="eagle3", id=str(folder))
    network = load_eagle3(conf, target).network
    assert isinstance(network, Eagle3Network)
    return network


# The target's states


@pytest.mark.parametrize("count", [1, 5, 200])
def test_the_lean_forward_keeps_the_states_that_transformers_reports(
    target: LoadedModel, count: int
) -> None:
    lean, cached = LeanModel(target.network, VOCABULARY), CachedModel(target.network, VOCABULARY)
    kept = (6, 0, 2, LAYERS)
    text = [place * 7 % VOCABULARY for place in range(20 + count)]
    states: list[Tensor] = []
    for model in (lean, cached):
        model.keep_states(kept)
        model.prefill(text[:20])
        assert model.states is not None
        assert model.states.shape == (20, len(kept) * 32)
        model.forward(torch.tensor(text[20:]))
        assert model.states is not None
        states.append(model.states)
    with torch.inference_mode():
        hidden = target.network(torch.tensor([text]), output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[layer][0, 20:] for layer in kept], dim=-1)
    for each in states:
        torch.testing.assert_close(each, expected, atol=2e-4, rtol=2e-4)


# The loop


class TestEagle3(FolderContract):
    ks, rules = (1, 3, 7), RULES
    kinds = dict.fromkeys(LAYOUTS, "eagle3")
    refusals = (
        ("specforge", {"architectures": ["MedusaModel"]}, r"\['MedusaModel'\]; read here are"),
        ("specforge", {"speculators_model_type": "dflash"}, "_type dflash; read here are"),
        ("specforge", {"norm_output": True}, "an EAGLE-3 head with norm_output, which is not read"),
        (
            "specforge",
            {"eagle_config": {"norm_before_fc": True}},
            "head with norm_before_fc, which",
        ),
        (
            "specforge",
            {"eagle_config": {"use_aux_hidden_state": False}},
            "an EAGLE-3 head with use_aux_hidden_state: false, which is not read here",
        ),
        ("specforge", {"logit_scale": 0.5}, "an EAGLE-3 head with logit_scale, which is not read"),
        (
            "specforge",
            {"intermediate_size": 64},
            r"gate_proj.weight is .* its config.json makes it",
        ),
    )


@pytest.mark.parametrize("forward", sample([CachedModel, SnapshotModel], CachedModel))
def test_replay_counts_the_rounds_on_other_forwards(
    target: LoadedModel, head: LayerHead, forward: type[CachedModel]
) -> None:
    assert_replay_counts_the_loops_rounds(keeping(target, head, forward), head, (5,))


def test_a_text_depends_on_the_seed_and_not_on_what_the_head_ran_before(
    target: LoadedModel, head: LayerHead
) -> None:
    model = keeping(target, head)
    drafter = HeadDrafter(head, model, SAMPLED)
    texts = [
        [text_of(decoded(model, drafter, replace(one, k=3).generation(CPU))) for one in order]
        for order in (asked(SAMPLED), asked(SAMPLED)[::-1])
    ]
    assert texts[0] == texts[1][::-1]


def test_plain_decoding_next_to_a_head_keeps_no_states(
    target: LoadedModel, head: LayerHead
) -> None:
    """They take a per cent of a small model's step, which would flatter the head."""
    model, (request, *_) = keeping(target, head), asked(GREEDY)
    kept: list[bool] = []
    forward = model.forward

    def noted(tokens: Tensor) -> Tensor:
        logits = forward(tokens)
        kept.append(model.states is not None)
        return logits

    model.forward = noted
    for k in (0, 2):
        drafter = HeadDrafter(head, model, GREEDY)
        trial = run_trial(replace(request, k=k), model, lambda _, made=drafter: made)
        assert trial.status == "ok"
        assert {*kept} == {k > 0}
        kept.clear()


def test_a_head_in_codes_of_8_bits_is_refused_and_not_run_without_its_scales(
    target: LoadedModel, tmp_path: Path
) -> None:
    save_head(random_head(), tmp_path, "speculators", "target")
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"up_proj.weight \(torch.float8_e4m3fn\) is of quantized"):
        read(tmp_path, target)


# Scores


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=str)
def test_a_text_of_an_earlier_process_is_scored_by_one_prefill_of_the_target(
    target: LoadedModel, head: LayerHead, sampling: SamplingParameters
) -> None:
    """The target's logits come from the final states of the prefill that gives the head's."""
    model = keeping(target, head, CachedModel)
    texts = generate_texts(model, asked(sampling, 12), name="model=target")
    fresh = score_with_head(texts, model, head, num_draft_tokens=3, draft_name="head")
    stored = [replace(text, hidden=None) for text in texts]
    lengths: list[int] = []
    backbone = target.network.base_model
    hook = backbone.register_forward_pre_hook(
        lambda _, __, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        traces = score_with_head(stored, model, head, num_draft_tokens=3, draft_name="head")
    finally:
        hook.remove()
    # After two that try whether the logits can be made of the final states
    assert lengths[2:] == [len(text.request.tokens) + len(text.tokens) - 1 for text in texts]
    for one, other in zip(traces, fresh, strict=True):
        np.testing.assert_allclose(one.target_logprob, other.target_logprob, atol=1e-5)
        np.testing.assert_allclose(one.draft_logprob, other.draft_logprob, atol=1e-5)


# A toy head whose drafts depend on where the round starts, enumerated


class ToyHead(FunctionModel):
    """Drafts from the state that it was last given and from the tokens it was fed since."""

    drafts = None

    def __init__(self) -> None:
        super().__init__(drafted_after)
        self.state: Tensor | None = None

    def start(self, first: Sequence[int]) -> None:
        del first
        self.prefill([])

    def condition(self, states: Tensor, drafts: int | None = None) -> None:
        del drafts
        self.state, self.cache = states[-1], []

    def extend(self, tokens: Tensor) -> None:
        self.forward(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.state is not None
        if not self.cache:  # of rows that have the target's states, the last alone matters here
            self.cache = [int(self.state.item())]
            rows = super().forward(tokens[-1:])
            return rows.expand(len(tokens), -1)
        return super().forward(tokens)

    def rewind(self, count: int) -> None:
        """The next round conditions it anew."""

    def logits(self, prefix: Tokens) -> Tensor:
        return self.probabilities(prefix).log()


def drafted_after(prefix: Tokens) -> Tensor:
    """The head's distribution: the state's number, then the tokens fed since."""
    return random_distribution(17)(prefix)


def drafted_from(before: Tokens, drafted: Tokens) -> Tensor:
    """The same from a start, with what is drafted after it."""
    return drafted_after((number_of(before[:-1]), before[-1], *drafted))


@pytest.mark.parametrize(
    ("rule", "k"),
    [
        ("ratio", 2),
        ("block", 2),
        pytest.param("exact_match", 2, marks=pytest.mark.exhaustive),
        pytest.param("greedy_draft", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_a_head_that_carries_states_is_lossless_and_replayed_exactly(rule: Rule, k: int) -> None:
    enumerate_all(ToyHead, drafted_from, rule, k)


# Reading and storing


def test_traces_of_a_head_come_back_as_they_were(
    target: LoadedModel, head: LayerHead, tmp_path: Path
) -> None:
    model = keeping(target, head)
    texts = generate_texts(model, asked(SAMPLED, 6), name="model=target")
    traces = score_with_head(texts, model, head, num_draft_tokens=4, draft_name="head")
    folder = RunFolder.create(tmp_path, "audition", ["target"], {})
    folder.write_traces(traces)
    for back, trace in zip(load_traces(folder.path), traces, strict=True):
        assert_same(back, trace)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 2}, r"reads layers \[1, 3, 5\], and model=target has 2"),
        ({"hidden_size": 48, "head_dim": 24}, "takes 32 numbers of each of 3 layers"),
        ({"vocab": 32}, "the tokens are of a vocabulary of 16, and model=target has 32"),
    ],
)
def test_a_head_for_another_target_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save_head(random_head(), tmp_path, "specforge", "target")
    with pytest.raises(UserError, match=says):
        read(tmp_path, random_target(**change))


def test_a_negative_id_in_d2t_is_said_to_be_negative(tmp_path: Path) -> None:
    network = random_head()
    network.d2t[0] = -1
    save_head(network, tmp_path, "specforge", "target")
    with pytest.raises(UserError, match=r"\(d2t\) has the id -1, which is negative"):
        read(tmp_path, random_target())


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_a_heads_vocabulary_is_the_targets_by_its_config_or_with_the_padding(
    layout: Layout, tmp_path: Path
) -> None:
    save_head(random_head(), tmp_path, layout, "target")
    target = random_target()
    file = tmp_path / "config.json"
    text = file.read_text()
    assert text.count(f'"vocab_size": {VOCABULARY}') == 1

    def read_with(vocabulary: int) -> None:
        file.write_text(text.replace(f'"vocab_size": {VOCABULARY}', f'"vocab_size": {vocabulary}'))
        read(tmp_path, target)

    with pytest.raises(UserError, match="of a vocabulary of 32, and model=target has 16"):
        read_with(32)
    read_with(VOCABULARY)
    target.network.config.vocab_size = 14  # the embedding has two rows more
    read_with(14)
    read_with(VOCABULARY)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"/head: no config\.json there"),
        ("{oops", r"/head: its config\.json cannot be read \(Expecting property name"),
        ("[1, 2]", r"/head: its config\.json holds a list, not an object"),
        ("no folder", "/head: no such folder; give one that is there"),
        ("a hub id", r"=org/head: cannot be loaded .*(connect|offline)"),
    ],
)
def test_a_head_without_a_config_that_can_be_read_is_refused_with_the_reason(
    content: str | None,
    says: str,
    target: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = tmp_path / "head"
    if content != "no folder":
        folder.mkdir()
        if content is not None:
            (folder / "config.json").write_text(content)
    for load_kind in (load_eagle3, load_medusa, load_dflash):
        with pytest.raises(UserError, match=says):
            load_kind(ModelConf(id="org/head" if content == "a hub id" else str(folder)), target)


def test_an_incomplete_head_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    network = random_head()
    del network.midlayer.mlp.up_proj
    save_head(network, tmp_path, "specforge", "target")
    with pytest.raises(UserError, match=r"it lacks midlayer\.mlp\.up_proj\.weight; read here are"):
        read(tmp_path, target)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*\.safetensors there|cannot be loaded"):
        read(tmp_path, target)


# Heads as others publish them


def test_shards_that_are_missing_or_hold_a_tensor_twice_are_named(
    target: LoadedModel, tmp_path: Path
) -> None:
    save_head(random_head(), tmp_path / "head", "specforge", "target")
    folder = stored_otherwise(tmp_path / "head", tmp_path, "shards")
    shard = "model-00002-of-00002.safetensors"
    (folder / shard).unlink()
    with pytest.raises(UserError, match=f"index.json names {shard}, which is not there; download"):
        read(folder, target)
    again = stored_otherwise(tmp_path / "head", tmp_path, "another name")
    shutil.copy(again / "head_of_target.safetensors", again / "other.safetensors")
    with pytest.raises(UserError, match=r"d2t is in other.safetensors and in another file; give"):
        read(again, target)


def without(folder: Path, *names: str, **tensors: Tensor) -> Path:
    """The head without these tensors, and with others."""
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if name not in names}
    save_file(kept | {f"{name}.weight": tensor for name, tensor in tensors.items()}, file)
    return folder


def changed(folder: Path, **entries: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_all_tokens_without_an_output_matrix_has_the_targets_or_its_own_embedding(
    target: LoadedModel, tied: bool, tmp_path: Path
) -> None:
    save_head(random_head(drafted=VOCABULARY), tmp_path, "specforge", "target")
    embedding, output = torch.randn(VOCABULARY, 32), output_weight(target.network)
    without(tmp_path, "lm_head.weight", "d2t", "t2d", embed_tokens=embedding)
    network = read(changed(tmp_path, tie_word_embeddings=tied), target)
    rows = torch.randn(3, 32)
    with torch.inference_mode():
        expected = network.norm(rows) @ (embedding if tied else output).T
        torch.testing.assert_close(network.logits(rows, VOCABULARY, 0), expected)
    own = sum(weight.numel() for weight in network.weights)
    stored = load_file(tmp_path / "model.safetensors").values()
    assert own == sum(tensor.numel() for tensor in stored)
    assert_replay_counts_the_loops_rounds(
        keeping(target, network.with_cache(VOCABULARY)),
        network.with_cache(VOCABULARY),
        (3,),
        budget=40,
    )


def test_a_head_of_fewer_tokens_needs_its_output_matrix(
    target: LoadedModel, tmp_path: Path
) -> None:
    save_head(random_head(), tmp_path, "specforge", "target")
    without(tmp_path, "lm_head.weight")
    with pytest.raises(UserError, match=r"lacks lm_head.weight, and drafts 12 of 16 tokens"):
        read(tmp_path, target)
    with pytest.raises(UserError, match=r"it lacks d2t, lm_head.weight; read here are"):
        read(without(tmp_path, "d2t"), target)


@pytest.mark.parametrize("where", ["top", "eagle_config"])
@pytest.mark.parametrize("forward", [LeanModel, CachedModel])
def test_the_last_boundary_is_the_output_of_the_last_layer_before_the_last_norm(
    target: LoadedModel, where: str, forward: type[CachedModel], tmp_path: Path
) -> None:
    """As vLLM and SGLang read it; NVIDIA's heads name it in `eagle_config`."""
    save_head(random_head(layers=(2, 4, LAYERS)), tmp_path, "specforge", "target")
    if where == "eagle_config":
        ids = {"eagle_aux_hidden_state_layer_ids": [2, 4, LAYERS]}
        changed(tmp_path, eagle_aux_hidden_state_layer_ids=None, eagle_config=ids)
    head = read(tmp_path, target).with_cache(VOCABULARY)
    model, text = keeping(target, head, forward), list(PROMPTS[-1])
    model.prefill(text)
    assert model.states is not None
    with torch.inference_mode():
        expected = target.network(torch.tensor([text]), output_hidden_states=True).hidden_states
        second, fourth, last = model.states.split(32, dim=1)
        torch.testing.assert_close(second, expected[2][0], atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(fourth, expected[4][0], atol=2e-4, rtol=2e-4)
        norm: Any = target.network.base_model.norm
        assert not torch.allclose(last, expected[LAYERS][0], atol=1e-2)
        torch.testing.assert_close(norm(last), expected[LAYERS][0], atol=2e-4, rtol=2e-4)
    assert_replay_counts_the_loops_rounds(keeping(target, head, forward), head, (3,), budget=40)


def test_layers_beyond_the_last_boundary_are_refused(target: LoadedModel, tmp_path: Path) -> None:
    save_head(random_head(layers=(2, 4, LAYERS + 1)), tmp_path, "specforge", "target")
    with pytest.raises(UserError, match=r"reads layers \[2, 4, 8\], and model=target has 7"):
        read(tmp_path, target)


# Commands, with the head that ships

WORDS = ["prompts.limit=2", "new_tokens=12", "k=[2]", "threads=1", "temperature=[0.0,1.0]"]
FEW = ["prompts.sets=[easy]", "prompts.limit=1", "new_tokens=6", "k=[1]", "threads=1"]
FEW += ["temperature=[0.0]"]


@pytest.mark.usefixtures("few_samples")
def test_a_sweep_measures_the_shipped_head_and_replays_it_exactly(tmp_path: Path) -> None:
    run = ran("sweep", *WORDS, "draft=tiny_eagle3", tmp_path, "until=all")
    assert {trace.depth for trace in run.traces} == {2}
    assert run.manifest.models["draft"].entries["layers_read"] == [2, 4, 5]
    assert_replay_is_exact(run)


def test_a_heads_memory_is_known_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose("sweep", [*WORDS, "draft=tiny_eagle3", f"results_root={tmp_path}"])
    opened = open_pair(config, prompt_sets.load(config.prompts))
    described, target = opened.describe().models["draft"], opened.target.memory_need
    assert target is not None
    need = head_memory_need(config.draft, target)
    assert need is not None
    assert need.weight_bytes == described.weights_bytes
    assert need.weight_bytes > 0
    assert need.kv_bytes_per_token == described.kv_bytes_per_token == 2 * 2 * 32 * 4
    monkeypatch.setattr(memory, "free_bytes", lambda _: target.weight_bytes)
    with pytest.raises(UserError, match=r"model=tiny and draft=tiny_eagle3: .*for draft=tiny_eag"):
        open_pair(config, prompt_sets.load(config.prompts))


@pytest.fixture
def graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `auto` chooses on a card; the code that is recorded there runs here as well."""
    monkeypatch.setattr(probe, "wants_graphs", lambda backend, _: backend != "eager")
    monkeypatch.setattr(probe, "check_graphs", lambda *_: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    compiled_pieces.cache_clear()
    yield
    compiled_pieces.cache_clear()


def on_a_card(run: StoredRun) -> Summary:
    """What is said of the run, had its device been an A10G."""
    device = {"device": "cuda", "device_name": "NVIDIA A10G", "device_memory_bytes": 24e9}
    environment = {**run.manifest.environment.entries, **device}
    return analyse(replace(run, manifest=run.manifest.updated(environment=environment)))


def fallbacks(summary: Summary) -> dict[str, Any]:
    """What is said of models that ran eagerly, by their roles."""
    said = [entry for entry in summary.caveats if entry.code == "engine_fallback"]
    page = " ".join(caveats(summary))
    assert page.count("ran eagerly") == len(said)
    return {str(entry.values["role"]): entry.values for entry in said}


@pytest.mark.usefixtures("graphs_on_the_cpu", "few_samples")
@pytest.mark.parametrize(
    ("draft", "p_min", "reason"),
    [
        ("tiny_eagle3", 0, "no CUDA graphs, a head reads hidden states"),
        ("tiny_good", 0.5, "no CUDA graphs, p_min reads every draft step back"),
    ],
)
def test_what_runs_eagerly_on_a_card_says_so_with_its_reason(
    draft: str, p_min: float, reason: str, tmp_path: Path
) -> None:
    words = [*FEW, f"results_root={tmp_path}", f"draft={draft}", f"p_min=[{p_min}]"]
    run = ran("sweep", *words, "until=all")
    assert run.manifest.models["target"].engine == "lean"
    said = fallbacks(on_a_card(run))
    assert {role: entry["name"] for role, entry in said.items()} == {
        "target": "tiny",
        "draft": draft,
    }
    for entry in said.values():
        assert str(entry["reason"]).startswith(reason)
        assert not entry["plain_too"]


@pytest.mark.usefixtures("graphs_on_the_cpu", "few_samples")
def test_a_head_makes_no_other_draft_of_an_audition_eager(tmp_path: Path) -> None:
    words = [*FEW, f"results_root={tmp_path}", "gpu=a10g"]
    run = ran("audition", *words, "drafts=[tiny_eagle3,tiny_good,ngram]")
    models = run.manifest.models
    assert {role: entry.engine for role, entry in models.items()} == {
        "target": "cuda_graphs",
        "tiny_good": "cuda_graphs",
        "tiny_eagle3": "eagle3",
    }
    # The head is compared with plain tokens of its own kind, which are stored apart
    eager = "tiny, eager"
    timed_with = {(timing.draft, timing.model) for timing in run.rounds}
    assert timed_with == {("tiny_eagle3", eager), ("tiny_good", "tiny"), ("ngram", "tiny")}
    steps = {(t.beside, t.model) for t in run.timings if t.role == "target"}
    assert steps == timed_with
    summary = on_a_card(run)
    for kind in ("step", "verify", "round"):
        rows = [row for row in summary.latency if (row.role, row.kind) == ("target", kind)]
        assert {row.model for row in rows} == {"tiny", eager}
    said = fallbacks(summary)
    assert list(said) == ["tiny_eagle3"]
    assert said["tiny_eagle3"]["plain_too"]
    # What a plain token costs is that of the graphs, though the head is named first
    (plain_s,) = (entry.plain_s for entry in summary.round_times if entry.draft == "tiny_good")
    assert summary.price_per_hour_usd is not None
    cost = usd_per_million_tokens(plain_s, summary.price_per_hour_usd)
    assert summary.plain_usd_per_million_tokens == pytest.approx(cost)


# Of the target as the others run it and for the head, and of a round with K = 1, seconds
PLAIN_S = {"tiny": 0.010, "tiny, eager": 0.030}
ROUND_S = {"tiny_eagle3": 0.020, "tiny_good": 0.012}


def timed_as(run: StoredRun, drafts: Sequence[str]) -> Summary:
    """What is said of an audition of these drafts, in this order, had rounds taken ROUND_S."""
    timing = RoundTiming(0, "", "", 0, 0.0, 64, 1, rounds=100, new_tokens=100, seconds=0.0)
    rounds = [
        replace(timing, visit=visit, draft=draft, model=model, k=k, seconds=100 * seconds)
        for draft in drafts
        for visit in (0, 1)
        for model in ("tiny, eager" if draft == "tiny_eagle3" else "tiny",)
        for k, seconds in ((0, PLAIN_S[model]), (1, ROUND_S[draft]))
    ]
    timed = replace(run, rounds=tuple(rounds))
    vars(timed)["traces"] = sorted(run.traces, key=lambda trace: drafts.index(trace.draft))
    return on_a_card(timed)


def test_a_head_that_ran_eagerly_is_compared_with_what_the_others_are_in_any_order(
    tmp_path: Path,
) -> None:
    words = [*FEW, f"results_root={tmp_path}", "gpu=a10g", "latency.measure=false"]
    run = ran("audition", *words, "drafts=[tiny_eagle3,tiny_good]")
    pages = []
    for drafts in (["tiny_eagle3", "tiny_good"], ["tiny_good", "tiny_eagle3"]):
        summary = timed_as(run, drafts)
        plain = [row.ms_per_token for row in summary.results if row.k == 0]
        assert plain
        assert plain == pytest.approx([10.0] * len(plain))
        rows = [row for row in summary.results if row.k]
        assert {row.draft for row in rows} == set(drafts)
        for row in rows:
            assert row.draft is not None
            assert row.rounds is not None
            assert row.drafted is not None
            # A round that proposes nothing is a plain token of the target as it ran there
            nothing = row.rounds - row.drafted
            own_plain_s = PLAIN_S["tiny, eager" if row.draft == "tiny_eagle3" else "tiny"]
            seconds = row.drafted * ROUND_S[row.draft] + nothing * own_plain_s
            assert row.ms_per_token == pytest.approx(1e3 * seconds / (row.new_tokens or 0))
            assert row.speedup is not None
            assert row.ms_per_token == pytest.approx(10.0 / row.speedup)
        assert summary.leaderboards
        for board in summary.leaderboards:
            assert [row.speedup for row in board.rows] == sorted(
                (row.speedup for row in board.rows), reverse=True
            )
            names = [row.draft for row in board.rows]
            assert names.index("tiny_good") < names.index("tiny_eagle3")
        pages.append({(row.draft, row.prompt_set, row.k): row.ms_per_token for row in rows})
    assert pages[0] == pytest.approx(pages[1])


@pytest.mark.usefixtures("graphs_on_the_cpu", "few_samples")
def test_an_audition_of_heads_alone_records_nothing(tmp_path: Path) -> None:
    run = ran("audition", *FEW, f"results_root={tmp_path}", "drafts=[tiny_eagle3]")
    assert {timing.model for timing in run.rounds} == {"tiny"}
    assert set(fallbacks(on_a_card(run))) == {"target", "tiny_eagle3"}


def test_an_entry_of_drafts_may_be_any_head() -> None:
    conf = draft_conf("eagle3@some/folder")
    assert (conf.name, conf.kind, conf.id) == ("eagle3", "eagle3", "some/folder")
    conf = draft_conf("mine@some/folder@kind:eagle3")
    assert (conf.name, conf.kind) == ("mine", "eagle3")


def test_rotary_frequencies_of_a_head_stay_in_float32_for_a_target_in_bfloat16(
    target: LoadedModel, tmp_path: Path
) -> None:
    save_head(random_head(norm_before_residual=False), tmp_path, "specforge", "target")
    exact = read(tmp_path, target)
    lower: Any = copy.deepcopy(target.network)
    low = replace(target, network=lower.to(torch.bfloat16))
    head = read(tmp_path, low)
    assert {weight.dtype for weight in head.parameters()} == {torch.bfloat16}
    assert torch.equal(head.rotary.inv_freq, exact.rotary.inv_freq)
    tokens, states = torch.tensor([[1, 2, 3]]), torch.randn(1, 2, head.fc.in_features)
    assert head.passes(tokens, states.to(torch.bfloat16), 2)[0].dtype == torch.bfloat16
