"""One generation from its request to its end, over whatever engines it takes."""
