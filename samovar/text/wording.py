"""A dialogue in the words of the model's chat template: tools, effort, and where the prompt ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from samovar.core.sampling_params import SamplingParams
from samovar.errors import ValidationError
from samovar.text.chat_template import RenderedPrompt
from samovar.text.dialogue import Dialogue
from samovar.text.effort import check_effort, effort_variables
from samovar.text.messages import last_text
from samovar.text.tool_schema import check_tools, for_template

if TYPE_CHECKING:
    from samovar.text.prepare import Preparer


@dataclass(frozen=True, slots=True, kw_only=True)
class WordedDialogue:
    """A checked dialogue and its prompt's text. `without_opening` renders it without the beginning of the answer."""

    dialogue: Dialogue
    params: SamplingParams
    rendered: RenderedPrompt
    knows_tools: bool
    without_opening: Callable[[], str]

    @property
    def continued(self) -> str | None:
        """The text that the answer goes on with, if it does."""
        return last_text(self.dialogue.messages) if self.dialogue.continue_final_message else None


def prepare_dialogue(door: Preparer, dialogue: Dialogue, params: SamplingParams) -> WordedDialogue:
    """Check and render. Raises `ValidationError`."""
    check_tools(dialogue.tools, dialogue.tool_choice, door.limits)
    check_effort(dialogue.reasoning_effort)
    if params.structured_outputs is not None:
        if dialogue.structured is not None:
            message = "structured_outputs: the answer's form is asked for twice; say it once"
            raise ValidationError(message, parameter="structured_outputs")
        dialogue = replace(dialogue, structured=params.structured_outputs)
    tools = for_template(dialogue.tools) if dialogue.tool_choice != "none" else None
    template = door.chosen_template(dialogue.chat_template)
    reads, constants = template.reads(has_tools=bool(tools))
    failure: ValidationError | None = None
    effort, thinks = dialogue.reasoning_effort, door.formats[1] is not None
    for variables in effort_variables(effort, params.thinking_token_budget, reads, constants, thinks=thinks):
        render = _renderer(door, dialogue, tools, variables)
        try:
            rendered = render(dialogue.add_generation_prompt)
        except ValidationError as error:  # perhaps this level of effort is what the template refuses
            failure = failure or error
            continue
        return WordedDialogue(
            dialogue=dialogue,
            params=params,
            rendered=rendered,
            knows_tools=template.knows_tools(),
            without_opening=lambda render=render: render(False).text,  # type: ignore[misc]
        )
    assert failure is not None  # there is at least one set of variables
    raise failure


def _renderer(
    door: Preparer, dialogue: Dialogue, tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
) -> Callable[[bool], RenderedPrompt]:
    def render(add_generation_prompt: bool) -> RenderedPrompt:
        given = dialogue.template_variables
        return door.render(
            dialogue.messages,
            tools=tools,
            documents=dialogue.documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=dialogue.continue_final_message,
            chat_template=dialogue.chat_template,
            template_variables={**variables, **given} if isinstance(given, Mapping) else given,
        )

    return render
