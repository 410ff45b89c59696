"""A transformers model for the loop: `forward` appends to a cache, `rewind` removes tokens.

How a cache is rewound depends on its content. Keys and values of attention can be cropped. A
recurrent state (Mamba2, gated delta rule) cannot: transformers' `crop` rewinds only the convolution
there, raises nothing, and the text is wrong from then on. Such models are rewound by restoring a
copy taken at the start of the round and feeding the accepted tokens again. Some models (Mamba-1)
also start from an empty state at every forward of several tokens: they are fed one token at a time.
A probe determines which of these a model needs (`harness.models.probe`).

`split_network` splits a network into backbone and output head. A final hidden state has some
thousand numbers, a row of logits some hundred thousand: texts can be stored as hidden states and
turned into logits a few rows at a time.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, get_args

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from harness.models.memory import is_out_of_memory
from harness.records import UserError

# The names under which a forward may take its cache: transformers' from 5.24 on, and before, then
# those of models that make their state themselves and return it (Mamba, xLSTM; RWKV)
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "state")
OWN_STATE = ("cache_params", "state")
# Positions per chunk while a cache is filled for timing, all sequences together
FILL_POSITIONS = 4096
# The head on the same hidden states repeats the same sums; soft caps and scales are far from that.
SAME_LOGITS = {torch.float32: 1e-5, torch.float64: 1e-10}
COARSE_SAME_LOGITS = 1e-3
# Of the states that are kept, the output of the last layer before the last norm
LAST_OUTPUT = -1
# Enough to compare, and never the logits of a long prompt.
SAMPLE_TOKENS = 16


def output_weight(network: PreTrainedModel) -> Tensor:
    """The output head's weight, [vocab with padding, hidden]."""
    head: Any = network.get_output_embeddings()
    return head.weight


def takes(network: PreTrainedModel, argument: str) -> bool:
    """True where a network's forward names this argument."""
    return argument in inspect.signature(network.forward).parameters


def cache_argument(network: PreTrainedModel) -> str | None:
    """The name of the cache argument of a network's forward; None where it takes none."""
    return next((name for name in CACHE_ARGUMENTS if takes(network, name)), None)


def makes_state(network: PreTrainedModel) -> bool:
    """True where a network makes its own kind of cache and returns it."""
    name = cache_argument(network)
    if name == "cache":  # xLSTM's is one of its own from 5.24 on, too
        return Cache not in get_args(inspect.signature(network.forward).parameters[name].annotation)
    return name in OWN_STATE


class CachedModel:
    """A causal model with a cache of one sequence, rewound by cropping.

    Attributes:
        rewinding: how the cache is rewound.
        engine: the forward in use: transformers, lean or cuda_graphs.
        engine_reason: why it is not a faster one; or None.
        recording_s: seconds spent so far on recording its work, with compiling.
        text_batches: how texts share a batch in generation and in scoring, or why they do not;
            set by `harness.measurement` when it has tried.
        positions: whether position ids are passed to every forward.
        states: [n, layers * hidden] the states of the last fed tokens that `keep_states` asks for;
            None where none are kept.

    The cache is transformers' DynamicCache without a config: sliding-window layers then keep every
    key and mask the old ones, which is identical in result and can be cropped past the window.
    """

    rewinding = "crop"
    engine = "transformers"

    def __init__(
        self, network: PreTrainedModel, vocab_size: int, *, positions: bool = False
    ) -> None:
        """`vocab_size` is the width that target and draft share; `positions` is for Bamba."""
        self.engine_reason: str | None = None
        self.recording_s = 0.0
        self.text_batches: dict[str, str] = {}
        self.positions = positions
        self.network = network
        head_hook: Any = getattr(network.get_output_embeddings(), "_hf_hook", None)
        if head_hook is not None:
            # accelerate brings the whole network's logits back to where its tokens were given; now
            # also those of the head alone to where its hidden states were
            head_hook.io_same_device = True
        self.vocab_size = vocab_size
        self.cache_argument = cache_argument(network) or CACHE_ARGUMENTS[0]
        self.makes_state = makes_state(network)
        self._cuts_logits = takes(network, "logits_to_keep")
        self.states: Tensor | None = None
        self._kept_layers: tuple[int, ...] = ()
        self._length = 0
        self._cache: Any = self.new_cache()

    @property
    def layers(self) -> int:
        return int(self.network.config.get_text_config().num_hidden_layers)

    def keep_states(self, layers: Sequence[int]) -> None:
        """Store, from now on, the inputs of these layers (from 0) in `states`, side by side.

        They are the residual stream, before any norm: entry i of transformers' hidden_states. The
        entry after the last layer is the input of the output head, after the last norm;
        `LAST_OUTPUT` is the output of the last layer, before that norm.
        """
        self._kept_layers, self.states = tuple(layers), None

    @contextmanager
    def keeping_no_states(self) -> Iterator[None]:
        """Store no states while the block runs, as for plain decoding, which does not need them."""
        kept, self._kept_layers = self._kept_layers, ()
        try:
            yield
        finally:
            self._kept_layers = kept

    @property
    def device(self) -> torch.device:
        """The device of the logits; of a network on several devices, that of its input tokens."""
        return self.network.device

    @property
    def cached_tokens(self) -> int:
        return self._length

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> None:
        self._clear()
        if tokens:
            self._run(torch.tensor(tokens), logits_to_keep=1)

    def describe(self) -> dict[str, Any]:
        optional = {"engine_reason": self.engine_reason, "text_batches": dict(self.text_batches)}
        present = {name: value for name, value in optional.items() if value}
        return {"rewinding": self.rewinding, "engine": self.engine, **present}

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        return self._run(tokens)

    def reserve(self, tokens: int) -> None:
        """Prepare for `tokens` tokens, with the last round's drafts; this cache grows by itself."""

    @torch.inference_mode()
    def fill(self, batch: int, context_tokens: int) -> None:
        """Make the cache one of `batch` texts of `context_tokens` arbitrary tokens, for timing."""
        self._clear()
        chunk = max(1, FILL_POSITIONS // batch)
        for start in range(0, context_tokens, chunk):
            count = min(chunk, context_tokens - start)
            tokens = torch.arange(start, start + count) % min(self.vocab_size, 997)
            self._run_batch(tokens.repeat(batch, 1), logits_to_keep=1)

    @torch.inference_mode()
    def forward_batch(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [batch, n]; return the logits after each, [batch, n, vocab]."""
        return self._run_batch(tokens)

    def rewind(self, count: int) -> None:
        if count:
            self._cache.crop(-count)
            self._length -= count

    def with_own_cache(self) -> Self:
        """The same network with an empty cache of its own, for a text beside others."""
        other = copy.copy(self)
        other.states = None
        other._clear()
        return other

    @torch.inference_mode()
    def read_as(self, other: "CachedModel") -> None:
        """Take the tokens in the cache of another model of the same network, without a forward."""
        self._clear()
        self._cache, self._length = copy.deepcopy(other._cache), other._length
        self.states = other.states

    def _clear(self) -> None:
        self._cache, self._length = self.new_cache(), 0

    def new_cache(self) -> Any:
        return DynamicCache()

    def _run(self, tokens: Tensor, logits_to_keep: int = 0) -> Tensor:
        return self._run_batch(tokens.unsqueeze(0), logits_to_keep)[0]

    def _run_batch(self, tokens: Tensor, logits_to_keep: int = 0) -> Tensor:
        tokens = tokens.to(self.network.device)
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            self.cache_argument: self._cache,
            "use_cache": True,
        }
        if self._cuts_logits:
            inputs["logits_to_keep"] = logits_to_keep
        if self._kept_layers:
            inputs["output_hidden_states"] = True
        end = self._length + tokens.shape[1]
        if self.positions:
            places = torch.arange(self._length, end, device=tokens.device)
            inputs["position_ids"] = places.expand(tokens.shape)
        with self._last_output() as last:
            output = self.network(**inputs)
        if self.makes_state:
            self._cache = getattr(output, self.cache_argument)
        if self._kept_layers:
            kept = [
                (last[0] if layer == LAST_OUTPUT else output.hidden_states[layer])[0]
                for layer in self._kept_layers
            ]
            self.states = torch.cat(kept, dim=-1)
        self._length = end
        return output.logits[..., : self.vocab_size]

    @contextmanager
    def _last_output(self) -> Iterator[list[Tensor]]:
        """A list for the last layer's output [B, n, hidden] of a forward, where it is kept."""
        outputs: list[Tensor] = []
        if LAST_OUTPUT not in self._kept_layers:
            yield outputs
            return
        layers: Any = getattr(self.network.get_decoder(), "layers", None)
        if layers is None:
            raise UserError(
                f"a head reads the output of the last layer, which is not read of a model of the "
                f"type {self.network.config.model_type}; give a head that reads earlier layers"
            )
        hook = layers[-1].register_forward_hook(
            lambda _, __, given: outputs.append(given[0] if isinstance(given, tuple) else given)
        )
        try:
            yield outputs
        finally:
            hook.remove()


class SnapshotModel(CachedModel):
    """A causal model whose cache has recurrent states: rewound by restoring a copy.

    It is taken before the first forward after a rewind; the accepted tokens are fed again.
    """

    rewinding = "snapshot"
    # The copy with its length, and the tokens fed since
    _saved: Any = None
    _fed: Sequence[Tensor] = ()

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        if self._saved is None:
            self._saved = (copy.deepcopy(self._cache), self._length)
        self._fed = (*self._fed, tokens)
        return self._run(tokens)

    @torch.inference_mode()
    def rewind(self, count: int) -> None:
        """Remove the last `count` tokens, which must be newer than the previous rewind."""
        if count:
            fed = torch.cat([*self._fed])
            self._cache, self._length = self._saved
            if count < len(fed):
                self._run(fed[: len(fed) - count], logits_to_keep=1)
        self._saved, self._fed = None, ()

    def new_cache(self) -> Any:
        return None if self.makes_state else DynamicCache(config=self.network.config)

    def _clear(self) -> None:
        super()._clear()
        self._saved, self._fed = None, ()


class SteppedModel(SnapshotModel):
    """A snapshot model that is fed one token at a time once its cache holds any.

    transformers' Mamba-1 starts from an empty state at every forward of several tokens, so only
    its single steps continue a text. A verify of K + 1 tokens then costs K + 1 steps.
    """

    rewinding = "snapshot, single steps"

    def _run_batch(self, tokens: Tensor, logits_to_keep: int = 0) -> Tensor:
        if self._length == 0:
            return super()._run_batch(tokens, logits_to_keep)
        steps: list[Tensor] = []
        states: list[Tensor] = []
        for token in tokens.split(1, dim=1):
            steps.append(super()._run_batch(token))
            states += [] if self.states is None else [self.states]
        if states:
            self.states = torch.cat(states)
        return torch.cat(steps, dim=1)


class SplitNetwork:
    """A network as backbone and output head; `split_network` checks that both give its logits."""

    def __init__(self, model: CachedModel) -> None:
        self._backbone: Any = model.network.base_model
        self._head: Any = model.network.get_output_embeddings()
        self._vocab = model.vocab_size
        self.device = model.device

    def hidden(self, **inputs: Any) -> Tensor:
        """The final hidden states [rows, positions, hidden]."""
        return self._backbone(**inputs).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [..., vocab] of hidden states on any device."""
        return self._head(hidden.to(self.device))[..., : self._vocab]


@torch.inference_mode()
def split_network(model: CachedModel, sample: Sequence[int]) -> SplitNetwork | None:
    """The backbone and head of a network; None where together they do not give its logits.

    This is so with soft-capped or scaled logits (Gemma 2, Granite, Cohere), and with backbones that
    cannot run alone or take other arguments. Both ways are computed once, on the last tokens of
    `sample`, and compared.
    """
    network: Any = model.network
    ids = torch.tensor([list(sample)[-SAMPLE_TOKENS:]], device=network.device)
    try:
        split = SplitNetwork(model)
        logits = split.logits(split.hidden(input_ids=ids, use_cache=False))
    except Exception as problem:  # a model's code may raise anything when its backbone runs alone
        if is_out_of_memory(problem):
            raise
        return None
    expected = network(input_ids=ids, use_cache=False).logits[..., : model.vocab_size]
    if logits.shape != expected.shape:
        return None
    allowed = SAME_LOGITS.get(network.dtype, COARSE_SAME_LOGITS) * expected.abs().amax()
    # With NaN logits the comparison is false: the network itself is used, and its error says where
    return split if bool((logits - expected).abs().amax() <= allowed) else None
