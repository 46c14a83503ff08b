"""The engines as the router sees them: which exist, how they are doing, and how to reach them."""
