"""Four small models that ship with the harness, so that a first run downloads nothing.

    tiny             the target: eight layers, knows the easy and the hard text
    tiny_good        one layer: knows the easy text, has hardly seen the hard text
    tiny_small       one narrow layer, trained briefly: a worse draft for about the same step time
    tiny_unrelated   the size of tiny_good, trained on other text altogether

Each folder is a checkpoint in transformers' format; `harness.models.load` reads them as
`embedded:<name>`. The text they learned and the training are in tools/train_embedded; `make
embedded` trains them again and measures how often each draft is accepted.
"""
