"""Point-to-point messages: NCCL between GPUs, Gloo between hosts without one."""
