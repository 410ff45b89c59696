"""Models: loaded, checked, and run with caches that can be rewound.

load.py          by hub id, local folder, embedded:<name> or as a dummy; a target with its draft
checkpoint.py    checks of a complete causal model; errors of transformers in one line
memory.py        sizes of a config, checks of memory       device.py  the device, its driver
gguf_file.py     GGUF files: headers, vocabularies
tokenizer.py     conversations to token ids; comparison of two tokenizers
cached.py        transformers' forward with a cache that rewinds, also as backbone and head
probe.py         choice of the fastest forward whose logits agree with uncached ones
routing.py       near ties of a mixture's routers in 16 bits
heads/           heads on the target's states: a module for each kind, with its reader
lean/            the harness's own forward for Llama and Qwen, also recorded as CUDA graphs
dummy.py         random weights in a released shape; embedded/ four small trained models
"""
