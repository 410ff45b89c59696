"""What is to be done on rented machines: one job per card and part of the drafts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import prompts as prompt_sets
from harness.commands.cost import BYTES_PER_TOKEN, all_cards, sizes_of
from harness.config import GpuConf, ModelConf, split_draft
from harness.records import NGRAM, UserError

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
# A container's memory: Python, torch with its CUDA context and the compiler's workers, plus the
# part of a checkpoint that is being copied to the card, at most MOST_OF_WEIGHTS_MIB
BASE_MIB, MOST_OF_WEIGHTS_MIB = 12 * 1024, 24 * 1024
WEIGHTS_SHARE = 0.25
GIB = 2**30


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
        memory_mib: host memory to request for the container.
    """

    launch: str
    name: str
    door: str
    gpu: str
    card: GpuConf
    overrides: tuple[str, ...]
    prompts: tuple[tuple[str, bytes], ...] = ()
    memory_mib: int = BASE_MIB

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
    memory_mib: int = BASE_MIB,
) -> list[Job]:
    """One job per card and chunk of drafts, the first card's first.

    Args:
        launch: its name.
        cards: by the cloud's name of each.
        drafts: entries of `drafts=`.
        chunk: drafts per container.
        overrides: what all jobs share of the command line.
        prompts: the user's own prompt files, name and content.
        memory_mib: of each container.

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
            memory_mib=memory_mib,
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
    drafts = [split_draft(entry).id or "" for entry in getattr(config, "drafts", ())]
    drafts += [config.draft.id] if hasattr(config, "draft") else []
    for source in filter(None, [config.model.id, *drafts]):
        if Path(source).exists() or source.startswith((".", "/", "~")):
            raise UserError(f"{source}: a local folder is not on the rented machine; give a hub id")
    if config.prompts.hub:
        raise UserError(
            f"prompts.hub={config.prompts.hub}: not on a rented machine; save its prompts to a "
            "file and give prompts.files=[...]"
        )
    prompt_sets.load(config.prompts)
    labels = prompt_sets.file_labels(config.prompts)
    # With the parent folders of their labels, so that files of one name stay distinct sets
    return tuple(
        (str(Path(label).parent / Path(name).name), Path(name).read_bytes())
        for name, label in zip(config.prompts.files, labels, strict=True)
    )


def check_fits(config: Any, drafts: Sequence[ModelConf], cards: Mapping[str, GpuConf]) -> None:
    """Refuse a card whose memory the weights and the caches of the longest generation exceed.

    Args:
        config: of the door.
        drafts: they are loaded one at a time.
        cards: by the cloud's name of each.

    Raises:
        UserError: with what is needed, part by part, what the card has, and which cards fit.
    """
    prompts = prompt_sets.load(config.prompts)
    longest = max(
        -(-len(prompt_sets.given_text(prompt).encode()) // BYTES_PER_TOKEN)
        + len(prompt_sets.missing_answers(prompt)) * prompt_sets.answer_tokens(config)
        for prompt in prompts
    )
    tokens = longest + config.new_tokens + max(config.k)
    parts = list(_parts([("model", config.model)], tokens))
    parts += sorted(_parts([("draft", conf) for conf in drafts], tokens), key=lambda p: p[1])[-1:]
    needed = sum(size for _, size in parts)
    for gpu, card in cards.items():
        if needed <= card.memory_gb * 1e9:
            continue
        fitting = {entry.name for entry in all_cards() if needed <= entry.memory_gb * 1e9}
        names = [name for name, short in GPUS.items() if short in fitting and name[-1] != "!"]
        advice = f"use --gpu {' or '.join(names)}, or" if names else "no card has as much; use"
        shares = ", ".join(f"{size / 1e9:,.3g} GB for {name}" for name, size in parts)
        raise UserError(
            f"--gpu {gpu}: {needed / 1e9:,.3g} GB of memory needed ({shares}, each with a cache of "
            f"{tokens:,} tokens), and the card has {card.memory_gb:g} GB; {advice} a smaller "
            "model"
        )


def _parts(models: Sequence[tuple[str, ModelConf]], tokens: int) -> Iterator[tuple[str, float]]:
    """Bytes that each model takes on a card, where its sizes are known and it is on one card."""
    for role, conf in models:
        sizes = None if conf.id == NGRAM or conf.device_map or conf.quantization else sizes_of(conf)
        if sizes is not None:
            unit = sizes.bytes_per_parameter
            cache = sizes.shape.kv_bytes_read(tokens, unit)
            yield f"{role}={conf.name}", sizes.shape.parameters * unit + cache


def container_memory_mib(models: Sequence[ModelConf]) -> int:
    """The host memory to request, in MiB.

    A checkpoint is mapped file by file and copied to the card tensor by tensor, so the host holds a
    part of it at a time.
    """
    largest = max((size for _, size in _parts([("", conf) for conf in models], 0)), default=0.0)
    return BASE_MIB + min(MOST_OF_WEIGHTS_MIB, round(WEIGHTS_SHARE * largest / GIB) * 1024)
