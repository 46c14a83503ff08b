"""Grammars: the allowed form of an answer, from a client's schema to the mask of the tokens that may come next."""
