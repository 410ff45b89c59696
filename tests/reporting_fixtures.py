"""Handmade run folders: the numbers are written out, so a test can say where each must land."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.records import (
    Failure,
    LatencyRow,
    ResultRow,
    StepTiming,
    Summary,
    Trial,
    Verdict,
)
from harness.storage import RunFolder, StoredRun, load

PAIR: dict[str, Any] = {
    "model": {"name": "tiny", "id": "embedded:tiny", "revision": None, "dtype": "auto"},
    "draft": {"name": "tiny_good", "id": "embedded:tiny_good", "revision": None, "dtype": "auto"},
    "prompts": {"sets": ["easy", "hard"]},
    "seed": 0,
    "threads": "auto",
}
ENVIRONMENT: dict[str, Any] = {
    "environment": {
        "command": ["sweep", "k=[1,2,4,8]"],
        "python": "3.12.4",
        "packages": {"torch": "2.13.0+cpu", "transformers": "5.23.0"},
        "device": "cpu",
        "device_name": "AMD EPYC 7R13",
        "cuda": None,
        "threads": 1,
        "git": {"commit": "0123abc", "dirty": False},
    },
    "models": {
        "target": {"name": "tiny", "dtype": "float32", "commit": None},
        "draft": {"name": "tiny_good", "dtype": "bfloat16", "commit": "c1a55e7"},
    },
    "prompts_sha256": "9f2c41d0",
}

# temperature, prompt set -> per K: tok/s, ms/tok, acceptance_rate, alpha lo hi, speedup lo hi,
# predicted speedup, tokens/round
SWEEP: dict[tuple[float, str], dict[int, tuple[float | None, ...]]] = {
    (0.0, "easy"): {
        0: (231.5, 4.32),
        1: (311.5, 3.21, 0.893, 0.901, 0.871, 0.926, 1.346, 1.312, 1.381, 1.402, 1.88),
        2: (363.6, 2.75, 0.842, 0.897, 0.866, 0.921, 1.571, 1.502, 1.633, 1.640, 2.66),
        4: (401.6, 2.49, 0.727, 0.889, 0.858, 0.915, 1.735, 1.611, 1.846, 1.822, 3.81),
        8: (336.7, 2.97, 0.519, 0.881, 0.849, 0.908, 1.455, 1.318, 1.581, 1.560, 4.92),
    },
    (0.0, "hard"): {
        0: (230.4, 4.34),
        1: (267.4, 3.74, 0.641, 0.647, 0.601, 0.689, 1.160, 1.112, 1.207, 1.208, 1.63),
        2: (260.4, 3.84, 0.522, 0.641, 0.596, 0.684, 1.130, 1.062, 1.195, 1.201, 2.02),
        4: (215.1, 4.65, 0.362, 0.633, 0.588, 0.677, 0.933, 0.861, 1.004, 0.998, 2.41),
        8: (134.8, 7.42, 0.196, 0.629, 0.583, 0.672, 0.585, 0.531, 0.641, 0.640, 2.54),
    },
    (1.0, "easy"): {
        0: (228.3, 4.38),
        1: (301.2, 3.32, 0.842, 0.848, 0.811, 0.879, 1.319, 1.281, 1.357, 1.363, 1.83),
        2: (333.3, 3.00, 0.768, 0.841, 0.803, 0.873, 1.460, 1.389, 1.527, 1.538, 2.51),
        4: (338.9, 2.95, 0.620, 0.832, 0.795, 0.866, 1.485, 1.364, 1.601, 1.579, 3.40),
        8: (258.4, 3.87, 0.398, 0.824, 0.786, 0.859, 1.132, 1.009, 1.251, 1.243, 4.05),
    },
    (1.0, "hard"): {
        0: (229.4, 4.36),
        1: (243.9, 4.10, 0.488, 0.493, 0.447, 0.538, 1.063, 1.019, 1.108, 1.109, 1.48),
        2: (219.8, 4.55, 0.366, 0.487, 0.441, 0.532, 0.958, 0.902, 1.014, 1.021, 1.70),
        4: (167.5, 5.97, 0.231, 0.481, 0.436, 0.526, 0.730, 0.672, 0.789, 0.779, 1.87),
        8: (101.6, 9.84, 0.117, 0.478, 0.431, 0.523, 0.443, 0.402, 0.486, 0.491, 1.92),
    },
}
BREAK_EVEN: dict[int, float | None] = {1: 0.344, 2: 0.481, 4: 0.668, 8: None}
REASON = "K=2 gives 1.35x [1.27, 1.42] on held-out prompts"


def sweep_rows() -> list[ResultRow]:
    """Measured and theory rows of the default sweep."""
    rows: list[ResultRow] = []
    for (temperature, prompt_set), cells in SWEEP.items():
        for k, cell in cells.items():
            where: dict[str, Any] = {
                "model": "tiny",
                "draft": "tiny_good",
                "prompt_set": prompt_set,
                "temperature": temperature,
                "k": k,
            }
            done: dict[str, Any] = {
                "source": "measured",
                "status": "complete",
                "prompts": 8,
                "new_tokens": 384,
            }
            times: dict[str, Any] = {"tokens_per_second": cell[0], "ms_per_token": cell[1]}
            if k == 0:
                rows.append(ResultRow(**where, **done, **times, speedup=1.0))
                continue
            names = (
                "acceptance_rate",
                "alpha",
                "alpha_lo",
                "alpha_hi",
                "speedup",
                "speedup_lo",
                "speedup_hi",
            )
            found: dict[str, Any] = dict(zip(names, cell[2:9], strict=True))
            rows.append(ResultRow(**where, **done, **times, **found, tokens_per_round=cell[10]))
            rows.append(
                ResultRow(
                    **where,
                    source="theory",
                    status="complete",
                    alpha=cell[3],
                    speedup=cell[9],
                    breakeven_alpha=BREAK_EVEN[k],
                )
            )
    return rows


def latency_rows() -> list[LatencyRow]:
    """A draft step, a target step, the verify curve for n = 1..9 and a prefill."""
    medians = [4.20, 4.41, 4.58, 4.77, 4.93, 5.20, 5.38, 5.61, 5.94]
    rows = [
        _latency("draft", "tiny_good", "step", 1, 1.24),
        _latency("draft", "tiny_good", "prefill", 32, 2.1),
    ]
    rows += [
        _latency("target", "tiny", "step", 1, 4.20),
        _latency("target", "tiny", "prefill", 32, 8.0),
    ]
    rows += [_latency("target", "tiny", "verify", n, ms) for n, ms in enumerate(medians, start=1)]
    return rows


def _latency(role: str, model: str, kind: str, tokens: int, ms: float) -> LatencyRow:
    context = 0 if kind == "prefill" else 64
    return LatencyRow(role, model, kind, tokens, context, 1, ms, 0.96 * ms, 1.09 * ms, 40)


def trial(
    prompt: str, prompt_set: str, temperature: float, k: int, lengths: Sequence[int]
) -> Trial:
    """One speculative generation with this histogram of accepted lengths."""
    rounds = sum(lengths)
    accepted = sum(index * number for index, number in enumerate(lengths))
    return Trial(
        cell=f"{prompt_set}-{prompt}-{temperature}-{k}",
        prompt_set=prompt_set,
        prompt=prompt,
        repetition=0,
        k=k,
        temperature=temperature,
        rule="ratio",
        status="ok",
        new_tokens=48,
        rounds=rounds,
        drafted=rounds * k,
        accepted=accepted,
        rejected=rounds - lengths[-1],
        bonus=lengths[-1],
        cut=0,
        accepted_lengths=tuple(lengths),
        room=(rounds,) * k,
        prefill_s=0.01,
        draft_prefill_s=0.002,
        first_token_s=0.004,
        decode_s=0.2,
        stop_reason="budget",
    )


def trials() -> list[Trial]:
    """Histograms at K = 4, the largest here, and some at K = 1 that a plot must pass over."""
    histograms = {
        ("easy", 0.0): (2, 1, 1, 2, 8),
        ("hard", 0.0): (8, 5, 3, 2, 3),
        ("easy", 1.0): (3, 2, 2, 2, 7),
        ("hard", 1.0): (12, 6, 3, 1, 1),
    }
    found = [
        trial("p0", name, temperature, 4, lengths)
        for (name, temperature), lengths in histograms.items()
    ]
    return [*found, trial("p0", "easy", 0.0, 1, (4, 22))]


def verdict(temperature: float, prompt_set: str = "all", **changes: Any) -> Verdict:
    """The sweep's verdict at one temperature: speculate at 0, not at 1."""
    pays = temperature == 0.0
    values: dict[str, Any] = {
        "decision": "speculate" if pays else "does_not_pay",
        "draft": "tiny_good" if pays else None,
        "k": 2 if pays else 0,
        "speedup": 1.348 if pays else 0.981,
        "speedup_lo": 1.271 if pays else 0.902,
        "speedup_hi": 1.422 if pays else 1.051,
        "reason": REASON if pays else "needs alpha >= 0.344 at K=1; measured 0.331",
    }
    return Verdict(temperature=temperature, prompt_set=prompt_set, **{**values, **changes})


def sweep_summary(**changes: Any) -> Summary:
    """The summary of the default sweep."""
    values: dict[str, Any] = {
        "verdict": verdict(0.0),
        "per_temperature": (verdict(0.0), verdict(1.0)),
        "per_prompt_set": (
            verdict(0.0, "easy", k=4),
            verdict(0.0, "hard", decision="undecided", k=1),
        ),
        "caveats": ("embedded models: they show that the harness works, not what to serve",),
        "headline": {
            "step_ratio": 3.387,
            "c": 0.2952,
            "draft_step_ms": 1.24,
            "target_step_ms": 4.20,
        },
    }
    return Summary(**{**values, **changes})


def stored(
    root: Path,
    door: str,
    *,
    config: Mapping[str, Any] = PAIR,
    results: Sequence[ResultRow] = (),
    latency: Sequence[LatencyRow] = (),
    trials: Iterable[Trial] = (),
    summary: Summary | None = None,
    extra: Mapping[str, Any] | None = None,
    status: str = "complete",
) -> StoredRun:
    """Write a run folder as a door does, and load it; what is not given is missing."""
    names = [str((config.get(role) or {}).get("name") or "") for role in ("model", "draft")]
    run = RunFolder.create(root, door, names, config)
    if results:
        run.write_results(results)
    if latency:
        timings = [_timing(row) for row in latency]
        run.write_latency(latency, timings)
    for entry in trials:
        run.append_trial(entry)
    if summary is not None:
        run.write_summary(summary, extra)
    run.update_manifest({**ENVIRONMENT, "status": status})
    return load(run.path)


def _timing(row: LatencyRow) -> StepTiming:
    where: Any = (row.role, row.model, row.kind, row.tokens, row.context_tokens, row.batch)
    return StepTiming(*where, samples_s=(row.median_ms / 1e3,))


def sweep_run(root: Path, **changes: Any) -> StoredRun:
    """The default sweep, complete."""
    values: dict[str, Any] = {
        "results": sweep_rows(),
        "latency": latency_rows(),
        "trials": trials(),
        "summary": sweep_summary(),
    }
    return stored(root, "sweep", **{**values, **changes})


def partial_sweep_run(root: Path) -> StoredRun:
    """A sweep in which one cell ran out of memory and another lost prompts."""
    broken = {
        ("hard", 1.0, 8): {
            "status": "failed",
            "error": "8 of 8 generations failed, first: out of memory",
        },
        ("hard", 1.0, 4): {
            "status": "partial",
            "error": "1 of 8 generations failed, first: out of memory",
        },
    }
    rows: list[ResultRow] = []
    for row in sweep_rows():
        trouble = broken.get((str(row.prompt_set), row.temperature or 0.0, row.k))
        if row.source == "measured" and trouble and trouble["status"] == "failed":
            where = (row.model, row.draft, row.prompt_set, row.temperature, row.k)
            row = ResultRow(*where, "measured", "failed", trouble["error"])
        elif row.source == "measured" and trouble:
            row = ResultRow(**{**row.__dict__, **trouble})
        rows.append(row)
    failures = (Failure("hard, temperature 1, K=8", "out of memory"),)
    return sweep_run(root, results=rows, summary=sweep_summary(failures=failures), status="failed")


def profile_run(root: Path) -> StoredRun:
    """The founding experiment's profile, with ideal and break-even rows."""
    config = {**PAIR, "model": {"name": "qwen3_4b"}, "draft": {"name": "qwen3_0_6b"}}
    shared: dict[str, Any] = {
        "prompt_set": "all",
        "temperature": 0.0,
        "k": 0,
        "source": "measured",
        "status": "complete",
    }
    results = [
        ResultRow(
            model="qwen3_4b",
            draft=None,
            **shared,
            tokens_per_second=33.4,
            ms_per_token=29.92,
            ms_per_token_p50=29.88,
            ms_per_token_p90=30.40,
            ttft_ms=31.8,
            peak_memory_bytes=8_911_000_000,
        ),
        ResultRow(
            model="qwen3_0_6b",
            draft=None,
            **shared,
            tokens_per_second=45.3,
            ms_per_token=22.09,
            ms_per_token_p50=22.09,
            ms_per_token_p90=22.40,
            ttft_ms=25.0,
        ),
        *theory_grid(
            [1.0],
            {1: 0.738, 2: 0.814, 4: 0.882},
            {(1.0, 1): 1.151, (1.0, 2): 1.211, (1.0, 4): 1.265},
        ),
    ]
    latency = [
        _latency("target", "qwen3_4b", "step", 1, 29.92),
        _latency("target", "qwen3_4b", "prefill", 512, 256.0),
        _latency("draft", "qwen3_0_6b", "step", 1, 22.09),
        *(
            _latency("target", "qwen3_4b", "verify", n, ms)
            for n, ms in ((1, 29.92), (2, 31.0), (5, 33.51))
        ),
    ]
    headline: dict[str, float | int | str | None] = {
        "step_ratio": 1.354,
        "c": 0.7383,
        "draft_step_ms": 22.09,
        "target_step_ms": 29.92,
    }
    return stored(
        root,
        "profile",
        config=config,
        results=results,
        latency=latency,
        summary=Summary(verdict=None, headline=headline),
    )


def theory_grid(
    alphas: Sequence[float],
    break_even: Mapping[int, float | None],
    speedups: Mapping[tuple[float, int], float],
) -> list[ResultRow]:
    """A theory row per (k, alpha)."""
    return [
        ResultRow(
            None,
            None,
            None,
            None,
            k,
            "theory",
            "complete",
            alpha=alpha,
            speedup=speedups[alpha, k],
            ms_per_token=29.92 / speedups[alpha, k],
            breakeven_alpha=needed,
        )
        for k, needed in break_even.items()
        for alpha in alphas
    ]


def breakeven_run(root: Path) -> StoredRun:
    """The founding post's steps, with a verify over five positions too dear for any alpha."""
    config = {
        "draft_ms": 22.09,
        "target_ms": 29.92,
        "verify_ms": [29.92, 31.0, 31.5, 60.0, 90.0],
        "alpha": [0.6, 0.9, 1.0],
        "k": [1, 2, 4],
    }
    speedups = {
        (0.6, 1): 0.9017, (0.6, 2): 0.7749, (0.6, 4): 0.3868,
        (0.9, 1): 1.0708, (0.9, 2): 1.0714, (0.9, 4): 0.6870,
        (1.0, 1): 1.1271, (1.0, 2): 1.1860, (1.0, 4): 0.8388,
    }  # fmt: skip
    rows = theory_grid([0.6, 0.9, 1.0], {1: 0.7744, 2: 0.8339, 4: None}, speedups)
    summary = Summary(verdict=None, headline={"c": 0.7383, "step_ratio": 1.354})
    return stored(root, "breakeven", config=config, results=rows, summary=summary)


def snapshot_run(root: Path) -> StoredRun:
    """Three prompts, one of each outcome, and one sampled offset."""
    shared = {"prompt_set": "easy", "temperature": 0.0, "k": 4}
    prompts = [
        {
            **shared,
            "prompt": "capital",
            "result": "PASS",
            "acceptance_rate": 0.392,
            "first_difference": None,
            "target_margin": None,
            "spec_margin": None,
        },
        {
            **shared,
            "prompt": "counting",
            "result": "TIE",
            "acceptance_rate": 0.396,
            "first_difference": 17,
            "target_margin": 0.0021,
            "spec_margin": 0.0013,
        },
        {
            **shared,
            "prompt": "a_prompt_with_a_very_long_identifier_that_must_be_broken",
            "result": "FAIL",
            "acceptance_rate": 0.374,
            "first_difference": 3,
            "target_margin": 1.2519,
            "spec_margin": 0.7711,
        },
    ]
    sampled = [
        {
            "k": 4,
            "temperature": 1.0,
            "offset": 2,
            "draws": 5000,
            "bins": 31,
            "chi2": 27.4312,
            "p_value": 0.6012,
            "result": "PASS",
        }
    ]
    return stored(
        root,
        "snapshot",
        summary=Summary(verdict=None),
        extra={"prompts": prompts, "sampled": sampled},
    )
