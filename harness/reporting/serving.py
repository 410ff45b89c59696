"""Lines to paste into a server, for the chosen draft and K, each with its own engine's speedup.

Engines accept by different rules, so one pair has up to three acceptances above temperature 0 and a
verdict is for an engine. A line's K and speedup are those of replay under its engine's rule, where
the run has the target's texts scored; else the line says that it does not know.

Syntax and rule of each, by the release named in VERSIONS:

- vLLM: config/speculative.py (`draft_sample_method` is greedy by default, `probabilistic` samples
  and accepts by the ratio); its validation without weights is `rejection_sample_method: synthetic`.
- SGLang: srt/server_args.py; STANDALONE at `--speculative-eagle-topk 1` drafts the argmax.
- llama.cpp: common/arg.cpp; the draft's best token is proposed, and accepted when the target's
  sampler draws the same (common/speculative.cpp). It stops drafting where the draft is unsure.
- mlx-lm: generate.py, `speculative_generate_step`: two independent draws, accepted when equal.
- transformers: generation/candidate_generator.py; settings are read from the draft's
  generation_config; samples the draft and accepts by the ratio.
- mistral.rs: draft models were removed after v0.8.0.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.reporting import formatting as fmt
from harness.reporting.reading import door_of, dummies_of, summary_of
from harness.reporting.snippets import Snippet

if TYPE_CHECKING:
    from harness.storage import StoredRun

VERSIONS = {
    "vLLM": "0.33",
    "SGLang": "0.5.23",
    "llama.cpp": "with --spec-type",
    "mlx-lm": "0.32.2",
    "transformers": "5.23",
}
RULE_OF = {
    "SGLang": "greedy_draft",
    "llama.cpp": "greedy_draft",
    "mlx-lm": "exact_match",
    "transformers": "ratio",
}
NGRAM = "ngram"
SERVING_DOORS = frozenset({"sweep", "audition"})
REMOVED = (
    "mistral.rs removed draft models after v0.8.0; its old setting was [speculative] gamma = K."
)
TOYS = "These names are of models that ship with this package or have random weights: put your own."


def snippets_of(run: "StoredRun") -> tuple[Snippet, ...]:
    """What to serve by this run's verdict; empty where it decides nothing."""
    summary = summary_of(run)
    verdict = summary.get("verdict")
    if door_of(run) not in SERVING_DOORS or verdict is None or verdict.get("temperature") is None:
        return ()
    target = model_id(run.config.get("model"))
    toys = _toys(run, target)
    if verdict.get("decision") != "speculate":
        return (_plain(target, toys),)
    if verdict.get("draft") == NGRAM:
        return (_lookup(target, verdict, toys),)
    draft = draft_id(run, str(verdict.get("draft")))
    verdict = {**verdict, "rule": (run.config.get("decode") or {}).get("rule", "ratio")}
    cells = {entry["rule"]: entry for entry in _engine_cells(run, verdict)}
    made = [
        _vllm(target, draft, verdict, cells),
        _sglang(target, draft, verdict, cells),
        _llama_cpp(verdict, cells),
        _mlx(target, draft, verdict, cells),
        _transformers(target, draft, verdict, cells),
    ]
    rates = _rates(summary, verdict)
    if rates:
        made.append(_validation(target, draft, int(verdict["k"]), rates))
    made.append(Snippet("mistral.rs", "", (REMOVED,)))
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
        own, _, identity = str(entry).partition("@")
        if own == name and identity:
            return identity
    described = (run.manifest.get("models") or {}).get(name) or {}
    return str(described.get("id") or name)


def _engine_cells(run: "StoredRun", verdict: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Per rule: its best K and speedup for the verdict's draft and temperature."""
    summary = summary_of(run)
    if summary.get("engines"):
        return list(summary["engines"])
    for entry in summary.get("rules_gap") or ():
        if (entry["draft"], entry["temperature"]) == (verdict["draft"], verdict["temperature"]):
            return [
                {"rule": rule, "k": entry["k"][rule], "speedup": entry["speedup"][rule]}
                for rule in entry["speedup"]
            ]
    return []


def _rates(summary: Mapping[str, Any], verdict: Mapping[str, Any]) -> list[float]:
    if summary.get("acceptance_rates"):
        return [float(rate) for rate in summary["acceptance_rates"]]
    for entry in summary.get("acceptance_by_position") or ():
        key = (entry["draft"], entry["temperature"], entry["k"])
        if key == (verdict["draft"], verdict["temperature"], verdict["k"]):
            rates = [float(rate) for rate in entry["positions"]]
            return [min(rates[: index + 1]) for index in range(len(rates))]
    return []


def _chosen(
    verdict: Mapping[str, Any], cells: Mapping[str, Mapping[str, Any]], rule: str
) -> tuple[int, str]:
    """The engine's K, and what is known of its speedup, as a sentence.

    The verdict's own where the engine accepts as this run did; greedily all rules are one.
    """
    if float(verdict["temperature"]) == 0 or rule == verdict["rule"]:
        gain = fmt.speedup(
            verdict.get("speedup"), verdict.get("speedup_lo"), verdict.get("speedup_hi")
        )
        same = (
            "all rules are one at temperature 0" if not verdict["temperature"] else f"rule {rule}"
        )
        return int(
            verdict["k"]
        ), f"{gain} on held-out prompts, under its rule of acceptance ({same})."
    cell = cells.get(rule)
    if cell is None:
        return int(verdict["k"]), (
            f"Its speedup is not known: it accepts by the rule {rule}, which was not replayed here."
        )
    gain = float(cell["speedup"])
    told = f"{fmt.speedup(gain)} by replay under its rule, {rule}, at its best K, {cell['k']}"
    return int(cell["k"]), f"{told}." if gain > 1 else f"{told}: it does not pay on this engine."


def _vllm(target: str, draft: str, verdict: Mapping[str, Any], cells: Any) -> Snippet:
    sampled, greedy = cells.get("ratio"), cells.get("greedy_draft")
    by_ratio = float(verdict["temperature"]) > 0 and (
        sampled is None or greedy is None or sampled["speedup"] > greedy["speedup"]
    )
    k, told = _chosen(verdict, cells, "ratio" if by_ratio else "greedy_draft")
    config: dict[str, Any] = {"method": "draft_model", "model": draft, "num_speculative_tokens": k}
    if by_ratio:
        config["draft_sample_method"] = "probabilistic"
    notes = [told]
    if by_ratio and greedy is not None:
        plain = f"{fmt.speedup(float(greedy['speedup']))} at K={greedy['k']}"
        notes.append(f"Without draft_sample_method vLLM drafts greedily: {plain}.")
    return Snippet(f"vLLM {VERSIONS['vLLM']}", _vllm_line(target, config), tuple(notes))


def _vllm_line(target: str, config: Mapping[str, Any], more: str = "") -> str:
    packed = json.dumps(config, separators=(",", ":"))
    return f"vllm serve {shlex.quote(target)} {more}--speculative-config {shlex.quote(packed)}"


def _sglang(target: str, draft: str, verdict: Mapping[str, Any], cells: Any) -> Snippet:
    k, told = _chosen(verdict, cells, RULE_OF["SGLang"])
    line = (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)}"
        f" --speculative-algorithm STANDALONE --speculative-draft-model-path {shlex.quote(draft)}"
        f" --speculative-num-steps {k} --speculative-eagle-topk 1"
        f" --speculative-num-draft-tokens {k + 1}"
    )
    return Snippet(f"SGLang {VERSIONS['SGLang']}", line, (told,))


def _llama_cpp(verdict: Mapping[str, Any], cells: Any) -> Snippet:
    k, told = _chosen(verdict, cells, RULE_OF["llama.cpp"])
    line = (
        "llama-server -m TARGET.gguf -md DRAFT.gguf "
        f"--spec-type draft-simple --spec-draft-n-max {k}"
    )
    unsure = (
        "It stops drafting where the draft is unsure, which replay at a fixed K does not do; "
        "quantised weights accept differently as well."
    )
    return Snippet(f"llama.cpp, {VERSIONS['llama.cpp']}", line, (told, unsure))


def _mlx(target: str, draft: str, verdict: Mapping[str, Any], cells: Any) -> Snippet:
    k, told = _chosen(verdict, cells, RULE_OF["mlx-lm"])
    line = (
        f"mlx_lm.generate --model {shlex.quote(target)} --draft-model {shlex.quote(draft)}"
        f" --num-draft-tokens {k}"
    )
    return Snippet(f"mlx-lm {VERSIONS['mlx-lm']}", line, (told,))


def _transformers(target: str, draft: str, verdict: Mapping[str, Any], cells: Any) -> Snippet:
    k, told = _chosen(verdict, cells, RULE_OF["transformers"])
    code = "\n".join(
        [
            "from transformers import AutoModelForCausalLM",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({target!r})",
            f"draft = AutoModelForCausalLM.from_pretrained({draft!r})",
            f"draft.generation_config.num_assistant_tokens = {k}",
            'draft.generation_config.num_assistant_tokens_schedule = "constant"',
            "draft.generation_config.assistant_confidence_threshold = 0.0",
            "output = model.generate(**inputs, assistant_model=draft)",
        ]
    )
    warped = (
        "At a temperature other than 1 it warps the draft twice and accepts less than replay says; "
        "pass a LogitsProcessorList with one TemperatureLogitsWarper and leave temperature at 1."
    )
    notes = (told,) if float(verdict["temperature"]) in (0.0, 1.0) else (told, warped)
    return Snippet(f"transformers {VERSIONS['transformers']}", code, notes, "python")


def _validation(target: str, draft: str, k: int, rates: Sequence[float]) -> Snippet:
    config = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": k,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [round(rate, 4) for rate in rates[:k]],
    }
    return Snippet(
        f"vLLM {VERSIONS['vLLM']}, to check the speedup on your server without the weights",
        _vllm_line(target, config, "--load-format dummy "),
        (
            "Random weights with the acceptance measured here, position by position: its latency "
            "is real, its text is not.",
        ),
    )


def _plain(target: str, toys: str | None) -> Snippet:
    notes = ("No draft: serve the target as it is.",)
    line = f"vllm serve {shlex.quote(target)}"
    return _with_note(Snippet(f"vLLM {VERSIONS['vLLM']}", line, notes), toys)


def _lookup(target: str, verdict: Mapping[str, Any], toys: str | None) -> Snippet:
    config = {
        "method": "ngram",
        "num_speculative_tokens": int(verdict["k"]),
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    gain = fmt.speedup(verdict.get("speedup"))
    told = (
        f"{gain} by replay; a look-up's proposals are chosen, so every engine's rule is the same."
    )
    return _with_note(
        Snippet(f"vLLM {VERSIONS['vLLM']}", _vllm_line(target, config), (told,)), toys
    )


def _toys(run: "StoredRun", target: str) -> str | None:
    return TOYS if target.startswith("embedded:") or dummies_of(run) else None


def _with_note(snippet: Snippet, note: str | None) -> Snippet:
    if note is None:
        return snippet
    return Snippet(snippet.title, snippet.code, (*snippet.notes, note))
