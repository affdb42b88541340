"""The engine: its loop, its executors, the client a front end holds, and `LLM`. Imports nothing by itself."""
