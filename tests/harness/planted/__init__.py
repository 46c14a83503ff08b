"""Defects planted one by one in a checkout: whether the tests that cover them find each."""
