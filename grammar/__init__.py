"""Grammars: what an answer may look like, from a client's schema to the mask of the tokens that may come next."""
