"""DeepSeek V4: as V3.2, in regions of another name."""

from __future__ import annotations

from samovar.text.formats.deepseek_v32 import dsml_format

FORMAT = dsml_format("deepseek_v4", "tool_calls")
