"""Folders that hold no complete causal language model: one clear line each, at every command."""

import json
import threading
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from random_models import TOKENIZER_FILES, qwen3, save
from runs import outcome_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, Qwen3Config

from harness.config import DraftConf, ModelConf
from harness.models.checkpoint import check_quantized
from harness.models.heads.files import head_config
from harness.models.load import load
from harness.records import UserError

pytestmark = pytest.mark.usefixtures("few_samples")
CPU = torch.device("cpu")
WEIGHTS, CONFIG = "model.safetensors", "config.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model."""
    return save(qwen3(tie_word_embeddings=False), tmp_path / "x")


def loaded(folder: Path, **more: object):
    return load(DraftConf(name="x", id=str(folder), **more), CPU)  # type: ignore[arg-type]


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def drop(folder: Path, *names: str) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in names])


def configure(folder: Path, **entries: object) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def without_one_tensor(folder: Path) -> None:
    drop(folder, "model.layers.1.mlp.up_proj.weight")


def without_a_head(folder: Path) -> None:
    drop(folder, HEAD)
    configure(folder, architectures=["Qwen3Model"])


def without_embedding_and_tied_head(folder: Path) -> None:
    drop(folder, HEAD, EMBEDDING)
    configure(folder, tie_word_embeddings=True)


def reward_model(folder: Path, **entries: object) -> None:
    config = Qwen3Config.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    configure(folder, **entries)


def eagle_1(folder: Path) -> None:
    """One layer, an fc over token and hidden state, no head; config.json names LlamaForCausalLM."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        layer = {k.removeprefix("model."): v for k, v in tensors.items() if ".layers.0." in k}
        tensors.clear()
        tensors |= {**layer, "fc.weight": torch.zeros(32, 64)}

    rewrite(folder, change)
    configure(folder, num_hidden_layers=1, layer_types=["full_attention"])


def speculators(folder: Path) -> None:
    config = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
    (folder / CONFIG).write_text(json.dumps(config))


def dspark(folder: Path) -> None:
    configure(folder, architectures=["Qwen3DSparkModel"], markov_rank=4)


def pard(folder: Path) -> None:
    """A causal model whose config.json names its mask token."""
    configure(folder, pard_token=7)


def instead_of_the_model(folder: Path, name: str, content: str) -> None:
    for file in (WEIGHTS, CONFIG):
        (folder / file).unlink()
    (folder / name).write_text(content)


def lora(folder: Path) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    instead_of_the_model(folder, "adapter_config.json", json.dumps(config))


def lora_with_its_base(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))


def gguf(folder: Path) -> None:
    instead_of_the_model(folder, "model-q4_k_m.gguf", "GGUF")


def of_an_unknown_end(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "stop"}')


def without_a_tokenizer(folder: Path) -> None:
    for name in TOKENIZER_FILES:
        (folder / name).unlink()


def truncated(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (without_one_tensor, r"it lacks 1 of 25 tensors \(.*up_proj.*incomplete"),
        (without_a_head, r"\(lm_head\.weight\).*a base model without its output head"),
        (without_embedding_and_tied_head, r"it lacks 2 of 25 tensors \(lm_head"),
        (reward_model, "a reward model or classifier"),
        (partial(reward_model, architectures=None), r"\(lm_head\.weight\).*a reward model"),
        (eagle_1, r"it lacks 3 of 14 tensors.*a head for speculative decoding"),
        (
            partial(configure, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=512),
            "a head for speculative decoding",
        ),
        (speculators, "a head for speculative decoding"),
        (dspark, "a head for speculative decoding"),
        (pard, "a PARD draft, which drafts .* give it as draft=pard"),
        (lora, "a LoRA adapter of org/base, not a whole model; merge"),
        (lora_with_its_base, "a LoRA adapter of its base model"),
        (gguf, "weights in GGUF"),
        (truncated, "damaged or cut short.*download or save it again"),
        (partial(configure, num_hidden_layers=1), r"config\.json cannot be used \(`num_hid"),
        (partial(configure, dtype="float33"), r"cannot be loaded \(.*'float33'\); save"),
        (
            partial(configure, text_config={"model_type": "qwen3"}),
            r"cannot be loaded \('dict' object",
        ),
        (partial(configure, pad_token_id=5000), r"cannot be loaded \(Padding_idx"),
        (of_an_unknown_end, r"cannot be loaded \(.*'stop'\)"),
        (without_a_tokenizer, "no tokenizer in this folder; add tokenizer.json"),
        (partial(configure, intermediate_size=64), "6 of 25 .*another architecture or size"),
    ],
    ids=lambda entry: getattr(entry, "__name__", ""),
)
def test_a_folder_that_is_no_complete_causal_model_is_refused_by_what_it_is(
    change: Callable[[Path], None], line: str, folder: Path
) -> None:
    change(folder)
    with pytest.raises(UserError, match=line) as raised:
        loaded(folder)
    assert str(raised.value).startswith(f"draft.id={folder}: ")
    assert "\n" not in str(raised.value)


def test_a_single_file_is_refused_with_what_to_give_instead(folder: Path) -> None:
    with pytest.raises(UserError, match="a file; give the folder"):
        loaded(folder / WEIGHTS)


@pytest.mark.parametrize("tied", [True, False])
def test_a_complete_model_loads_with_its_own_weights(tmp_path: Path, tied: bool) -> None:
    """A tied head is not in the file; layers for multi-token prediction may be left over."""
    made = qwen3(tie_word_embeddings=tied)
    folder = save(made, tmp_path / "x")
    assert (HEAD in load_file(folder / WEIGHTS)) is not tied
    rewrite(folder, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(2, 2)}))
    ids = torch.tensor([[5, 9, 77, 3]])
    assert torch.equal(loaded(folder).network(ids).logits, made(ids).logits)


def test_every_command_that_loads_refuses_an_incomplete_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    without_one_tensor(folder)
    few = [f"results_root={tmp_path}/results", "prompts.limit=1", "new_tokens=4", "threads=1"]
    line = r"\.id=.*: it lacks 1 of 25 tensors"
    for command in ("sweep", "snapshot", "profile"):
        with pytest.raises(UserError, match=f"draft{line}"):
            outcome_of(command, *few, "draft=hf", f"draft.id={folder}", "draft.name=x")
    target = ["model=hf", f"model.id={folder}", "model.name=x", "drafts=[tiny_good]"]
    with pytest.raises(UserError, match=f"model{line}"):
        outcome_of("audition", *few, *target)


@pytest.mark.parametrize(
    ("key", "value", "extra"),
    [("quantization", "int8", "quantization"), ("device_map", "auto", "accelerate")],
)
def test_a_setting_without_its_package_names_the_extra(
    key: str, value: str, extra: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.models.load.find_spec", lambda _name: None)
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    assert extra in project["optional-dependencies"]
    line = rf"^draft\.{key}={value}: needs .*`pip install {project['name']}\[{extra}\]`$"
    with pytest.raises(UserError, match=line):
        loaded(folder, **{key: value})


def test_pickled_weights_are_read_only_where_that_is_allowed(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"no \*.safetensors there; .* draft.allow_pickle=true"):
        loaded(folder)
    assert loaded(folder, allow_pickle=True).vocab_size == 1024


# ---- the hub, and code of a repository -------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, str], None]]:
    """A hub that answers every request with one status and one error code."""
    says: list[tuple[int, str]] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, code = says[-1]
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:  # type: ignore[override]
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, constants = f"http://127.0.0.1:{server.server_port}", "huggingface_hub.constants"
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(f"{constants}.ENDPOINT", url)
    monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield lambda status, code: says.append((status, code))
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "token", "says"),
    [
        (401, "", "hf_expired", "the hub refuses your token .status 401., which is expired"),
        (401, "RepoNotFound", "hf_expired", "the hub refuses your token .status 401."),
        (401, "RepoNotFound", "", "no such repository without a token .status 401.*HF_TOKEN"),
        (403, "GatedRepo", "hf_mine", "gated .status 403.: accept its terms at .*/org/x.*HF_TOKEN"),
        (401, "GatedRepo", "", "gated .status 401.: accept its terms at .*/org/x.*HF_TOKEN"),
        (403, "", "hf_narrow", "your token may not read it .status 403."),
        (404, "RepoNotFound", "hf_mine", "a hub id that exists"),
    ],
)
@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_what_the_hub_refuses_is_said_with_its_cause(
    status: int,
    code: str,
    token: str,
    says: str,
    kind: str,
    hub: Callable[[int, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub(status, code)
    monkeypatch.setenv("HF_TOKEN", token)
    draft = DraftConf(name="x", id="org/x", kind=kind)
    with pytest.raises(UserError, match=rf"^draft\.id=org/x: .*{says}") as refused:
        head_config(draft) if kind == "eagle3" else load(draft, CPU)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "classes",
    [
        {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"},
        {"AutoModelForCausalLM": "modeling_x.X"},
    ],
)
def test_a_folder_with_code_of_its_own_names_the_key_that_runs_it(
    classes: dict[str, str], folder: Path
) -> None:
    configure(folder, model_type="unheard_of", auto_map=classes)
    line = r"needs the Python code of its own repository \(auto_map.*draft\.trust_remote_code=true"
    with pytest.raises(UserError, match=line):
        loaded(folder)


# ---- quantized weights ---------------------------------------------------------------------------

UP = "model.layers.0.mlp.up_proj.weight"


def codes_of(tensors: dict[str, torch.Tensor]) -> None:
    """Projections in float8 with their scales, as ModelOpt writes them."""
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax() / 448.0
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.1)


def modelopt(folder: Path) -> None:
    rewrite(folder, codes_of)
    configure(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})


def modelopt_beside_its_config(folder: Path) -> None:
    rewrite(folder, codes_of)
    entry = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(entry))


def method_of_another_engine(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "exl3", "bits": 4})


def scales_without_a_method(folder: Path) -> None:
    rewrite(folder, codes_of)


def codes_without_scales(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)}))


def scales_of_wide_weights(folder: Path) -> None:
    name = UP.replace(".weight", ".weight_scale_inv")
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(1, 1)}))


def packed_codes(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}_packed"] = torch.zeros(48, 4, dtype=torch.int32)
        del tensors[UP]

    rewrite(folder, change)
    configure(folder, compression_config={"quant_method": "compressed-tensors"})


def scales_of_another_name(folder: Path) -> None:
    name = UP.replace(".weight", ".w_scale")
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(1)}))


def mlx(folder: Path) -> None:
    configure(folder, quantization={"group_size": 64, "bits": 4})


def mlx_twice(folder: Path) -> None:
    sizes = {"group_size": 64, "bits": 4}
    configure(folder, quantization=sizes, quantization_config=sizes)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (scales_of_another_name, r"w_scale \(F32\) is of quantized weights"),
        (mlx, "quantized by MLX"),
        (mlx_twice, "quantized by MLX"),
        (modelopt, "quantized by modelopt FP8, which transformers does not read"),
        (modelopt_beside_its_config, "quantized by modelopt NVFP4"),
        (method_of_another_engine, "quantized by exl3"),
        (scales_without_a_method, r"layers\.0.*_proj\.(weight|weight_scale) .* quantized weights"),
        (codes_without_scales, rf"{UP} \(I8\) is of quantized weights"),
        (scales_of_wide_weights, r"weight_scale_inv \(F32\) is of quantized weights"),
        (packed_codes, r"weight_packed \(I32\) is of quantized weights"),
    ],
    ids=lambda entry: getattr(entry, "__name__", ""),
)
def test_codes_are_never_run_as_if_they_were_the_weights(
    change: Callable[[Path], None], line: str, folder: Path, tmp_path: Path
) -> None:
    """Before anything is loaded, so in a dry run too."""
    change(folder)
    for role in ("model", "draft"):
        words = [f"{role}=hf", f"{role}.id={folder}", f"{role}.name=x", "dry_run=true"]
        with pytest.raises(UserError, match=f"^{role}.id={folder}: .*{line}.*engine=vllm"):
            outcome_of("sweep", *words, f"results_root={tmp_path}/results")
    with pytest.raises(UserError, match=line):
        loaded(folder)


@pytest.mark.parametrize("named", [{"quant_method": "bitsandbytes"}, {}])
def test_a_checkpoint_of_bitsandbytes_is_one_that_transformers_reads(
    named: dict[str, str], folder: Path
) -> None:
    """transformers names its two methods by their bits, and config.json by a flag."""
    codes_without_scales(folder)
    configure(folder, quantization_config={**named, "load_in_8bit": True})
    config = json.loads((folder / "config.json").read_text())
    check_quantized(ModelConf(id=str(folder), name="x"), str(folder), config)


def test_scales_of_a_cache_and_masks_of_bytes_are_no_quantized_weights(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.bias"] = torch.ones(4, 4, dtype=torch.uint8)

    before = loaded(folder).network.state_dict()
    rewrite(folder, change)
    after = loaded(folder).network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
