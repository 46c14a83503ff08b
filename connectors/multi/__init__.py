"""Several connectors as one: a hand-off connector next to stores."""
