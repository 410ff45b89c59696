"""Caveats on a server run: is it lossless, what was left out or disturbed; and on a plan of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from math import ceil

from harness import formatting as fmt
from harness.analysis.caveats.record import Quoted, caveat
from harness.analysis.setup import Setup
from harness.engine_facts.engines import spec_of
from harness.records import GREEDY, Rule, ServingEngine, grouped
from harness.storage.manifest import PlannedServer
from harness.summary import LoadCell, Plan, ServedGate, UserLatency, Values, Visits

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


# ---- plans of a server ---------------------------------------------------------------------------

# By how much a text may be longer than those of the loads
CONTEXT_SLACK = 0.1
# Simulated requests beyond a percentile, with which largest rates err by 2 % (docs/LOG.md)
LEAST_BEYOND = 100


def _say_plan_not_measured(values: Quoted) -> str:
    parts: list[str] = []
    if values["rate"] is not None:
        known = values["largest_rate"]
        above = "at any rate" if known is None else f"at more than {known:g} requests/s"
        parts.append(f"waits {above} are simulated alone (rate=[...] in the server run)")
    if values["slots"] is not None:
        parts.append(
            "loads at a rate ran on servers of {slots} slots and are not used: what requests cost"
            " there is known for up to {slots_timed} side by side (concurrency=[1,2,4,{slots}] in"
            " the server run)".format(**values)
        )
    if values["context"] is not None:
        parts.append(
            "the longest text has {context} tokens with its prompt, the longest under load"
            " {context_timed}".format(**values)
        )
    if values["mean_prompts"]:
        parts.append(
            "no prefills of two lengths were timed, so every prompt costs the mean and high"
            " percentiles of TTFT are too low"
        )
    return f"planned and not measured: {'; '.join(parts)}"


@caveat("note", _say_plan_not_measured)
def plan_not_measured(server: PlannedServer, plan: Plan) -> Iterator[Values]:
    """What is planned and was not measured; each None, or False, where it was.

    rate: beyond largest_rate, the largest measured (None: none). slots: of loads at a rate, other
    than this plan's; slots_timed: up to which costs are known. context, context_timed: of the
    longest text, and of the loads'. mean_prompts: whether a prompt's length has no cost.
    """
    planned_rate = max((each.largest_rate for each in plan.servable), default=0.0)
    beyond = planned_rate > (server.largest_rate or 0.0)
    slots = ", ".join(map(str, server.other_slots)) or None
    longer = server.context > (1.0 + CONTEXT_SLACK) * server.context_timed
    if beyond or slots or longer or not server.prompts_priced:
        yield {
            "rate": planned_rate if beyond else None,
            "largest_rate": server.largest_rate,
            "slots": slots,
            "slots_timed": server.slots_timed,
            "context": server.context if longer else None,
            "context_timed": server.context_timed,
            "mean_prompts": not server.prompts_priced,
        }


@caveat(
    "note",
    "only {beyond} simulated requests are beyond p{percentile:g}: near a card's capacity TTFT"
    " comes out too low, and the largest rate too high; give requests={requests}",
)
def plan_few_beyond(plan: Plan, counted_share: float) -> Iterator[Values]:
    """That few simulated requests wait longer than the percentile; requests: that are enough."""
    beyond = (1.0 - plan.percentile / 100.0) * counted_share * plan.seeds * plan.requests
    if beyond < LEAST_BEYOND - 1e-9:
        needed = 100 * ceil(plan.requests * LEAST_BEYOND / beyond / 100.0 - 1e-9)
        yield {"percentile": plan.percentile, "beyond": round(beyond), "requests": needed}
