"""inference.proto -> message classes, without a compiler: reads the part of the language that the file uses.

The text is the only description of the interface. Nothing generated is kept; a test compares what is read here with what
protoc reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "samovar.v1"
FILE = "samovar/v1/inference.proto"

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_FIELD, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "int32", "int64", "string", "uint32")
}
_TOKEN = re.compile(r"\s*(?://[^\n]*\n|(\"[^\"]*\"|[\w.]+|[{}();=<>,]))")


def source() -> str:
    """The text of the file."""
    return resources.files("samovar.server.grpc").joinpath("inference.proto").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Interface:
    """The classes of the messages by name, and the services' descriptor."""

    file: Any
    messages: dict[str, type[Any]]

    def __getitem__(self, name: str) -> type[Any]:
        return self.messages[name]


@cache
def interface() -> Interface:
    """The interface, registered in protobuf's default pool, where reflection looks."""
    pool = descriptor_pool.Default()
    described = read(source())
    pool.AddSerializedFile(described.SerializeToString())
    file = pool.FindFileByName(FILE)
    messages = {name: message_factory.GetMessageClass(kind) for name, kind in file.message_types_by_name.items()}
    return Interface(file, messages)


def read(text: str) -> Any:
    """The text as a FileDescriptorProto. Raises `SyntaxError` for what it does not know."""
    file = descriptor_pb2.FileDescriptorProto(name=FILE, syntax="proto3")
    words = _Words(list(_tokens(text)))
    enums = set(re.findall(r"^enum (\w+)", text, re.MULTILINE))
    while words.left:
        match words.take():
            case "syntax":
                words.expect("=", '"proto3"', ";")
            case "package":
                file.package = words.take()
                words.expect(";")
            case "message":
                _read_message(words, file.message_type.add(), enums)
            case "enum":
                _read_enum(words, file.enum_type.add())
            case "service":
                _read_service(words, file.service.add())
            case other:
                raise SyntaxError(f"{FILE}: {other!r} is not understood")
    return file


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if found is None:
            raise SyntaxError(f"{FILE}: {text[at : at + 20]!r} is not understood")
        at = found.end()
        if found[1] is not None:
            yield found[1]


@dataclass(slots=True)
class _Words:
    left: list[str]
    at: int = field(default=0)

    def __post_init__(self) -> None:
        self.left.reverse()

    def take(self) -> str:
        return self.left.pop()

    def expect(self, *words: str) -> None:
        for word in words:
            if (found := self.take()) != word:
                raise SyntaxError(f"{FILE}: {word!r} expected, {found!r} found")

    def accept(self, word: str) -> bool:
        if self.left[-1] != word:
            return False
        self.take()
        return True


def _read_message(words: _Words, message: Any, enums: set[str]) -> None:
    message.name = words.take()
    words.expect("{")
    optional = []
    while not words.accept("}"):
        if words.accept("oneof"):
            index = len(message.oneof_decl)
            message.oneof_decl.add(name=words.take())
            words.expect("{")
            while not words.accept("}"):
                _read_field(words, message, enums).oneof_index = index
        elif words.accept("map"):
            _read_map(words, message)
        else:
            is_optional = words.accept("optional")
            entry = _read_field(words, message, enums)
            if is_optional:
                entry.proto3_optional = True
                optional.append(entry)
    for entry in optional:  # each has a oneof of its own, after those that are written
        entry.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{entry.name}")


def _read_field(words: _Words, message: Any, enums: set[str]) -> Any:
    label = _FIELD.LABEL_REPEATED if words.accept("repeated") else _FIELD.LABEL_OPTIONAL
    kind, name = words.take(), words.take()
    words.expect("=")
    entry = message.field.add(name=name, number=int(words.take()), label=label)
    words.expect(";")
    if kind in _SCALARS:
        entry.type = _SCALARS[kind]
    else:
        entry.type = _FIELD.TYPE_ENUM if kind in enums else _FIELD.TYPE_MESSAGE
        entry.type_name = f".{PACKAGE}.{kind}"
    return entry


def _read_map(words: _Words, message: Any) -> None:
    """A map is a repeated message of key and value."""
    words.expect("<")
    key = words.take()
    words.expect(",")
    value = words.take()
    words.expect(">")
    name = words.take()
    words.expect("=")
    number = int(words.take())
    words.expect(";")
    entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
    entry.options.map_entry = True
    for at, (part, kind) in enumerate((("key", key), ("value", value)), 1):
        entry.field.add(name=part, number=at, label=_FIELD.LABEL_OPTIONAL, type=_SCALARS[kind])
    message.field.add(
        name=name,
        number=number,
        label=_FIELD.LABEL_REPEATED,
        type=_FIELD.TYPE_MESSAGE,
        type_name=f".{PACKAGE}.{message.name}.{entry.name}",
    )


def _read_enum(words: _Words, enum: Any) -> None:
    enum.name = words.take()
    words.expect("{")
    while not words.accept("}"):
        name = words.take()
        words.expect("=")
        enum.value.add(name=name, number=int(words.take()))
        words.expect(";")


def _read_service(words: _Words, service: Any) -> None:
    service.name = words.take()
    words.expect("{")
    while not words.accept("}"):
        words.expect("rpc")
        method = service.method.add(name=words.take())
        words.expect("(")
        method.input_type = f".{PACKAGE}.{words.take()}"
        words.expect(")", "returns", "(")
        if words.accept("stream"):
            method.server_streaming = True
        method.output_type = f".{PACKAGE}.{words.take()}"
        words.expect(")", ";")
