"""Build every causal model type of transformers small; compare it with a plain greedy loop.

    make test-families              # all of them, 4 minutes of CPU time; writes the table
    python tools/model_families.py mamba  # some, printed only

Each type is made small from its config class, given random weights under which its text depends on
its context, saved, and loaded as a user would load it. Then, on the same network:

- reference: greedy decoding by one forward per token over the whole text, use_cache=False;
- the product's loop, plain and speculative with K = 1, 2, 4, 8, its own perturbed copy as draft;
- the product's replay: texts generated in a batch, scored, and their rounds counted.

Prompts are shorter and longer than every window and chunk (8), and texts cross them. A type is
`identical` when all texts are the reference's and replay counts the loop's rounds, `refused` when
the product says in one line why it does not serve it. Anything else is a bug: WRONG or CRASHED.
`not built` are types whose config class alone does not make a network.

Each type runs in its own process with bounds on time and memory; what is done is kept in a JSON
file, so that an interrupted run goes on where it stopped.
"""

import argparse
import copy
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForCausalLM,
)

from harness.analysis.replayed import replayed
from harness.config import ModelConf
from harness.measurement.draft_scores import score_texts
from harness.measurement.generations import Request
from harness.measurement.target_texts import generate_texts
from harness.models.cached import CachedModel
from harness.models.checkpoint import quiet_transformers
from harness.models.load import EMBEDDED, load
from harness.models.probe import cached_model
from harness.records import UserError
from tests.stubs import REQUEST, decoded, generation_of, text_of

TABLE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
CPU = torch.device("cpu")
# The last ids are padding and end of text: beyond the width in use, so that no text holds them
VOCAB, VISIBLE = 128, 120
KS = (1, 2, 4, 8)
BUDGET = 20
PROMPTS = ((5, 17, 90, 33, 64), tuple((29 * index + 7) % VISIBLE for index in range(19)))
# How wide the random weights are, and how far the draft is from the target; each tried in turn
SPREADS, NOISES = (1.0, 1.6, 2.5), (0.1, 0.02, 0.4)
SECONDS, MEMORY = 240, 6 << 30
# Types that are checked in `make test` too: one for each way of running a model
SAMPLE = (
    *("llama", "gpt_oss", "gemma4_text", "roberta", "bamba", "mamba", "mamba2", "rwkv"),
    *("openai-gpt", "qwen3_next", "lfm2", "deepseek_v3"),
)


@dataclass(frozen=True)
class Row:
    """What was found for one model type; the columns of the table."""

    model_type: str
    forward: str
    rewinding: str
    attention: str
    result: str
    reason: str


# Building


def _all(value: int, *names: str) -> dict[str, int]:
    return dict.fromkeys(names, value)


# Sizes by the names that configs have for them; a default above is brought down to it
SIZES: dict[str, int] = {
    **_all(VOCAB, "vocab_size", "n_vocab", "vocab_size_per_layer_input", "unpadded_vocab_size"),
    **_all(VOCAB, "encoder_hash_byte_group_vocab", "pronunciation_vocab_size", "shape_vocab_size"),
    **_all(VOCAB, "decoder_vocab_size", "ngram_vocab_size_base"),
    **_all(32, "hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim", "embed_dim"),
    **_all(32, "word_embed_proj_dim", "input_embedding_size", "output_embedding_size"),
    **_all(32, "embedding_size", "lru_width", "backbone_hidden_size", "hidden_size_global"),
    **_all(32, "pronunciation_embed_dim", "shape_embed_dim", "ple_embed_dim", "input_size"),
    **_all(64, "intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"),
    **_all(64, "d_inner", "dff", "dim_ff", "ffn_hidden_size", "feed_forward_size", "mamba_d_ssm"),
    **_all(64, "intermediate_size_mlp", "dense_intermediate_size", "shared_intermediate_size"),
    **_all(64, "prefix_dense_intermediate_size"),
    **_all(4, "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    **_all(4, "decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"),
    **_all(4, "num_decoder_attention_heads", "num_encoder_attention_heads"),
    **_all(4, "linear_num_heads", "linear_num_value_heads"),
    # With fewer, many scores are exactly zero, and which of these are chosen is up to the kernel
    **_all(16, "index_n_heads"),
    **_all(2, "num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads"),
    **_all(2, "num_global_key_value_heads", "linear_num_key_heads"),
    **_all(8, "head_dim", "swa_head_dim", "global_head_dim", "d_head", "dim_head", "d_kv"),
    **_all(8, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_channels", "rotary_dim"),
    **_all(8, "attention_head_size", "linear_key_head_dim", "linear_value_head_dim"),
    **_all(8, "linear_head_dim", "attention_head_dim"),
    **_all(16, "qk_head_dim", "index_head_dim", "q_lora_rank", "kv_lora_rank", "o_lora_rank"),
    **_all(16, "gated_norm_rank", "laurel_rank", "hidden_size_per_layer_input", "adapter_rank"),
    **_all(16, "moe_latent_size", "router_hidden_size", "hc_lowrank"),
    **_all(16, "moe_intermediate_size", "shared_expert_intermediate_size"),
    **_all(16, "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"),
    **_all(16, "expert_ffn_hidden_size"),
    **_all(4, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    **_all(2, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"),
    **_all(2, "top_k_experts"),
    **_all(1, "n_shared_experts", "num_shared_experts", "n_group", "topk_group"),
    **_all(1, "moe_num_shared_experts", "num_expert_group", "zero_expert_num"),
    **_all(1, "first_k_dense_replace", "num_dense_layers"),
    **_all(8, "sliding_window", "attention_chunk_size", "sliding_window_size", "window_size"),
    **_all(8, "attention_window_size", "local_attention", "keep_window_size", "chunk_size"),
    **_all(8, "local_attention_window_len", "mamba_chunk_size", "index_topk"),
    **_all(256, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    **_all(256, "model_max_length", "max_target_positions", "max_source_positions"),
    **_all(256, "context_length", "original_max_position_embeddings"),
    **_all(8, "mamba_d_state", "state_size", "ssm_state_size", "mamba_d_head", "mamba_head_dim"),
    **_all(8, "mamba_headdim", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
    **_all(1, "mamba_n_groups", "n_groups", "mamba_ngroups"),
    **_all(4, "mamba_dt_rank", "time_step_rank"),
    **_all(4, "num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"),
    **_all(4, "num_layers", "num_decoder_layers", "num_encoder_layers", "num_blocks"),
}
DOTS3 = {
    **_all(4, "num_key_value_heads", "swa_num_attention_heads", "swa_num_key_value_heads"),
    **_all(16, "swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim"),
    **_all(8, "swa_qk_nope_head_dim", "swa_v_head_dim", "qk_rope_head_dim"),
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# What a type needs in addition: sizes that must fit each other, or that its config leaves open
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": DOTS3,
        "vision_config": {"adapter_in_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": DOTS3,
    "gemma4": {"text_config": {"global_head_dim": 16}},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified": {"text_config": {"global_head_dim": 16}},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "zamba": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
}
QSA = {
    **_all(16, "indexer_n_heads"),
    **_all(2, "indexer_compress_ratio"),
    **_all(8, "indexer_head_dim", "indexer_budget"),
    "indexer_kv_heads": 1,
}


def small_config(model_type: str) -> PreTrainedConfig:
    """A type's config with every size brought down, one layer of each kind at least."""
    cls: Any = CONFIG_MAPPING[model_type]
    small = _merged(_shrunk(cls().to_dict()), SPECIAL.get(model_type, {}))
    if "layer_types" in small:
        small["num_hidden_layers"] = len(small["layer_types"])
    return cls(**small, is_decoder=True)


def _merged(small: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        name: _merged(small[name], value)
        for name, value in special.items()
        if name in small and isinstance(value, dict) and name.endswith("config")
    }
    return {**small, **special, **nested}


def _shrunk(defaults: Mapping[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in defaults.items():
        number = value if isinstance(value, int) and not isinstance(value, bool) else 0
        if name == "per_layer_config":
            continue  # made again by the config, from sizes that are brought down
        if isinstance(value, dict) and name.endswith("config"):
            small[name] = _shrunk(value)
        elif number > SIZES.get(name, number):
            small[name] = SIZES[name]
        elif number >= VISIBLE and name.endswith(("token_id", "token_index")):
            small[name] = VOCAB - 3
    for name, token in (
        *(("pad_token_id", VOCAB - 1), ("bos_token_id", VOCAB - 2), ("eos_token_id", VOCAB - 2)),
        ("decoder_start_token_id", VOCAB - 2),
    ):
        if name in defaults:
            small[name] = token
    if "tie_word_embeddings" in defaults:
        small["tie_word_embeddings"] = False
    if defaults.get("kv_lora_rank"):
        small["num_key_value_heads"] = 4  # all heads share the latent
    if "indexer_budget" in defaults:
        small.update(QSA)
    if defaults.get("layer_types"):
        kinds = list(dict.fromkeys(defaults["layer_types"]))
        small["layer_types"] = kinds * 2 if len(kinds) == 1 else kinds
        small["num_hidden_layers"] = len(small["layer_types"])
    small.pop("is_decoder", None)
    if defaults.get("mlp_layer_types"):
        kinds = list(dict.fromkeys(defaults["mlp_layer_types"]))
        layers = range(small.get("num_hidden_layers", SIZES["num_hidden_layers"]))
        small["mlp_layer_types"] = [kinds[min(layer, len(kinds) - 1)] for layer in layers]
    return small


# Set by a structured rule of the type, not by chance: decays, steps, skip weights, scales
KEPT = ("A_log", "dt_bias", ".D", "time_decay", "time_first", "inv_freq", "slope", "decay")


@torch.no_grad()
def randomise(network: PreTrainedModel, spread: float) -> None:
    """Random weights wide enough that a text depends on what came before."""
    generator = torch.Generator().manual_seed(7)
    embedding = network.get_input_embeddings().weight
    for name, tensor in network.named_parameters():
        if not tensor.is_floating_point():
            continue
        drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if tensor is embedding:
            tensor.copy_(drawn)
        elif tensor.ndim == 1 or any(kept in name for kept in KEPT):
            tensor.add_(0.1 * drawn)
        else:
            tensor.copy_(drawn * spread * tensor.shape[-1] ** -0.5)


def build(model_type: str) -> PreTrainedModel:
    """A small network of this type whose greedy text depends on its context."""
    network: Any = None
    for spread in SPREADS:
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(small_config(model_type), dtype=torch.float32)
        network.eval()
        randomise(network, spread)
        text = greedy(network, PROMPTS[0])
        if len(set(text)) > 5 and text != greedy(network, PROMPTS[0][-1:]):
            return network
    return network


# Checking


@torch.inference_mode()
def greedy(network: PreTrainedModel, prompt: Sequence[int]) -> tuple[int, ...]:
    """The reference: one forward without a cache over the whole text for each token."""
    text = list(prompt)
    for _ in range(BUDGET):
        logits: Tensor = network(input_ids=torch.tensor([text]), use_cache=False).logits
        text.append(int(logits[0, -1, :VISIBLE].argmax()))
    return tuple(text[len(prompt) :])


def _request(prompt: Sequence[int]) -> Request:
    return replace(REQUEST, prompt=str(len(prompt)), tokens=tuple(prompt), budget=BUDGET)


def _rounds(target: CachedModel, draft: CachedModel | None, prompt: Sequence[int], k: int):
    return decoded(target, draft, generation_of(prompt, BUDGET, k, seed=1))


def plain_text(target: CachedModel, prompt: Sequence[int]) -> tuple[int, ...]:
    """The product's plain loop."""
    return tuple(text_of(_rounds(target, None, prompt, 0)))


def speculative_text(
    target: CachedModel, draft: CachedModel, prompt: Sequence[int], k: int
) -> tuple[tuple[int, ...], int, float]:
    """The product's speculative loop: the text, its rounds, and the share of drafts accepted."""
    rounds = _rounds(target, draft, prompt, k)
    accepted = sum(entry.accepted for entry in rounds)
    return tuple(text_of(rounds)), len(rounds), accepted / sum(entry.drafted for entry in rounds)


@torch.no_grad()
def perturbed(network: PreTrainedModel, scale: float) -> PreTrainedModel:
    """A copy that agrees with the network now and then."""
    draft = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(3)
    for tensor in draft.parameters():
        if tensor.is_floating_point() and tensor.ndim > 1:
            drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor.add_(scale * tensor.std() * drawn)
    return draft


def _draft(network: PreTrainedModel, target: CachedModel) -> CachedModel:
    """A perturbed copy of which some tokens are accepted and some are not."""
    drafts = (
        cached_model(perturbed(network, scale), VISIBLE, "draft=perturbed") for scale in NOISES
    )
    tried = next(drafts)
    while not 0.1 < speculative_text(target, tried, PROMPTS[0], 2)[2] < 0.95:
        following = next(drafts, None)
        if following is None:
            break
        tried = following
    return tried


def wrong_texts(network: PreTrainedModel, target: CachedModel, ks: Sequence[int]) -> str:
    """What differs from the reference, in words; empty if nothing does."""
    draft = _draft(network, target)
    reference = {prompt: greedy(network, prompt) for prompt in PROMPTS}
    loop_rounds: dict[tuple[Sequence[int], int], int] = {}
    wrong: list[str] = []
    for prompt, text in reference.items():
        where = f"prompt of {len(prompt)} tokens"
        if plain_text(target, prompt) != text:
            wrong.append(f"plain text, {where}")
        for k in ks:
            generated, loop_rounds[prompt, k], _ = speculative_text(target, draft, prompt, k)
            if generated != text:
                wrong.append(f"K = {k}, {where}")
    texts = generate_texts(target, [_request(prompt) for prompt in PROMPTS], name="model=x")
    wrong += [
        f"generated text, prompt of {len(text.request.tokens)} tokens"
        for text in texts
        if text.tokens != reference[text.request.tokens]
    ]
    traces = score_texts(texts, target, draft, draft_name="perturbed")
    counts = replayed(traces, "ratio", ks)
    for row, prompt in enumerate(PROMPTS):
        wrong += [
            f"replayed rounds at K = {k}, prompt of {len(prompt)} tokens"
            for k in ks
            if counts[k].rounds[row] != loop_rounds[prompt, k]
        ]
    return "; ".join(wrong)


def check(model_type: str, ks: Sequence[int] = KS) -> Row:
    """Build, load and compare one type."""
    row = {"model_type": model_type, "forward": "-", "rewinding": "-", "attention": "-"}
    try:
        with quiet_transformers():
            network = build(model_type)
    except Exception as problem:
        return Row(**row, result="not built", reason=_one_line(problem))
    name = f"model={model_type}"
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        try:
            network.save_pretrained(folder)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(EMBEDDED / "tiny" / file, Path(folder) / file)
        except Exception as problem:
            return Row(**row, result="not built", reason=f"cannot be saved: {_one_line(problem)}")
        try:
            conf = ModelConf(name=model_type, id=folder, dtype="float32")
            loaded = load(conf, CPU)
            described = loaded.describe()
            json.dumps(described)
            row["attention"] = str(described["attention"])
            target = cached_model(loaded.network, VISIBLE, name)
            row["forward"], row["rewinding"] = target.engine, target.rewinding
            if target.positions:
                row["rewinding"] += ", position_ids"
            wrong = wrong_texts(loaded.network, target, ks)
        except UserError as problem:
            reason = str(problem).removeprefix(f"{name}: ").replace(folder, "FOLDER")
            return Row(**row, result="refused", reason=reason)
    if wrong:
        return Row(**row, result="WRONG", reason=wrong)
    notes = [f"{what} {how}" for what, how in target.text_batches.items() if how != "padded"]
    return Row(**row, result="identical", reason="; ".join(notes))


def _one_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:200]


# Running


def isolated(model_type: str, ks: Sequence[int] = KS) -> Row:
    """`check` in a process of its own, with bounds on time and memory."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            signal.alarm(SECONDS)
            try:
                row = check(model_type, ks)
            except BaseException as problem:
                where = traceback.extract_tb(problem.__traceback__)[-1]
                at = f" at {Path(where.filename).name}:{where.lineno}"
                row = Row(model_type, "-", "-", "-", "CRASHED", _one_line(problem) + at)
            with os.fdopen(writer, "w") as out:
                json.dump(asdict(row), out)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as out:
        answer = out.read()
    os.waitpid(process, 0)
    if not answer:
        return Row(model_type, "-", "-", "-", "CRASHED", f"killed, or longer than {SECONDS} s")
    return Row(**json.loads(answer))


def all_types() -> list[str]:
    """Every model type that transformers maps to a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def table(rows: Sequence[Row]) -> str:
    """docs/families.md."""
    import transformers

    counts = {
        result: sum(row.result == result for row in rows)
        for result in ("identical", "refused", "not built", "WRONG", "CRASHED")
    }
    head = [
        "# Model types",
        "",
        f"Every model type of transformers {transformers.__version__} that is a causal language "
        "model, built small with random",
        "weights (float32, CPU), loaded, and compared with an independent greedy loop without a "
        "cache: plain and",
        "speculative texts at K = 1, 2, 4, 8 across window and chunk edges, and replay. "
        "`tools/model_families.py` says how;",
        "`make test-families` writes this table.",
        "",
        ", ".join(f"{count} {result}" for result, count in counts.items()) + ".",
        "",
        "| model type | forward | rewinding | attention | result | reason or note |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(_line, rows)]) + "\n"


def _line(row: Row) -> str:
    cells = (" ".join(value.replace("|", "\\|").split()) for value in asdict(row).values())
    return f"| {' | '.join(cells)} |"


def rows_of(text: str) -> dict[str, Row]:
    """The rows of a table by model type."""
    rows: dict[str, Row] = {}
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| model type"):
            cells = [cell.strip() for cell in line.replace("\\|", "\0")[1:-1].split("|")]
            rows[cells[0]] = Row(*(cell.replace("\0", "|") for cell in cells))
    return rows


def main() -> int:
    """Check the types that are named, or all of them and write the table."""
    parser = argparse.ArgumentParser(description="compare every model type with a plain loop")
    parser.add_argument("types", nargs="*", help="model types; none: all, and write the table")
    default = Path(tempfile.gettempdir()) / "harness_families.json"
    parser.add_argument("--k", type=int, nargs="+", default=KS, help="numbers of draft tokens")
    parser.add_argument("--done", type=Path, default=default, help="results so far")
    parser.add_argument("--fresh", action="store_true", help="forget an interrupted run's results")
    parser.add_argument("--table", type=Path, default=TABLE)
    asked = parser.parse_args()
    done: dict[str, dict[str, str]] = {}
    if asked.done.exists() and not asked.fresh and not asked.types:
        done = json.loads(asked.done.read_text(encoding="utf-8"))
    # A fork of a process in which torch has started threads would wait for them forever
    torch.set_num_threads(1)
    # Imported and compiled once, for all the processes to come
    load(ModelConf(name="tiny", id="embedded:tiny"), CPU)
    for model_type in asked.types or all_types():
        if model_type not in done:
            done[model_type] = asdict(isolated(model_type, asked.k))
            if not asked.types:
                asked.done.write_text(json.dumps(done), encoding="utf-8")
        print(_line(Row(**done[model_type])), flush=True)
    rows = [Row(**done[model_type]) for model_type in asked.types or all_types()]
    if not asked.types:
        asked.table.write_text(table(rows), encoding="utf-8")
        asked.done.unlink()  # what is kept is for an interrupted run, not for another day's code
    return int(any(row.result in ("WRONG", "CRASHED") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
