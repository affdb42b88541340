"""Formats of tool calls and of reasoning, one file each."""
