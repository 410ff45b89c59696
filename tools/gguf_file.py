"""Write a loaded model, an EAGLE-3 head or a block drafter as a GGUF file, which llama.cpp reads.

    python -m tools.gguf_file

writes NAME.gguf of every model that ships with the harness; they are of Qwen3. The tests write
block drafters with it. Any other model is converted with llama.cpp's own convert_hf_to_gguf.py and
named by `model.gguf=`.

The names of the tensors are the `gguf` package's (`get_tensor_name_map`). Norms are stored in
float32; llama.cpp has no other kernels for them.

A head's names and keys are those that llama.cpp's conversion/llama.py writes and
src/models/eagle3.cpp reads. Its query and key rows are reordered, because llama.cpp turns
neighbouring pairs of a head's numbers where transformers turns its two halves (`_interleaved`;
llama.cpp, convert_hf_to_gguf.py, `LlamaModel.permute`). `d2t` holds the target's ids themselves.
What it shares with the target, the embedding, is not in the file.

A DFlash drafter's are those of conversion/qwen.py (`DFlashModel`) and src/models/dflash.cpp. It
shares the embedding and the output matrix with the target; one with its own is not converted here.
A DSpark drafter's file also has the two matrices of its Markov head, of the vanilla kind, which is
the only one that src/models/dflash.cpp computes.

The tokenizer goes in as byte-level BPE, with the name of the expression that splits text into
words. Where prompts are sent as token ids, as the harness does, only the pieces are used.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor, nn

from harness.config import DraftConf, ModelConf
from harness.models.embedded import EMBEDDED, gguf_of
from harness.models.heads.base import LoadedHead
from harness.models.heads.dflash import DFlashNetwork
from harness.models.heads.dspark import DSparkNetwork
from harness.models.heads.eagle3 import STATES, Eagle3Network
from harness.models.load import LoadedModel, load
from harness.records import UserError

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# How byte-level tokenizers split text into words (the pattern of tokenizer.json), and llama.cpp's
# names of these splits
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPLITS = {QWEN2_SPLIT: "qwen2", LLAMA3_SPLIT: "llama-bpe"}
# Of a layer, by its network's names; they follow `blk.N.`
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Of an EAGLE-3 head with its layer, and of a block drafter without
HEAD_TENSORS = {
    "embed_tokens": "token_embd",
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    **{f"midlayer.{name}": f"blk.0.{stored}" for name, stored in LAYER_TENSORS.items()},
}
DRAFTER_TENSORS = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
}
# Which of the target's layers a head reads; the name before build 11500 and since
LAYERS_KEYS = ("extract_layers", "target_layers")
ELSEWHERE = "convert it with llama.cpp's convert_hf_to_gguf.py and name the file"


def write_gguf(loaded: LoadedModel, path: Path) -> Path:
    """Write a model of Qwen3 with its tokenizer as a GGUF file of the same dtype.

    Raises:
        UserError: a dtype or a tokenizer that is not converted here.
    """
    config: Any = loaded.network.config
    where = loaded.shown
    kind = DTYPES.get(loaded.network.dtype)
    if kind is None:
        raise UserError(f"{where}: {loaded.network.dtype} is not converted to GGUF; use float32")

    def fill(writer: Any) -> None:
        writer.add_name(loaded.name)
        _write_sizes(writer, config, loaded.context_tokens, loaded.vocab_size)
        _write_tokenizer(writer, loaded, where)

    return _written(path, config.model_type, kind, fill, _tensors(loaded))


def write_eagle3_gguf(head: LoadedHead, target: LoadedModel, path: Path) -> Path:
    """Write an EAGLE-3 head, with its target's tokenizer, as a GGUF file of the same dtype.

    Raises:
        UserError: a head of another kind, a dtype or a tokenizer that is not converted here.
    """
    network, where = head.network, head.shown
    if not isinstance(network, Eagle3Network):
        raise UserError(f"{where}: only EAGLE-3 heads are converted to GGUF here; {ELSEWHERE}")
    if len(network.layers) != STATES:
        raise UserError(f"{where}: llama.cpp's EAGLE-3 heads read {STATES} of the target's layers")
    kind = DTYPES.get(network.lm_head.weight.dtype)
    if kind is None:
        raise UserError(f"{where}: {network.lm_head.weight.dtype} is not converted to GGUF")

    def fill(writer: Any) -> None:
        writer.add_name(head.name)
        _write_sizes(writer, network.config, target.context_tokens, target.vocab_size)
        for key in LAYERS_KEYS:
            writer.add_array(f"eagle3.{key}", list(network.layers))
        writer.add_uint32("eagle3.target_hidden_size", network.width // len(network.layers))
        writer.add_bool("eagle3.norm_before_residual", network.norm_before_residual)
        _write_tokenizer(writer, target, where)
        if len(network.d2t) != target.vocab_size:
            ids = network.d2t.cpu() + torch.arange(len(network.d2t))
            writer.add_tensor("d2t", ids.numpy())

    return _written(path, "eagle3", kind, fill, _head_tensors(network))


def write_block_gguf(head: LoadedHead, target: LoadedModel, path: Path) -> Path:
    """Write a DFlash or DSpark drafter, with its target's tokenizer, in its own dtype.

    Raises:
        UserError: a drafter with an embedding of its own, a Markov head, a dtype or a tokenizer
            that is not converted here.
    """
    network, where = head.network, head.shown
    assert isinstance(network, DFlashNetwork)  # the kind says so
    markov = network.markov_head if isinstance(network, DSparkNetwork) else None
    if markov is not None and markov.kind != "vanilla":
        raise UserError(
            f"{where}: its Markov head is {markov.kind}, and llama.cpp computes vanilla ones alone"
        )
    if isinstance(network.embed, nn.Module) or isinstance(network.output, nn.Module):
        raise UserError(f"{where}: it has its own embedding or output matrix; {ELSEWHERE}")
    kind = DTYPES.get(network.fc.weight.dtype)
    if kind is None:
        raise UserError(f"{where}: {network.fc.weight.dtype} is not converted to GGUF")

    def fill(writer: Any) -> None:
        writer.add_name(head.name)
        _write_sizes(writer, network.config, target.context_tokens, target.vocab_size)
        writer.add_array("dflash.target_layers", list(network.layers))
        writer.add_uint32("dflash.block_size", network.block)
        if isinstance(network, DSparkNetwork):
            writer.add_bool("dflash.sample_from_anchor", network.first == 0)
            writer.add_bool("dflash.has_confidence_head", False)
        writer.add_causal_attention(False)
        _write_tokenizer(writer, target, where)
        writer.add_mask_token_id(network.mask_token)

    return _written(path, "dflash", kind, fill, _drafter_tensors(network))


def _drafter_tensors(network: DFlashNetwork) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in network.state_dict().items():
        stem = name.removesuffix(".weight")
        renamed = DRAFTER_TENSORS.get(stem)
        if renamed is None:
            _, layer, part = stem.split(".", 2)
            renamed = f"blk.{layer}.{LAYER_TENSORS[part]}"
        yield f"{renamed}.weight", tensor.detach().cpu()


def _written(
    path: Path,
    architecture: str,
    kind: str,
    fill: Callable[[Any], None],
    tensors: Iterable[tuple[str, Tensor]],
) -> Path:
    """A file with the keys that `fill` writes, and tensors of a GGUF type; vectors are float32."""
    partial = path.with_name(f"{path.name}.partial")
    writer = gguf.GGUFWriter(partial, architecture)
    file_type = "ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"
    writer.add_file_type(getattr(gguf.LlamaFileType, file_type))
    fill(writer)
    for name, tensor in tensors:
        data: Any = tensor.float().numpy()
        stored = getattr(gguf.GGMLQuantizationType, kind if tensor.ndim > 1 else "F32")
        writer.add_tensor(name, gguf.quants.quantize(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # A run that is killed here leaves no half a model under the name that is looked for
    return partial.replace(path)


def _write_sizes(writer: Any, config: Any, context_tokens: int | None, vocab: int) -> None:
    writer.add_context_length(context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_rope_dimension_count(_head_size(config))
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(vocab)


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _tensors(loaded: LoadedModel) -> Iterator[tuple[str, Tensor]]:
    config: Any = loaded.network.config
    architecture = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in loaded.network.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # llama.cpp takes the embedding where there is no output matrix
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None  # of the types of model that are written here
        yield known, tensor.detach().cpu()


def _head_tensors(network: Eagle3Network) -> Iterator[tuple[str, Tensor]]:
    config: Any = network.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in network.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem not in HEAD_TENSORS or (stem == "embed_tokens" and not network.own_embedding):
            continue
        rows, projection = tensor.detach().cpu(), stem.split(".")[-1]
        if projection in heads:
            rows = _interleaved(rows, heads[projection])
        yield f"{HEAD_TENSORS[stem]}.weight", rows


def _interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head from halves (a b ... | a' b' ...) to pairs (a a' b b' ...)."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


# ---- the tokenizer -------------------------------------------------------------------------------


def _write_tokenizer(writer: Any, loaded: LoadedModel, where: str) -> None:
    described = json.loads(loaded.tokenizer.backend_tokenizer.to_str())
    split = _split_name(described, f"{where}: {ELSEWHERE}: {loaded.keys.of('gguf', 'FILE')}")
    pieces = _pieces(described, loaded.vocab_size, gguf.TokenType)
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in described["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_types([kind for _, kind in pieces])
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    ids: list[tuple[Callable[[int], None], int | None]] = [
        (writer.add_bos_token_id, loaded.tokenizer.bos_token_id),
        (writer.add_eos_token_id, loaded.tokenizer.eos_token_id),
        (writer.add_pad_token_id, getattr(loaded.tokenizer, "pad_token_id", None)),
    ]
    for add, token in ids:
        if token is not None:
            add(token)


def _split_name(described: dict[str, Any], refusal: str) -> str:
    """llama.cpp's name of how the tokenizer splits text into words."""
    before = described["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [before])
    if described["model"]["type"] == "BPE" and steps[-1].get("type") == "ByteLevel":
        if len(steps) == 1 and steps[0]["use_regex"]:
            return "gpt-2"
        patterns = [step.get("pattern", {}).get("Regex") for step in steps[:-1]]
        if len(patterns) == 1 and patterns[0] in SPLITS:
            return SPLITS[patterns[0]]
    raise UserError(f"{refusal}; only byte-level BPE of GPT-2, Llama 3 and Qwen is converted here")


def _pieces(described: dict[str, Any], size: int, kinds: Any) -> list[tuple[str, Any]]:
    """Text and kind of every id, as many as the embedding has rows."""
    pieces = [(f"[PAD{token}]", kinds.UNUSED) for token in range(size)]
    for piece, token in described["model"]["vocab"].items():
        pieces[token] = (piece, kinds.NORMAL)
    for added in described["added_tokens"]:
        kind = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
        pieces[added["id"]] = (added["content"], kind)
    return pieces


def main() -> None:
    """Write NAME.gguf of every model that ships with the harness, in float32."""
    cpu = torch.device("cpu")
    target = load(ModelConf(name="tiny", id="embedded:tiny"), cpu)
    for file in sorted(EMBEDDED.glob("*/model.safetensors")):
        conf = DraftConf(name=file.parent.name, id=f"embedded:{file.parent.name}")
        path = gguf_of(file.parent)
        if conf.name == "tiny_eagle3":
            conf.kind = "eagle3"
            write_eagle3_gguf(conf.spec.load(conf, target), target, path)
        else:
            write_gguf(load(conf, cpu), path)


if __name__ == "__main__":
    main()
