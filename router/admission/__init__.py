"""Who may have how much of the router, and who is next."""
