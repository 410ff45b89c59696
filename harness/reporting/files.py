"""Writing a report's files: beside their place first, then renamed into it."""

from pathlib import Path


def write(file: Path, text: str) -> None:
    """Put `text` into `file`; a reader sees the old file or the new one, never a part of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(text, encoding="utf-8", newline="\n")
    beside.replace(file)
