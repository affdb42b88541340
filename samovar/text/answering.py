"""What answering a dialogue takes: how the answer is read, and the grammar it must follow."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from samovar.core.constraint import Constraint
from samovar.core.once import Once
from samovar.core.structured import StructuredOutputsParams
from samovar.core.tools import NamedTool, ToolDefinition
from samovar.errors import ValidationError
from samovar.text.answer import AnswerPlan
from samovar.text.dialogue import Dialogue
from samovar.text.formats.base import ReasoningFormat, ToolFormat
from samovar.text.grammar_source import GrammarSource
from samovar.text.lark import Lark
from samovar.text.reasoning import PromptEnd, prompt_end, reasoning_span
from samovar.text.tool_preamble import FORMAT as PREAMBLE_FORMAT
from samovar.text.wording import WordedDialogue

if TYPE_CHECKING:
    from samovar.text.prepare import Preparer

_once = Once(logging.getLogger(__name__))


def plan_dialogue(
    door: Preparer, asked: WordedDialogue, end: PromptEnd | None = None
) -> tuple[AnswerPlan, Constraint | None]:
    """How the answers of a rendered dialogue are read, and what the engine enforces on them.

    `end` says where the prompt leaves the model if the rendered text does not tell. Raises `ValidationError`.
    """
    dialogue, format = asked.dialogue, door.formats[1]
    if end is None:
        end = "free" if format is None else _end_of(asked, format)
    plan = plan_answer(dialogue, _tool_format(door, asked), format, begins_in_reasoning=end == "open")
    grammar = answer_grammar(dialogue, plan, door.needed_grammar()) if needs_grammar(dialogue) else None
    budget = asked.params.thinking_token_budget
    has_budget = budget is not None and budget >= 0
    if has_budget and format is None:
        _once.warn("thinking_token_budget changes nothing: how this model marks its reasoning is not known")
    if format is None or door.tokenizer is None or not (grammar is not None or has_budget):
        return plan, None if grammar is None else Constraint(grammar=grammar)
    may_open = dialogue.reasoning_effort != "none"
    span = reasoning_span(door.tokenizer, format, end, budget, may_open=may_open)
    return plan, None if grammar is None and span is None else Constraint(grammar=grammar, reasoning=span)


def _end_of(asked: WordedDialogue, format: ReasoningFormat) -> PromptEnd:
    if not (asked.dialogue.continue_final_message or asked.dialogue.add_generation_prompt):
        return "free"
    return prompt_end(asked.rendered, format, continued=asked.continued, without_opening=asked.without_opening)


def _tool_format(door: Preparer, asked: WordedDialogue) -> ToolFormat | None:
    """How calls are written: as the template teaches, and where it teaches nothing, as `tool_preamble` does."""
    if not asked.dialogue.tools or asked.dialogue.tool_choice == "none":
        return None
    if asked.knows_tools and door.formats[0] is not None:
        return door.formats[0]
    if not asked.knows_tools:
        _once.warn("the chat template knows no tools: the system message tells of them, calls are in the hermes format")
    from samovar.text.formats.choose import tool_format  # loads every format

    return tool_format(PREAMBLE_FORMAT)


def plan_answer(
    dialogue: Dialogue, tools: ToolFormat | None, reasoning: ReasoningFormat | None, *, begins_in_reasoning: bool
) -> AnswerPlan:
    """How the answer is told apart. Without tools to call, or with choice "none", nothing is a call."""
    calls = bool(dialogue.tools) and dialogue.tool_choice != "none"
    return AnswerPlan(
        reasoning=reasoning,
        begins_in_reasoning=begins_in_reasoning,
        tools=tools if calls else None,
        definitions={tool.name: tool for tool in dialogue.tools} if calls else {},
        parallel=dialogue.parallel_tool_calls,
    )


def needs_grammar(dialogue: Dialogue) -> bool:
    """Whether the answer must follow a grammar."""
    if dialogue.structured is not None:
        return True
    if not dialogue.tools or dialogue.tool_choice == "none":
        return False
    return dialogue.tool_choice != "auto" or any(tool.strict for tool in dialogue.tools)


def answer_grammar(dialogue: Dialogue, plan: AnswerPlan, source: GrammarSource) -> str:
    """The checked grammar of what follows the reasoning. Raises `ValidationError` for what cannot be enforced.

    A required or named choice: calls and nothing else, all arguments as their schemas say. Structured output with tools
    that may be called: the one or the other. A strict tool that may be called: free text, then calls, in which the
    arguments of tools that are not strict are any object.
    """
    structured = dialogue.structured
    between = plan.reasoning.whole.between if plan.reasoning is not None and plan.reasoning.whole is not None else ()
    if plan.tools is None:
        assert structured is not None  # otherwise nothing asked for a grammar
        return checked_structured(structured, source, between)
    document = _with_calls(dialogue, plan.tools, source, between)
    try:
        source.check(document)
    except ValidationError as error:
        if structured is not None:
            raise
        message = str(error)
        if error.parameter is not None and message.startswith(error.parameter):
            message = message[len(error.parameter) :].lstrip(": ")
        raise ValidationError(f"tools: {message}", parameter="tools", value=error.value) from None
    return document


def checked_structured(params: StructuredOutputsParams, source: GrammarSource, between: Sequence[str] = ()) -> str:
    """The checked grammar of an answer that is nothing but structured output, after one of the texts of `between`."""
    if between:
        lark = source.lark()
        grammar = lark.document(_headed(lark, between, source.json_expression(params, lark)))
    else:
        grammar = source.structured(params)
    source.check(grammar)
    return grammar


def _headed(lark: Lark, between: Sequence[str], expression: str) -> str:
    return lark.seq(lark.any_of(*map(lark.text, between)), expression) if between else expression


def _naming_the_tool(error: ValidationError, tools: Sequence[ToolDefinition], source: GrammarSource) -> ValidationError:
    """The refusal of the tools' grammar, with the name of the first tool whose parameters are refused alone."""
    for tool in tools:
        try:
            source.lark(field="tools").json(tool.parameters)
        except ValidationError as found:
            message = f"tools: function {tool.name!r}: {str(found).removeprefix('tools: ')}"
            return ValidationError(message, parameter="tools", value=found.value)
    return error


def _with_calls(dialogue: Dialogue, format: ToolFormat, source: GrammarSource, between: Sequence[str]) -> str:
    lark, choice, tools = source.lark(field="tools"), dialogue.tool_choice, list(dialogue.tools)
    parallel, structured = dialogue.parallel_tool_calls, dialogue.structured
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.name]
    elif choice == "auto":
        tools = [tool if tool.strict else replace(tool, parameters={}) for tool in tools]
    try:
        calls = format.grammar(lark, tools, parallel)
    except ValidationError as error:
        raise _naming_the_tool(error, tools, source) from None
    if choice != "auto":
        return lark.document(calls)
    if structured is not None:
        form = _headed(lark, between, source.json_expression(structured, lark))
        return lark.document(lark.any_of(form, calls))
    if format.whole is not None:
        return lark.document(format.whole.free(lark, calls))
    return lark.document(lark.free_then(format.opens, calls, only_at_start=format.only_at_start))
