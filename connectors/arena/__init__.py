"""KV pools that peers on the same host map: their memory, the block table next to it, and copies out of them."""
