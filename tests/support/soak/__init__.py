"""Chaos under load: `make soak`. Everything that can go wrong does, and no answer may be wrong, no request may hang."""
