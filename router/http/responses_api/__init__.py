"""POST /v1/responses: OpenAI's Responses API, translated to chat and back. Nothing is stored without API keys."""
