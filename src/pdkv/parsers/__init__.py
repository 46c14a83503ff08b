"""What a model writes, told apart while it writes: thoughts, calls of tools, and the text for the user."""
