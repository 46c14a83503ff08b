"""HTTP front, prefix index, routing policies, dispatch. Imports no torch."""
