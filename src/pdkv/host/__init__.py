"""What this machine offers: Linux calls, memory limits, private directories, locks."""
