"""Heads: drafts that read the hidden states of their target.

One module per kind, each with the network and the reader of its published checkpoints: EAGLE,
EAGLE-3 and P-EAGLE (which share `decoder_layer`), a model's own MTP layer, Medusa heads, PARD
drafts, DFlash and DSpark drafters. `base` has the common classes; `files` reads the files of every
kind and compares them with the target.
"""
