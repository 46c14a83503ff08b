"""Common parts of transports between two engines: cards of peers, the base classes of pull and push, authentication."""
