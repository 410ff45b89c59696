"""Heads: drafts that read the hidden states of their target.

One module per kind, each with the network and the reader of its published checkpoints: EAGLE,
EAGLE-3 and P-EAGLE (`decoder_layer` is what these share), a model's own MTP layer, Medusa heads,
DFlash and DSpark drafters. `base` is what all have in common, `files` reads the files of any of
them and compares them with the target.
"""
