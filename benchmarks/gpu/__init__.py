"""What has to be seen on a GPU, part by part: python -m benchmarks.gpu, or `make gpu` (docs/gpu.md)."""
