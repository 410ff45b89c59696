"""An engine as somebody adds one: its facts, its serving lines and its client, in one module."""

from collections.abc import Callable, Sequence
from typing import Any

from harness.decoding.sampling import SamplingParameters
from harness.engine_facts.spec import Counting, EngineSpec, PairToServe, ServingLine
from harness.engines.adapters import Adapter
from harness.engines.http_server import HttpServer, Running
from harness.engines.protocol import Asked, Completion, EngineFacts
from harness.engines.protocol import Server as EngineServer


def _line(pair: PairToServe) -> str:
    return f"toy serve {pair.target} --draft {pair.draft} --k {pair.k}"


SPEC = EngineSpec(
    name="toy",
    title="Toy",
    version="1.0",
    rules=("greedy_draft",),
    counting=Counting(first_position=0, shortens_last_draft=False),
    alike=frozenset(("model",)),
    plain=lambda pair: f"toy serve {pair.target}",
    lines={"model": ServingLine(_line, "It is a toy.")},
    client=__name__,
)


class ToyServer(HttpServer):
    """One running server."""

    decoded_field = "text"

    def __init__(self, running: Running, k: int) -> None:
        """Take over a server that drafts `k` tokens per round."""
        super().__init__(f"Toy at k={k}", k, running)
        version = running.client.about("/about", "version", "a toy server")["version"]
        self.facts = EngineFacts(SPEC, version, SPEC.rule)

    def complete(self, asked: Asked, deadline_s: float) -> Completion:
        """Ask once for a completion."""
        body = {"prompt": [*asked.prompt], "seed": asked.seed, "budget": asked.budget}
        body["temperature"] = asked.sampling.temperature
        answer = self.ask("/complete", body, deadline_s)
        told = dict(answer.body)
        return Completion(tokens=tuple(told.pop("tokens")), request_s=answer.request_s, **told)


def adapter(spec: EngineSpec) -> Adapter:
    """How its servers are used: they are not started here."""
    return Adapter(spec, attach=lambda *_: ToyServer)


# ---- what the stand-in for a server of it answers ------------------------------------------------

# Seconds of a plain token and of a round, whatever the machine
STEP_S, ROUND_S = 1e-3, 1.2e-3


def answers(server: EngineServer, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Texts and rounds of our own loop, as if they had taken those times."""

    def complete(body: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParameters(body["temperature"])
        done = server.generate(Asked(body["prompt"], sampling, body["seed"], body["budget"]))
        steps_s = len(done.tokens) * STEP_S if done.rounds is None else done.rounds * ROUND_S
        return {
            "tokens": done.tokens,
            "stop_reason": done.stop_reason,
            "rounds": done.rounds,
            "drafted": done.drafted,
            "accepted": done.accepted,
            "prefill_s": STEP_S,
            "decode_s": steps_s,
        }

    return {
        "/about": {"version": "1.0"},
        "/complete": complete,
        "/detokenize": lambda body: {"text": decode(body["tokens"])},
    }
