"""Costs of rounds on an engine that another run measured, with its draft and with others.

A server run measures R(0), and R(K) of one draft (`harness.analysis.server_costs`). So:

- That draft, by the hash of its weights and not by its name, costs what was measured. One of the
  same shape does too: a forward's time depends on sizes and types, not on the weights' values.
- Another draft model. In a round that drafts n tokens the target verifies n + 1 positions, the
  draft makes its forwards, and the loop does the rest. With another draft only its forwards change:

      R'(n) = R(n) - (d - d') F(n)

  with d and d' a step of the measured draft and of the other one, and F(n) what the draft computes
  in such a round, in steps: n, and where an engine's draft also reads every verified batch
  (`EngineSpec.draft_reads_verified`) a forward over n + 1 positions, which is taken to grow with
  positions as the target's does.

No step of a draft is seen from outside: the slope of R(n) is a draft step and one more verified
position together. What is known is a step of the target, R(0), and what a smaller model takes of it
lies between two shares. Where reading or arithmetic decides, that is its bytes / the target's.
Where each layer costs the same whatever its size, as where kernels are launched or a graph is
walked, it is its layers / the target's. A step with both costs lies between the two. R(n) narrows
this: verifying n + 1 positions costs at least a plain token, and more positions cost no less. The
middle of what is left is the prediction. The truth may be anywhere between both ends, so the
variance of that error is the square of their distance / 12, a uniform distribution's.

Where even the smaller of the two shares is more than R(n) leaves room for, or sizes are not known,
draft and verify do not separate, and the draft is refused.
"""

from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.round_costs import Latency, ServedTimes
from harness.analysis.server_costs import ServerCosts
from harness.analysis.setup import architecture
from harness.command_words import as_typed
from harness.engine_facts.draft_kinds import DRAFTS
from harness.engine_facts.engines import ENGINES, OWN, drafts_alike, spec_of
from harness.records import GREEDY, UserError
from harness.stats.jackknife import Array
from harness.storage.manifest import CostsAt, EngineCosts, ModelEntry
from harness.summary import Basis
from harness.theory.architecture import COUNTED, NUMBERS, NUMBERS_OF_EXPERTS
from harness.theory.speedup import RoundTimes

# What two models of one shape have in common
SHAPE = (
    *("kind", "architecture", "dtype", "parameters", "weights_bytes", "drafts_at_most", "tied"),
    *NUMBERS,
    *NUMBERS_OF_EXPERTS,
)
# Rounds whose times have an error may leave a step this part too little room
TIMING = 0.2


def priced_by(
    costs: EngineCosts, name: str, kind: str, entry: ModelEntry, temperature: float
) -> Latency:
    """The latency of a draft on the engine; UserError where it does not follow there."""
    timed = nearest(costs, temperature)
    every = [ServerCosts.of(each) for each in (timed.costs, *timed.without)]
    basis, ends = basis_of(costs, name, kind, entry, temperature), None
    if basis == "composed":
        other = _OtherDraft.of(costs, name, entry)
        low, high = other.shares_of_layers(every[0], name, costs.run)
        ends = other.composed(every[0], low), other.composed(every[0], high)
        every = [other.composed(each, (low + high) / 2.0) for each in every]
    served = ServedTimes(
        engine=costs.engine.name,
        run=costs.run,
        temperature=timed.costs.temperature,
        visits=costs.visits,
        basis=basis,
        costs=every[0],
        without=tuple(every[1:]),
        ends=ends,
        error=(timed.error, timed.error_degrees),
    )
    return Latency(every[0].times, served=served)


def basis_of(
    costs: EngineCosts, name: str, kind: str, entry: ModelEntry, temperature: float
) -> Basis:
    """How a draft's costs on the engine are known; UserError if not, or it drafts other tokens."""
    engine, measured = spec_of(costs.engine.name), costs.draft
    key = as_typed("latency_from", costs.run)
    known = engine.name in ENGINES and kind in engine.drafts
    if not known or not (engine == OWN or drafts_alike(engine.name, kind, temperature)):
        raise UserError(f"{key}: {engine.title} does not draft as draft {name!r} does here")
    if kind == measured.kind:
        if DRAFTS[kind].looks_up or _same_checkpoint(entry, measured):
            return "measured"
        if _same_shape(replace(entry, kind=kind), measured):
            return "same_shape"
    if kind == measured.kind == "model":
        return "composed"
    raise UserError(
        f"{key}: rounds of draft {measured.name!r} ({DRAFTS[str(measured.kind)].noun}) were"
        f" timed there, and those of draft {name!r} ({DRAFTS[kind].noun}) do not follow from them"
    )


def nearest(costs: EngineCosts, temperature: float) -> CostsAt:
    """At the nearest temperature; greedy decoding draws no token, so it stands for itself."""
    alike = [at for at in costs.at if (at.costs.temperature > GREEDY) == (temperature > GREEDY)]
    if not alike:
        known = ",".join(f"{at.costs.temperature:g}" for at in costs.at)
        raise UserError(
            f"{as_typed('latency_from', costs.run)}: no round times for"
            f" temperature={temperature:g}; give"
            f" temperature=[{known}], which it has"
        )
    return min(alike, key=lambda at: abs(at.costs.temperature - temperature))


def check_target(costs: EngineCosts, entry: ModelEntry) -> None:
    """Refuse costs with another target than the one of this entry, or in another precision."""
    key, measured = as_typed("latency_from", costs.run), costs.target
    served = costs.engine.dtype or measured.dtype
    if None not in (entry.dtype, served) and entry.dtype != served:
        raise UserError(
            f"{key}: measured in {served}, and model={entry.name} is loaded in {entry.dtype}; give"
            f" model.dtype={served}, or name a run in {entry.dtype}"
        )
    if not _same_checkpoint(entry, measured):
        raise UserError(
            f"{key}: measured with model={measured.name} ({measured.id}), which is not"
            f" model={entry.name} ({entry.id}); name a run of this target"
        )


def _same_checkpoint(one: ModelEntry, other: ModelEntry) -> bool:
    hashes = one.weights_sample_sha256, other.weights_sample_sha256
    if None not in hashes:
        return hashes[0] == hashes[1] and one.dtype == other.dtype
    commits = one.commit, other.commit
    return one.id is not None and one.id == other.id and (None in commits or len({*commits}) == 1)


def _same_shape(one: ModelEntry, other: ModelEntry) -> bool:
    known = one.parameters is not None and one.weights_bytes is not None
    return known and all(getattr(one, name) == getattr(other, name) for name in SHAPE)


@dataclass(frozen=True)
class _Shares:
    """A step of a draft in steps of the target, where its cost is by bytes read, and by layers."""

    by_bytes: float
    by_layers: float

    def at(self, layers: float) -> float:
        """The cost where a share of a step, 0.0 to 1.0, costs by the number of layers."""
        return (1.0 - layers) * self.by_bytes + layers * self.by_layers


@dataclass(frozen=True)
class _OtherDraft:
    """A step of the measured draft, and of another one; see `EngineSpec.draft_reads_verified`."""

    measured: _Shares
    other: _Shares
    reads_verified: bool

    @classmethod
    def of(cls, costs: EngineCosts, name: str, entry: ModelEntry) -> "_OtherDraft":
        entries = costs.target, costs.draft, entry
        layers = [each.layers or 0 for each in entries]
        read = [_bytes_of_step(each) for each in entries]
        if 0.0 in read:
            read = [float(each.weights_bytes or 0) for each in entries]
        if 0 in layers or 0.0 in read:
            raise UserError(
                f"{as_typed('latency_from', costs.run)}: draft {name!r} was not measured there,"
                " and its rounds"
                " cannot follow from another draft's, for the sizes of a model are not known"
            )
        measured, other = (
            _Shares(costs.bytes_factor * read[at] / read[0], layers[at] / layers[0])
            for at in (1, 2)
        )
        return cls(measured, other, spec_of(costs.engine.name).draft_reads_verified)

    def shares_of_layers(self, costs: ServerCosts, name: str, run: str) -> tuple[float, float]:
        """The least and the largest share of a step that may cost by the number of layers.

        Raises UserError where its steps take longer than its rounds leave, by bytes and by layers.
        """
        by_bytes, by_layers = self.measured.by_bytes, self.measured.by_layers
        least, most = min(by_bytes, by_layers), self._longest_step(costs)
        if least > (1.0 + TIMING) * most:
            raise UserError(
                f"{as_typed('latency_from', run)}: draft and verify do not separate in its"
                " rounds: by its size"
                f" a step of its draft takes {least:.2g} plain tokens, and the rounds have room for"
                f" {max(0.0, most):.2g}; measure draft {name!r} there"
            )
        if max(by_bytes, by_layers) <= most:
            return 0.0, 1.0
        limit = max(0.0, most - least) / (abs(by_layers - by_bytes) or 1.0)
        return (0.0, limit) if by_bytes < by_layers else (1.0 - limit, 1.0)

    def _longest_step(self, costs: ServerCosts) -> float:
        """The longest step that rounds leave room for, in plain tokens."""
        n, rounds = _relative(costs)
        left = (rounds - 1.0) / (n + float(self.reads_verified))
        most = float(left.min())
        return min(most, _slope(n, rounds)) if len(n) > 1 else most

    def composed(self, costs: ServerCosts, layers: float) -> ServerCosts:
        """Costs with the other draft, where this share of a step costs by the number of layers."""
        n, rounds = _relative(costs)
        step, other = self.measured.at(layers), self.other.at(layers)
        forwards = n
        if self.reads_verified:
            slope = _slope(n, rounds) if len(n) > 1 else step
            # R(n) = 1 + growth n + step (n + 1 + growth n) + what is not a forward
            growth = max(0.0, (slope - step) / (1.0 + step))
            forwards = n + 1.0 + growth * n
        plain_s = costs.times.plain_s
        seconds = plain_s * (rounds - (step - other) * forwards)
        round_s = tuple(zip(n.astype(int).tolist(), seconds.tolist(), strict=True))
        return replace(costs, times=RoundTimes(plain_s, round_s))


def _relative(costs: ServerCosts) -> tuple[Array, Array]:
    """The K that were timed, and R(K) / R(0)."""
    timed = [(n, seconds / costs.times.plain_s) for n, seconds in costs.times.round_s if n]
    n, rounds = np.array(timed, dtype=np.float64).T
    return n, rounds


def _slope(n: Array, rounds: Array) -> float:
    """The slope of a line through R(n) / R(0), errors relative to R(n)."""
    return float(np.polyfit(n, rounds, 1, w=1.0 / rounds)[0])


def _bytes_of_step(entry: ModelEntry) -> float:
    """Bytes that a step must read; 0.0 where the architecture is not counted."""
    shape = architecture(entry) if entry.architecture in COUNTED.values() else None
    if shape is None or not entry.bytes_per_parameter:
        return 0.0
    return shape.weight_bytes_read(1, entry.bytes_per_parameter)
