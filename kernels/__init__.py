"""One wrapper per kernel: Triton on GPU, a torch reference of the same signature everywhere.

Nothing is imported here: some kernels are for processes without torch.
"""
