"""One process writes a run at a time.

Who writes a run holds an flock on its run.lock, which the operating system releases when the
process ends, however it ends. The file says which process it is, for whoever is refused, and is
removed at a normal end.
"""

import errno
import json
import logging
import os
import platform
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from weakref import WeakValueDictionary, finalize

from harness.records import UserError
from harness.storage.files import NO_LINKS, writing

try:
    import fcntl
except ImportError:  # not a POSIX system: runs are written without a lock
    fcntl = None

LOCK = "run.lock"
# Errors of a file system without locks.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
_log = logging.getLogger(__name__)


class Busy(UserError):
    """Another process is writing the run."""


class Lock:
    """Held while a run is being written; released with the last reference, or with the process.

    Attributes:
        unlocked: why there is no lock on this file system; None where there is one.
    """

    def __init__(self, folder: Path, handle: int | None, unlocked: str | None = None) -> None:
        """Use `take` instead."""
        self.folder, self.unlocked = folder, unlocked
        if handle is not None:
            finalize(self, _release, handle, folder / LOCK, os.getpid())


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
            _held[key] = known = _locked(folder)
    return known


def _locked(folder: Path) -> Lock:
    if fcntl is None:
        return _without(folder, "this system has no flock")
    file = folder / LOCK
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o666)
        with ExitStack() as unless_held:
            unless_held.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Busy(
                    f"resume={folder}: {_holder(handle)} is writing this run, and only one process "
                    "may: wait until it ends, or stop it"
                ) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                return _without(folder, f"flock: {error.strerror}")
            # Otherwise the last holder has just removed the file: try again with a new one
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.lstat(file)):
                    _sign(handle)
                    unless_held.pop_all()
                    return Lock(folder, handle)


def _without(folder: Path, reason: str) -> Lock:
    _log.warning("%s: written without a lock (%s); let one process write it", folder, reason)
    return Lock(folder, None, reason)


def _sign(handle: int) -> None:
    """Write who holds the lock; on a full disk the lock holds without this."""
    entry = {
        "pid": os.getpid(),
        "host": platform.node(),
        "since_utc": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
    }
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(entry).encode() + b"\n")


def _holder(handle: int) -> str:
    try:
        entry = json.loads(os.pread(handle, 4096, 0))
        return f"process {int(entry['pid'])} on {entry['host']} (since {entry['since_utc']} UTC)"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _release(handle: int, file: Path, process: int) -> None:
    # A forked child has a copy of the handle, but the lock is its parent's
    if os.getpid() == process:
        with suppress(OSError):
            file.unlink()
    with suppress(OSError):
        os.close(handle)
