"""Bodies of the Messages API as typed records: what is accepted, what is answered.

Types of blocks and tools are open here and judged by name in `unions`; `None` in a request always means "not given".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from samovar.core.sampling_params import MAX_SEED

MAX_MESSAGES = 100_000
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Id = Annotated[str, Meta(min_length=1, max_length=4096)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class CacheControl(msgspec.Struct, kw_only=True):
    """A breakpoint of Anthropic's prompt cache. Accepted everywhere; here every prompt beginning is cached anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class ContentBlock(msgspec.Struct, kw_only=True):
    """One block of a message: text, thinking, redacted_thinking, tool_use, tool_result, document, search_result, ...

    Which of the fields are needed depends on `type`.
    """

    type: Annotated[str, Meta(min_length=1, max_length=128)]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: Id | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Id | None = None
    tool_name: Name | None = None
    content: Any = None
    is_error: bool | None = None
    source: Any = None
    title: str | None = None
    context: str | None = None
    citations: Any = None
    cache_control: CacheControl | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of the conversation. `system` is a word of the operator between turns."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock] | None = None
    clear_at: str | None = None
    output_config: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool. Those without `type`, or of type custom, need a name and an `input_schema`."""

    type: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    name: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[str] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks first. `display` omitted leaves the text of thinking blocks empty."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1024, le=MAX_SEED)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: Any = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The JSON Schema that the text of the answer satisfies."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """How the answer is made."""

    effort: Effort | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """About the request. Has no effect."""

    user_id: Annotated[str, Meta(max_length=1024)] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    model: Name
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[ContentBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    context_management: dict[str, Any] | None = None
    compaction: dict[str, Any] | None = None
    betas: list[str] | None = None
    anthropic_beta: list[str] | None = None
    billing_policy: Any = None
    speed: Literal["standard", "fast"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages. With `max_tokens` 0 the prompt is only read into the cache."""

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_SEED)]
    stream: bool | None = None
    stop_sequences: list[Annotated[str, Meta(min_length=1)]] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Any = None
    thread: Any = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    fallbacks: Any = None
    fallback_credit_token: Any = None


# --- answers


class TokenCount(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """What output tokens were spent on."""

    thinking_tokens: int


class FinalUsage(msgspec.Struct, kw_only=True):
    """Token counts. The prompt is `input_tokens` + `cache_read_input_tokens`; nothing is billed for writing the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class Usage(FinalUsage, kw_only=True):
    """Token counts of a whole answer."""

    service_tier: Literal["standard"] = "standard"


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """What the model says."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """What the model thinks. `signature` names the text; it is taken back unread."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A call of one of the request's tools."""

    id: str
    name: str
    input: dict[str, Any] = {}


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AppliedEdits(msgspec.Struct, kw_only=True):
    """Edits of the context that were made: none, here."""

    applied_edits: list[dict[str, Any]] = []


class AnswerMessage(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/messages without `stream`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: Usage
    context_management: AppliedEdits | UnsetType = UNSET


class MessageStart(msgspec.Struct, kw_only=True, tag="message_start"):
    """The first event: the message without content."""

    message: AnswerMessage


class BlockStart(msgspec.Struct, kw_only=True, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: AnswerBlock


class TextDelta(msgspec.Struct, kw_only=True, tag="text_delta"):
    """More of a text block."""

    text: str


class ThinkingDelta(msgspec.Struct, kw_only=True, tag="thinking_delta"):
    """More of a thinking block."""

    thinking: str


class SignatureDelta(msgspec.Struct, kw_only=True, tag="signature_delta"):
    """The end of a thinking block."""

    signature: str


class InputDelta(msgspec.Struct, kw_only=True, tag="input_json_delta"):
    """More of a tool call's input, as JSON text."""

    partial_json: str


class BlockDelta(msgspec.Struct, kw_only=True, tag="content_block_delta"):
    """News of the open block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, kw_only=True, tag="content_block_stop"):
    """The open block is complete."""

    index: int


class StopDelta(msgspec.Struct, kw_only=True):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, kw_only=True, tag="message_delta"):
    """The message is complete; the counts are those of the whole message."""

    delta: StopDelta
    usage: FinalUsage
    context_management: AppliedEdits | UnsetType = UNSET


class MessageStop(msgspec.Struct, kw_only=True, tag="message_stop"):
    """The last event."""


class Ping(msgspec.Struct, kw_only=True, tag="ping"):
    """A sign of life."""


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping


class ThreadDetails(msgspec.Struct, kw_only=True):
    """Tells Anthropic's SDK to go on without a thread."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"


class ErrorBody(msgspec.Struct, kw_only=True):
    """What went wrong."""

    type: str
    message: str
    details: ThreadDetails | UnsetType = UNSET


class ErrorResponse(msgspec.Struct, kw_only=True):
    """Body of every error answer under /v1/messages, and the `error` event of a stream that failed."""

    type: Literal["error"] = "error"
    error: ErrorBody
