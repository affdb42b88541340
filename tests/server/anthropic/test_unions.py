"""Every type and field of the official SDK's requests is used, skipped with a notice, or refused by name."""

from __future__ import annotations

import re
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import typing_extensions
from anthropic.types import (
    beta,
    content_block_param,
    document_block_param,
    message_count_tokens_params,
    message_create_params,
    thinking_config_param,
    tool_choice_param,
    tool_result_block_param,
    tool_union_param,
)
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params

from samovar.server.anthropic import unions
from samovar.server.anthropic.client_tools import FAMILIES
from samovar.server.anthropic.schema import CountTokensRequest, MessagesRequest, Thinking, ToolChoice


def literals(annotation: Any, module: str) -> set[str]:
    """The strings of every Literal in an annotation."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = eval(annotation.__forward_arg__, vars(sys.modules[module]))
    if typing.get_origin(annotation) is typing.Literal:
        return set(typing.get_args(annotation))
    found: set[str] = set()
    for inner in typing.get_args(annotation):
        found |= literals(inner, module)
    return found


def types_of(union: Any) -> set[str]:
    """The values of `type` that a union of TypedDicts and models knows."""
    if typing.get_origin(union) is typing.Union:
        return set().union(*(types_of(member) for member in typing.get_args(union)))
    if typing.get_origin(union) is typing.Annotated:
        return types_of(typing.get_args(union)[0])
    if typing_extensions.is_typeddict(union):
        return literals(union.__annotations__["type"], union.__module__) or {f"no type in {union.__name__}"}
    if hasattr(union, "model_fields"):
        return literals(union.model_fields["type"].annotation, union.__module__)
    return set()


def _covered(found: set[str], *tables: Any) -> None:
    assert len(found) > 2
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names)), "in two tables"
    assert found <= set(names), f"unknown to us: {found - set(names)}"


def test_blocks() -> None:
    """Both unions of content blocks."""
    found = types_of(content_block_param.ContentBlockParam) | types_of(beta.BetaContentBlockParam)
    _covered(found, unions.USED_BLOCKS, unions.SKIPPED_BLOCKS, unions.REFUSED_BLOCKS)
    assert len(found) > 20


def test_blocks_of_results() -> None:
    """What a tool's result may hold."""
    found = types_of(tool_result_block_param.Content) | types_of(beta.beta_tool_result_block_param.Content)
    _covered(found, unions.USED_IN_RESULT, unions.REFUSED_IN_RESULT)


def test_sources() -> None:
    """Where documents come from."""
    found = types_of(document_block_param.Source) | types_of(beta.beta_request_document_block_param.Source)
    _covered(found, unions.USED_SOURCES, unions.REFUSED_SOURCES)


def test_tools() -> None:
    """Both unions of tools."""
    found = types_of(tool_union_param.ToolUnionParam) | types_of(beta.BetaToolUnionParam)
    assert len(found) > 20
    _covered({unions.tool_family(kind) for kind in found}, [unions.CUSTOM_TOOL], FAMILIES, unions.SKIPPED_TOOLS)


def test_choices_and_thinking() -> None:
    """Small unions are types of our own."""
    ours = typing.get_type_hints(ToolChoice)["type"]
    assert types_of(tool_choice_param.ToolChoiceParam) <= set(typing.get_args(ours))
    ours = typing.get_type_hints(Thinking)["type"]
    assert types_of(thinking_config_param.ThinkingConfigParam) <= set(typing.get_args(ours))


@pytest.mark.parametrize(
    ("params", "ours"),
    [
        (message_create_params.MessageCreateParamsBase, MessagesRequest),
        (beta_create_params.MessageCreateParamsBase, MessagesRequest),
        (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
        (beta_count_params.MessageCountTokensParams, CountTokensRequest),
    ],
)
def test_fields(params: Any, ours: Any) -> None:
    """Every field of both endpoints, beta ones included, is a field of ours: none is unknown."""
    assert len(params.__annotations__) > 10
    assert set(params.__annotations__) <= set(ours.__struct_fields__)
    assert set(unions.SKIPPED_FIELDS) | set(unions.REFUSED_FIELDS) <= set(MessagesRequest.__struct_fields__)


def test_the_page_names_everything() -> None:
    """docs/anthropic.md has every name of the tables."""
    page = (Path(__file__).parents[3] / "docs" / "anthropic.md").read_text("utf-8")
    named = set(re.findall(r"`([^`\n]+)`", page))
    tables: list[Any] = [
        MessagesRequest.__struct_fields__, unions.USED_BLOCKS, unions.SKIPPED_BLOCKS, unions.REFUSED_BLOCKS,
        unions.USED_IN_RESULT, unions.REFUSED_IN_RESULT, unions.USED_SOURCES, unions.REFUSED_SOURCES, FAMILIES,
        unions.SKIPPED_TOOLS, unions.SKIPPED_INSIDE,
    ]  # fmt: skip
    assert {name for table in tables for name in table} - {"model"} <= named
