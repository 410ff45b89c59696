"""A random pair with the vocabulary, padding and chat template of Qwen2.5, and long prompts.

Its tokenizer is a byte-level BPE whose merges are made here: all pairs of bytes, then pairs with a
third byte, as many as Qwen2.5 has. Nothing is downloaded.
"""

import json
from functools import cache
from itertools import islice, product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

# Qwen2.5: tokens of its BPE, special tokens after them, rows of the embedding
BPE_TOKENS, SPECIAL_TOKENS, VOCABULARY = 151_643, 22, 151_936
PROMPT_TOKENS = 600
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant."
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("the function", "returns", "a list", "of numbers", "whose sum", "is", "that of", "rows")


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """151,643 tokens of a BPE and 22 special ones, as in Qwen2.5."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(product(letters, repeat=2))
    triples = (((f"{a}{b}"), c) for c in letters for a, b in pairs)
    merges = [*pairs, *islice(triples, BPE_TOKENS - len(letters) - len(pairs))]
    tokens = [*letters, *("".join(merge) for merge in merges)]
    assert len(set(tokens)) == BPE_TOKENS
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special += [f"<|special_{n}|>" for n in range(len(special), SPECIAL_TOKENS)]
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special,
        chat_template=CHATML,
    )


def save_pair(folder: Path) -> tuple[Path, Path]:
    """A target of two layers, and a draft that is its first one."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=False,
        num_hidden_layers=2,
    )
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    later = target.model.layers[1]
    for out in (later.self_attn.o_proj, later.mlp.down_proj):
        out.weight.data.mul_(0.05)  # so that its tokens are accepted now and then
    draft_config = Qwen2Config(**{**config.to_dict(), "num_hidden_layers": 1, "layer_types": None})
    draft = AutoModelForCausalLM.from_config(draft_config, dtype=torch.float32).eval()
    draft.load_state_dict(target.state_dict(), strict=False)
    shared = tokenizer()
    for name, model in (("target", target), ("draft", draft)):
        model.config.eos_token_id = shared.eos_token_id
        model.save_pretrained(folder / name)
        shared.save_pretrained(folder / name)
    return folder / "target", folder / "draft"


def write_prompts(file: Path, number: int) -> Path:
    """Prompts that differ from each other, of at least PROMPT_TOKENS tokens each."""
    encode = tokenizer()
    lines: list[str] = []
    for prompt in range(number):
        text = ""
        while len(encode(text)["input_ids"]) < PROMPT_TOKENS:
            start = len(text) + prompt
            words = (WORDS[(start * step + prompt) % len(WORDS)] for step in range(1, 40))
            text += f"{' '.join(words)}. "
        lines.append(json.dumps({"id": f"long-{prompt}", "prompt": text}))
    file.write_text("\n".join(lines) + "\n")
    return file
