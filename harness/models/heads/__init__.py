"""Heads: drafts that read the hidden states of their target.

One module per kind, each with the network and the reader of its published checkpoints: EAGLE and
EAGLE-3 (`decoder_layer` is what these two share), a model's own MTP layer, Medusa heads, DFlash and
DSpark drafters. `base` is what they have in common, `files` reads the files of any of them and
compares them with the target.
"""
