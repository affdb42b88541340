"""The OpenAI dialect: schemas, and the endpoints that turn them into Requests and GenerationEvents into JSON."""
