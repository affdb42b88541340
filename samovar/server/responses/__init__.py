"""POST /v1/responses and what belongs to it: items in, items out, events, and the store of answers."""
