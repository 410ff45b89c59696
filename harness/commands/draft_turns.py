"""Visits of an audition's drafts in turn, so that a machine whose pace drifts favours none of them.

Drafts are scored and timed one after the other, minutes apart. Those that may be served are timed
once more together: each turn visits every one of them, every second turn in reverse order. Their
round times are those of the turns then, and the target's plain token next to each is compared turn
by turn. That needs all of them in memory at once. On a card, where other work is rare and recorded
work is large, and where they do not fit, each has all of its visits while it is the only one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from harness.analysis.round_costs import can_pay, timed_precisely
from harness.commands.eligible_drafts import draft_size
from harness.commands.pair import CACHES_SHARE, HeadPair, Target, with_draft
from harness.commands.progress import progress
from harness.commands.run_time import Stopwatch
from harness.commands.timing import enough_memory, visits_of_draft
from harness.config import AuditionConfig, ModelConf
from harness.measurement.round_times import LEAST_VISITS, RoundVisits, timed_ks
from harness.models.memory import free_bytes, shape_of
from harness.storage import RunFolder


def fit_together(target: Target, drafts: Sequence[ModelConf], config: AuditionConfig) -> bool:
    """True for several drafts on processors whose memory holds all of them with their caches.

    One of unknown size counts as large as the target.
    """
    network, device = target.target.network, target.target_model.device
    if len(drafts) < 2 or device.type != "cpu":
        return False
    target_bytes = sum(each.numel() * each.element_size() for each in network.parameters())
    sizes = [draft_size(conf, config.model) for conf in drafts if not conf.spec.looks_up]
    weights = sum(float(target_bytes) if size is None else size.weight_bytes for size in sizes)
    shape = shape_of(network.config)
    per_token = shape.kv_bytes_read(1, network.dtype.itemsize) if shape else 0.0
    # Of target and draft, grown to twice what they hold, for every K and plain decoding twice
    at_once = len(timed_ks(config.k)) + 2
    caches = len(drafts) * at_once * 2.0 * target.positions * 2.0 * per_token
    free = free_bytes(device)
    return free is None or weights + caches < CACHES_SHARE * free


def visit_in_turn(
    folder: RunFolder,
    target: Target,
    drafts: Sequence[ModelConf],
    config: AuditionConfig,
    watch: Stopwatch,
) -> None:
    """Visit the drafts that may be served in turn, until their round times are known precisely.

    No turn is begun that the budget is not likely to hold.
    """
    drafts = [conf for conf in drafts if _may_be_served(folder, conf)]
    before = [visits_of_draft(folder, target, conf, None, config, in_turn=True) for conf in drafts]
    if not drafts or _are_enough(folder, before):
        return
    longest_s, missing = 0.0, max(each.missing for each in before)
    with progress("timing the drafts in turn", missing) as tick, enough_memory("drafts in turn"):
        turns = [_Turn(folder, target, conf, config) for conf in drafts]
        visits = [turn.visits for turn in turns]
        while longest_s < watch.left_s and not _are_enough(folder, visits):
            begun, number = monotonic(), min(each.complete for each in visits) + 1
            for turn in turns if number % 2 else turns[::-1]:
                turn.reach(number)
            longest_s = max(longest_s, monotonic() - begun)
            tick()


def _are_enough(folder: RunFolder, visits: Sequence[RoundVisits]) -> bool:
    """True where every draft has all of its visits, or is timed precisely by those in turn."""
    complete = min(each.complete for each in visits)
    if complete >= max(each.most for each in visits):
        return True
    timings = [timing for timing in folder.rounds.read() if timing.turn is not None]
    drafts = {timing.draft for timing in timings}
    return complete >= LEAST_VISITS and all(timed_precisely(timings, each) for each in drafts)


def _may_be_served(folder: RunFolder, conf: ModelConf) -> bool:
    """False for one that failed, was dropped, or loses whatever it accepts."""
    notes = folder.manifest.audition
    out = {*notes.dropped, *notes.untimed}
    out |= {each.draft for each in (*notes.not_eligible, *notes.failures)}
    return conf.name not in out and (conf.spec.looks_up or can_pay(folder.rounds.read(), conf.name))


class _Turn:
    """One draft, loaded, with its visits in turn.

    Attributes:
        visits: that are made so far.
    """

    def __init__(
        self, folder: RunFolder, target: Target, conf: ModelConf, config: AuditionConfig
    ) -> None:
        pair = with_draft(target, conf, config)
        self._target = pair.target_model
        self._layers = pair.head.network.layers if isinstance(pair, HeadPair) else ()
        self.visits: RoundVisits = visits_of_draft(
            *(folder, pair, conf, pair.timed_drafting, config, pair.most),
            in_turn=True,
            counted=_uncounted,
        )

    def reach(self, visits: int) -> None:
        """Make visits until so many are complete; the target keeps a head's states meanwhile."""
        self._target.keep_states(self._layers)
        try:
            self.visits.reach(visits)
        finally:
            self._target.keep_states(())


@contextmanager
def _uncounted(_: str, __: int) -> Iterator[Callable[[], None]]:
    """Counts nothing, for what is a part of a turn."""
    yield lambda: None
