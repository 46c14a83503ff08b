"""The families of models that are computed, each as far as it differs from Llama (docs/models.md)."""
