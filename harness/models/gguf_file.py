"""GGUF files as models: sizes, vocabulary and chat template from the header, without the weights.

The format is that of ggml's docs/gguf.md: magic, version, two counts, then keys with their values,
then a record for each tensor, then the tensors. The package `gguf` reads the same, in 15 s and 520
MB for a vocabulary of 150,000 tokens, where this takes about a second.

Texts are cut into tokens, and chat templates filled in, by a server of the file (`GgufTokenizer`).
Whether two files have one tokenizer is decided from their headers (docs/decisions/0031).
"""

import hashlib
import mmap
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from harness.records import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Of a value's type in the header: its format, and those of strings and arrays
SCALARS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")
STRING, ARRAY = 8, 9
# Weights and bytes of a block by the number of a tensor's type (ggml.h, `type_traits` of ggml.c)
BLOCKS: Mapping[int, tuple[int, int]] = {
    kind: (weights, size)
    for weights, sizes in (
        (1, {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2}),
        (32, {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 40, 20: 18, 39: 17}),
        (64, {40: 36}),
        (128, {41: 18}),
        (256, {10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 15: 292, 16: 66, 17: 74, 18: 98}),
        (256, {19: 50, 21: 110, 22: 82, 23: 136, 29: 56, 34: 54, 35: 66}),
    )
    for kind, size in sizes.items()
}
# Kinds of tokens (llama.h, `llama_token_type`)
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
# Files that are no causal language model, by general.type or general.architecture
NO_MODELS: Mapping[str, str] = {
    "adapter": "a LoRA adapter; give the model that it was made for, and the adapter as"
    " flags=[--lora,FILE]",
    "mmproj": "the image part of a model (mmproj); give the language model's file",
    "clip": "the image part of a model (mmproj); give the language model's file",
    "imatrix": "an importance matrix; give the model's file",
    **dict.fromkeys(
        ("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3"),
        "an embedding model, which generates no text",
    ),
    **dict.fromkeys(("t5", "t5encoder"), "no causal model: it has an encoder"),
    **dict.fromkeys(("llada", "llada-moe", "dream"), "a diffusion model, which has no next token"),
}
# Tokens that end a text by what they say, as in llama.cpp's llama-vocab.cpp (`special_eog_ids`)
ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
        *("<|fim_pad|>", "<fim-pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>"),
        *("<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)
END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# ORG/REPO:QUANT, as llama.cpp's -hf has it
HUB_NAME = re.compile(r"(?P<owner>[\w.-]+)/(?P<repo>[\w.-]+):(?P<quant>[\w.-]+)")


class Special(NamedTuple):
    """A token that is set apart from ordinary text, as tokenizers of transformers list it."""

    content: str
    special: bool


@dataclass(frozen=True)
class GgufHeader:
    """The header of a model's file, of all its parts; of merges and scores, a hash."""

    path: Path
    keys: Mapping[str, Any]
    parameters: int
    weights_bytes: int

    @property
    def architecture(self) -> str:
        """The name of the architecture, which begins the keys of its sizes."""
        return str(self.keys["general.architecture"])

    def size(self, name: str) -> int | None:
        """A size of the architecture; None where it is missing or one for each layer."""
        value = self.keys.get(f"{self.architecture}.{name}")
        return value if isinstance(value, int) else None

    @property
    def tokens(self) -> list[str]:
        return self.keys["tokenizer.ggml.tokens"]

    @property
    def ends(self) -> frozenset[int]:
        """Every id at which llama.cpp ends a text."""
        named = (self.keys.get(f"tokenizer.ggml.{name}_token_id") for name in END_KEYS)
        ids = {int(token) for token in named if token is not None}
        return frozenset(ids | {i for i, text in enumerate(self.tokens) if text in ENDS})

    def describe(self, name: str) -> dict[str, Any]:
        sizes = {
            "layers": self.size("block_count"),
            "hidden": self.size("embedding_length"),
            "ffn": self.size("feed_forward_length"),
            "heads": self.size("attention.head_count"),
            "kv_heads": self.size("attention.head_count_kv"),
        }
        return {
            "name": name,
            "weights": "gguf",
            "architecture": self.architecture,
            "parameters": self.parameters,
            "weights_bytes": self.weights_bytes,
            **{key: size for key, size in sizes.items() if size is not None},
            "vocab": len(self.tokens),
            "context_tokens": self.size("context_length"),
            "chat_template": bool(self.keys.get("tokenizer.chat_template")),
        }


class GgufTokenizer:
    """A file's vocabulary, with the parts of a transformers tokenizer that the harness uses.

    Attributes:
        ask: sends a body to a path of a server that has the file; None while there is none.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.name_or_path = str(header.path)
        self.chat_template = header.keys.get("tokenizer.chat_template")
        self.eos_token_id = header.keys.get("tokenizer.ggml.eos_token_id")
        self.rows = len(header.tokens)
        self.ask: Callable[[str, Mapping[str, Any]], Any] | None = None
        self._header = header

    @cached_property
    def _kinds(self) -> Sequence[int]:
        return self._header.keys.get("tokenizer.ggml.token_type") or [1] * self.rows

    @cached_property
    def _ids(self) -> dict[str, int]:
        rows = zip(self._header.tokens, self._kinds, strict=True)
        return {text: token for token, (text, kind) in enumerate(rows) if kind != UNUSED}

    def get_vocab(self) -> dict[str, int]:
        """Ids by text; rows that only fill the vocabulary up are no tokens."""
        return self._ids

    @cached_property
    def added_tokens_decoder(self) -> dict[int, Special]:
        """Control tokens and those that a user defined, by id."""
        apart = (UNKNOWN, CONTROL, USER_DEFINED)
        return {
            token: Special(self._header.tokens[token], kind != USER_DEFINED)
            for token, kind in enumerate(self._kinds)
            if kind in apart
        }

    def cut_difference(self, other: "GgufTokenizer") -> str | None:
        """Why texts of the same tokens are cut differently by another file; None where not."""
        for name in ("model", "pre", "merges", "scores"):
            mine, its = (each._header.keys.get(f"tokenizer.ggml.{name}") for each in (self, other))
            if mine != its and (name != "scores" or self._header.keys.get(MODEL_KEY) == "llama"):
                values = f" is {mine} and {its}" if name in ("model", "pre") else " differs"
                return f"tokenizer.ggml.{name}{values} in their headers"
        return None

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = False
    ) -> dict[str, list[int]]:
        """The ids of a text, by the server; special tokens in it are read as such."""
        del verbose
        body = {"content": text, "add_special": add_special_tokens, "parse_special": True}
        return {"input_ids": self._asked("/tokenize", body)["tokens"]}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        enable_thinking: bool = False,
        tools: Any = None,
        **_: Any,
    ) -> dict[str, list[int]]:
        """The ids by the file's template, which the server fills in; ValueError if it cannot."""
        body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": enable_thinking}}
        if tools is not None:
            body["tools"] = tools
        try:
            prompt = self._asked("/apply-template", body)["prompt"]
        except UserError as error:
            raise ValueError(str(error)) from error
        return self(prompt)

    def _asked(self, path: str, body: Mapping[str, Any]) -> Any:
        assert self.ask is not None  # whoever encodes has started a server
        return self.ask(path, body)


MODEL_KEY = "tokenizer.ggml.model"
# Keys of which only a digest is kept
COMPARED = ("tokenizer.ggml.merges", "tokenizer.ggml.scores")
LENGTH = 8  # bytes of a string's length


def parts_of(file: Path) -> list[Path]:
    """The files of a model that is split in parts, of which one is named; else the file alone."""
    match = PART.fullmatch(file.name)
    if match is None or not int(match["count"]):
        return [file]
    stem, count = match["stem"], match["count"]
    return [file.with_name(f"{stem}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]


def bytes_of(file: Path) -> int:
    """The bytes of a model's file, of all its parts; 0 of those that are not there."""
    return sum(part.stat().st_size for part in parts_of(file) if part.is_file())


def read_model(file: Path, where: str) -> GgufHeader:
    """The header of a causal language model's file, of a split model its first part."""
    parts = parts_of(file)
    if file != parts[0]:
        raise UserError(f"{where}: a part of a model; give the first one, {parts[0].name}")
    for part in parts:
        if not part.is_file():
            of = "" if len(parts) == 1 else f" {part.name}, one of the model's {len(parts)} parts"
            raise UserError(f"{where}: no such file{of}")
    return _read_model(tuple((part, part.stat().st_mtime_ns) for part in parts), where)


@lru_cache(maxsize=8)
def _read_model(parts: tuple[tuple[Path, int], ...], where: str) -> GgufHeader:
    files = [_read_file(part, where) for part, _ in parts]
    keys = files[0].keys
    architecture = str(keys.get("general.architecture", ""))
    kind = "adapter" if "adapter.type" in keys else str(keys.get("general.type", ""))
    for name in (kind, architecture):
        if name in NO_MODELS:
            raise UserError(f"{where}: {NO_MODELS[name]}")
    if f"{architecture}.block_count" not in keys:
        raise UserError(
            f"{where}: its header names no language model (architecture"
            f" {architecture or 'missing'}); give a model's file"
        )
    tokens = keys.get("tokenizer.ggml.tokens")
    if tokens is not None and len(keys.get("tokenizer.ggml.token_type", tokens)) != len(tokens):
        raise UserError(f"{where}: {CUT}")
    if tokens is None:
        raise UserError(f"{where}: its header has no vocabulary; convert the checkpoint again")
    parameters, size = (each.parameters for each in files), (each.weights_bytes for each in files)
    return replace(files[0], parameters=sum(parameters), weights_bytes=sum(size))


def _read_file(file: Path, where: str) -> GgufHeader:
    named = where if file.name in where else f"{where}: {file.name}"
    with file.open("rb") as opened:
        if opened.read(4) != MAGIC:
            raise UserError(f"{named}: not a GGUF file, whose first bytes are GGUF")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return GgufHeader(file, *_Reader(data).read(named))
            except MALFORMED as error:
                raise UserError(f"{named}: {CUT}") from error


CUT = "the file is cut; fetch or convert it again"
# What reading values that are not there, or not of their type, raises
MALFORMED = (
    *(struct.error, IndexError, OverflowError, ZeroDivisionError),
    *(ValueError, TypeError, RecursionError),
)


class _Reader:
    """Reads a header from its beginning on."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 4

    def read(self, named: str) -> tuple[dict[str, Any], int, int]:
        """Keys, weights and their bytes; one of MALFORMED is raised if it ends in its header."""
        version = self._number("I")
        if version not in VERSIONS:
            raise UserError(f"{named}: GGUF of version {version}; convert it again, to version 3")
        tensors, entries = self._number("Q"), self._number("Q")
        keys: dict[str, Any] = {}
        for _ in range(entries):
            name, begin = self._string(), self._at
            if name in COMPARED:  # long, and read for nothing else
                self._skip(self._number("I"))
                keys[name] = hashlib.sha256(self._data[begin : self._at]).hexdigest()
            else:
                keys[name] = self._value(self._number("I"))
        parameters, ends = 0, [0]
        for _ in range(tensors):
            self._string()
            count = 1
            for size in [self._number("Q") for _ in range(self._number("I"))]:
                count *= size
            weights, block_bytes = BLOCKS.get(self._number("I"), (1, 0))
            ends.append(self._number("Q") + count // weights * block_bytes)
            parameters += count
        alignment = int(keys.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        if tensors and start + max(ends) > len(self._data):
            raise UserError(f"{named}: {CUT}")
        return keys, parameters, max(ends)

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def _string(self) -> str:
        begin = self._at + LENGTH
        self._skip(STRING)
        return self._data[begin : self._at].decode(errors="replace")

    def _skip(self, kind: int) -> None:
        if kind == STRING:
            size = self._number("Q")
            self._at += size
        elif kind == ARRAY:
            of, count = self._number("I"), self._number("Q")
            if of in (STRING, ARRAY):
                for _ in range(count):
                    self._skip(of)
            else:
                self._at += count * struct.calcsize(f"<{SCALARS[of]}")
        else:
            self._at += struct.calcsize(f"<{SCALARS[kind]}")
        if self._at > len(self._data):
            raise IndexError

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._number(str(SCALARS[kind]))
        of, count = self._number("I"), self._number("Q")
        if of == STRING:  # files of one family share their vocabulary
            begin = self._at
            for _ in range(count):
                self._skip(STRING)
            return _strings(self._data[begin : self._at])
        if of == ARRAY:
            return [self._value(of) for _ in range(count)]
        form = f"<{count}{SCALARS[of]}"
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return list(values)


@lru_cache(maxsize=8)
def _strings(raw: bytes) -> list[str]:
    """The strings of an array, each behind its length."""
    found, at = list[str](), 0
    while at < len(raw):
        begin = at + LENGTH
        at = begin + int.from_bytes(raw[at:begin], "little")
        found.append(raw[begin:at].decode(errors="replace"))
    return found


# ---- files of the hub ----------------------------------------------------------------------------


def hub_file(name: str) -> Path:
    """The file of ORG/REPO:QUANT, where the hub's cache or llama.cpp's has it."""
    match = HUB_NAME.fullmatch(name)
    assert match is not None
    quant = re.compile(rf"(^|[-._/]){re.escape(match['quant'])}([-./]|$)", re.IGNORECASE)
    found = {
        file: inside
        for file, inside in _cached_files(match["owner"], match["repo"])
        if quant.search(inside) and "mmproj" not in inside and parts_of(file)[0] == file
    }
    if len(names := sorted({*found.values()})) > 1:
        raise UserError(
            f"{name}: several files of that name are cached, {', '.join(names)}; give one"
        )
    if not found:
        repo = f"{match['owner']}/{match['repo']}"
        raise UserError(
            f"{name}: not in the cache of the hub or of llama.cpp; hf download {repo} --include"
            f" '*{match['quant']}*.gguf' fetches it, or give a file that is here"
        )
    return max(found, key=lambda file: file.stat().st_mtime)


def _cached_files(owner: str, repo: str) -> Iterator[tuple[Path, str]]:
    """Cached GGUF files of a repository, each with its path in there."""
    from huggingface_hub.constants import HF_HUB_CACHE

    snapshots = Path(HF_HUB_CACHE) / f"models--{owner}--{repo}" / "snapshots"
    for snapshot in snapshots.iterdir() if snapshots.is_dir() else ():
        for file in snapshot.rglob("*.gguf"):
            yield file, file.relative_to(snapshot).as_posix()
    home = Path.home()
    caches = home / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    cache = (
        os.environ.get("LLAMA_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or caches) / "llama.cpp"
    )
    prefix = f"{owner}_{repo}_"
    for file in Path(cache).glob(f"{prefix}*.gguf"):
        yield file, file.name.removeprefix(prefix)
