"""Tensor parallelism: rank processes, their messages and their ring queue."""
