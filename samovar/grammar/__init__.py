"""Structured output: schemas, patterns and grammars of clients, made safe, compiled, and matched token by token."""
