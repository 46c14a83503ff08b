"""Chooses the engines of a request."""
