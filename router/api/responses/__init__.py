"""OpenAI's responses: answered, stored, continued and made in the background."""
