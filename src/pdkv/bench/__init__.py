"""A client's view of any OpenAI server: load, measurements and reports (`pd bench`)."""
