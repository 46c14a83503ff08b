"""Facilities and limits of the machine: Linux calls, memory limits, private directories, locks."""
