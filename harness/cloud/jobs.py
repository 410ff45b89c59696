"""Jobs on rented machines: one for each card, checked before anything is rented.

`harness.cloud.remote` runs the jobs there, and lets the cards of an audition share its texts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra.errors import HydraException

from harness import prompts as prompt_sets
from harness.cli import compose, draft_confs
from harness.commands.dry_run import all_cards
from harness.commands.eligible_drafts import sizes_of
from harness.config import SCHEMAS, GpuConf, ModelConf, is_folder
from harness.engine_facts.engines import OWN, rented
from harness.engines.adapters import adapter_of
from harness.records import Prompt, UserError, where
from harness.theory.architecture import MemoryFit

# The cloud's names of cards, and their files in conf/gpu
GPUS = {
    "L4": "l4",
    "A10": "a10g",
    "A10G": "a10g",
    "L40S": "l40s",
    "A100": "a100_40",
    "A100-40GB": "a100_40",
    "A100-80GB": "a100_80",
    "H100": "h100",
    "H100!": "h100",  # never a silent upgrade
    "H200": "h200",
    "B200": "b200",
}
# Checks a card with benchmarks/gpu.py; everything else is a command of the package
SMOKE = "smoke"
LOCAL_KEYS = ("dry_run", "resume", "traces_from", "texts_from", "latency_from", "combine", "url")
# A container's host memory: Python, torch with its CUDA context and the compiler's workers, plus
# the part of a checkpoint that is being copied to the card, at most MOST_OF_WEIGHTS_MIB
BASE_MIB, MOST_OF_WEIGHTS_MIB = 12 * 1024, 24 * 1024
WEIGHTS_SHARE = 0.25
GIB = 2**30
MOST_CARDS = 8  # in one machine

PromptFiles = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Job:
    """One command's work on one card.

    Attributes:
        launch: name of the jobs started together; launch and name identify the stored run.
        name: of this job within the launch.
        command: profile, sweep, ..., or SMOKE.
        gpu: the cloud's name of the card, with ":2" for two of them.
        card: data sheet and price of one card.
        overrides: the command line.
        prompts: the user's prompt files, name and content, to be copied to the machine.
        memory_mib: host memory to request for the container.
        engine: engine of the measured server; "own" for every other command.
    """

    launch: str
    name: str
    command: str
    gpu: str
    card: GpuConf
    overrides: tuple[str, ...]
    prompts: PromptFiles = ()
    memory_mib: int = BASE_MIB
    engine: str = OWN.name

    @property
    def price_per_hour_usd(self) -> float:
        return _count(self.gpu) * self.card.price_per_hour_usd

    def home(self, root: str | Path) -> Path:
        """The job's folder on the volume that is mounted at `root`."""
        return Path(root) / self.launch / self.name


def plan_jobs(
    command: str, overrides: Sequence[str], gpus: Sequence[str], resume: str = ""
) -> tuple[list[Job], Any]:
    """One job for each card, and their common configuration.

    Args:
        command: profile, sweep, ..., or SMOKE, which takes the command line of a profile.
        overrides: the command line.
        gpus: the cloud's names of cards, "H100:2" for two of them in one machine.
        resume: the launch to continue; "" for a new one.

    Raises:
        UserError: an invalid override, or one that does not apply to a rented machine; a card that
            is unknown, named twice or has too little memory.
    """
    cards = dict(card_named(gpu) for gpu in gpus)
    names = [card.name for card in cards.values()]
    if len(names) != len(gpus) or len(set(names)) != len(names):
        raise UserError(f"--gpus {','.join(gpus)}: a card is there twice")
    if not names:
        raise UserError("--gpus: name at least one")
    composed_as = "profile" if command == SMOKE else command
    try:
        config = compose(composed_as, overrides)
    except HydraException as error:
        raise UserError(" ".join(str(error).split())) from error
    drafts = draft_confs(config) if command == "audition" else [config.draft]
    _check_rentable(command, config, drafts)
    engine = _engine(config) if command == "server" else OWN.name
    _check_fits(config, prompt_sets.load(config.prompts), drafts, cards, engine)
    if resume and (Path(resume).name != resume or resume.startswith(".")):
        raise UserError(f"--resume {resume}: give the launch's name, as it was printed")
    launch = resume or f"{datetime.now(UTC):%Y%m%d-%H%M%S}_{command}"
    has_gpu_key = "gpu" in SCHEMAS[composed_as].__dataclass_fields__
    memory = container_memory_mib([config.model, *drafts])
    jobs = [
        Job(
            launch=launch,
            name=f"{command}-{card.name}",
            command=command,
            gpu=gpu,
            card=card,
            overrides=(*overrides, *([f"gpu={card.name}"] if has_gpu_key else [])),
            prompts=_prompt_files(config),
            memory_mib=memory,
            engine=engine,
        )
        for gpu, card in cards.items()
    ]
    return jobs, config


def card_named(gpu: str) -> tuple[str, GpuConf]:
    """The cloud's name of a card, with the number of cards if several, and its data sheet."""
    known = {name.lower(): name for name in GPUS}
    asked, colon, count = gpu.strip().partition(":")
    name = known.get(asked.lower())
    if name is None:
        raise UserError(f"--gpu {gpu}: no such card; there are {', '.join(GPUS)}")
    if colon and (not count.isdecimal() or not 1 <= int(count) <= MOST_CARDS):
        raise UserError(f"--gpu {gpu}: after the colon stands how many, 1 to {MOST_CARDS}")
    several = f":{int(count)}" if colon and int(count) > 1 else ""
    return name + several, where(all_cards(), name=GPUS[name])[0]


def _count(gpu: str) -> int:
    return int(gpu.partition(":")[2] or 1)


def _check_rentable(command: str, config: Any, drafts: Sequence[ModelConf]) -> None:
    """Refuse keys for local runs, models in a local folder and prompts of the hub."""
    given = [key for key in LOCAL_KEYS if getattr(config, key, None)]
    if given:
        raise UserError(
            f"{' and '.join(given)}: for local runs, python -m harness.{command} {given[0]}=..."
        )
    for conf in (config.model, *drafts):
        if is_folder(conf.id):
            raise UserError(
                f"{conf.id}: a local folder is not on the rented machine; give a hub id"
            )
    if config.prompts.hub:
        raise UserError(
            f"prompts.hub={config.prompts.hub}: not on a rented machine; save its prompts to a "
            "file and give prompts.files=[...]"
        )


def _engine(config: Any) -> str:
    """The engine of a server run; raises UserError where rented machines do not have it."""
    known = (OWN.name, *rented())
    if config.engine not in known:
        raise UserError(
            f"engine={config.engine}: not on a rented machine; there are {', '.join(known)}"
        )
    adapter_of(config)
    return config.engine


def _prompt_files(config: Any) -> PromptFiles:
    labels = prompt_sets.file_labels(config.prompts)
    # With the parent folders of their labels, so that files of one name stay distinct sets
    return tuple(
        (str(Path(label).parent / Path(name).name), Path(name).read_bytes())
        for name, label in zip(config.prompts.files, labels, strict=True)
    )


def _check_fits(
    config: Any,
    prompts: Sequence[Prompt],
    drafts: Sequence[ModelConf],
    cards: Mapping[str, GpuConf],
    engine: str,
) -> None:
    """Refuse a card that is too small for the weights and KV caches of the longest generation.

    Drafts are loaded one at a time. Models that `device_map` spreads use the memory of all cards;
    all others are on the first card. A server holds a second copy of its models, next to those that
    score its texts; its share of the card is computed on the machine, from the free memory.
    """
    tokens = max(prompt_sets.estimated_tokens(prompts, config)) + config.new_tokens + max(config.k)
    parts = list(_parts([("model", config.model)], tokens))
    parts += sorted(_parts([("draft", conf) for conf in drafts], tokens), key=attrgetter("bytes"))[
        -1:
    ]
    spread = any(conf.device_map for conf in (config.model, *drafts))
    needed = sum(part.bytes for part in parts)
    on_one_card = sum(part.bytes for part in parts if not part.spread)
    shares = ", ".join(f"{part.bytes / 1e9:,.3g} GB for {part.name}" for part in parts)
    for gpu, card in cards.items():
        count = _count(gpu)
        if count > 1 and not spread and engine == OWN.name:
            raise UserError(
                f"--gpu {gpu}: only one card would be used; model.device_map=auto spreads the model"
            )
        memory = card.memory_gb * 1e9
        if on_one_card <= memory and needed <= count * memory:
            if engine != OWN.name and config.score and 2 * needed > memory:
                raise UserError(
                    f"--gpu {gpu}: the server and the models that score its texts need"
                    f" {2 * needed / 1e9:,.3g} GB, and the card has {card.memory_gb:g} GB; use a"
                    " larger card, or score=false, which predicts nothing"
                )
            continue
        fitting = {entry.name for entry in all_cards() if needed <= entry.memory_gb * 1e9}
        names = [name for name, short in GPUS.items() if short in fitting and name[-1] != "!"]
        advice = f"use --gpu {' or '.join(names)}, or" if names else "no card has as much; use"
        has = f"the card has {card.memory_gb:g} GB"
        if count > 1:
            has = (
                f"{count} cards have {card.memory_gb:g} GB each ({on_one_card / 1e9:,.3g} GB must"
                " be on one; device_map=auto spreads a model)"
            )
        raise UserError(
            f"--gpu {gpu}: {needed / 1e9:,.3g} GB of memory needed ({shares}, each with a cache of "
            f"{tokens:,} tokens), and {has}; {advice} a smaller model"
        )


@dataclass(frozen=True)
class _Part:
    """The bytes of a model: its weights and its KV cache."""

    name: str
    bytes: float
    spread: bool  # over all cards, not on one


def _parts(models: Sequence[tuple[str, ModelConf]], tokens: int) -> Iterator[_Part]:
    for role, conf in models:
        sizes = None if conf.spec.looks_up or conf.quantization else sizes_of(conf)
        if sizes is not None:
            kept = MemoryFit(math.inf, (sizes.memory,), tokens).needed_bytes
            yield _Part(f"{role}={conf.name}", kept, conf.device_map is not None)


def container_memory_mib(models: Sequence[ModelConf]) -> int:
    """The host memory to request, in MiB.

    A checkpoint is mapped file by file and copied to the card tensor by tensor, so the host holds
    only a part of it at a time.
    """
    largest = max((part.bytes for part in _parts([("", conf) for conf in models], 0)), default=0.0)
    return BASE_MIB + min(MOST_OF_WEIGHTS_MIB, round(WEIGHTS_SHARE * largest / GIB) * 1024)
