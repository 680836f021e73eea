"""Owns the chat template: rendering with Hugging Face's conventions.

A template is suffix-stable when the text of new messages does not depend on what came before. Then a growing
conversation needs only its new messages rendered; the recorded tokens of the past stay as they are (paper 5.1).
`gyre_proxy.proof` finds out for which messages that holds. Invariant: given texts cannot choose where a suffix
begins.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gyre_proxy.conversation import TEMPLATE_OWN, Message
from gyre_proxy.errors import BadRequest, TokenizerError
from gyre_proxy.form import find_form

_PRIOR = "\ufdd1prior\ufdd1"
_PRELUDE = (Message("user", "q"), Message("assistant", _PRIOR))


class _GenerationBlock(Extension):
    """Templates may mark what the model wrote with {% generation %}; for rendering the mark means nothing."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_DICT = frozenset(dir(dict))


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's own, which finds the fields of messages by way of an exception each; here they are looked up."""

    def getattr(self, obj: object, attribute: str) -> object:
        if type(obj) is dict and attribute not in _DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: object, ensure_ascii: bool = False, **options: object) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class ChatTemplate:
    """A compiled chat template with its fixed arguments (special tokens, enable_thinking, ...).

    `form` is how it takes messages.
    """

    def __init__(self, source: str, arguments: Mapping[str, object]) -> None:
        environment = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template does not compile: {error}") from error
        self.source = source
        self._words = _words(environment.parse(source))
        self._now: datetime | None = None
        self._adopt(arguments)

    def _adopt(self, arguments: Mapping[str, object]) -> None:
        taken = TEMPLATE_OWN.intersection(arguments)
        if taken:
            raise BadRequest(
                f"template arguments cannot set {', '.join(sorted(taken))}", "chat_template_kwargs"
            )
        self._arguments = dict(arguments)
        self.form = find_form(self._render)

    def with_arguments(self, arguments: Mapping[str, object]) -> "ChatTemplate":
        """The same template with further arguments, which override. Raises BadRequest for reserved names."""
        other = copy.copy(self)
        other._adopt({**self._arguments, **arguments})
        return other

    def at(self, now: datetime) -> "ChatTemplate":
        """The same template with its clock stopped, so that two renderings can be compared."""
        other = copy.copy(self)
        other._now = now
        return other

    def render(self, messages: Sequence[Message], tools: Sequence[dict] = (), generation: bool = True) -> str:
        """The whole prompt as text, with the beginning of an answer unless `generation` is false.

        Raises BadRequest with the template's own words when it refuses.
        """
        return self._render(self.form.messages(messages), list(tools), generation)

    def words(self) -> list[str]:
        """Strings that the template compares with or looks for, in their order."""
        return list(self._words)

    def suffix(self, messages: Sequence[Message]) -> str:
        """The text between an assistant's last sampled character and the next answer, turn end included."""
        return self.render((*_PRELUDE, *messages)).partition(_PRIOR)[2]

    def _render(self, messages: list[dict], tools: list[dict], generation: bool = True) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=generation,
                strftime_now=self._strftime,
                **self._arguments,
            )
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}") from error

    def _strftime(self, pattern: str) -> str:
        return (self._now or datetime.now()).strftime(pattern)


def _words(tree: jinja2.nodes.Template) -> tuple[str, ...]:
    """String constants in comparisons and in the arguments of calls, filters and tests."""
    asking = (jinja2.nodes.Compare, jinja2.nodes.Call, jinja2.nodes.Filter, jinja2.nodes.Test)
    found = [
        const.value
        for node in tree.find_all(asking)
        for const in node.find_all(jinja2.nodes.Const)
        if isinstance(const.value, str) and const.value.strip()
    ]
    return tuple(dict.fromkeys(found))
