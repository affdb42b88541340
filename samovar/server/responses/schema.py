"""Bodies of /v1/responses as typed records: what is accepted, what is answered, and what a stream holds.

Input items and tools stay plain values here: `items` and `tools` read them, one type after the other, by their tables.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from samovar.core.sampling_params import MAX_SEED
from samovar.server.openai.schema import Count, Effort, Int64, Positive, SamplingFields, StructuredOutputs

ShortText = Annotated[str, Meta(max_length=1024)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


# --- what is asked


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How much to think. No summary is ever made: the reasoning itself is given."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: str | None = None
    mode: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """What the text of an answer must look like; enforced, whatever `strict` says."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=256)] | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """Settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    """With `include_obfuscation`, deltas carry random characters that hide their length. Default: none."""

    include_obfuscation: bool | None = None


class ResponseRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Positive | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Include] | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    # Beyond OpenAI, under the names that chat has for them; those of sampling are inherited.
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_SEED)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Int64 | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None


class RetrieveQuery(msgspec.Struct, kw_only=True):
    """Query of GET /v1/responses/{response_id}. `starting_after` is the number of the last event already seen."""

    stream: bool | None = None
    starting_after: Count | None = None
    include: list[Include] = msgspec.field(default_factory=list)
    include_obfuscation: bool | None = None
    include_many: list[Include] = msgspec.field(name="include[]", default_factory=list)


class ItemsQuery(msgspec.Struct, kw_only=True):
    """Query of GET /v1/responses/{response_id}/input_items."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: list[Include] = msgspec.field(default_factory=list)
    include_many: list[Include] = msgspec.field(name="include[]", default_factory=list)


# --- what is answered


class ResponseTopLogprob(msgspec.Struct, kw_only=True):
    """One alternative at one position."""

    token: str
    logprob: float
    bytes: list[int]


class ResponseLogprob(ResponseTopLogprob, kw_only=True):
    """The chosen token at one position and its best alternatives."""

    top_logprobs: list[ResponseTopLogprob]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """A part of a message. `annotations` is always empty: nothing is cited here."""

    text: str = ""
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[ResponseLogprob] = msgspec.field(default_factory=list)


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """A part of a reasoning item."""

    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What the model said."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText] = msgspec.field(default_factory=list)


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought. Send it back with the next turn; `summary` is always empty."""

    id: str
    summary: list[Any] = msgspec.field(default_factory=list)
    status: ItemStatus = "in_progress"
    content: list[ReasoningText] = msgspec.field(default_factory=list)


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function tool. `id` is the item's, `call_id` the call's: outputs name the latter."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool; its input is free text."""

    id: str
    call_id: str
    name: str
    input: str = ""
    status: ItemStatus = "in_progress"
    namespace: str | UnsetType = UNSET


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """Where input tokens came from. Writing to the cache costs nothing here, and counts as nothing."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """What output tokens were used for."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts of one response."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails


class ResponseFailure(msgspec.Struct, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ReasoningEcho(msgspec.Struct, kw_only=True):
    """The reasoning settings in effect."""

    effort: str | None = None
    summary: None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/responses. `notices` says what of the request was skipped, and why."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    completed_at: int | None = None
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningEcho = msgspec.field(default_factory=ReasoningEcho)
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] = msgspec.field(default_factory=dict)
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    notices: list[str] | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event of a stream: each type has its own fields of these. `responses.grammar` has their order."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[ResponseLogprob] | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class ResponseInputTokens(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseDeleted(msgspec.Struct, kw_only=True):
    """Answer of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseItems(msgspec.Struct, kw_only=True):
    """Answer of GET /v1/responses/{response_id}/input_items: the chain of earlier responses first."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
