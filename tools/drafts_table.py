"""Write README's table of what can draft for what: python tools/drafts_table.py.

The engines' columns are those of `harness.engine_facts.engines`.
"""

from pathlib import Path

from harness.engine_facts.draft_kinds import DRAFTS, DraftKind
from harness.engine_facts.engines import with_lines
from harness.engine_facts.spec import EngineSpec

PAGE = Path(__file__).resolve().parents[1] / "README.md"
HEADING = "## What can draft for what\n"
# How each is named in `drafts=`; what a sweep and a snapshot cannot run stands alone
ENTRIES: dict[DraftKind, str] = {
    "model": "`qwen3_0_6b`, `name@folder-or-hub-id`",
    "eagle": "`eagle@folder-or-hub-id`",
    "eagle3": "`eagle3@folder-or-hub-id`",
    "peagle": "`peagle@folder-or-hub-id`",
    "pard": "`pard@folder-or-hub-id`",
    "mtp": "`mtp`, `mtp@folder-or-hub-id`",
    "medusa": "`medusa@folder-or-hub-id`",
    "dflash": "`dflash@folder-or-hub-id`",
    "dspark": "`dspark@folder-or-hub-id`",
    "ngram": "`ngram`",
    "ngram_simple": "`ngram_simple`, K of 2 or more",
    "ngram_simple_1": "`ngram_simple_1`",
    "ngram_simple_12": "`ngram_simple_12`, K of 12 or more",
    "ngram_mod": "`ngram_mod` (server with `score=false`, audition of files)",
    "early_exit": "`early_exit@layers:4`",
    "copy": "`bf16`; with `pip install .[quantization]` also `int8`, `int4`",
}


def table() -> str:
    """A row for each kind of draft."""
    engines = [spec for spec in with_lines().values() if spec.variant_of is None]
    titles = " | ".join(spec.title for spec in engines)
    rows = [f"| draft | entry of `drafts` | {titles} |", "|---|---|" + "---|" * len(engines)]
    for kind, entry in ENTRIES.items():
        cells = " | ".join(_cell(spec, kind) for spec in engines)
        rows.append(f"| {DRAFTS[kind].phrase} | {entry} | {cells} |")
    return "\n".join(rows) + "\n"


def _cell(spec: EngineSpec, kind: DraftKind) -> str:
    """Whether an engine has a line for a kind."""
    if kind not in spec.lines:
        return "-"
    return "yes" if kind in spec.alike or not DRAFTS[kind].replayed else "differs"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(HEADING)
    _, mark, tail = rest.partition("\n## ")
    note = (
        "All of these can be measured or ranked here. An engine's column says whether a report has"
        " a line to serve it there; what\na report recommends for an engine is a draft that the"
        " engine has. `differs`: it has one of this kind, but finds other\ntokens with it."
        " Of llama.cpp's kinds, MTP layers were never run with the harness.\n"
    )
    PAGE.write_text(f"{head}{HEADING}\n{note}\n{table()}{mark}{tail}", encoding="utf-8")
