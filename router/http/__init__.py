"""The router's HTTP side: OpenAI's API over FastAPI."""
