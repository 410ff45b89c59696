"""Refuse a folder that is not a complete causal language model, and name its kind.

transformers fills missing weights with random values and continues, so an incomplete download, a
reward model or an EAGLE head would be run and measured. Such folders are recognised by their
configuration, before anything large is read, and by the names of the tensors that are missing or
left over after loading. Errors of transformers and the hub become one line, too.

So are quantized weights that would be run without their scales: transformers skips a method of
quantization that it does not know with a warning, and converts codes of 8 bits to floating point as
if they were the weights. The method is read from the small files (`quant_method` of config.json,
and hf_quant_config.json of NVIDIA's ModelOpt), and the stored dtypes and names of tensors are
looked at where the files are here. Names of scales and codes are those of compressed-tensors,
ModelOpt, GPTQ, AWQ, bitsandbytes and MLX.
"""

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub import get_token, list_repo_files
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, modeling_utils
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils import logging as hf_logging
from transformers.utils.hub import cached_file

from harness.config import ModelConf
from harness.models.memory import is_out_of_memory
from harness.records import UserError, first_line

# Keys and class names that only heads for speculative decoding have (EAGLE 1-3, HASS, Medusa,
# DFlash, DSpark, MLP speculators, and whatever the speculators library saves)
HEAD_KEYS = (
    *("speculators_model_type", "eagle_config", "dflash_config", "markov_rank"),
    *("draft_vocab_size", "medusa_num_heads"),
)
HEAD_CLASS = re.compile(r"eagle|medusa|dflash|dspark|speculator", re.IGNORECASE)
# The key of a causal model that fills mask tokens (AMD-AGI/PARD, pard/pard_infer.py)
PARD_KEY = "pard_token"
HEAD_TENSORS = re.compile(r"^(model\.)?(fc\.|d2t$|t2d$|midlayer\.|medusa_head\.|hidden_norm\.)")
SCORER_CLASS = re.compile(
    r"For(Sequence|Token)Classification|ForQuestionAnswering|ForMultipleChoice|RewardModel"
)
SCORER_TENSORS = re.compile(r"^(score|classifier|v_head|value_head|reward_head|qa_outputs)\b")
SHOWN = 3
# What transformers says of an architecture or a tokenizer that is not its own
FOREIGN = re.compile(r"trust_remote_code|does not recognize|Unrecognized")

HEAD = (
    "a head for speculative decoding (EAGLE, Medusa or their kind), which drafts from the target's "
    "hidden states and is no model of its own; an EAGLE-3 head is given as draft=eagle3 draft.id=, "
    "or drafts=[eagle3@folder-or-hub-id], EAGLE, P-EAGLE and Medusa heads, DFlash and DSpark "
    "drafters as eagle, peagle, medusa, dflash and dspark; give a causal model as the draft, or "
    "serve another head with an engine that supports it and compare its numbers with plain "
    "decoding: python -m harness.breakeven acceptance_from=<result of vllm bench serve>"
)
PARD = (
    "a PARD draft, which drafts a round's tokens in one pass from mask tokens; as a draft model it "
    "would be run token by token, at another cost; give it as draft=pard draft.id=, or "
    "drafts=[pard@folder-or-hub-id]"
)
SCORER = (
    "a reward model or classifier, which scores text and generates none; give the causal model "
    "that it was trained from"
)
GGUF = (
    "weights in GGUF, the format of llama.cpp, and the harness runs transformers; give the folder "
    "or hub id of the original (config.json and *.safetensors), or measure the files on llama.cpp: "
    "python -m harness.server engine=llamacpp model=FILE.gguf draft=FILE.gguf"
)

MODELOPT = "hf_quant_config.json"
# What belongs to codes that stand in place of weights. Scales of a KV cache (k_scale) do not.
OF_CODES = re.compile(
    r"(^|[._])(weight_scale(_inv|_2)?|weight_packed|weight_zero_point|qweight|qzeros|SCB"
    r"|weight\.absmax|weight\.quant_map)$"
)
# What belongs to codes where the module has a weight too
BESIDE_CODES = re.compile(r"(.*\.)(w_)?(scales?|zeros?|zero_points?)$")
# As safetensors and torch name them, in lower case without "torch."
CODES = re.compile(r"^(f8_|f6_|f4|float8|float4|i8$|u8$|i4$|u4$|int8$|uint8$|int4$|uint4$)")
ADVICE = (
    "its codes would be run as if they were the weights; give the original or a dequantized copy,"
    " or measure it on an engine that reads it (python -m harness.server engine=vllm)"
)

# The files of weights that transformers saves, and how the name of an index of their shards ends
WEIGHTS, PICKLED, INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"

# Patterns of the files of tokenizers
TOKENIZERS = ("tokenizer.json", "*.model", "vocab*", "*.vocab", "*.tiktoken", "tekken.json")


def check_source(conf: ModelConf, source: str) -> None:
    """Refuse a model that by its small files is no complete causal language model."""
    path = Path(source)
    if path.is_file():
        kind = GGUF if path.suffix == ".gguf" else "a file; give the folder that holds it"
        raise _not_a_model(conf, kind)
    config, adapter = small_file(source, "config.json", conf), None
    if config is None or path.is_dir():
        adapter = small_file(source, "adapter_config.json", conf)
    if adapter is not None:
        base = adapter.get("base_model_name_or_path") or "its base model"
        raise _not_a_model(
            conf,
            f"a LoRA adapter of {base}, not a whole model; merge the two and give that folder "
            "(peft: AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload()"
            ".save_pretrained(folder), with the tokenizer)",
        )
    if config is None:
        named = [entry.name for entry in path.glob("*.gguf")] if path.is_dir() else [source]
        if any("gguf" in name.lower() for name in named):
            raise _not_a_model(conf, GGUF)
        return
    kind = _kind_of_config(config)
    if kind is not None and not (kind is PARD and conf.kind == "pard"):
        raise _not_a_model(conf, kind)
    check_quantized(conf, source, config)


def check_quantized(conf: ModelConf, source: str, config: Mapping[str, Any]) -> None:
    """Refuse quantized weights that are not read as such, as far as the files are here."""
    stated = stated_quantization(config)
    if stated is None:
        modelopt = small_file(source, MODELOPT, conf) or {}
        method, algorithm = None, (modelopt.get("quantization") or {}).get("quant_algo")
        shown = method if algorithm is None else f"modelopt {algorithm}"
    else:
        method, algorithm = _method_in(stated), stated.get("quant_algo")
        shown = f"{method} {algorithm}" if algorithm else method
    if shown is not None and method not in AUTO_QUANTIZER_MAPPING:
        raise UserError(
            f"{conf.where}: quantized by {shown}, which transformers does not read; {ADVICE}"
        )
    if stated is None:
        here = file_of(source, "config.json", conf)
        check_tensors(conf.where, stored_dtypes(here.parent) if here else {})


def stated_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry of a config.json, or of its text model's, that says how weights are quantized."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for name in ("quantization_config", "quantization"):  # MLX writes the second, or both
            if isinstance(part.get(name), Mapping):
                return part[name]
    return None


def _method_in(stated: Mapping[str, Any]) -> str:
    """The method, as transformers' quantizers/auto.py names it."""
    method = stated.get("quant_method")
    if method in (None, "bitsandbytes"):
        bits = next((bits for bits in (8, 4) if stated.get(f"load_in_{bits}bit")), None)
        if bits is not None:
            return f"bitsandbytes_{bits}bit"
    if method is None and {"bits", "group_size"} <= stated.keys():
        return "MLX or another method that its config.json does not name"
    return str(method or "a method that its config.json does not name")


def check_tensors(where: str, dtypes: Mapping[str, str]) -> None:
    """Refuse codes among tensors, by their dtypes, of which no config says how they are read."""
    for name, dtype in dtypes.items():
        of_weight = name.endswith("weight") and CODES.match(dtype.lower().removeprefix("torch."))
        beside = BESIDE_CODES.fullmatch(name)
        if of_weight or OF_CODES.search(name) or (beside and f"{beside[1]}weight" in dtypes):
            raise UserError(
                f"{where}: {name} ({dtype}) is of quantized weights, and no method that would"
                f" read them is in its config.json; {ADVICE}"
            )


def stored_dtypes(folder: Path) -> dict[str, str]:
    """Dtypes of tensors in the headers of a folder's safetensors files; none of damaged ones."""
    dtypes: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118  # not a dict
                    dtypes[name] = stored.get_slice(name).get_dtype()
        except (SafetensorError, OSError):  # loading says what is wrong with it
            continue
    return dtypes


def check_has_tokenizer(conf: ModelConf, source: str) -> None:
    """Refuse a folder without a tokenizer, for which transformers may make an empty one."""
    folder = Path(source)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise UserError(
            f"{conf.where}: no tokenizer in this folder; add {TOKENIZERS[0]}, as of the"
            " model that it was trained from"
        )


def check_complete(
    conf: ModelConf, network: PreTrainedModel, info: Mapping[str, Iterable[Any]]
) -> None:
    """Refuse a network with weights that by `output_loading_info` were not in the checkpoint."""
    missing = sorted(info["missing_keys"])
    wrong_shape = sorted(entry[0] for entry in info["mismatched_keys"])
    unexpected = sorted(info["unexpected_keys"])
    count = len(network.state_dict())
    if missing:
        fault = f"it lacks {len(missing)} of {count} tensors ({_some(missing)})"
    elif wrong_shape:
        fault = (
            f"{len(wrong_shape)} of {count} tensors have another shape than config.json says "
            f"({_some(wrong_shape)})"
        )
    elif any(info.get("error_msgs", ())):
        fault = f"it could not be read ({_some([str(line) for line in info['error_msgs']])})"
    else:
        return
    seems = _kind_of_tensors(network, missing, wrong_shape, unexpected, count)
    raise UserError(
        f"{conf.where}: {fault}, and transformers would run it with random values there; "
        f"it seems to be {seems}"
    )


def _not_a_model(conf: ModelConf, kind: str) -> UserError:
    return UserError(f"{conf.where}: this is {kind}")


def _kind_of_config(config: Mapping[str, Any]) -> str | None:
    names = " ".join(str(name) for name in config.get("architectures") or ())
    model_type = str(config.get("model_type", ""))
    if any(name in config for name in HEAD_KEYS) or HEAD_CLASS.search(f"{names} {model_type}"):
        return HEAD
    if PARD_KEY in config:
        return PARD
    writes = re.search(r"CausalLM|LMHead|ConditionalGeneration", names)
    return SCORER if SCORER_CLASS.search(names) and not writes else None


def _kind_of_tensors(
    network: PreTrainedModel,
    missing: Sequence[str],
    wrong_shape: Sequence[str],
    unexpected: Sequence[str],
    count: int,
) -> str:
    if any(HEAD_TENSORS.match(name) for name in unexpected):
        return HEAD
    if any(SCORER_TENSORS.match(name) for name in unexpected):
        return SCORER
    if missing and set(missing) <= _head_names(network):
        return (
            "a base model without its output head (a body or an embedding model); give the causal "
            "model"
        )
    if (wrong_shape and not missing) or (2 * len(missing) > count and unexpected):
        return (
            "of another architecture or size than its config.json says "
            f"({len(unexpected)} tensors are left over); give a folder whose files belong together"
        )
    return "an incomplete checkpoint; download or save it again"


def _head_names(network: PreTrainedModel) -> set[str]:
    head: Any = network.get_output_embeddings()
    return {
        f"{name}.{parameter}"
        for name, module in network.named_modules()
        if module is head
        for parameter, _ in module.named_parameters()
    }


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def small_file(source: str, name: str, conf: ModelConf) -> dict[str, Any] | None:
    """A small json file; None where transformers, which reads it next, says more precisely why."""
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "connection_errors")}
    try:
        file = file_of(source, name, conf, **quiet)
        content = json.loads(file.read_text(encoding="utf-8")) if file else None
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def file_of(source: str, name: str, conf: ModelConf, **options: Any) -> Path | None:
    """A file of a folder or a hub id, with options of `cached_file`; None where there is none."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    options = {"_raise_exceptions_for_missing_entries": False, **options}
    found = cached_file(source, name, revision=conf.revision, **options)
    return None if found is None else Path(found)


def weight_files(
    conf: ModelConf,
    source: str,
    names: Sequence[str] = (WEIGHTS,),
    wanted: Callable[[str], bool] = lambda _: True,
) -> list[Path]:
    """The files of a checkpoint's weights; of indexed shards those with a wanted tensor.

    They are the first of `names` that is there, as one file or as an index of shards; otherwise the
    *.safetensors of other names. Without any it raises OSError.
    """
    for name in names:
        file = file_of(source, name, conf)
        if file is not None:
            return [file]
        if small_file(source, name + INDEX, conf) is not None:
            return _shards(conf, source, name + INDEX, wanted)
    others = _other_weights(conf, source)
    if not others:
        raise OSError(f"no file named {WEIGHTS} in {source}")
    if others[0].endswith(INDEX):
        return _shards(conf, source, others[0], wanted)
    return [file for name in others if (file := file_of(source, name, conf))]


def other_name(conf: ModelConf, source: str) -> str | None:
    """The one *.safetensors, or index of these, of a folder without weights of the usual names."""
    usual = (WEIGHTS, PICKLED)[: 1 + conf.allow_pickle]
    names = [name for part in usual for name in (part, part + INDEX)]
    if not Path(source).is_dir() or any((Path(source) / name).is_file() for name in names):
        return None
    others = _other_weights(conf, source)
    return others[0] if len(others) == 1 else None


def _other_weights(conf: ModelConf, source: str) -> list[str]:
    """The name of the one index of *.safetensors, or the names of all of these files."""
    folder = Path(source)
    try:
        names = [] if folder.is_dir() else list_repo_files(source, revision=conf.revision)
    except OfflineModeIsEnabled:
        cached = file_of(source, "config.json", conf)
        folder, names = (folder if cached is None else cached.parent), []
    names = names or [path.name for path in folder.glob("*")]
    of_weights = sorted(name for name in names if "/" not in name)
    indexes = [name for name in of_weights if name.endswith(f".safetensors{INDEX}")]
    files = [name for name in of_weights if name.endswith(".safetensors")]
    return indexes if len(indexes) == 1 else files


def _shards(conf: ModelConf, source: str, index: str, wanted: Callable[[str], bool]) -> list[Path]:
    files: Mapping[str, str] = (small_file(source, index, conf) or {})["weight_map"]
    shards: list[Path] = []
    for name in sorted({file for tensor, file in files.items() if wanted(tensor)}):
        shard = file_of(source, name, conf)
        if shard is None:
            raise UserError(
                f"{conf.where}: {index} names {name}, which is not there; download or save it again"
            )
        shards.append(shard)
    return shards


@contextmanager
def explained(conf: ModelConf) -> Iterator[None]:
    """Turn errors of transformers and the hub, of any kind, into one line that says what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{conf.where}: {_explanation(conf, error)}") from error


def _explanation(conf: ModelConf, error: Exception) -> str:
    keys, reason = conf.keys, first_line(error)
    if isinstance(error, ImportError):
        return reason
    if isinstance(error, SafetensorError | UnpicklingError | EOFError):
        return (
            f"a file of its weights is damaged or cut short ({reason}); download or save it again"
        )
    if isinstance(error, StrictDataclassError):
        cause = " ".join(str(error.__cause__ or error).split())[:200].rstrip(".")
        return f"its config.json cannot be used ({cause})"
    if is_out_of_memory(error):
        spread = "larger cards" if conf.device_map else keys.of("device_map", "auto")
        return (
            "does not fit the device's memory; use a smaller model,"
            f" {keys.of('dtype', 'bfloat16')}, {keys.of('quantization', 'int8')} or {spread}"
        )
    if not conf.allow_pickle and "model.safetensors" in str(error):
        return (
            "no *.safetensors there; weights are not read from pickles (pytorch_model.bin) unless "
            f"you trust them: {keys.of('allow_pickle', 'true')}"
        )
    refusal = _hub_refusal(conf, error)
    if refusal is not None:
        return refusal
    if not conf.trust_remote_code and FOREIGN.search(str(error)):
        config = small_file(str(conf.id), "config.json", conf) or {}
        if "trust_remote_code" in str(error) or config.get("auto_map"):
            return (
                "needs the Python code of its own repository (auto_map in its json files); where"
                f" you trust that code, {keys.of('trust_remote_code', 'true')} runs it"
            )
    if isinstance(error, KeyError):
        reason = f"no {reason}"
    folder = Path(str(conf.id))
    if folder.is_dir() and not (folder / "config.json").is_file():
        return "no config.json in this folder; give that of a model which transformers saved"
    if folder.is_dir():
        advice = "save or download it again, or give another folder or hub id"
    else:
        advice = (
            f"give a local folder ({keys.of('id', '/path/to/model')}), a hub id that exists and is "
            "reachable, or fill the hub cache where there is network "
            f"(hf download {conf.id}) and set HF_HUB_OFFLINE=1"
        )
    return f"cannot be loaded ({reason}); {advice}"


def _hub_refusal(conf: ModelConf, error: BaseException | None) -> str | None:
    """Why the hub refuses this client, with what to do; None for an error of another cause."""
    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    status = error.response.status_code
    login = "set HF_TOKEN to it, or run `hf auth login`"
    if isinstance(error, GatedRepoError):
        return (
            f"gated (status {status}): accept its terms at https://huggingface.co/{conf.id}, and"
            f" give a token of that account which may read gated repositories: {login}"
        )
    if status == 401 and get_token() is not None:
        return (
            "the hub refuses your token (status 401), which is expired, revoked or mistyped; make a"
            f" new one at https://huggingface.co/settings/tokens and {login}; a public model needs"
            " none (unset HF_TOKEN, or `hf auth logout`)"
        )
    if status == 401:
        return (
            "the hub shows no such repository without a token (status 401): the id is mistyped, or"
            f" the repository is private and needs a token that may read it: {login}"
        )
    if status == 403:
        return f"your token may not read it (status 403); give one that may: {login}"
    return None


@contextmanager
def without_warm_up() -> Iterator[None]:
    """Load without the block of the model's size that transformers allocates ahead on a card.

    The block saves calls of cudaMalloc. But weights that are loaded into one block are parts of it,
    so the memory between them that fusing projections frees (`lean.weights`) cannot be returned. No
    setting switches it off: `_load_pretrained_model` of modeling_utils.py (transformers 5.0 to
    5.23) calls it wherever there is a device_map.
    """
    name = "caching_allocator_warmup"
    before = getattr(modeling_utils, name)
    setattr(modeling_utils, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(modeling_utils, name, before)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off the progress bars and advice of transformers and the hub."""
    before = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(before)
        hub.setLevel(hub_level)
        if bars:
            hf_logging.enable_progress_bar()
