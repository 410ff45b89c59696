"""Caveats on a server run: is the server lossless, and what was left out or disturbed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from harness import formatting as fmt
from harness.analysis.caveats.record import Quoted, caveat
from harness.analysis.setup import Setup
from harness.engine_facts.engines import spec_of
from harness.records import GREEDY, Rule, ServingEngine, grouped
from harness.summary import LoadCell, ServedGate, UserLatency, Values, Visits

# ---- texts and rounds ----------------------------------------------------------------------------


def _say_server_not_lossless(values: Quoted) -> str:
    at = f"at temperature {values['temperature']:g}"
    if values["repeats"]:
        return (
            f"{at}, K={values['k']}, all visits of the server returned the same"
            f" {values['texts']} texts, which the target would not: it ignores the temperature or"
            " the seeds of requests; texts and rounds here are not those of sampling"
        )
    nats, expected = values["nats"], values["expected_nats"]
    known = nats is not None and expected is not None
    off = f"; {nats:.2f} nats per token, {expected:.2f} is right" if known else ""
    if not values["k"]:
        return (
            f"{at} the plain server's own texts are not the target's that is loaded here"
            f" ({scores(values)}{off}): other weights (quantised, another revision) or other"
            " sampling settings; the gate and replay mean little"
        )
    return (
        f"the server is NOT LOSSLESS {at}, K={values['k']} ({scores(values)}): what it returns is"
        f" not what the target would{off}; nothing is predicted there"
    )


@caveat("caution", _say_server_not_lossless)
def server_not_lossless(gates: Sequence[ServedGate]) -> Iterator[Values]:
    """Sampled texts that are not the target's; of K = 0 the plain server's own.

    repeats: all visits returned the same texts. text_z, plain_z: how far they are from the
    target's, and from plain ones; nats, expected_nats: per token.
    """
    repeating: set[float] = set()
    for gate in gates:
        if gate.lossless is False and gate.temperature not in {GREEDY, *repeating}:
            repeating |= {gate.temperature} if gate.repeats else set()
            yield {
                "temperature": gate.temperature,
                "k": gate.k,
                "texts": gate.texts,
                "repeats": gate.repeats,
                "text_z": gate.text_z,
                "plain_z": gate.plain_z,
                "nats": gate.nats_per_token,
                "expected_nats": gate.expected_nats_per_token,
            }


def scores(values: Quoted) -> str:
    """How far texts are off, as "texts z = -85.1, against plain decoding's z = -60.2"."""
    names = (("texts", values.get("text_z")), ("against plain decoding's", values.get("plain_z")))
    return ", ".join(f"{name} z = {z:.1f}" for name, z in names if z is not None)


def _say_server_rounds_unlike_replay(values: Quoted) -> str:
    at = f"at temperature {values['temperature']:g}, K={values['k']}"
    rounds, expected, z = (values.get(name) for name in ("rounds", "expected_rounds", "rounds_z"))
    if rounds is None or expected is None:
        return f"{at}, the rounds are not those of replay"
    by = f"{values.get('equal')} of {values.get('texts')} texts exactly"
    by = by if z is None else f"z = {z:.1f}"
    counts = f"{fmt.count(rounds)} where replay expects {fmt.count(expected)}, {by}"
    other = values.get("other_rule")
    if other is not None:
        key = "leave decode.rule out" if other == "greedy_draft" else f"give decode.rule={other}"
        return (
            f"{at}, its rounds are not those of decode.rule={values['rule']} ({counts}); they are"
            f" those of {other}: {key}, or every prediction is of another server"
        )
    return (
        f"{at}, its rounds are not those of replay ({counts}): the draft that is served is not"
        " quite the one that scored the texts (fewer bits, another revision), or its acceptance"
        " rule is another. Texts are not affected; predictions at this temperature err by about"
        f" {fmt.percent(abs(rounds / expected - 1.0))}"
    )


@caveat("caution", _say_server_rounds_unlike_replay)
def server_rounds_unlike_replay(
    unlike: Sequence[ServedGate], rule: Rule | None
) -> Iterator[Values]:
    """The gate, of those whose rounds are not replay's, where they differ most.

    rounds_z, or equal and texts where rounds are certain (else None); rule: the engine's,
    other_rule: whose replay the rounds fit, or None.
    """
    if not unlike:
        return
    worst = max(unlike, key=lambda gate: abs((gate.rounds or 0) - (gate.expected_rounds or 0)))
    yield {
        "temperature": worst.temperature,
        "k": worst.k,
        "rounds": worst.rounds,
        "expected_rounds": worst.expected_rounds,
        "rounds_z": worst.rounds_z,
        "equal": worst.equal_rounds,
        "texts": worst.replayed_texts,
        "rule": rule,
        "other_rule": worst.other_rule,
    }


@caveat(
    "note",
    lambda values: (
        f"on {spec_of(str(values['engine'])).title} a draft is served in its target's dtype,"
        f" {values['served']}, and here it scored texts in {values['scored']}:"
        f" draft.dtype={values['served']} scores what is served"
    ),
)
def draft_served_in_other_dtype(engine: ServingEngine, scored: str | None) -> Iterator[Values]:
    """The draft's dtype on the server, and where its texts were scored."""
    if engine.dtype is not None and scored not in (None, engine.dtype):
        yield {"engine": engine.name, "served": engine.dtype, "scored": scored}


# ---- what was left out ---------------------------------------------------------------------------


@caveat(
    "note",
    "to end within budget_s={budget_s:g} this run asked for less than was configured: {prompts}"
    " prompts, at most {new_tokens} tokens a text, visits: {repetitions}, temperature"
    " {temperatures}, K = {ks}; budget_s=null asks for everything",
)
def server_asked_less(setup: Setup) -> Iterator[Values]:
    """What a run within budget_s asked for, where that is less than was configured."""
    less = setup.run.manifest.asked_less
    if less is not None and not less.everything:
        yield {
            "prompts": less.prompts,
            "new_tokens": less.new_tokens,
            "repetitions": less.repetitions,
            "temperatures": ", ".join(f"{value:g}" for value in less.temperature),
            "ks": ", ".join(map(str, less.k)),
            "budget_s": setup.run.config.get("budget_s"),
        }


# Temperature, K, and the visits in which it was timed, fewer than were asked for
Lacking = tuple[float, int, Visits]


def _say_server_visits_lacking(values: Quoted) -> str:
    load = "under load " if values["load"] else ""
    which = f"{load}K={values['ks']} at temperature {values['temperature']:g}"
    if not values["timed"]:
        return f"{which} was timed in no visit next to plain decoding; resume= measures it"
    return (
        f"{which} was timed in {values['timed']} of {values['asked']} visits: it is compared with"
        " plain decoding over these alone, and no answer names it while another K has many more;"
        " resume= measures the others"
    )


@caveat("note", _say_server_visits_lacking)
def server_visits_lacking(lacking: Iterable[Lacking], *, load: bool) -> Iterator[Values]:
    """These K, by temperature and visits; load: whether of requests side by side."""
    groups = grouped(lacking, lambda entry: (entry[0], entry[2]))
    for (temperature, visits), entries in groups.items():
        ks = ", ".join(map(str, sorted({k for _, k, _ in entries})))
        yield {"temperature": temperature, "ks": ks, **asdict(visits), "load": load}


# ---- loads ---------------------------------------------------------------------------------------


@caveat(
    "caution",
    "at {rate:g} requests per second more arrives than the server serves (K = {ks}): its queue"
    " grows for as long as they come, so waits there are those of this many requests; give a lower"
    " rate=",
)
def rate_beyond_capacity(waits: Sequence[UserLatency]) -> Iterator[Values]:
    """The least rate at which more arrives than servers of these K serve."""
    behind = [row for row in waits if row.queue_grows]
    if behind:
        rate = min(row.rate or 0.0 for row in behind)
        ks = sorted({row.k for row in behind if row.rate == rate})
        yield {"rate": rate, "ks": ", ".join(map(str, ks))}


@caveat(
    "caution",
    "other programs took {others:.2f} processors while requests were sent side by side, so no K is"
    " named for loads; measure them again on a quiet machine",
)
def loads_disturbed(others: float | None) -> Iterator[Values]:
    """Processors that other work kept busy during loads, where these are too many; else None."""
    if others is not None:
        yield {"others": others}


def _say_server_queues(values: Quoted) -> str:
    flag = spec_of(str(values["engine"])).slots_flag
    more = "" if flag is None else f"; more slots: {flag} {values['concurrency']}"
    return (
        f"the servers decode {values['slots']} requests side by side, so of"
        f" {values['concurrency']} or more in flight the others wait: what was timed there is a"
        f" queue, and no K is given for that load{more}"
    )


@caveat("caution", _say_server_queues)
def server_queues(engine: ServingEngine, cells: Sequence[LoadCell]) -> Iterator[Values]:
    """The smallest concurrency above the slots that the servers have."""
    queues = [cell for cell in cells if cell.slots is not None]
    if queues:
        first = min(queues, key=lambda cell: cell.concurrency or 0)
        yield {"engine": engine.name, "concurrency": first.concurrency, "slots": first.slots}
