"""Bodies of the OpenAI endpoints as typed records: what is accepted, what is answered, and the source of /openapi.json.

Every known field has a type and a range here; a wrong one is answered with 400 and the field's name. `None` in a
request always means "not given". Limits that depend on the model are checked by `core.validation`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from samovar.core.sampling_params import MAX_SEED

Int64 = Annotated[int, Meta(ge=-(2**63), le=MAX_SEED)]
Count = Annotated[int, Meta(ge=0, le=MAX_SEED)]
Positive = Annotated[int, Meta(ge=1, le=MAX_SEED)]
LogprobCount = Annotated[int, Meta(ge=-1, le=MAX_SEED)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
ClientId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides text; only with `stream: true`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
JsonSchema = dict[str, Any] | bool
ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")]


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """The schema of `response_format`. It is enforced whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema: JsonSchema | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """What the answer must look like. `schema` beside "json_object" counts as one of "json_schema"."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's way of saying it: exactly one of the first six."""

    json: str | JsonSchema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """How tokens are chosen, beyond what OpenAI's own APIs agree on: chat, completions and responses."""

    top_k: Annotated[int, Meta(ge=-1, le=MAX_SEED)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    logit_bias: dict[str, float] | None = None


class GenerateFields(SamplingFields, kw_only=True):
    """Fields that chat and completions share."""

    model: str | None = None
    n: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    prompt_logprobs: LogprobCount | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_SEED)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    priority: Int64 | None = None
    request_id: ClientId | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: Positive | None = None
    user: str | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_SEED)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Literal["auto", "llguidance", "guidance"] | None = None
    grammar: str | None = None
    json_schema: JsonSchema | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message: text, refusal or thinking; media parts need a model that takes them."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """Name and arguments of a call in the history."""

    name: str
    arguments: str | dict[str, Any] | None = None


class HistoryToolCall(msgspec.Struct, kw_only=True):
    """A tool call that an assistant message of the history holds."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of the conversation. Fields beyond these are handed to the chat template as they are."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[HistoryToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function the model may call. `parameters` is the JSON Schema of its arguments; `strict` enforces it always."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, kw_only=True):
    """A tool of the request."""

    type: Literal["function"] = "function"
    function: FunctionTool


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """Another way to say `reasoning_effort`, `thinking_token_budget` and `include_reasoning`."""

    effort: Effort | None = None
    max_tokens: Count | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ReasoningFields(GenerateFields, kw_only=True):
    """Fields about what the model thinks before it answers."""

    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = None


class ToolFields(ReasoningFields, kw_only=True):
    """Fields about tools, and their names of 2023."""

    tools: list[ChatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionTool] | None = None
    function_call: str | dict[str, Any] | None = None


class ChatCompletionRequest(ToolFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None


class CompletionRequest(GenerateFields, kw_only=True):
    """Body of POST /v1/completions. `prompt` is a text, texts, token ids, or lists of token ids (not a mixture)."""

    prompt: str | list[str | int | list[int]]
    logprobs: LogprobCount | None = None


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """What generated tokens were spent on."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Token counts of one call, all choices together; a prompt shared by n choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class TopLogprob(msgspec.Struct, kw_only=True):
    """One alternative of one position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob, kw_only=True):
    """The chosen token of one position and its best alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of a chat choice, one entry a token."""

    content: list[ChatLogprob]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of a completion choice; the four lists are parallel. None stands where nothing is known."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, kw_only=True):
    """Log-probability of one token at one prompt position."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(msgspec.Struct, kw_only=True):
    """A call the model made. `arguments` is the text of a JSON object, if the answer was not cut."""

    name: str
    arguments: str


class MadeToolCall(msgspec.Struct, kw_only=True):
    """A call the model made, with the id that its result must name."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The generated message. `content` is null if there is nothing but calls."""

    role: str
    content: str | None
    refusal: str | None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[MadeToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: CalledFunction | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/chat/completions without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    num_truncated_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to a call: first its name, then pieces of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallChunk(msgspec.Struct, kw_only=True, omit_defaults=True):
    """News of one call. `id` and `type` come once, with the name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallChunk] | None = None
    function_call: FunctionDelta | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """News of one answer. `finish_reason` is null until the last chunk of the choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One `data:` line of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    num_truncated_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion; `index` counts prompts times n."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    num_truncated_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/completions, and one `data:` line of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """One model this server answers for."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "samovar"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[dict[str, Any]] = []


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages to be rendered with the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[ChatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """The text of token ids, special tokens included."""

    prompt: str


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong. `param` names the field as the caller spelled it; `code` is the HTTP status."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(msgspec.Struct, kw_only=True):
    """Body of every error answer, and the last `data:` line but one of a stream that failed."""

    error: ErrorDetail


class Version(msgspec.Struct, kw_only=True):
    """Answer of GET /version."""

    version: str


class Load(msgspec.Struct, kw_only=True):
    """Answer of GET /load: API calls in progress."""

    server_load: int


class Readiness(msgspec.Struct, kw_only=True):
    """Answer of GET /ready."""

    status: Literal["ready", "starting", "draining", "dead", "paused"]
    model: str | None = None
