"""The HTTP front end: OpenAI-shaped endpoints over one `EngineClient`. Knows HTTP and text; no tensors, no torch."""
