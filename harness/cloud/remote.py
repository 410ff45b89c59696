"""A command's work on a rented machine: jobs that may be run twice, and what comes back from them.

A rented container can vanish at any moment and its work be given to another one. So a job has a
folder of its own on a volume that outlives containers, known by the launch and the job's name: the
next container finds there what was measured, and goes on with it.

An audition over several cards generates the target's completions once: the first job generates
them, all others take them from its run (`traces_from`), score what they lack and time their own
steps. Nothing here knows any cloud: `modal_app.py` does the renting.
"""

import gzip
import importlib
import io
import shutil
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.analysis.setup import is_card
from harness.cli import compose
from harness.cloud.jobs import Job, plan_jobs
from harness.commands.run_lifecycle import Outcome
from harness.records import Failure, UserError, in_one_line
from harness.reporting import formatting as fmt
from harness.storage import RunFolder, load
from harness.theory.cost import money

MAX_UNPACKED_BYTES = 16 * 2**30


@dataclass(frozen=True)
class Delivery:
    """What came back of a job.

    Attributes:
        status: as a command exits: 0 complete, 1 cells failed, 2 the user's error.
        folder: the run folder over there; None where there is none.
        archive: it, packed.
        error: what went wrong; the run is then as far as it got.
        device: what the card called itself.
        upgraded: whether that is another card than was asked for.
        seconds, usd: what the container that finished the job was rented for, and its price.
    """

    job: Job
    status: int
    folder: str | None = None
    archive: bytes | None = None
    error: str | None = None
    device: str | None = None
    upgraded: bool = False
    seconds: float = 0.0
    usd: float | None = None

    @property
    def failure(self) -> Failure | None:
        """What went wrong; None where nothing did."""
        if self.error is None and self.archive is not None:
            return None
        return Failure(f"{self.job.name} on {self.job.gpu}", self.error or "nothing came back")

    def unpack(self, results_root: str | Path) -> Path | None:
        """Write the run into `results_root`, named after its card as well; None without a run.

        Raises:
            UserError: the archive is damaged, or is no run folder, or the disk is full.
        """
        if self.archive is None or self.folder is None:
            return None
        name = f"{Path(self.folder).name}_{self.job.card.name}"
        try:
            return unpack(self.archive, Path(results_root), name)
        except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
            raise UserError(
                f"{self.job.name}: what came back cannot be unpacked into {results_root} "
                f"({error}); --resume {self.job.launch} fetches it again"
            ) from error

    def lines(self, folder: Path | None) -> list[str]:
        """What to print of it: which card it was, how long it took and what it cost.

        Args:
            folder: where its run lies now; None where nothing came back.
        """
        job, card = f"{self.job.name} on {self.job.gpu}", self.job.card
        if folder is None:
            return [f"{job}: failed: {self.error}"]
        price = f"{fmt.dollars(card.price_per_hour_usd)} an hour, {card.date}"
        spent = f"{fmt.seconds(self.seconds)}, about {fmt.dollars(self.usd)}"
        lines = [f"{job}: {spent} (the card alone, at {price})"]
        if self.upgraded:
            lines.append(
                f"note: {self.job.gpu} was asked for and {self.device} ran:"
                f" these are not the latencies of {self.job.gpu}"
            )
        if self.error is not None:
            lines += [
                f"{job}: failed: {self.error}",
                f"note: what it had stored came back: python -m harness.report run={folder}",
            ]
        elif self.status:
            lines.append("note: some cells did not complete; --resume runs them again")
        return [*lines, f"run: {folder}"]


def launch(
    door: str,
    overrides: Sequence[str],
    gpus: Sequence[str],
    resume: str,
    have_done: Callable[[list[Job]], list[Delivery]],
) -> int:
    """Have a command's work done on each card, and bring the runs home.

    Args:
        door: profile, sweep, ...
        overrides: its command line.
        gpus: cards as the cloud calls them; several only for an audition, which ranks them.
        resume: the launch to go on with.
        have_done: rents the machines.

    Returns:
        The exit status; what the user can fix is one line on standard error.
    """
    try:
        jobs, config = plan_jobs(door, overrides, gpus, resume)
        name = jobs[0].launch
        print(f"launch: {name} (--resume {name} goes on with it)", flush=True)
        deliveries = have_done(jobs)
        folders: list[str] = []
        for delivery in deliveries:
            folder = delivery.unpack(config.results_root)
            print(*delivery.lines(folder), sep="\n", flush=True)
            if folder is not None and delivery.failure is None:
                folders.append(str(folder))
        status = max(delivery.status for delivery in deliveries)
        return max(status, _combine(config, folders, deliveries)) if len(jobs) > 1 else status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _combine(config: Any, folders: Sequence[str], deliveries: Sequence[Delivery]) -> int:
    """Rank the cards in one more run, where any came back."""
    from harness.commands import audition

    if not folders:
        return 0
    failures = [failure for entry in deliveries if (failure := entry.failure) is not None]
    outcome = audition.combine(replace(config, combine=list(folders)), failures)
    print(f"run: {outcome.folder}")
    return outcome.status


def work(door: str, overrides: Sequence[str]) -> Outcome:
    """Do a command's work here, given its command line."""
    return importlib.import_module(f"harness.{door}").work(compose(door, overrides))


def carry_out(job: Job, root: str | Path) -> Delivery:
    """Do a job, or what is missing of it, and pack its run.

    An error after everything is measured would occur again in a retry: the run is packed anyway,
    and the delivery names the error.

    Raises:
        Exception: what the work raises, except a UserError: a retry may succeed, and continues from
            what is stored. `failed` packs that where no retry succeeds.
    """
    begin, home = time.perf_counter(), job.home(root)
    overrides = [*job.overrides, f"results_root={home}", *_prompts(job, home)]
    stored = stored_run(home)
    if stored is not None:
        overrides.append(f"resume={stored}")
    try:
        outcome = work(job.door, overrides)
    except UserError as error:
        return replace(failed(job, error, root), seconds=time.perf_counter() - begin)
    assert outcome.folder is not None, "a dry run is refused before anything is rented"
    _note(outcome.folder, job, time.perf_counter() - begin)
    delivery = deliver(job, outcome.folder)
    if outcome.reason is None:
        return delivery
    return replace(delivery, status=1, error=outcome.reason)


def fan_out(
    jobs: Sequence[Job],
    root: str | Path,
    have_done: Callable[[Sequence[Job]], Iterable[Delivery]],
) -> list[Delivery]:
    """Have an audition's jobs done: the first generates the texts, all others take them from it.

    Where a job fails the next one is the first; what is complete already is not done again.

    Returns:
        As many deliveries as jobs, in their order.
    """
    done: dict[str, Delivery] = {}
    for job in jobs:
        folder = stored_run(job.home(root))
        if folder is not None and _complete(folder):
            done[job.name] = deliver(job, folder)
    waiting = [job for job in jobs if job.name not in done]
    source = next(filter(None, map(_texts_of, done.values())), None)
    while waiting and source is None:
        job = _sharing(waiting.pop(0), root, None)
        (done[job.name],) = have_done([job])
        source = _texts_of(done[job.name])
    if waiting:
        found = have_done([_sharing(job, root, source) for job in waiting])
        done |= dict(zip((job.name for job in waiting), found, strict=True))
    return [done[job.name] for job in jobs]


def stored_run(home: Path) -> Path | None:
    """The latest run under a job's folder that got as far as a manifest; None if none did."""
    runs = sorted(path.parent for path in home.glob("*/manifest.json"))
    return runs[-1] if runs else None


def deliver(job: Job, folder: Path) -> Delivery:
    """Pack a stored run."""
    manifest = load(folder).manifest
    rented = manifest.get("cloud") or {}
    return Delivery(
        job,
        status=0 if _complete(folder) else 1,
        folder=str(folder),
        archive=pack(folder),
        device=(manifest.get("environment") or {}).get("device_name"),
        upgraded=bool(rented.get("upgraded")),
        seconds=rented.get("seconds", 0.0),
        usd=rented.get("usd"),
    )


def failed(job: Job, error: BaseException, root: str | Path) -> Delivery:
    """The delivery of a job that failed for good, with what it had stored on the volume."""
    folder = stored_run(job.home(root))
    delivery = Delivery(job, 1) if folder is None else deliver(job, folder)
    status = 2 if isinstance(error, UserError) else 1
    return replace(delivery, status=status, error=in_one_line(error))


def _complete(folder: str | Path) -> bool:
    return load(folder).manifest.get("status") == "complete"


def _texts_of(entry: Delivery) -> str | None:
    """The folder that other jobs can take the texts from; None where some may be missing."""
    whole = entry.folder is not None and (entry.error is None or _complete(entry.folder))
    return entry.folder if whole else None


def _sharing(job: Job, root: str | Path, source: str | None) -> Job:
    """The job with the run to take texts from: the one it began with, where it was begun before."""
    begun = stored_run(job.home(root))
    if begun is not None:
        source = load(begun).config.get("traces_from")
    if source is None:
        return job
    shared = (f"traces_from={source}", "latency.measure=true")
    return replace(job, overrides=(*job.overrides, *shared))


def _prompts(job: Job, home: Path) -> list[str]:
    """The user's prompt files, written where the command can read them."""
    files = [home / "prompts" / name for name, _ in job.prompts]
    for file, (_, content) in zip(files, job.prompts, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return [f"prompts.files=[{','.join(map(str, files))}]"] if files else []


def _note(folder: Path, job: Job, seconds: float) -> None:
    """Write into the manifest what was rented and what ran."""
    manifest = load(folder).manifest
    environment = manifest.get("environment") or {}
    name, memory = environment.get("device_name"), environment.get("device_memory_bytes")
    rented = {
        "asked_gpu": job.gpu,
        "upgraded": not is_card(job.card.name, job.card.memory_gb, name, memory),
        "seconds": seconds,
        "price_per_hour_usd": job.card.price_per_hour_usd,
        "price_date": job.card.date,
        "usd": money(seconds, job.card.price_per_hour_usd),
    }
    RunFolder(folder, manifest).update_manifest({"cloud": rented})


def pack(folder: Path) -> bytes:
    """A run folder as a compressed tar archive, under its own name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    return buffer.getvalue()


def unpack(archive: bytes, results_root: Path, name: str) -> Path:
    """Write a packed run folder into `results_root` as `name` and return where it is.

    Jobs on two machines that began in one second have folders of one name, hence `name`.
    """
    results_root.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=results_root, prefix=".") as scratch,
        gzip.open(io.BytesIO(archive)) as content,
        tarfile.open(fileobj=content) as members,
    ):
        members.extractall(scratch, members=_bounded(members), filter="data")
        while content.read(2**20):
            pass  # to the end of the archive, where its checksum is
        (packed,) = Path(scratch).iterdir()
        return Path(shutil.copytree(packed, results_root / name, dirs_exist_ok=True))


def _bounded(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files and directories of an archive, up to the size that a run can have.

    Raises:
        tarfile.TarError: it is larger, or holds something other than files and directories.
    """
    size = 0
    for member in archive:
        size += member.size
        if size > MAX_UNPACKED_BYTES:
            raise tarfile.TarError(f"it holds more than {MAX_UNPACKED_BYTES:,} bytes")
        if not (member.isfile() or member.isdir()) or Path(member.name).is_absolute():
            raise tarfile.TarError(f"{member.name}: not a file or directory of the run")
        yield member
