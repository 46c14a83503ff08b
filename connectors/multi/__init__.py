"""Several connectors as one: a hand-off connector beside stores."""
