"""Decides how much of the router each client may have, and who is next."""
