"""One process writes a run at a time: it holds run.lock, which says which process it is.

The operating system releases the lock when the process ends, however it ends; at a normal end the
file is removed.
"""

import errno
import logging
import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from weakref import WeakValueDictionary, finalize

from filelock import FileLock, Timeout

from harness.command_words import as_typed
from harness.records import UserError
from harness.storage.files import writing

LOCK = "run.lock"
# Errors of a file system without locks.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
_log = logging.getLogger(__name__)


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
