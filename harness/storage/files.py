"""The files of a run folder: written whole, by one process at a time, and verified when read.

Writing. A file is written next to its place, fsynced and renamed into it. A line of trials.jsonl,
or of another file of lines, is appended and fsynced, and cut off again where it could not be
written whole. A full or read-only disk therefore leaves what was stored before as it was.

Checksums. Such a line ends with the CRC-32 of its own bytes, so each line is verified alone. For
the other files checksums.json holds SHA-256 digests. A file and its digest cannot be replaced in
one step, so the new digest is stored first, next to that of the file still in place, and both are
valid until the next write: a process killed in between leaves no file that looks damaged. A file
without a digest (checksums.json was deleted) is read unverified.

The lock. A process that writes a run holds run.lock, which says which process it is. The system
releases the lock when the process ends, however it ends; at a normal end the file is removed.

Reading. Run folders are sent around. Only regular files inside the folder are read or replaced:
a symbolic link could lead a reader, or the next report, out of it.
"""

import errno
import hashlib
import json
import logging
import os
import platform
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, finalize

from filelock import FileLock, Timeout

from harness.command_words import as_typed
from harness.records import UserError, first_line

CHECKSUMS = "checksums.json"
# No run writes larger ones; a folder from elsewhere must not fill the memory.
TEXT_BYTES = 64 * 2**20
DATA_BYTES = 4 * 2**30
MAX_VALUES, MAX_DEPTH = 1_000_000, 64
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
_SEAL = re.compile(rb', "checksum": "([0-9a-f]{8})"\}')
# Symbolic links are not followed, and child processes do not inherit the open file.
NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
LOCK = "run.lock"
# Errors of a file system without locks.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
_log = logging.getLogger(__name__)


def read(file: Path, limit: int = DATA_BYTES) -> bytes | None:
    """The content of a regular file; None where there is none."""
    try:
        handle = os.open(file, os.O_RDONLY | NO_LINKS | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as opened:
            known = os.fstat(handle)
            if not stat.S_ISREG(known.st_mode):
                raise UserError(f"{file}: cannot be read: not a regular file")
            if known.st_size > limit:
                raise UserError(
                    f"{file}: cannot be read: {known.st_size:,} bytes, and no run writes more than "
                    f"{limit:,} there"
                )
            return opened.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        if file.is_symlink():
            raise UserError(
                f"{file}: a symbolic link, which a run folder must not hold: it can lead out of "
                "the folder; put the file itself there"
            ) from error
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error


def check_values(value: Any, file: Path) -> None:
    """Refuse what is small in a file but huge in memory: aliases of aliases, deep nesting."""
    count, waiting = 0, [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        count += 1
        if count > MAX_VALUES or depth > MAX_DEPTH:
            raise UserError(f"{file}: cannot be read: nested too deeply, or too many values")
        if isinstance(item, Mapping):
            waiting += [(entry, depth + 1) for entry in item.values()]
        elif isinstance(item, list):
            waiting += [(entry, depth + 1) for entry in item]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an error of the disk into one line that says what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.exists():
            raise UserError(
                f"{folder}: was deleted while it was written; start the run anew"
            ) from error
        name = Path(error.filename).name if isinstance(error.filename, str) else None
        # A lock that is not given (matplotlib's, of its fonts) has no number of the system's
        said = error.strerror or first_line(error)
        what = f"{name}: {said}" if name else said
        raise UserError(
            f"{folder}: cannot be written ({what}); what was stored there before is intact, and "
            f"{as_typed('resume', folder)} continues the run once this is fixed"
        ) from error


def write(file: Path, content: bytes) -> None:
    """Replace a file: a reader sees the old one or the new one, never a part."""
    # With the process id, since a run and a report on it may write the same file at the same time
    new = file.with_name(f".{file.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    try:
        with _named(file), _opened(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
            _write_all(handle, content)
            os.fsync(handle)
        os.replace(new, file)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    _sync_directory(file.parent)


def directory(folder: Path) -> None:
    """Make a directory inside a run folder; one that is a link would lead out of it."""
    if folder.is_symlink():
        raise UserError(f"{folder}: a symbolic link, which would lead out of the run; remove it")
    folder.mkdir(parents=True, exist_ok=True)


def append(file: Path, lines: bytes) -> None:
    """Append lines durably: on the disk when this returns, and otherwise not in the file."""
    new = not file.exists()
    with _opened(file, os.O_RDWR | os.O_CREAT | os.O_APPEND) as handle:
        end = _end_of_lines(handle)
        try:
            with _named(file):
                _write_all(handle, lines)
                os.fsync(handle)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(handle, end)
            raise
    if new:
        _sync_directory(file.parent)


def repair_last_line(file: Path) -> None:
    """Cut off a half-written last line, and end a whole one that lacks only its line break."""
    if file.exists():
        with _opened(file, os.O_RDWR | os.O_APPEND) as handle:
            _end_of_lines(handle)
            os.fsync(handle)


def _end_of_lines(handle: int) -> int:
    """The size of the file, whose last byte is a line break when this returns."""
    size = os.fstat(handle).st_size
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return size
    content = b""
    while len(content) < size and b"\n" not in content:
        block = min(2**16, size - len(content))
        content = os.pread(handle, block, size - len(content) - block) + content
    torn = content[content.rfind(b"\n") + 1 :]
    if sealed(torn):
        os.write(handle, b"\n")
        return size + 1
    os.ftruncate(handle, size - len(torn))
    return size - len(torn)


@contextmanager
def _opened(file: Path, flags: int) -> Iterator[int]:
    """The handle of an open file; a symbolic link is an error."""
    handle = os.open(file, flags | NO_LINKS, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Put the file's name into an error of the disk that has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


def _write_all(handle: int, content: bytes) -> None:
    waiting = memoryview(content)
    while waiting:
        waiting = waiting[os.write(handle, waiting) :]


def _sync_directory(folder: Path) -> None:
    """Make a rename survive a power failure, where the file system offers it."""
    with suppress(OSError), _opened(folder.resolve(), os.O_RDONLY) as handle:
        os.fsync(handle)


def seal(entry: str) -> bytes:
    """A JSON object as a line whose last field is the CRC-32 of the bytes before that field."""
    body = entry.removesuffix("}").encode()
    return body + f', "checksum": "{zlib.crc32(body):08x}"}}\n'.encode()


def sealed(line: bytes) -> bool | None:
    """True where a line is as it was written; None where it carries no checksum."""
    seals = list(_SEAL.finditer(line))
    if not seals:
        return None
    last = seals[-1]
    return last.end() == len(line) and zlib.crc32(line[: last.start()]) == int(last[1], 16)


@dataclass
class Record:
    """The content of checksums.json."""

    # By file name, the digests that are valid
    files: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    trials: int | None = None  # how many lines trials.jsonl had when the run ended; None before


def digest(content: bytes) -> str:
    """The SHA-256 of a file's content, as sha256sum prints it."""
    return hashlib.sha256(content).hexdigest()


def record(folder: Path) -> Record:
    """Read checksums.json; empty where there is none."""
    file = folder / CHECKSUMS
    content = read(file, TEXT_BYTES)
    if content is None:
        return Record()
    try:
        entries = json.loads(content)
        files, trials = entries["files"], entries["trials"]
        known = {str(name): [str(value) for value in values] for name, values in files.items()}
        if entries["checksum"] != _own_digest(files, trials):
            raise ValueError("its own checksum differs")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{file}: cannot be read: damaged ({error}); delete it to read the folder unverified"
        ) from error
    return Record(known, trials)


def write_record(folder: Path, content: Record) -> None:
    entries = {
        "algorithm": "sha256",
        "files": content.files,
        "trials": content.trials,
        "checksum": _own_digest(content.files, content.trials),
    }
    write(folder / CHECKSUMS, (json.dumps(entries, indent=2) + "\n").encode())


def _own_digest(files: Any, trials: Any) -> str:
    return digest(json.dumps([files, trials], sort_keys=True).encode())


def read_verified(folder: Path, name: str, limit: int = DATA_BYTES) -> bytes | None:
    """The content of a file of the run, held against its digest; None where there is none."""
    while True:
        before = record(folder)
        content = read(folder / name, limit)
        if content is None or name not in before.files or digest(content) in before.files[name]:
            return content
        if record(folder).files == before.files:  # otherwise it was replaced in between
            raise damaged(folder / name, "its bytes are not those that were written")


def damaged(file: Path, reason: str) -> UserError:
    """The error for a file that is not as it was written, with what to do."""
    return UserError(
        f"{file}: cannot be read: damaged ({reason}); put back a copy of it, or, if it was edited "
        f"on purpose, delete {file.parent / CHECKSUMS} to read the folder unverified"
    )


class Files:
    """The verified files of a run that is being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._replaced: dict[str, str] = {}

    def write(self, name: str, content: bytes) -> None:
        """Replace a file and its digest."""
        with writing(self.folder):
            known, new = self._record(), digest(content)
            valid = known.files.get(name)
            if valid is None:  # checksums.json was deleted
                present = read(self.folder / name)
                valid = [] if present is None else [digest(present)]
            known.files[name] = list(dict.fromkeys([new, *valid]))
            write_record(self.folder, known)
            write(self.folder / name, content)
        self._replaced[name] = new

    def end(self, trials: int) -> None:
        """Store how many generations the run has, now that it has ended."""
        with writing(self.folder):
            write_record(self.folder, replace(self._record(), trials=trials))

    def _record(self) -> Record:
        """The stored digests; of a file that this process replaced only the new one is valid."""
        known = record(self.folder)
        for name, new in self._replaced.items():
            if known.files.get(name, [""])[0] == new:  # and no other writer came after it
                known.files[name] = [new]
        return known


# ---- one writer ----------------------------------------------------------------------------------


class Busy(UserError):
    """Another process is writing the run."""


class Lock:
    """Held while a run is being written; released with the last reference, or with the process."""

    def __init__(self, folder: Path) -> None:
        """Take it, or raise Busy; use `take`, by which a process shares it with itself."""
        self.folder = folder
        file, lock = folder / LOCK, FileLock(folder / LOCK, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout as error:
            raise Busy(
                f"{as_typed('resume', folder)}: {_holder(file)} is writing this run, and only one"
                " process may:"
                " wait until it ends, or stop it"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            reason = error.strerror
            _log.warning(
                "%s: written without a lock (%s); let one process write it", folder, reason
            )
            return
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError):  # on a full disk the lock holds without this
            file.write_text(f"process {os.getpid()} on {platform.node()} (since {since} UTC)\n")
        finalize(self, _release, lock, file, os.getpid())


_held: "WeakValueDictionary[tuple[int, Path], Lock]" = WeakValueDictionary()


def held() -> list[Path]:
    """The run folders that this process is writing."""
    return [lock.folder for (process, _), lock in _held.items() if process == os.getpid()]


def take(folder: Path) -> Lock:
    """Take the run's lock, or raise Busy; a process that has it already shares it with itself."""
    key = (os.getpid(), folder.resolve())
    known = _held.get(key)
    if known is None:
        with writing(folder):
            _held[key] = known = Lock(folder)
    return known


def _holder(file: Path) -> str:
    with suppress(OSError, ValueError):
        return file.read_text(encoding="utf-8").strip() or "another process"
    return "another process"


def _release(lock: FileLock, file: Path, process: int) -> None:
    if os.getpid() == process:  # in a forked child the lock is its parent's
        with suppress(OSError):
            file.unlink()
        lock.release()
