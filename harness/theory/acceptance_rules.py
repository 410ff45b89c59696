"""The acceptance rules, by which drafted tokens are accepted, one record for each rule.

A rule is a name of `harness.records.Rule`, its `AcceptanceRule` here, and its function in
`harness.decoding.verification.VERIFY`, which decides a round. All rules are lossless: the emitted
text has the target's distribution. At temperature 0 they coincide. The rules of an engine are in
its `EngineSpec.rules`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness.records import Rule

Array = NDArray[np.float64]


@dataclass(frozen=True)
class AcceptanceRule:
    """Facts of an acceptance rule for replay, measurements and reports."""

    phrase: str  # how drafts are proposed and accepted, as a clause
    # See `accept_probabilities`; a function of its three arrays
    chance: Callable[[Array, Array, Array], Array]
    # Above temperature 0, the distribution of a draft token that was rejected, given the token
    # emitted in its place: where the draft's probabilities are above the target's (`excess`), or
    # the draft's without the emitted token (`others`). `unknown` where it depends on the round's
    # later tokens; drafting that stops early is then not replayed.
    rejected: Literal["excess", "others", "unknown"]
    # Whether the draft proposes its most likely token at every temperature
    draft_chooses: bool = False
    # Whether the tokens of a round are judged together, so that a position's chance depends on
    # where the round starts
    judges_together: bool = False


def _by_ratio(target: Array, draft: Array, _: Array) -> Array:
    return np.exp(np.minimum(0.0, draft - target))


def _by_equal_draws(_: Array, draft: Array, __: Array) -> Array:
    return np.exp(np.minimum(0.0, draft))


def _by_argmax(_: Array, __: Array, draft_is_argmax: Array) -> Array:
    return draft_is_argmax


def _by_block(target: Array, draft: Array, _: Array) -> Array:
    summed = (draft - target).cumsum(axis=-1)
    reached = np.minimum.accumulate(np.minimum(0.0, summed), axis=-1)
    before = np.concatenate([np.zeros_like(reached[..., :1]), reached[..., :-1]], axis=-1)
    # A round cannot get beyond a token that the draft excludes
    excluded = before == -np.inf
    return np.where(excluded, 0.0, np.exp(reached - np.where(excluded, 0.0, before)))


ACCEPTANCE_RULES: Mapping[Rule, AcceptanceRule] = {
    "ratio": AcceptanceRule(
        "the draft is sampled and accepted by a ratio of probabilities", _by_ratio, "excess"
    ),
    "exact_match": AcceptanceRule(
        "draft and target sample and must agree", _by_equal_draws, "others"
    ),
    "greedy_draft": AcceptanceRule(
        "the draft proposes its likeliest token", _by_argmax, "others", draft_chooses=True
    ),
    "block": AcceptanceRule(
        "the draft is sampled and its tokens are accepted together",
        _by_block,
        "unknown",
        judges_together=True,
    ),
}


def accept_probabilities(
    rule: Rule, target_logprob: ArrayLike, draft_logprob: ArrayLike, draft_is_argmax: ArrayLike
) -> Array:
    """The chance that the draft token at a position was accepted, given the emitted token there.

    `harness.theory.replay` derives it for each rule.

    Args:
        rule: the acceptance rule. Where it judges together, the chance is given the round's earlier
            tokens too, and the last axis is the offsets of a round, as `replay.by_start` lays them
            out.
        target_logprob: log target(x_i) under the text's sampling parameters; any shape.
        draft_logprob: log draft(x_i) under the same; -inf where the draft excludes the token.
        draft_is_argmax: whether x_i is the draft's most likely token.
    """
    arrays = (target_logprob, draft_logprob, draft_is_argmax)
    return ACCEPTANCE_RULES[rule].chance(*(np.asarray(each, dtype=np.float64) for each in arrays))
