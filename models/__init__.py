"""Model definitions and the safetensors loader."""
