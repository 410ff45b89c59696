"""The embedded family: four small models that ship with the harness, and the script that made them.

A newcomer should see a measured report before downloading anything. So one target (`tiny`) and
three drafts are committed here, trained on text that `corpus.py` generates:

    tiny             the target: eight layers, knows the easy and the hard text
    tiny_good        one layer: knows the easy text, has hardly seen the hard text
    tiny_small       one narrow layer, trained briefly: a worse draft for about the same step time
    tiny_unrelated   the size of tiny_good, trained on other text altogether

`python -m harness.models.embedded.train` rebuilds them and measures what each is worth.
"""
