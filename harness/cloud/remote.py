"""A door's work on a rented machine: jobs that may be run twice, and what comes back from them.

A rented container can vanish at any moment and its work be given to another one. So a job has a
folder of its own on a volume that outlives containers, known by the launch and the job's name: who
takes a job over finds there what was measured, and goes on with it.

An audition over several cards writes the target's texts once: the first job generates them, all
others take them from its run (`traces_from`), score what they lack and time their own steps.
Nothing here knows any cloud: `modal_app.py` does the renting.
"""

import gzip
import io
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.analysis.fleet import is_card
from harness.cloud.jobs import Job
from harness.commands.outcome import Outcome
from harness.records import Failure, UserError, in_one_line
from harness.reporting.cloud import Receipt
from harness.storage import RunFolder, load
from harness.theory.cost import money

MAX_UNPACKED_BYTES = 16 * 2**30


@dataclass(frozen=True)
class Delivery:
    """What came back.

    Attributes:
        job: of which.
        status: as a door exits: 0 complete, 1 cells failed, 2 the user's error.
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

    @property
    def receipt(self) -> Receipt:
        """What to tell of it."""
        return Receipt(
            name=self.job.name,
            gpu=self.job.gpu,
            status=self.status,
            error=self.error,
            device=self.device,
            upgraded=self.upgraded,
            seconds=self.seconds,
            usd=self.usd,
            price_per_hour_usd=self.job.card.price_per_hour_usd,
            price_date=self.job.card.date,
        )

    def unpack(self, results_root: str | Path) -> Path | None:
        """Write the run into `results_root`, named after its card as well; None without a run.

        Raises:
            UserError: the archive is damaged, or is no run folder, or there is no room for it.
        """
        if self.archive is None or self.folder is None:
            return None
        part = self.job.name.removeprefix(f"{self.job.door}-")
        try:
            return unpack(self.archive, Path(results_root), f"{Path(self.folder).name}_{part}")
        except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
            raise UserError(
                f"{self.job.name}: what came back cannot be unpacked into {results_root} "
                f"({error}); --resume {self.job.launch} fetches it again"
            ) from error


def carry_out(job: Job, root: str | Path, work: Callable[[list[str]], Outcome]) -> Delivery:
    """Do a job, or what is missing of it, and pack its run.

    Args:
        job: the job.
        root: the volume.
        work: does the door's work, given its command line.

    An error after everything is measured would occur again in a retry: the run is packed anyway,
    and the delivery names the error.

    Raises:
        Exception: what `work` raises, except a UserError: a retry may succeed, and continues from
            what is stored. `failed` packs that where no retry succeeds.
    """
    begin, home = time.perf_counter(), job.home(root)
    stored = stored_run(home)
    words = [*job.overrides, f"results_root={home}", *_prompts(job, home)]
    if stored is not None:
        words.append(f"resume={stored}")
    try:
        outcome = work(words)
    except UserError as error:
        return replace(failed(job, error, root), seconds=time.perf_counter() - begin)
    assert outcome.folder is not None, "a dry run is refused before anything is rented"
    _note(outcome.folder, job, time.perf_counter() - begin)
    if outcome.reason is not None:
        return replace(deliver(job, outcome.folder), status=1, error=outcome.reason)
    return deliver(job, outcome.folder)


def delivered(job: Job, root: str | Path) -> Delivery | None:
    """The job's run where it is complete already, so that nothing need be rented for it."""
    folder = stored_run(job.home(root))
    if folder is None or load(folder).manifest.get("status") != "complete":
        return None
    return deliver(job, folder)


def stored_run(home: Path) -> Path | None:
    """The latest run under a job's folder that got as far as a manifest; None if none did."""
    runs = sorted(path.parent for path in home.glob("*/manifest.json"))
    return runs[-1] if runs else None


def deliver(job: Job, folder: Path) -> Delivery:
    """Pack a stored run."""
    stored = load(folder)
    environment, cloud = (
        stored.manifest.get("environment") or {},
        stored.manifest.get("cloud") or {},
    )
    failed = stored.manifest.get("status") != "complete"
    return Delivery(
        job,
        status=1 if failed else 0,
        folder=str(folder),
        archive=pack(folder),
        device=environment.get("device_name"),
        upgraded=bool(cloud.get("upgraded")),
        seconds=cloud.get("seconds", 0.0),
        usd=cloud.get("usd"),
    )


def fan_out(
    jobs: Sequence[Job],
    root: str | Path,
    one: Callable[[Job], Delivery],
    many: Callable[[Sequence[Job]], Iterable[Delivery]],
) -> list[Delivery]:
    """Have an audition's jobs done: the first writes the texts, all others take them from it.

    Where a job fails the next one is the first; what is stored already is not done again.

    Args:
        jobs: of one launch.
        root: the volume.
        one: has a job done.
        many: has jobs done side by side.

    Returns:
        As many deliveries as jobs, in their order.
    """
    done = {job.name: found for job in jobs if (found := delivered(job, root)) is not None}
    waiting = [job for job in jobs if job.name not in done]
    source = next(filter(None, map(_texts_of, done.values())), None)
    while waiting and source is None:
        job = _sharing(waiting.pop(0), root, None)
        done[job.name] = one(job)
        source = _texts_of(done[job.name])
    names = [job.name for job in waiting]
    found = many([_sharing(job, root, source) for job in waiting]) if waiting else ()
    done |= dict(zip(names, found, strict=True))
    return [done[job.name] for job in jobs]


def failed(job: Job, error: BaseException, root: str | Path) -> Delivery:
    """The delivery of a job that failed for good, with what it had stored.

    Args:
        job: the job.
        error: why.
        root: the volume.
    """
    folder = stored_run(job.home(root))
    delivery = Delivery(job, 1) if folder is None else deliver(job, folder)
    status = 2 if isinstance(error, UserError) else 1
    return replace(delivery, status=status, error=in_one_line(error))


def _texts_of(entry: Delivery) -> str | None:
    """The folder that other jobs can take the texts from; None where some may be missing."""
    if entry.folder is None or entry.error is None:
        return entry.folder
    return entry.folder if load(entry.folder).manifest.get("status") == "complete" else None


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
    """The user's prompt files, written where the door can read them."""
    if not job.prompts:
        return []
    folder = home / "prompts"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in job.prompts:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return [f"prompts.files=[{','.join(str(folder / name) for name, _ in job.prompts)}]"]


def _note(folder: Path, job: Job, seconds: float) -> None:
    """Write into the manifest what was rented and what ran."""
    manifest = load(folder).manifest
    here = manifest.get("environment") or {}
    name, memory = here.get("device_name"), here.get("device_memory_bytes")
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
