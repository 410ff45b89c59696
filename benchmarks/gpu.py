"""What one CUDA card does: eager against graphs, MBU, v(n), and speedup at a known acceptance.

    python benchmarks/gpu.py --smoke                              the smoke run alone
    python benchmarks/gpu.py --out results/examples/h200_dummy    the smoke run, then the benchmark

No network and no downloads: dummy weights in the released shapes.

It begins with a smoke run of at most five minutes, which ends with status 1 and the reason where
something is wrong on this card. Every model is opened with two of its layers, which need the same
kernels as the full model:

- it runs as compiled CUDA graphs, and did not fall back;
- every forward (eager, recorded, recorded and compiled) has the logits of transformers' own
  forward; error and time of each are printed;
- eager attention has them for 1 to 17 positions over short and long contexts;
- speculative text equals plain text at temperature 0, with a poor draft and with the target itself;
- nothing is compiled again afterwards.

Then, for each pair of a target with Qwen3-0.6B, it measures, in one process, one after the other,

1. the copy bandwidth of the card, the yardstick of every MBU below;
2. a decoding step of transformers' eager `generate`, and of our recorded graphs;
3. v(n), a forward over n positions in steps, and the draft's step;
4. the loop at the acceptances of a well-known post (Qwen3-4B with 0.6B on an A10G), each K's own,
   set synthetically: measured speedup next to what step times and the renewal recursion predict,
   and the part of a round that no forward explains.

Pairs that no longer fit into --budget seconds are left out, and said to be. `--shape tiny --device
cpu` runs the same code on toy shapes, without graphs, to show that it runs.
"""

import argparse
import gc
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from harness.analysis.cells import expected_tokens_per_round
from harness.cli import compose
from harness.config import rates_for
from harness.decoding.sampling import SamplingParameters
from harness.measurement.clock import Clock
from harness.measurement.environment import copy_bandwidth
from harness.measurement.generations import Request, run_trial
from harness.measurement.lossless import compare_texts
from harness.models.cached import CachedModel
from harness.models.device import kernel_settings
from harness.models.dummy import build
from harness.models.lean.model import LeanModel
from harness.models.lean.static import StaticModel
from harness.models.lean.weights import unsupported
from harness.models.memory import is_out_of_memory
from harness.models.probe import allowed_error, cached_model, forward_error
from harness.records import Trial
from harness.summary import TextCheck
from harness.theory.acceptance import alpha_from_acceptance_rate, conditional
from harness.theory.architecture import Architecture, architecture_of
from harness.theory.roofline import bandwidth_utilisation

TARGETS = ("qwen3_4b", "qwen3_8b", "qwen3_32b", "qwen3_30b_a3b")
DRAFT = "qwen3_0_6b"
# K: acceptance_rate on easy and on hard prompts, as the post printed them
POST = {1: (0.429, 0.368), 2: (0.347, 0.292), 4: (0.342, 0.239), 8: (0.207, 0.156)}
TINY = {
    "family": "qwen3",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 128,
    "vocab": 512,
    "tied_embeddings": True,
}
# Seconds that a pair has taken on the cards we planned for; one that cannot fit is not begun
LEAST_PAIR_S = 60.0
SMOKE_S = 300.0
SMOKE_LAYERS = 2
SMOKE_CONTEXTS = (1, 2, 7, 24, 119, 120, 127, 128, 129, 500, 640)
SMOKE_POSITIONS = range(1, 18)
VOCAB_IN_PROMPTS = 500
IN_A_ROW = 4
# Entries of a smoke step that are printed first, without their names
SHOWN_FIRST = ("step", "seconds")


@dataclass(frozen=True)
class Opened:
    """A dummy with its engine."""

    name: str
    shape: Architecture
    model: CachedModel
    itemsize: int

    def bytes_read(self, context: int, tokens: int = 1) -> float:
        return self.shape.bytes_read(
            context_tokens=context, tokens=tokens, bytes_per_parameter=self.itemsize
        )


class Stopped(Exception):
    """Something is wrong on this card, so measurements on it would not be valid."""


def opened(name: str, asked: argparse.Namespace, room: int, layers: int | None = None) -> Opened:
    """Build a dummy and record it; `room` is the longest generation.

    Raises:
        Stopped: the card does not run it as compiled CUDA graphs.
    """
    device = torch.device(asked.device)
    conf = (
        TINY
        if asked.shape == "tiny"
        else dict(compose("profile", [f"model={name}"]).model.architecture)
    )
    conf = {**conf, "layers": layers or conf["layers"]}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    network = build(conf, dtype, device, key="model")
    model = cached_model(network, network.config.vocab_size, name, "auto")
    check_engine(name, model, device)
    model.reserve(room)
    return Opened(name, architecture_of(conf), model, dtype.itemsize)


def check_engine(name: str, model: CachedModel, device: torch.device) -> None:
    """Stop where a model on a card fell back from compiled CUDA graphs."""
    ran = model.describe()
    reason = ran.get("engine_reason")
    engine, compiled = ran["engine"], ran.get("compiled", True)
    graphed = engine == "cuda_graphs" and compiled and not reason
    if device.type == "cuda" and not graphed:
        raise Stopped(f"{name} does not run as compiled CUDA graphs but as {ran}")


@dataclass
class Smoke:
    """The smoke run's steps so far, with results and seconds; the last may be unfinished."""

    console: Console
    steps: list[dict[str, Any]]

    @contextmanager
    def step(self, what: str) -> Iterator[dict[str, Any]]:
        """One step; what goes wrong stops the run."""
        entry: dict[str, Any] = {"step": what}
        self.steps.append(entry)
        start = time.monotonic()
        try:
            yield entry
        except Stopped:
            raise
        except Exception as error:  # the report has the steps before it, and this as its end
            raise Stopped(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            entry["seconds"] = time.monotonic() - start
        results = [f"{key} {value}" for key, value in entry.items() if key not in SHOWN_FIRST]
        line = f"  {what}: {entry['seconds']:.1f} s{': ' if results else ''}{', '.join(results)}"
        self.console.print(line, soft_wrap=True)


def smoke_run(asked: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Check what only a card can show; returns every step with its results and seconds.

    Raises:
        Stopped: naming what is wrong.
    """
    smoke, begin, longest = Smoke(console, []), time.monotonic(), 0.0
    console.print(f"[bold]smoke run[/bold], {SMOKE_LAYERS} layers of each model")
    room = asked.context + asked.new_tokens + max(POST) + 2
    with smoke.step(f"{DRAFT}: opened") as entry:
        draft = opened(DRAFT, asked, room, SMOKE_LAYERS)
        entry["engine"] = draft.model.describe()["engine"]
    for name in (DRAFT, *asked.targets):
        started = time.monotonic()
        if started - begin + longest > SMOKE_S:
            console.print(f"  {name}: not checked, it would not fit into {SMOKE_S:.0f} s")
            smoke.steps.append({"step": f"{name}: not checked", "seconds": 0.0})
            continue
        target = draft
        if name != DRAFT:
            with smoke.step(f"{name}: opened") as entry:
                target = opened(name, asked, room, SMOKE_LAYERS)
                entry["engine"] = target.model.describe()["engine"]
        _forwards(smoke, target, asked)
        _eager_positions(smoke, target, asked)
        if name != DRAFT:
            _same_text(smoke, target, draft, asked)
        _no_recompilation(smoke, target, asked)
        longest = max(longest, time.monotonic() - started)
    return smoke.steps


def implementations(opened_model: Opened) -> dict[str, Callable[[], CachedModel]]:
    """Every forward of a network by name; "as opened" is the one that the benchmark times.

    Heads, p_min and backend=eager use "eager".
    """
    network, width = opened_model.model.network, opened_model.model.vocab_size
    forwards: dict[str, Callable[[], CachedModel]] = {"as opened": lambda: opened_model.model}
    if unsupported(network) is not None:
        return forwards
    forwards["eager"] = lambda: LeanModel(network, width)
    forwards["fixed shapes"] = lambda: StaticModel(network, width, compiled=False)
    if opened_model.model.device.type == "cuda":
        forwards["compiled"] = lambda: StaticModel(network, width)
    return forwards


def _forwards(smoke: Smoke, opened_model: Opened, asked: argparse.Namespace) -> None:
    """Compare each forward with transformers': the error of its logits, and the time of a step."""
    for name, make in implementations(opened_model).items():
        with smoke.step(f"{opened_model.name}: {name}") as entry:
            model = make()
            model.reserve(asked.context + asked.new_tokens + max(POST) + 2)
            error = forward_error(model)
            entry["error"] = f"{error:.2g}"
            _within(opened_model, name, error)
            counts = (1, max(POST) + 1)
            timed = Opened(opened_model.name, opened_model.shape, model, opened_model.itemsize)
            times = forward_ms(timed, asked.context, counts, samples=5)
            entry |= {f"v{n}_ms": f"{ms:.3f}" for n, ms in times.items()}


def _eager_positions(smoke: Smoke, opened_model: Opened, asked: argparse.Namespace) -> None:
    """Eager attention at every number of positions, over contexts that meet each alignment."""
    network, width = opened_model.model.network, opened_model.model.vocab_size
    if unsupported(network) is not None:
        return
    contexts = sorted({*SMOKE_CONTEXTS, asked.context})
    with smoke.step(f"{opened_model.name}: eager attention, 1 to 17 positions") as entry:
        model, reference = LeanModel(network, width), CachedModel(network, width)
        worst = 0.0
        for context in contexts:
            model.prefill(prompt_of(context, 1))
            reference.prefill(prompt_of(context, 1))
            for n in SMOKE_POSITIONS:
                tokens = torch.tensor(prompt_of(n, 2), device=model.device)
                wanted = reference.forward(tokens)
                error = (model.forward(tokens) - wanted).abs().max() / wanted.abs().max()
                model.rewind(n)
                reference.rewind(n)
                worst = max(worst, float(error))
                _within(
                    opened_model, f"eager attention, {n} positions after {context}", float(error)
                )
        entry |= {"contexts": len(contexts), "error": f"{worst:.2g}"}


def _same_text(smoke: Smoke, target: Opened, draft: Opened, asked: argparse.Namespace) -> None:
    """Speculative text equals plain text at temperature 0, up to ties between two tokens."""
    itself = Opened(
        target.name,
        target.shape,
        cached_model(target.model.network, target.model.vocab_size, target.name, "auto"),
        target.itemsize,
    )
    itself.model.reserve(asked.context + asked.new_tokens + max(POST) + 2)
    for name, other in ((draft.name, draft), ("itself", itself)):
        with smoke.step(f"{target.name}: text with {name} as the draft") as entry:
            plain = generation(target, other, 0, (), asked, 0, temperature=0.0)
            speculative = generation(target, other, 4, (), asked, 0, temperature=0.0)
            for trial in (plain, speculative):
                if trial.status != "ok" or trial.tokens is None:
                    raise Stopped(f"{target.name}: a generation failed: {trial.error}")
            assert plain.tokens is not None
            assert speculative.tokens is not None
            comparison = compare_texts(
                target.model,
                prompt_of(asked.context, 0),
                plain.tokens,
                speculative.tokens,
                TextCheck("smoke", name, 0, 4, "OPEN"),
            )
            entry |= {
                "result": comparison.result,
                "accepted": speculative.accepted,
                "drafted": speculative.drafted,
            }
            if comparison.result not in ("PASS", "TIE"):
                changed = f"speculation changed the text: {comparison}"
                raise Stopped(f"{target.name} with {name}: {changed}")


def _no_recompilation(smoke: Smoke, opened_model: Opened, asked: argparse.Namespace) -> None:
    """Other contexts and numbers of positions compile nothing."""
    with smoke.step(f"{opened_model.name}: nothing compiled again") as entry:
        model = opened_model.model
        for n in (1, 2):
            model.prefill(prompt_of(asked.context, 0))
            model.forward(torch.tensor(prompt_of(n, 3), device=model.device))
        stats = torch._dynamo.utils.counters["stats"]
        before = stats.get("unique_graphs", 0)
        for context, n in itertools.product((asked.context, asked.context // 2 + 1), range(1, 10)):
            model.prefill(prompt_of(context, 0))
            model.forward(torch.tensor(prompt_of(n, 3), device=model.device))
        entry["compiled"] = stats.get("unique_graphs", 0) - before
        if entry["compiled"]:
            raise Stopped(f"{opened_model.name}: {entry['compiled']} graphs were compiled again")


def _within(opened_model: Opened, what: str, error: float) -> None:
    allowed = allowed_error(opened_model.model.network)
    if not error <= allowed:
        raise Stopped(
            f"{opened_model.name}, {what}: logits are off by {error:.2g} of their range, "
            f"above {allowed:.2g}"
        )


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple((37 * index * (seed + 1) + 11) % VOCAB_IN_PROMPTS for index in range(length))


def eager_generate_ms(opened_model: Opened, context: int, steps: int = 24) -> float:
    """Milliseconds per token of transformers' generate: what 24 tokens more cost than one."""
    network, clock = cast(Any, opened_model.model.network), Clock(opened_model.model)
    ids = torch.tensor([prompt_of(context, 0)], device=opened_model.model.device)

    def seconds(new_tokens: int) -> float:
        settings: Any = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        start = clock.now()
        with torch.inference_mode():
            network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(do_sample=False, pad_token_id=0, **settings),
            )
        return clock.now() - start

    seconds(2)
    differences = [(seconds(steps + 1) - seconds(1)) / steps for _ in range(3)]
    return 1e3 * statistics.median(differences)


def forward_ms(
    opened_model: Opened, context: int, counts: Sequence[int], samples: int, in_a_row: int = 1
) -> dict[int, float]:
    """Median milliseconds of a forward over n positions after `context`, kinds interleaved.

    The target is read back after every forward, a draft only after a whole proposal: its steps are
    timed `in_a_row`.
    """
    model, clock = opened_model.model, Clock(opened_model.model)
    model.prefill(prompt_of(context, 0))
    tokens = {n: torch.tensor(prompt_of(n, 3), device=model.device) for n in counts}
    found: dict[int, list[float]] = {n: [] for n in counts}
    for sample, n in itertools.product(range(-3, samples), counts):
        start = clock.now()
        for _ in range(in_a_row):
            model.forward(tokens[n])
        seconds = (clock.now() - start) / in_a_row
        model.rewind(n * in_a_row)
        if sample >= 0:
            found[n].append(seconds)
    return {n: 1e3 * statistics.median(values) for n, values in found.items()}


def generation(
    target: Opened,
    draft: Opened,
    k: int,
    rates: tuple[float, ...],
    asked: argparse.Namespace,
    seed: int,
    temperature: float | None = None,
) -> Trial:
    request = Request(
        cell=f"{k}/{seed}",
        prompt_set="dummy",
        prompt=str(seed),
        category=None,
        tokens=prompt_of(asked.context, seed),
        k=k,
        sampling=SamplingParameters(asked.temperature if temperature is None else temperature),
        rule="ratio",
        budget=asked.new_tokens,
        repetition=0,
        seed=seed,
        eos=frozenset(),
        model=target.name,
        draft=draft.name if k else None,
        synthetic=conditional(rates) if k and rates else None,
    )
    return run_trial(request, target.model, draft.model if k else None)


def synthetic_sweep(
    target: Opened, draft: Opened, times: dict[str, Any], asked: argparse.Namespace
) -> list[dict[str, Any]]:
    """Baseline and every (set, K) in turn, in rotating order, at the post's acceptances."""
    cells: list[tuple[str, int, tuple[float, ...]]] = [("", 0, ())]
    for k, pair in POST.items():
        for name, rate in zip(("easy", "hard"), pair, strict=True):
            cells.append((name, k, rates_for(alpha_from_acceptance_rate(rate, k), k)))
    seconds: dict[int, list[float]] = {index: [] for index in range(len(cells))}
    tokens: dict[int, list[int]] = {index: [] for index in range(len(cells))}
    rounds: dict[int, int] = dict.fromkeys(range(len(cells)), 0)
    for seed in range(-1, asked.prompts):
        turn = seed % len(cells)
        for index in [*range(turn, len(cells)), *range(turn)]:
            name, k, rates = cells[index]
            trial = generation(target, draft, k, rates, asked, seed)
            if seed >= 0:
                seconds[index].append(trial.decode_s or 0.0)
                tokens[index].append(trial.new_tokens or 0)
                rounds[index] += trial.rounds or 0
    plain_ms = 1e3 * sum(seconds[0]) / sum(tokens[0])
    rows = []
    for index, (name, k, rates) in enumerate(cells[1:], start=1):
        ms = 1e3 * sum(seconds[index]) / sum(tokens[index])
        round_ms = k * times["draft_step_ms"] + times["verify_ms"][k + 1]
        expected = expected_tokens_per_round(rates, tokens[index])
        measured_round_ms = 1e3 * sum(seconds[index]) / rounds[index]
        # At the rounds that were drawn, so that the luck of few rounds is not counted as error
        predicted = times["step_ms"] * sum(tokens[index]) / (rounds[index] * round_ms)
        rows.append(
            {
                "set": name,
                "k": k,
                "alpha": rates[0],
                "speedup": plain_ms / ms,
                "predicted": predicted,
                "expected_speedup": times["step_ms"] * expected / round_ms,
                "overhead": 1 - round_ms / measured_round_ms,
                "tokens_per_round": sum(tokens[index]) / rounds[index],
                "expected_tokens_per_round": expected,
            }
        )
    return [{"plain_ms_per_token": plain_ms}, *rows]


def measure(
    name: str, draft: Opened, draft_ms: dict[int, float], copy_gb_s: float, asked: Any, room: int
) -> dict[str, Any]:
    """Everything about one target."""
    target = opened(name, asked, room)
    eager = eager_generate_ms(target, asked.context)
    counts = (1, 2, 3, 5, 9)
    verify = forward_ms(target, asked.context, counts, asked.samples)
    step = verify[1]
    times = {
        "model": name,
        "engine": target.model.describe(),
        "eager_generate_ms": eager,
        "step_ms": step,
        "verify_ms": verify,
        "draft_step_ms": draft_ms[1],
        "c": draft_ms[1] / step,
        "mbu": bandwidth_utilisation(target.bytes_read(asked.context), step / 1e3, copy_gb_s),
        "floor_ms": target.bytes_read(asked.context) / copy_gb_s / 1e6,
        "peak_memory_bytes": torch.cuda.max_memory_allocated()
        if target.model.device.type == "cuda"
        else None,
    }
    return {**times, "synthetic": synthetic_sweep(target, draft, times, asked)}


def show(result: dict[str, Any], console: Console) -> None:
    """One pair on the screen."""
    v = {n: ms / result["step_ms"] for n, ms in result["verify_ms"].items()}
    console.print(
        f"[bold]{result['model']}[/bold] ({result['engine']['engine']}): "
        f"step {result['step_ms']:.3f} ms, "
        f"{result['eager_generate_ms'] / result['step_ms']:.1f}x eager generate's "
        f"{result['eager_generate_ms']:.2f} ms; MBU {result['mbu']:.0%} of the copy bandwidth; "
        f"c {result['c']:.2f}; "
        + ", ".join(f"v({n}) {value:.2f}" for n, value in v.items() if n > 1)
    )
    table = Table()
    for column in ("set", "K", "alpha", "speedup", "predicted", "measured/predicted", "overhead"):
        table.add_column(column, justify="right")
    for row in result["synthetic"][1:]:
        table.add_row(
            row["set"],
            str(row["k"]),
            f"{row['alpha']:.3f}",
            f"{row['speedup']:.2f}x",
            f"{row['predicted']:.2f}x",
            f"{row['speedup'] / row['predicted']:.3f}",
            f"{row['overhead']:.1%}",
        )
    console.print(table)


def described(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device)
        if cuda
        else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernels": kernel_settings(),
        "date": time.strftime("%Y-%m-%d"),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=("released", "tiny"), default="released")
    parser.add_argument("--smoke", action="store_true", help="the smoke run alone")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=6, help="generations per cell")
    parser.add_argument("--samples", type=int, default=40, help="of each forward")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds, for all pairs")
    parser.add_argument("--out", type=Path, help="folder for gpu.json")
    return parser.parse_args()


def main() -> None:
    asked, console = arguments(), Console()
    try:
        run(asked, console)
    except Stopped as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def run(asked: argparse.Namespace, console: Console) -> None:
    """The smoke run, then the benchmark unless --smoke is given."""
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device here; --device cpu --shape tiny shows that it runs")
    torch.set_num_threads(1)
    smoke = smoke_run(asked, console)
    gc.collect()
    console.print(f"smoke run passed in {sum(step['seconds'] for step in smoke):.0f} s")
    if asked.out:
        write(asked, smoke, [], [], None, None)
    if asked.smoke:
        return
    begin = time.monotonic()
    room = asked.context + asked.new_tokens + max(POST) + 2
    copy_gb_s = copy_bandwidth(device).gb_s
    console.print(f"{described(device)['device']}: copy bandwidth {copy_gb_s:.0f} GB/s")
    draft = opened(DRAFT, asked, room)
    draft_ms = forward_ms(draft, asked.context, (1, 2), asked.samples, IN_A_ROW)
    results, left_out = [], []
    longest = LEAST_PAIR_S if asked.shape == "released" else 0.0
    for name in asked.targets:
        started = time.monotonic()
        if started - begin + longest > asked.budget:
            left_out.append(name)
            continue
        try:
            results.append(measure(name, draft, draft_ms, copy_gb_s, asked, room))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            left_out.append(f"{name} (out of memory: {str(error).splitlines()[0]})")
            continue
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        longest = max(longest, time.monotonic() - started)
        show(results[-1], console)
        if asked.out:
            write(asked, smoke, results, left_out, copy_gb_s, draft_ms)
    if left_out:
        console.print(f"left out: {', '.join(left_out)}")
    if asked.out:
        write(asked, smoke, results, left_out, copy_gb_s, draft_ms)
        console.print(f"wrote {asked.out / 'gpu.json'}")
    if not results:
        raise SystemExit("error: no model was measured")


def write(
    asked: Any,
    smoke: list[Any],
    results: list[Any],
    left_out: list[str],
    copy_gb_s: float | None,
    draft_ms: Any,
) -> None:
    """After the smoke run and every pair, so that a run that is cut short keeps what it has."""
    asked.out.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(asked).items() if key != "out"}
    content = {
        **described(torch.device(asked.device)),
        "settings": settings,
        "smoke": smoke,
        "copy_gb_s": copy_gb_s,
        "draft": {"model": DRAFT, "forward_ms": draft_ms},
        "pairs": results,
        "left_out": left_out,
    }
    (asked.out / "gpu.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
