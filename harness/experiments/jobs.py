"""What is to be done on rented machines: one job per card and part of the drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import prompts as prompt_sets
from harness.config import GpuConf
from harness.records import UserError

# What the cloud calls a card, and its file in conf/gpu.
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
STAMP = "%Y%m%d-%H%M%S"


@dataclass(frozen=True)
class Job:
    """One door's work on one card.

    Attributes:
        launch: what was started together; the same launch and name find the same stored run.
        name: of this job within the launch.
        door: profile, sweep, ...
        gpu: the card as the cloud calls it.
        card: its figures and its price.
        overrides: the door's command line.
        prompts: the user's own prompt files, name and content; they are not on that machine.
    """

    launch: str
    name: str
    door: str
    gpu: str
    card: GpuConf
    overrides: tuple[str, ...]
    prompts: tuple[tuple[str, bytes], ...] = ()

    def home(self, root: str | Path) -> Path:
        """The job's folder on the volume that is mounted at `root`."""
        return Path(root) / self.launch / self.name


def card_of(gpu: str) -> tuple[str, str]:
    """The cloud's name of a card and its name in conf/gpu.

    Raises:
        UserError: no such card; the message lists those that there are.
    """
    known = {name.lower(): name for name in GPUS}
    name = known.get(gpu.strip().lower())
    if name is None:
        raise UserError(f"--gpu {gpu}: no such card; there are {', '.join(GPUS)}")
    return name, GPUS[name]


def launch_name(door: str, resume: str = "") -> str:
    """A new launch's name, or that of the one to go on with.

    Raises:
        UserError: `resume` is a path, not a name.
    """
    if resume and (Path(resume).name != resume or resume.startswith(".")):
        raise UserError(f"--resume {resume}: give the launch's name, as it was printed")
    return resume or f"{datetime.now(UTC).strftime(STAMP)}_{door}"


def audition_jobs(
    launch: str,
    cards: Mapping[str, GpuConf],
    drafts: Sequence[str],
    chunk: int,
    *,
    overrides: Sequence[str] = (),
    prompts: Sequence[tuple[str, bytes]] = (),
) -> list[Job]:
    """One job per card and chunk of drafts, the first card's first.

    Args:
        launch: its name.
        cards: by the cloud's name of each.
        drafts: entries of `drafts=`.
        chunk: drafts per container.
        overrides: what all jobs share of the command line.
        prompts: the user's own prompt files, name and content.

    Raises:
        UserError: no card, no draft, a card or draft named twice, or a chunk below 1.
    """
    short = [card.name for card in cards.values()]
    for key, names in (("--gpus", short), ("--drafts", list(drafts))):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None or not names:
            raise UserError(f"{key}: {f'{twice} is there twice' if twice else 'name at least one'}")
    if chunk < 1:
        raise UserError(f"--chunk {chunk}: give a whole number of at least 1")
    parts = [drafts[start : start + chunk] for start in range(0, len(drafts), chunk)]
    return [
        Job(
            launch=launch,
            name=f"audition-{card.name}-{number}",
            door="audition",
            gpu=gpu,
            card=card,
            overrides=(*overrides, f"drafts=[{','.join(part)}]", f"gpu={card.name}"),
            prompts=tuple(prompts),
        )
        for gpu, card in cards.items()
        for number, part in enumerate(parts, start=1)
    ]


def check_rentable(door: str, config: Any) -> tuple[tuple[str, bytes], ...]:
    """Refuse what a rented machine cannot do, and read what must go there.

    Args:
        door: profile, sweep, ...
        config: its configuration.

    Returns:
        The user's own prompt files, name and content.

    Raises:
        UserError: a key for local runs, a model in a local folder, a draft or file that is not.
    """
    local = ("dry_run", "resume", "traces_from", "latency_from", "combine")
    given = [key for key in local if getattr(config, key, None)]
    if given:
        raise UserError(
            f"{' and '.join(given)}: for local runs, python -m harness.{door} {given[0]}=..."
        )
    drafts = [entry.partition("@")[2] for entry in getattr(config, "drafts", ())]
    drafts += [config.draft.id] if hasattr(config, "draft") else []
    for source in filter(None, [config.model.id, *drafts]):
        if Path(source).exists() or source.startswith((".", "/", "~")):
            raise UserError(f"{source}: a local folder is not on the rented machine; give a hub id")
    prompt_sets.load(config.prompts)
    files = [Path(name) for name in config.prompts.files]
    return tuple((path.name, path.read_bytes()) for path in files)
