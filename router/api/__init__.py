"""The endpoints, in the shapes of OpenAI's and Anthropic's APIs."""
