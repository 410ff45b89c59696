"""Models: loaded, checked, and run with caches that can be rewound.

load.py          by hub id, local folder, embedded:<name> or as a dummy; a target with its draft
checkpoint.py    is it a complete causal model; errors of transformers in one line
memory.py        sizes of a config, and does it fit        device.py  which device, and why not
tokenizer.py     conversations to token ids; do two models share a tokenizer
cached.py        transformers' forward with a cache that rewinds, also as backbone and head
probe.py         picks the fastest forward whose logits agree with uncached ones
heads/           heads on the target's states: a module for each kind, with its reader
lean/            our own forward for Llama and Qwen, also recorded as CUDA graphs
dummy.py         random weights in a released shape; embedded/ four small trained models
"""
