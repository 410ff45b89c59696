"""Which rounds of the running loop a command times, and where their times are stored.

`harness.measurement.round_times` makes the visits; the commands spread them over what they measure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from harness.analysis.latency import can_pay
from harness.commands.drafted import Drafted, EncodedPrompt, Target
from harness.commands.other_runs import Rates
from harness.commands.pair import completion, request
from harness.commands.progress import progress
from harness.config import AuditionConfig, ModelConf, PairConfig, ServerConfig
from harness.decoding.protocols import Drafter
from harness.measurement.generations import Draft, Request
from harness.measurement.round_times import RoundVisits, TimedLoop, timed_ks, visits_for
from harness.records import Cell, RoundTiming, grouped
from harness.storage import RunFolder
from harness.storage.contents import Lines

# Of all visits, the share that is made again at most where other work disturbed them
REPEATED = 0.25
# A threshold that no token which is drafted is below
NEVER = 1e-300


def visits_of_pair(
    folder: RunFolder,
    pair: Drafted,
    config: PairConfig,
    temperatures: Sequence[float],
    synthetic: Mapping[Cell, Rates] | None = None,
    store: Lines[RoundTiming] | None = None,
    *,
    repeated: bool = False,
) -> RoundVisits:
    """The visits of a run of one pair, at every K of its list; `synthetic` as of its generations.

    Where drafting stops early a round proposes any number of tokens up to K. So it is timed at some
    numbers, with the draft steps read back and a threshold that none is below. Times are kept in
    rounds.jsonl, or in `store`. Those that other work disturbed are made again where `repeated`.
    """
    ks = sorted({k for k in config.k if k > 0})
    if config.decode.stop != "none":
        ks = timed_ks(ks, pair.most)
    elif pair.most is not None and pair.most < max(ks, default=0):  # what a larger K drafts
        ks = sorted({*ks, pair.most})

    def asked(entry: EncodedPrompt, k: int, temperature: float) -> Request:
        made = request(pair, config, entry, k, temperature, 0, synthetic=synthetic)
        return replace(made, stop_below=made.stop_below and NEVER)

    cells = [(k, temperature) for k in (0, *ks) for temperature in temperatures]
    most = visits_for(len(pair.prompts) * config.repetitions)
    # What other work takes of the processors is in no card's times, nor in processor time
    shared = pair.target_model.device.type == "cpu" and config.loop_clock == "wall"
    return RoundVisits(
        _timed_loop(pair, pair.timed_drafting, pair.draft_name, cells, asked),
        folder,
        folder.rounds if store is None else store,
        visits=most,
        counted=progress,
        repeated=round(REPEATED * most) if repeated and shared else 0,
    )


def time_own_loop(
    folder: RunFolder, pair: Drafted, config: ServerConfig, stored: Sequence[RoundTiming]
) -> None:
    """Time rounds of our own loop next to a server's, where wanted, or copy those of another run.

    Args:
        stored: those of another run, which are taken instead.
    """
    known = folder.own_rounds.read()
    for timing in stored:
        if timing not in known:
            folder.own_rounds.append(timing)
    if stored or not config.own_loop:
        return
    decode = replace(config.decode, rule=config.decode.rule or "ratio")
    config = replace(config, decode=decode)
    visits = visits_of_pair(folder, pair, config, config.temperature, store=folder.own_rounds)
    visits.begin()
    visits.up_to(1.0)


def visits_of_draft(
    folder: RunFolder,
    target: Target,
    conf: ModelConf,
    draft: Draft | None,
    config: AuditionConfig,
    most: int | None = None,
) -> RoundVisits:
    """The visits of one draft of an audition; half of them where it cannot pay at any acceptance.

    Args:
        draft: the loaded model, or what makes the drafter of a request; None while there is none,
            to see what is missing.
        most: tokens that it drafts a round at most; None: any number.
    """

    def no_draft(_: Request) -> Drafter:
        raise AssertionError("rounds are timed with a draft")

    def asked(entry: EncodedPrompt, k: int, temperature: float) -> Request:
        plain = completion(target.target, config, entry, temperature, 0)
        return replace(plain, k=k, draft=conf.name if k else None, rule=config.decode.rule)

    cells = [(k, value) for k in (0, *timed_ks(config.k, most)) for value in config.temperature]
    visits = visits_for(len(target.prompts) * config.repetitions, among_many=True)
    if config.latency.target_ms is not None or config.latency_from is not None:
        visits = 0
    return RoundVisits(
        _timed_loop(target, draft or no_draft, conf.name, cells, asked),
        folder,
        folder.rounds,
        visits=visits,
        counted=progress,
        enough=lambda timings: not conf.spec.looks_up and not can_pay(timings, conf.name),
    )


def _timed_loop(
    target: Target,
    draft: Draft,
    name: str,
    cells: Sequence[tuple[int, float]],
    asked: Callable[[EncodedPrompt, int, float], Request],
) -> TimedLoop:
    """The loop that times each cell, a K and a temperature, as `asked` of a prompt of each set."""
    by_set = grouped(target.prompts, lambda entry: entry.prompt.prompt_set)
    requests = {key: [asked(each[0], *cell) for cell in cells] for key, each in by_set.items()}
    prompts = {key: [entry.tokens for entry in each] for key, each in by_set.items()}
    return TimedLoop(target.target_model, draft, name, requests, prompts, target.positions)
