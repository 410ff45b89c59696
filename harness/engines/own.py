"""The harness's own loop behind the protocol of engines, to be compared with the servers.

It decodes in this process: prefill and rounds on the device, with one read by the host per round.
All tokens of a text come from rounds, also the first one, and a draft is never shortened.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from time import process_time

import torch

from harness import PACKAGE
from harness.decoding.loops import autoregressive_rounds, speculative_rounds
from harness.decoding.protocols import CausalModel, Drafter, Generation, uniforms_needed
from harness.decoding.sampling import SamplingParameters, Uniforms
from harness.engine_facts.engines import OWN
from harness.engine_facts.spec import EngineSpec
from harness.engines.adapters import Adapter, ToServe
from harness.engines.protocol import Asked, Completion, Engine, EngineFacts, Server
from harness.records import Rule
from harness.theory.acceptance import conditional


@dataclass(frozen=True)
class OwnLoop(Engine):
    """A loaded target, with the drafter of its pair."""

    target: CausalModel
    # Makes the drafter of a request from its sampling parameters and its K; None where only plain
    # decoding is measured
    drafter: Callable[[SamplingParameters, int], Drafter] | None
    eos: frozenset[int]
    rule: Rule
    now: Callable[[], float]  # seconds, read after the models' devices have finished
    drafts_fewer: bool = False  # as in `EngineFacts`

    def open(self, k: int, synthetic: Sequence[float] | None = None) -> "OwnServer":
        return OwnServer(self, k, None if synthetic is None else conditional(synthetic))


class OwnServer(Server):
    """The loop at one K."""

    def __init__(self, loop: OwnLoop, k: int, synthetic: Sequence[float] | None) -> None:
        """Decode with `k` draft tokens; `synthetic` is conditional on the tokens before each."""
        self.k, self._loop, self._synthetic = k, loop, synthetic
        self.facts = EngineFacts(OWN, version(PACKAGE), loop.rule, drafts_fewer=loop.drafts_fewer)

    @torch.inference_mode()
    def generate(self, asked: Asked) -> Completion:
        loop, prompt = self._loop, asked.prompt
        needed = uniforms_needed(asked.budget, self.k, loop.rule)
        generation = Generation(
            prompt=prompt,
            budget=asked.budget,
            sampling=asked.sampling,
            uniforms=Uniforms.keyed(asked.seed, "request", 0, needed, loop.target.device),
            num_draft_tokens=self.k,
            eos=loop.eos,
            rule=loop.rule,
            synthetic=self._synthetic,
        )
        drafter = None
        if self.k:
            assert loop.drafter is not None
            drafter = loop.drafter(asked.sampling, self.k)
        cpu, begin = self.cpu_s(), loop.now()
        loop.target.prefill(prompt[:-1])
        if drafter is None:
            rounds = autoregressive_rounds(loop.target, generation)
        else:
            drafter.begin(prompt)
            rounds = speculative_rounds(loop.target, drafter, generation)
        prefilled, prefilled_cpu = loop.now(), self.cpu_s()
        done = list(rounds)
        end, end_cpu = loop.now(), process_time()
        tokens = tuple(token for entry in done for token in entry.tokens)
        return Completion(
            tokens=tokens,
            stop_reason="eos" if tokens[-1] in loop.eos else "budget",
            rounds=len(done) if self.k else None,
            drafted=sum(entry.drafted for entry in done) if self.k else None,
            accepted=sum(entry.accepted for entry in done) if self.k else None,
            prefill_s=prefilled - begin,
            decode_s=end - prefilled,
            request_s=end - begin,
            cpu_s=None if cpu is None else end_cpu - cpu,
            decode_cpu_s=None if prefilled_cpu is None else end_cpu - prefilled_cpu,
            steps=tuple(done) if self.k else None,
        )

    def cpu_s(self) -> float | None:
        return process_time() if self._loop.target.device.type == "cpu" else None

    def check_vocabulary(self, tokens: Sequence[int], text: str) -> None:
        """Accept: the tokenizer is the target's own."""


def adapter(spec: EngineSpec) -> Adapter:
    return Adapter(spec, start=_loaded)


def _loaded(serve: ToServe) -> Engine:
    assert serve.loop is not None  # refused with score=false
    return serve.loop
