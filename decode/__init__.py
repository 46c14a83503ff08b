"""What makes an engine a decode engine: admission of remote KV, tickets, local fallback."""
