"""Which of torch's CUDA kernels may run: set once per process, before the first forward.

Two of torch's defaults make timings or texts worse here, and neither matters on the CPU:

- From Hopper on, scaled_dot_product_attention prefers cuDNN, which builds a plan for every pair of
  query and key length. Decoding has a new key length in every step, so the tens of milliseconds
  that a plan takes would be counted as part of the step.
- A matrix product in bfloat16 or float16 may add its partial sums in that dtype. Verifying n
  positions splits the sums differently from a step of one, so that near ties fall differently.
"""

import torch


def settle_kernels() -> None:
    """Switch cuDNN attention and reduced-precision sums off for every model."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def kernel_settings() -> dict[str, bool]:
    """The current settings, for the manifest."""
    matmul = torch.backends.cuda.matmul
    return {
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "bf16_reduced_precision_sums": bool(matmul.allow_bf16_reduced_precision_reduction),
        "fp16_reduced_precision_sums": bool(matmul.allow_fp16_reduced_precision_reduction),
    }
