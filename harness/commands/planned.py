"""The pair on every card of conf/gpu, from sizes and data sheets alone: no weights, no card."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console

from harness.analysis.views import architecture
from harness.commands.cost import all_cards, card_of
from harness.config import GpuConf, ModelConf, ProfileConfig
from harness.reporting.console import print_table
from harness.reporting.tables.cards import cards_table
from harness.theory.architecture import Architecture, architecture_of
from harness.theory.planning import PlanRequest, plan_cards

BYTES = {"float32": 4.0}
SERVED = 2.0  # bfloat16, what a server would load


def modelled_cards(
    config: ProfileConfig, described: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """What summary.json says of the pair on cards that are not at hand.

    Args:
        config: its models' `architecture`, where they have one, is what is planned with.
        described: the manifest's entries of the loaded models, for those whose config has none.

    Returns:
        What was planned for, and a row per card; None where a model's sizes are not known, and for
        the embedded toys, which nobody would serve.
    """
    target = _shape("model", config.model, (described or {}).get("target"))
    draft = _shape("draft", config.draft, (described or {}).get("draft"))
    ks = tuple(sorted(k for k in set(config.k) if k > 0))
    if target is None or draft is None or not ks:
        return None
    unit = BYTES.get(config.model.dtype, SERVED)
    request = PlanRequest(
        target,
        draft,
        tuple(range(1, max(ks) + 1)),
        tuple(config.alpha),
        config.plan.context_tokens,
        config.plan.batch,
        unit,
    )
    cards = [card_of(card) for card in _considered(config.gpu)]
    return {
        "context_tokens": request.context_tokens,
        "batch": request.batch,
        "bytes_per_parameter": unit,
        "chosen": config.gpu.name if config.gpu else None,
        "rows": [asdict(row) for row in plan_cards(cards, request)],
    }


def print_cards(config: ProfileConfig) -> None:
    """Print the modelled cards; a line that says why, where there is nothing to model from."""
    console = Console(highlight=False)
    planned = modelled_cards(config)
    table = cards_table(planned) if planned else None
    if table is None:
        console.print(
            "cards (modelled): a model's architecture is not in its config; choose one that has it "
            "(model=qwen3_4b) or give model.architecture={family: qwen3, ...}",
            soft_wrap=True,
            markup=False,
        )
        return
    print_table(table, console)


def _considered(chosen: GpuConf | None) -> list[GpuConf]:
    """Every card of conf/gpu; the chosen one with the figures it was given."""
    cards = all_cards()
    if chosen is None:
        return cards
    return [chosen, *(card for card in cards if card.name != chosen.name)]


def _shape(key: str, conf: ModelConf, described: Mapping[str, Any] | None) -> Architecture | None:
    if isinstance(conf.architecture, dict):
        return architecture_of(conf.architecture, f"{key}.architecture")
    if described is None or described.get("weights") == "embedded":
        return None
    return architecture(described)
