"""KV pools that peers on the same host map: their memory, the block table beside them, and copies out of them."""
