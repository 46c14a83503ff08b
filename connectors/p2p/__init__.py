"""Point-to-point links: sockets between hosts and within one, NCCL between distinct GPUs."""
