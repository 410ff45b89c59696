"""Four small models and a head that ship with the harness, so that a first run downloads nothing.

    tiny             the target: eight layers, knows the easy and the hard text
    tiny_good        one layer: knows the easy text, has hardly seen the hard text
    tiny_small       one narrow layer, trained briefly: a worse draft for about the same step time
    tiny_unrelated   the size of tiny_good, trained on other text altogether
    tiny_eagle3      an EAGLE-3 head of tiny, trained on tiny's own texts, in SpecForge's layout

Each folder of a model is a checkpoint in transformers' format; `harness.models.load` reads it as
`embedded:<name>`, and `harness.models.heads.eagle3` the head. The text they learned and the
training are in tools/train_embedded; `make embedded` trains them again and measures how often each
draft model is accepted. Each folder has the same weights as NAME.gguf, for llama.cpp, which
tools/gguf_file.py writes.
"""

from pathlib import Path

EMBEDDED = Path(__file__).parent
PREFIX = "embedded:"


def folder_of(model_id: str) -> Path | None:
    """The folder of `embedded:NAME`, whether it is there or not; None of any other id."""
    return EMBEDDED / model_id.removeprefix(PREFIX) if model_id.startswith(PREFIX) else None


def gguf_of(folder: Path) -> Path:
    """The GGUF file of an embedded model."""
    return folder / f"{folder.name}.gguf"
