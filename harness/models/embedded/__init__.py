"""Four small models and a head that ship with the harness, so that a first run downloads nothing.

    tiny             the target: eight layers, trained on the easy and the hard text
    tiny_good        one layer, trained on the easy text, and hardly on the hard text
    tiny_small       one narrow layer, trained briefly: a worse draft for about the same step time
    tiny_unrelated   the size of tiny_good, trained on another text
    tiny_eagle3      an EAGLE-3 head of tiny, trained on tiny's own texts, in SpecForge's layout

Each folder of a model is a checkpoint in transformers' format; `harness.models.load` reads it as
`embedded:<name>`, and `harness.models.heads.eagle3` the head. The training and its texts are in
tools/train_embedded; `make embedded` trains them again and measures the acceptance of each draft
model. Each folder has the same weights as NAME.gguf, for llama.cpp, written by tools/gguf_file.py.
"""

from pathlib import Path

EMBEDDED = Path(__file__).parent
PREFIX = "embedded:"


def folder_of(model_id: str) -> Path | None:
    """The folder of `embedded:NAME`, which may not exist; None for any other id."""
    return EMBEDDED / model_id.removeprefix(PREFIX) if model_id.startswith(PREFIX) else None


def gguf_of(folder: Path) -> Path:
    return folder / f"{folder.name}.gguf"
