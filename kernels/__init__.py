"""One wrapper per kernel: Triton on GPU, a torch reference of the same signature everywhere."""
