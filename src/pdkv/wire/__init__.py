"""What the router and the engines say to each other: messages, frames, heartbeats."""
