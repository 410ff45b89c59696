"""The text that the embedded models learned, their training, and what each draft is worth.

`python -m tools.train_embedded.train` trains them again (`--measure-only` only measures them), and
`python -m tools.train_embedded.eagle3` the head of the target.
"""
