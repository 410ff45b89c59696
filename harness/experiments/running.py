"""A run's status while its work goes on."""

from collections.abc import Iterator
from contextlib import contextmanager

from harness.storage import RunFolder


@contextmanager
def running(folder: RunFolder) -> Iterator[None]:
    """Mark the run failed if the block raises; what was measured stays."""
    folder.update_manifest({"status": "running"})
    try:
        yield
    except KeyboardInterrupt as stop:
        # Not a failure: the run is unfinished, and whoever stopped it wants to know where it is
        raise KeyboardInterrupt(str(folder.path)) from stop
    except BaseException:
        folder.update_manifest({"status": "failed"})
        raise
