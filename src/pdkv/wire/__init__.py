"""Communication between the router and the engines: messages, frames, heartbeats."""
