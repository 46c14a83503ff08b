"""The conformance kit's cases, and the report of a check."""
