"""What point-to-point connectors share: cards of peers, the pull and push bases, authentication."""
