"""The engines as the router sees them: who they are, how they do, what they are asked."""
