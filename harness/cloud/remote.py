"""Jobs on a rented machine, which may be run twice, and the runs that they return.

A rented container can end at any moment; its job is then given to another one. So a job has its own
folder on a volume that outlives containers, found by the names of launch and job: the next
container finds the stored measurements there, and continues.

An audition over several cards generates the target's completions once: the first job generates
them, all others take them from its run (`traces_from`), score missing drafts and time their own
steps. This module is independent of the provider: `modal_app.py` rents the machines.

A smoke run is a job as well. It checks a card with `benchmarks/gpu.py`, and returns the printed
output and gpu.json in place of a run.
"""

import gzip
import io
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from harness import formatting as fmt
from harness.cli import compose, work
from harness.cloud.jobs import SMOKE, Job, plan_jobs
from harness.command_words import as_typed, command
from harness.commands.run_lifecycle import Outcome
from harness.config import CONF_DIR
from harness.measurement.environment import device_name
from harness.models.device import resolve_device
from harness.records import Failure, UserError, in_one_line
from harness.storage import RunFolder, load
from harness.storage.manifest import CloudRental
from harness.theory.cost import money
from harness.theory.roofline import is_card

MAX_UNPACKED_BYTES = 16 * 2**30
OUTPUT = "output.txt"
# Steps of a smoke run; {model} and {folder} are filled in. Each must end with status 0.
_VERSIONS = (
    "import sys, torch, transformers;"
    " print('torch', torch.__version__, 'CUDA', torch.version.cuda,"
    " 'transformers', transformers.__version__);"
    # Only torch's CUDA builds contain Triton, so the card is checked first
    " torch.cuda.is_available() or sys.exit('torch sees no CUDA device');"
    " import triton; print('triton', triton.__version__)"
)
SMOKE_STEPS = (
    ("nvidia-smi",),
    (sys.executable, "-c", _VERSIONS),
    ("gcc", "--version"),
    # The smoke run, and the benchmark where it passes
    (sys.executable, "-m", "benchmarks.gpu", "--targets", "{model}", "--out", "{folder}"),
)


@dataclass(frozen=True)
class Delivery:
    """The results of a job.

    Attributes:
        status: the exit status: 0 complete, 1 cells failed, 2 the user's error.
        folder: the run folder on the rented machine; None where there is none.
        archive: the run folder as a tar.gz.
        error: why the job failed; the run then has what was stored before.
        device: the device name that the driver reports.
        upgraded: whether that is another card than was asked for.
        seconds, usd: the rented time of the container that finished the job, and its price.
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
        """The reason of a failure; None where there is none."""
        if self.error is None and self.archive is not None:
            return None
        return Failure(f"{self.job.name} on {self.job.gpu}", self.error or "nothing came back")

    def unpack(self, results_root: str | Path) -> Path | None:
        """Write the run into `results_root` and return its folder; None without a run.

        The card is a part of the folder's name.

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
        """The lines to print: card, time, cost and run of the job.

        Args:
            folder: the run folder here; None where the job returned none.
        """
        job, card = f"{self.job.name} on {self.job.gpu}", self.job.card
        if folder is None:
            return [f"{job}: failed: {self.error}"]
        price = f"{fmt.dollars(self.job.price_per_hour_usd)} an hour, {card.date}"
        time_and_price = f"{fmt.seconds(self.seconds)}, about {fmt.dollars(self.usd)}"
        lines = [f"{job}: {time_and_price} (the card alone, at {price})"]
        if self.job.command == SMOKE:
            result = "PASS" if self.error is None else f"FAIL: {self.error}"
            return [*lines, f"smoke run: {result}", f"output: {folder}"]
        if self.upgraded:
            lines.append(
                f"note: {self.job.gpu} was asked for and {self.device} ran:"
                f" these are not the latencies of {self.job.gpu}"
            )
        if self.error is not None:
            lines += [
                f"{job}: failed: {self.error}",
                f"note: what it had stored came back: {command('report', as_typed('run', folder))}",
            ]
        elif self.status:
            lines.append("note: some cells did not complete; --resume runs them again")
        return [*lines, f"run: {folder}"]


def launch(
    command: str,
    overrides: Sequence[str],
    gpus: Sequence[str],
    resume: str,
    run_jobs: Callable[[list[Job]], list[Delivery]],
) -> int:
    """Run a command on each card, and copy the runs here.

    Args:
        command, overrides, gpus, resume: as in `plan_jobs`; several cards only for an audition,
            which ranks them.
        run_jobs: rents the machines and runs the jobs on them.

    Returns:
        The exit status; an error that the user can fix is one line on standard error.
    """
    try:
        jobs, config = plan_jobs(command, overrides, gpus, resume)
        name = jobs[0].launch
        print(f"launch: {name} (--resume {name} continues it)", flush=True)
        deliveries = run_jobs(jobs)
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
    from harness.commands import audition

    if not folders:
        return 0
    failures = [failure for entry in deliveries if (failure := entry.failure) is not None]
    outcome = audition.combine(replace(config, combine=list(folders)), failures)
    print(f"run: {outcome.folder}")
    return outcome.status


def run_command(command: str, overrides: Sequence[str]) -> Outcome:
    return work(command, compose(command, overrides))


def run_job(job: Job, root: str | Path) -> Delivery:
    """Run a job, or the missing part of it, and pack its run.

    An error after all measurements would occur again in a retry, so the run is packed anyway and
    the delivery has the error.

    A run that was begun on another card is not continued: a container that replaces another one may
    have an A10 in place of an A10G, and one run must not mix the times of two cards.

    Raises:
        Exception: every error of the command except a UserError, since a retry may succeed and
            continues the stored run. `failed` packs that run where no retry succeeds.
    """
    begin, home = time.perf_counter(), job.home(root)
    if job.command == SMOKE:
        return _smoke_run(job, home / job.launch)
    overrides = [*job.overrides, f"results_root={home}", *_written_prompts(job, home)]
    try:
        device = device_name(resolve_device(compose(job.command, overrides).device.name))
        stored = stored_run(home, device)
        if stored is not None:
            overrides.append(f"resume={stored}")
        elif (other := stored_run(home)) is not None:
            print(f"{job.name}: {other} was begun on another card, and this is {device}: a new run")
        outcome = run_command(job.command, overrides)
    except UserError as error:
        return replace(failed(job, error, root), seconds=time.perf_counter() - begin)
    assert outcome.folder is not None, "a dry run is refused before anything is rented"
    _record_rental(outcome.folder, job, time.perf_counter() - begin)
    delivery = deliver(job, outcome.folder)
    if outcome.reason is None:
        return delivery
    return replace(delivery, status=1, error=outcome.reason)


def fan_out(
    jobs: Sequence[Job], root: str | Path, run_jobs: Callable[[Sequence[Job]], Iterable[Delivery]]
) -> list[Delivery]:
    """Run an audition's jobs: the first generates the texts, all others take them from its run.

    Where the first job fails, the next one generates them. Completed jobs are not run again.

    Returns:
        A delivery for each job, in their order.
    """
    done: dict[str, Delivery] = {}
    for job in jobs:
        folder = stored_run(job.home(root))
        if folder is not None and _complete(folder):
            done[job.name] = deliver(job, folder)
    waiting = [job for job in jobs if job.name not in done]
    source = next(filter(None, map(_folder_with_texts, done.values())), None)
    while waiting and source is None:
        job = _with_texts_from(waiting.pop(0), root, None)
        (done[job.name],) = run_jobs([job])
        source = _folder_with_texts(done[job.name]) if waiting else None
    if waiting:
        deliveries = run_jobs([_with_texts_from(job, root, source) for job in waiting])
        done |= dict(zip((job.name for job in waiting), deliveries, strict=True))
    return [done[job.name] for job in jobs]


def stored_run(home: Path, device: str | None = None) -> Path | None:
    """The latest run under a job's folder that has a manifest; None if none has.

    Args:
        home: the job's folder.
        device: skip runs that were begun on a device of another name.
    """
    runs = sorted(path.parent for path in home.glob("*/manifest.json"))
    if device is not None:
        runs = [run for run in runs if load(run).manifest.environment.device_name in (None, device)]
    return runs[-1] if runs else None


def deliver(job: Job, folder: Path) -> Delivery:
    """The delivery of a job's stored run."""
    manifest = load(folder).manifest
    rental = manifest.cloud
    return Delivery(
        job,
        status=0 if _complete(folder) else 1,
        folder=str(folder),
        archive=pack(folder),
        device=manifest.environment.device_name,
        upgraded=rental.upgraded if rental else False,
        seconds=rental.seconds if rental else 0.0,
        usd=rental.usd if rental else None,
    )


def failed(job: Job, error: BaseException, root: str | Path) -> Delivery:
    """The delivery of a job that failed in all retries, with its stored run."""
    folder = stored_run(job.home(root))
    delivery = Delivery(job, 1) if folder is None else deliver(job, folder)
    status = 2 if isinstance(error, UserError) else 1
    return replace(delivery, status=status, error=in_one_line(error))


def _complete(folder: str | Path) -> bool:
    return load(folder).manifest.status == "complete"


def _folder_with_texts(entry: Delivery) -> str | None:
    """The run folder from which other jobs can take the texts; None where some may be missing."""
    complete = entry.folder is not None and (entry.error is None or _complete(entry.folder))
    return entry.folder if complete else None


def _with_texts_from(job: Job, root: str | Path, source: str | None) -> Job:
    """The job with the run to take texts from; a stored run keeps the source that it had."""
    previous_run = stored_run(job.home(root))
    if previous_run is not None:
        source = load(previous_run).config.get("traces_from")
    if source is None:
        return job
    shared = (f"traces_from={source}", "latency.measure=true")
    return replace(job, overrides=(*job.overrides, *shared))


def _written_prompts(job: Job, home: Path) -> list[str]:
    files = [home / "prompts" / name for name, _ in job.prompts]
    for file, (_, content) in zip(files, job.prompts, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return [f"prompts.files=[{','.join(map(str, files))}]"] if files else []


def _record_rental(folder: Path, job: Job, seconds: float) -> None:
    """Write the rented card, its time and its price into the manifest."""
    manifest = load(folder).manifest
    machine = manifest.environment
    name, memory = machine.device_name, machine.device_memory_bytes
    rental = CloudRental(
        asked_gpu=job.gpu,
        upgraded=not is_card(job.card.name, job.card.memory_gb, name, memory),
        seconds=seconds,
        price_per_hour_usd=job.price_per_hour_usd,
        price_date=job.card.date,
        usd=money(seconds, job.price_per_hour_usd),
    )
    RunFolder(folder, manifest).note(cloud=rental)


def _smoke_run(job: Job, folder: Path) -> Delivery:
    """Check this machine's card by `SMOKE_STEPS`, up to the first that fails.

    The output of the steps is printed and written into `folder`, with gpu.json if the benchmark
    ran.
    """
    begin, error = time.perf_counter(), None
    keys = dict(word.split("=", 1) for word in job.overrides)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / OUTPUT).open("w", encoding="utf-8") as output:
        for step in SMOKE_STEPS:
            words = [word.format(model=keys["model"], folder=folder) for word in step]
            status, last = _teed(words, output)
            if status:
                error = f"{shlex.join(words[:3])} ended with status {status}: {last}"
                break
    seconds = time.perf_counter() - begin
    usd = money(seconds, job.price_per_hour_usd)
    return Delivery(
        job, 1 if error else 0, str(folder), pack(folder), error, seconds=seconds, usd=usd
    )


def _teed(words: Sequence[str], output: TextIO) -> tuple[int, str]:
    """Run a command and print and write its output; its exit status, and its last line."""
    last = ""
    try:
        with subprocess.Popen(
            words,
            cwd=CONF_DIR.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                output.write(line)
                output.flush()
                last = line.strip() or last
            return process.wait(), last
    except OSError as error:
        return 127, in_one_line(error)


def pack(folder: Path) -> bytes:
    """A run folder as a compressed tar archive, under its own name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    return buffer.getvalue()


def unpack(archive: bytes, results_root: Path, name: str) -> Path:
    """Write a packed run folder into `results_root` as `name` and return its path.

    `name` makes it unique: jobs that begin in the same second on two machines have folders of the
    same name.
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
    """The files and directories of an archive, up to `MAX_UNPACKED_BYTES`.

    Raises:
        tarfile.TarError: it is larger, or has an entry that is no file or directory.
    """
    size = 0
    for member in archive:
        size += member.size
        if size > MAX_UNPACKED_BYTES:
            raise tarfile.TarError(f"it holds more than {MAX_UNPACKED_BYTES:,} bytes")
        if not (member.isfile() or member.isdir()) or Path(member.name).is_absolute():
            raise tarfile.TarError(f"{member.name}: not a file or directory of the run")
        yield member
