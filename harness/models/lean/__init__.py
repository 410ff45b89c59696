"""A forward pass of our own for the Llama family, because a small step is mostly overhead.

transformers' forward serves every architecture and every use; for one token of a small model, or
of any model on a fast GPU, most of its time is Python between kernels. The modules here hold the
same arithmetic for Llama, Qwen2, Qwen3 and Qwen3's mixtures of experts, over caches allocated once:

    weights.py   a network's weights, projections fused; the network keeps views of them
    layers.py    the arithmetic, pure functions of tensors
    model.py     LeanModel: position on the host, caches sliced; the CPU, a GPU without graphs
    pieces.py    a layer in fixed shapes with its cache write inside, compiled or not
    static.py    StaticModel: position on the device, fixed shapes; what a CUDA graph can replay

`harness.models.probe` compares the logits with transformers' own before use,
and a network that is not understood keeps transformers' forward, with the reason in the manifest.
"""
