"""Write the table of docs/keys.md from the schemas of harness.config: python tools/keys_page.py."""

from pathlib import Path

from harness.config import SCHEMAS, keys_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "keys.md"
HEADING = "## All keys\n"


def table() -> str:
    """Every key with the commands that take it and what it means."""
    commands: dict[str, list[str]] = {}
    meanings: dict[str, str] = {}
    for command, schema in SCHEMAS.items():
        for name, entry in keys_of(schema):
            commands.setdefault(name, []).append(command)
            meanings.setdefault(name, entry.metadata["meaning"])
    rows = ["| key | commands | meaning |", "|---|---|---|"]
    for name, takers in commands.items():
        who = "all" if len(takers) == len(SCHEMAS) else ", ".join(takers)
        rows.append(f"| `{name}` | {who} | {meanings[name].replace('|', '/')} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    PAGE.write_text(f"{head}{HEADING}\n{table()}", encoding="utf-8")
