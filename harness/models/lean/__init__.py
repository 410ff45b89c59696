"""The harness's own forward for the Llama family, since a small step is mostly overhead.

transformers' forward serves every architecture and every use; for one token of a small model, or
of any model on a fast GPU, most of its time is Python between kernels. The modules here have the
same arithmetic for Llama, Qwen2, Qwen3 and Qwen3's mixtures of experts, over preallocated caches:

    weights.py   a network's weights, projections fused; the network keeps views of them
    layers.py    the arithmetic, pure functions of tensors
    model.py     LeanModel: position on the host, caches sliced; the CPU, a GPU without graphs
    static.py    StaticModel: position on the device, fixed shapes, for CUDA graphs

`harness.models.probe` compares the logits with transformers' own before use. A network that is not
supported keeps transformers' forward, with the reason in the manifest.
"""
