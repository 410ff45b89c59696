"""The list of engines: the `EngineSpec` of each, by name.

To add one, write its `EngineSpec` in a module next to this one and list it in `ENGINES`.
"""

from harness.engine_facts import llamacpp, mlx, sglang, tensorrt_llm, transformers, vllm
from harness.engine_facts.draft_kinds import DRAFTS, UNKNOWN, DraftKind
from harness.engine_facts.spec import Counting, EngineSpec
from harness.records import GREEDY, OWN_LOOP, RULES

# The harness's own loop, which decodes in this process
OWN = EngineSpec(
    name=OWN_LOOP,
    title="the harness's loop",
    rules=RULES,
    counting=Counting(first_position=0, shortens_last_draft=False),
    client="harness.engines.own",
    drafts=tuple(kind for kind, draft in DRAFTS.items() if draft.replayed),
    synthetic="everywhere",
)
# Any server with OpenAI's /v1/completions
OPENAI = EngineSpec(
    name="openai",
    title="OpenAI-compatible server",
    client="harness.engines.openai",
    starts=False,
    drafts=("model", "eagle3", "mtp", "ngram"),
)
# By name, in the order of reports: the first serving command is that of the first engine with one
ENGINES: dict[str, EngineSpec] = {
    spec.name: spec
    for spec in (
        OWN,
        vllm.SPEC,
        vllm.PROBABILISTIC,
        vllm.BLOCK_VERIFICATION,
        sglang.SPEC,
        sglang.REJECTION_SAMPLING,
        sglang.BLOCK_VERIFICATION,
        tensorrt_llm.SPEC,
        llamacpp.SPEC,
        mlx.SPEC,
        transformers.SPEC,
        OPENAI,
    )
}


def spec_of(name: str) -> EngineSpec:
    """The engine of a stored run; an engine that is not listed here has only a name."""
    return ENGINES.get(name) or EngineSpec(name, name)


def with_lines() -> dict[str, EngineSpec]:
    """The engines with serving commands; these have rows in reports."""
    return {name: spec for name, spec in ENGINES.items() if spec.lines}


def measurable() -> dict[str, EngineSpec]:
    """The engines that the command `server` measures."""
    return {name: spec for name, spec in ENGINES.items() if spec.client is not None}


def drafts_alike(name: str, kind: DraftKind, temperature: float) -> bool:
    """True where an engine proposes the same tokens as a run with this kind of draft.

    True for an unknown kind, too. At temperature 0 a variant has the same drafts as its engine.
    """
    spec = ENGINES[name]
    if temperature == GREEDY and spec.variant_of is not None:
        spec = ENGINES[spec.variant_of]
    return kind == UNKNOWN or kind in spec.alike


def rented() -> dict[str, str]:
    """The pip requirement of each engine that has an image on rented machines, by name."""
    return {name: spec.rented for name, spec in ENGINES.items() if spec.rented}
