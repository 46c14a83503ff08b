"""Follows one generation from its request to its end, over as many engines as it takes."""
