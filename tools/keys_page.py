"""Write the table of docs/keys.md from the schemas of harness.config: python tools/keys_page.py."""

from pathlib import Path

from harness.config import SCHEMAS, keys_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "keys.md"
HEADING = "## All keys\n"


def table() -> str:
    """Every key with the commands that take it and what it means; a row for each meaning."""
    meanings: dict[str, dict[str, list[str]]] = {}
    for command, schema in SCHEMAS.items():
        for name, entry in keys_of(schema):
            meaning = entry.metadata["meaning"]
            meanings.setdefault(name, {}).setdefault(meaning, []).append(command)
    rows = ["| key | commands | meaning |", "|---|---|---|"]
    for name, takers in meanings.items():
        group, _, key = name.partition(".")
        if group == "draft" and meanings.get(f"model.{key}") == takers:
            continue  # it is in the model's row
        of_both = group == "model" and meanings.get(f"draft.{key}") == takers
        keys = f"`{name}`, `draft.{key}`" if of_both else f"`{name}`"
        for meaning, commands in takers.items():
            who = "all" if len(commands) == len(SCHEMAS) else ", ".join(commands)
            rows.append(f"| {keys} | {who} | {meaning.replace('|', '/')} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    PAGE.write_text(f"{head}{HEADING}\n{table()}", encoding="utf-8")
