"""The files of a head, read from a folder or the hub for one target.

No published layout has a tokenizer: a head's tokens are its target's. A head that was trained for
another target would draft nonsense without an error, so everything comparable is compared with the
target.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from harness.config import ModelConf
from harness.engine_facts.draft_kinds import DRAFTS
from harness.models.checkpoint import (
    PICKLED,
    WEIGHTS,
    check_tensors,
    explained,
    file_of,
    quiet_transformers,
    weight_files,
)
from harness.models.heads.base import LoadedHead
from harness.models.load import LoadedModel, source_of
from harness.models.memory import MemoryNeed, check_fits
from harness.records import UserError, first_line

# Names of tensors that only training needs
UNUSED = frozenset({"verifier_lm_head.weight", "verifier_norm.weight"})


class HeadFiles:
    """The files of a head, read for one target; every error is one line that names both."""

    def __init__(self, conf: ModelConf, target: LoadedModel, kind: str, layouts: str) -> None:
        """Take the files that `conf` names; `kind` and `layouts` are for errors."""
        self.conf, self.target, self.kind = conf, target, kind
        self.layouts, self.where = layouts, conf.where
        self.target_name = target.shown
        self.config = head_config(conf)
        self.target_config: Any = target.network.config.get_text_config()

    def tensors(
        self, files: Sequence[str] = (WEIGHTS,), pickles: Sequence[str] = (PICKLED,)
    ) -> dict[str, Tensor]:
        """The weights by name, without the prefix `model.` and without tensors for training.

        They are read from the first of these that is there, as one file or in shards, pickles only
        if these may be read; otherwise from the *.safetensors of other names.
        """
        conf = self.conf
        names = (*files, *(pickles if conf.allow_pickle else ()))
        tensors: dict[str, Tensor] = {}
        with quiet_transformers():
            for file in weight_files(conf, source_of(conf), names):
                safe = file.suffix == ".safetensors"
                read = load_file(file) if safe else torch.load(file, weights_only=True)
                twice = sorted(tensors.keys() & read.keys())
                if twice:
                    raise UserError(
                        f"{self.where}: {twice[0]} is in {file.name} and in another file; give a "
                        f"folder with one *.safetensors, or name the one to read {files[-1]}"
                    )
                tensors |= read
            check_tensors(self.where, {name: str(each.dtype) for name, each in tensors.items()})
        return {
            name.removeprefix("model."): tensor
            for name, tensor in tensors.items()
            if name not in UNUSED
        }

    def unknown_layout(self, found: str | None = None) -> UserError:
        """The error for files in none of the layouts that are read."""
        return unknown_layout(self.where, self.kind, self.layouts, found or found_in(self.config))

    def other_target(self, why: str) -> UserError:
        return UserError(f"{self.where}: {self.kind} for another target: {why}")

    def other_vocabulary(self, tokens: int, vocabulary: int | None = None) -> UserError:
        return self.other_target(
            f"the tokens are of a vocabulary of {tokens}, and {self.target_name} has "
            f"{vocabulary or self.target.vocab_size}"
        )

    def check_layers(
        self, tensors: Mapping[str, Tensor], layers: Sequence[int], how: str = ""
    ) -> None:
        """Refuse a head that reads layers which the target lacks, or of another width than its."""
        count = self.target_config.num_hidden_layers
        if min(layers) < 0 or max(layers) > count or len(set(layers)) < len(layers):
            raise UserError(
                f"{self.where}: it reads layers {list(layers)}{how}, and {self.target_name} has "
                f"{count}; give the head of this target"
            )
        hidden, fc = self.target_config.hidden_size, tensors.get("fc.weight")
        if fc is not None and fc.shape[1] != len(layers) * hidden:
            raise self.other_target(
                f"it takes {fc.shape[1] // len(layers)} numbers of each of {len(layers)} layers, "
                f"and {self.target_name} has a hidden size of {hidden}"
            )

    def check_vocabulary(self, tokens: int | None) -> None:
        """Refuse a head whose config.json has another vocabulary size than the target's.

        The target's size is that of its config.json, or the padded rows of its output matrix.
        """
        if tokens not in (None, self.target_config.vocab_size, self.target.vocab_size):
            raise self.other_vocabulary(tokens)

    def check_mask_token(self, token: int) -> int:
        if not 0 <= token < self.target.vocab_size:
            raise self.other_vocabulary(token + 1)
        return token

    def check_ids(self, ids: Tensor) -> Tensor:
        """The target's ids [draft vocabulary] of tokens that a head can draft, if they exist."""
        if int(ids.min()) < 0:
            raise UserError(
                f"{self.where}: its map of draft tokens to the target's (d2t) has the id"
                f" {int(ids.min())}, which is negative; the file is damaged or of another layout"
            )
        if int(ids.max()) >= self.target.vocab_size:
            raise self.other_vocabulary(int(ids.max()) + 1)
        return ids

    def own_matrix(
        self, tensors: dict[str, Tensor], name: str, shared: Any, rows: int, hidden: int
    ) -> Tensor | None:
        """The head's own [rows, hidden], removed from `tensors`; None if it uses `shared`."""
        own, of_target = tensors.pop(name, None), shared.weight.shape[1]
        if own is not None and len(own) != rows:
            raise self.other_vocabulary(len(own), rows)
        if own is not None and own.shape[1] != hidden:
            raise self._other_shape(name, own, [rows, hidden])
        if own is None and of_target != hidden:
            raise UserError(
                f"{self.where}: it has no {name} of its own and a hidden size of {hidden}, and "
                f"that of {self.target_name} is {of_target}; give the head of this target"
            )
        return own

    def matrices(
        self,
        tensors: dict[str, Tensor],
        hidden: int,
        ids: Tensor | None = None,
        *,
        tied: bool = False,
    ) -> tuple[nn.Module, bool, Callable[[Tensor], Tensor]]:
        """The embedding, whether it is the head's own, and the function to the logits.

        The head's own matrices are removed from `tensors`. One without an output matrix has that of
        its own embedding where it is tied to it, otherwise the target's, which is returned as its
        `__call__`, since it must be no submodule of a head. `ids` are the target's ids of the
        tokens that it can draft; None: all.
        """
        vocabulary = self.target.vocab_size
        embed: Any = self.target.network.get_input_embeddings()
        own = self.own_matrix(tensors, "embed_tokens.weight", embed, vocabulary, hidden)
        own_embedding = own is not None
        if own is not None:
            embed = nn.Embedding.from_pretrained(own)
        shared: Any = (
            embed if tied and own_embedding else self.target.network.get_output_embeddings()
        )
        drafted = vocabulary if ids is None else len(ids)
        output = self.own_matrix(tensors, "lm_head.weight", shared, drafted, hidden)
        if output is None and ids is not None and ids.tolist() != [*range(vocabulary)]:
            raise self.unknown_layout(
                f"it lacks lm_head.weight, and drafts {drafted} of {vocabulary} tokens"
            )
        if output is None and shared is not embed:
            return embed, own_embedding, shared.__call__
        made = nn.Linear(hidden, drafted, bias=False, device="meta")
        made.weight = shared.weight if output is None else nn.Parameter(output, requires_grad=False)
        return embed, own_embedding, made

    def fill(
        self,
        network: nn.Module,
        tensors: Mapping[str, Tensor],
        *,
        given: Sequence[str] = (),
        optional: Sequence[str] = (),
    ) -> None:
        """Load the weights; every tensor must be there, and none left over.

        The network has those whose names begin with `given`; those in `optional` may be missing.
        """
        wanted = {
            name: tensor
            for name, tensor in network.state_dict().items()
            if not name.startswith(tuple(given))
        }
        missing = sorted(wanted.keys() - set(optional) - tensors.keys())
        left = sorted(tensors.keys() - wanted.keys())
        if missing or left:
            what = "lacks" if missing else "has"
            raise self.unknown_layout(f"it {what} {', '.join((missing or left)[:3])}")
        for name, made in wanted.items():
            if name in tensors and tensors[name].shape != made.shape:
                raise self._other_shape(name, tensors[name], made.shape)
        network.load_state_dict(dict(tensors), strict=False)

    def _other_shape(self, name: str, tensor: Tensor, shape: Sequence[int]) -> UserError:
        return UserError(
            f"{self.where}: {name} is {list(tensor.shape)}, and its config.json "
            f"makes it {list(shape)}; give a folder whose files belong together"
        )

    def loaded(
        self, network: Any, facts: Mapping[str, Any], context_tokens: int | None
    ) -> LoadedHead:
        """The head on its target's device, in its dtype, if it fits the device's memory."""
        conf, target = self.conf, self.target
        dtype, device = target.network.dtype, target.network.device
        weight_bytes = float(sum(weight.numel() for weight in network.weights) * dtype.itemsize)
        kv_bytes = network.kv_bytes_per_token
        check_fits([MemoryNeed(conf.keys, conf.name, device, dtype, weight_bytes, kv_bytes)], 0)
        network = network.to(device)
        # Without its buffers: rotary frequencies stay in float32, as in the engines
        for weight in network.parameters():
            weight.data = weight.data.to(dtype)
        return LoadedHead.of(conf, target, network.eval(), facts, context_tokens)


def head_config(conf: ModelConf) -> dict[str, Any]:
    where = conf.where
    # Only with this option transformers raises where the hub cannot be reached
    reached = {"_raise_exceptions_for_missing_entries": True}
    with quiet_transformers(), explained(conf):
        file = file_of(source_of(conf), "config.json", conf, **reached)
    if file is None:
        raise UserError(f"{where}: no config.json there; give a folder or hub id of a head")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = first_line(error)
        raise UserError(
            f"{where}: its config.json cannot be read ({reason}); download or save it again"
        ) from error
    if not isinstance(config, dict):
        raise UserError(
            f"{where}: its config.json holds a {type(config).__name__}, not an object; give a "
            "folder or hub id of a head"
        )
    return config


def found_in(config: Mapping[str, Any]) -> str:
    """The kind that a config.json names, for errors."""
    speculators = config.get("speculators_model_type")
    names = [str(name) for name in config.get("architectures") or ()]
    found = f"speculators_model_type {speculators}" if speculators else f"architectures {names}"
    return f"its config.json has {found}"


def unknown_layout(where: str, kind: str, layouts: str, found: str) -> UserError:
    """The error for a head in none of the layouts that are read."""
    return UserError(
        f"{where}: not {kind} in a layout that is known: {found}; read here are {layouts}"
    )


def check_reads_states(config: Mapping[str, Any], where: str, kind: str) -> None:
    """Refuse a head whose config.json says that it reads no inner layers."""
    sections = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    if any(section.get("use_aux_hidden_state") is False for section in sections):
        raise UserError(
            f"{where}: {kind} with use_aux_hidden_state: false, which is not read here; give one "
            "that reads the target's inner layers"
        )


def is_of(config: Mapping[str, Any], kind: str) -> bool:
    """True where a config.json's model type or architectures name a kind of head."""
    names = [config.get("model_type"), *(config.get("architectures") or ())]
    return any(kind in str(name).lower() for name in names)


def head_memory_need(conf: ModelConf, target: MemoryNeed) -> MemoryNeed | None:
    """The memory of a head, from its config alone, so without its own embedding; None: unknown."""
    spec = DRAFTS[conf.kind]
    if not spec.shape:
        return None
    with explained(conf):
        shape = spec.read_shape(head_config(conf), conf.where)
    return MemoryNeed.of(shape, target.dtype, target.device, conf.keys, conf.name)
