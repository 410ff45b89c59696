"""The formulas of speculative decoding, one subject a module: no clock, no files, no torch."""
