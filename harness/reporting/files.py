"""Writing a report's files: beside their place first, then renamed into it."""

from pathlib import Path

from harness.storage import files


def write(file: Path, text: str) -> None:
    """Put `text` into `file`; a reader sees the old file or the new one, never a part of it.

    Raises:
        UserError: the directory is a link out of the run.
        OSError: it cannot be written.
    """
    files.write(file, text.encode())
