"""What to paste into a server: one line per engine for the draft and K that the verdict names.

The lines themselves, and what each engine is known to do, are in `engine_lines`. Here: whether
there is anything to serve, under which names, and what the run knows of every rule of acceptance.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.analysis.leaderboard import ENGINES
from harness.config import split_draft
from harness.records import NGRAM
from harness.reporting import engine_lines as lines
from harness.reporting import formatting as fmt
from harness.reporting.reading import door_of, dummies_of, summary_of, synthetic
from harness.reporting.served import Served
from harness.reporting.snippets import Snippet

if TYPE_CHECKING:
    from harness.storage import StoredRun

# The longest n-gram that the harness's own look-up searches for
LOOKUP_TOKENS = 2
SERVING_DOORS = frozenset({"sweep", "audition"})
REMOVED = (
    "mistral.rs removed draft models after v0.8.0; its old setting was [speculative] gamma = K."
)
TOYS = "These names are of models that ship with this package or have random weights: put your own."
NO_DRAFT = "No draft: serve the target as it is."


def snippets_of(run: "StoredRun") -> tuple[Snippet, ...]:
    """What to serve by this run's verdict; empty where it decides nothing."""
    verdict = summary_of(run).get("verdict")
    if door_of(run) not in SERVING_DOORS or verdict is None or verdict.get("temperature") is None:
        return ()
    target = model_id(run.config.get("model"))
    toys = TOYS if target.startswith("embedded:") or dummies_of(run) else None
    if verdict.get("decision") != "speculate":
        made = [_plain(run, target, verdict)]
    elif verdict.get("draft") == NGRAM:
        made = [_lookup(target, verdict)]
    else:
        made = _drafted(run, target, verdict)
    return (_with_note(made[0], toys), *made[1:])


def model_id(conf: Mapping[str, Any] | None) -> str:
    """The id to serve: the hub's or a folder."""
    return str((conf or {}).get("id") or (conf or {}).get("name") or "TARGET")


def draft_id(run: "StoredRun", name: str) -> str:
    """The draft's id: from a pair's config, or from an audition's list (`name@id`, or a name)."""
    conf = run.config.get("draft")
    if conf and conf.get("name") == name:
        return model_id(conf)
    for entry in run.config.get("drafts") or ():
        draft = split_draft(str(entry))
        if draft.name == name and draft.id:
            return draft.id
    described = (run.manifest.get("models") or {}).get(name) or {}
    return str(described.get("id") or name)


def _drafted(run: "StoredRun", target: str, verdict: Mapping[str, Any]) -> list[Snippet]:
    decode = run.config.get("decode") or {}
    gain = fmt.speedup(verdict.get("speedup"), verdict.get("speedup_lo"), verdict.get("speedup_hi"))
    served = Served(
        target=target,
        draft=draft_id(run, str(verdict.get("draft"))),
        k=int(verdict["k"]),
        temperature=float(verdict["temperature"]),
        rule=_rule(run),
        gain=gain,
        cells={entry["rule"]: entry for entry in _engine_cells(run, verdict)},
        top_k=decode.get("top_k"),
        top_p=decode.get("top_p"),
        min_p=decode.get("min_p"),
        repetition_penalty=decode.get("repetition_penalty"),
        stop=decode.get("stop_threshold") if decode.get("stop") == "threshold" else None,
        imposed=synthetic(run),
    )
    made = [
        lines.vllm(served),
        lines.sglang(served),
        lines.llama_cpp(served),
        lines.mlx(served),
        lines.transformers(served),
    ]
    rates = _rates(summary_of(run), verdict)
    if len(rates) >= served.k:
        made.append(lines.vllm_validation(served, rates))
    return [*made, Snippet("mistral.rs", "", (REMOVED,))]


def _rule(run: "StoredRun") -> str:
    """The rule that the verdict is under."""
    return str((run.config.get("decode") or {}).get("rule") or "ratio")


def _engine_cells(run: "StoredRun", verdict: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Per rule: its best K and speedup for the verdict's draft and temperature."""
    summary = summary_of(run)
    if summary.get("engines"):
        return list(summary["engines"])
    return [
        {"rule": board["rule"], "k": row["k"], "speedup": row["speedup"]}
        for board in summary.get("leaderboards") or ()
        for row in board["rows"]
        if board["temperature"] == verdict["temperature"]
        and row["draft"] == verdict["draft"] is not None
    ]


def _rates(summary: Mapping[str, Any], verdict: Mapping[str, Any]) -> list[float]:
    """Unconditional acceptance per position at the verdict's K, never increasing."""
    if summary.get("acceptance_rates"):
        return [float(rate) for rate in summary["acceptance_rates"]]
    for entry in summary.get("acceptance_by_position") or ():
        key = (entry["draft"], entry["temperature"], entry["k"])
        if key == (verdict["draft"], verdict["temperature"], verdict["k"]):
            rates = [float(rate) for rate in entry["positions"]]
            return [min(rates[: index + 1]) for index in range(len(rates))]
    return []


def _plain(run: "StoredRun", target: str, verdict: Mapping[str, Any]) -> Snippet:
    """The target alone; and which other rule of acceptance might pay, where replay says so."""
    notes = [NO_DRAFT]
    own = _rule(run)
    if float(verdict["temperature"]) > 0 and not synthetic(run):
        notes += [
            f"Under the rule {cell['rule']} ({', '.join(ENGINES[cell['rule']])}) replay gives"
            f" {fmt.speedup(float(cell['speedup']))} at K={cell['k']}, picked on these prompts;"
            f" decode.rule={cell['rule']} judges it."
            for cell in _engine_cells(run, verdict)
            if cell["rule"] != own and float(cell["speedup"]) > 1
        ]
    return Snippet(lines.titled("vLLM"), lines.vllm_plain(target), tuple(notes))


def _lookup(target: str, verdict: Mapping[str, Any]) -> Snippet:
    config = {
        "method": "ngram",
        "num_speculative_tokens": int(verdict["k"]),
        "prompt_lookup_max": LOOKUP_TOKENS,
        "prompt_lookup_min": 1,
    }
    gain = fmt.speedup(verdict.get("speedup"), verdict.get("speedup_lo"), verdict.get("speedup_hi"))
    told = (
        f"{gain} on held-out prompts; a look-up's proposals are chosen, so every engine's rule is"
        " the same."
    )
    return Snippet(lines.titled("vLLM"), lines.vllm_line(target, config), (told,))


def _with_note(snippet: Snippet, note: str | None) -> Snippet:
    if note is None:
        return snippet
    return Snippet(snippet.title, snippet.code, (*snippet.notes, note))
