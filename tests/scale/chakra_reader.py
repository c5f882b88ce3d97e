"""A reader of Chakra traces by protobuf's wire format and the published schema, for tests alone.

It shares no code with the writer. Fields are those of schema/protobuf/et_def.proto of
mlcommons/chakra (21585d8), with their numbers and types.
"""

from collections.abc import Iterator
from typing import Any

VARINT, LENGTH = 0, 2
VALUES = {7: "int32", 9: "int64", 13: "uint64", 27: "bool", 29: "string"}
SCHEMA: dict[str, dict[int, tuple[str, str]]] = {
    "GlobalMetadata": {1: ("version", "string"), 2: ("attr", "AttributeProto*")},
    "AttributeProto": {
        1: ("name", "string"), 2: ("doc_string", "string"),
        **{number: (f"{kind}_val", kind) for number, kind in VALUES.items()},
    },
    "Node": {
        1: ("id", "uint64"), 2: ("name", "string"), 3: ("type", "uint64"),
        4: ("ctrl_deps", "uint64*"), 5: ("data_deps", "uint64*"),
        6: ("start_time_micros", "uint64"), 7: ("duration_micros", "uint64"),
        10: ("attr", "AttributeProto*"),
    },
}  # fmt: skip


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A base-128 number, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            assert shift <= 70, "a number of more than ten bytes"
            return value, at


def message(kind: str, data: bytes) -> dict[str, Any]:
    """The fields of a message; one that the schema does not have is an error."""
    found: dict[str, Any] = {}
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        name, of = SCHEMA[kind][key >> 3]
        value, at = varint(data, at)
        if key & 7 == LENGTH:
            body, at = data[at : at + value], at + value
            assert len(body) == value, "it ends within a field"
            several = _of_bytes(of, body)
        else:
            assert key & 7 == VARINT and of.rstrip("*") not in ("string", "AttributeProto")
            several = [_signed(of, value)]
        if of.endswith("*"):
            found.setdefault(name, []).extend(several)
        else:
            assert name not in found, f"two of {name}"
            (found[name],) = several
    return found


def _of_bytes(of: str, body: bytes) -> list[Any]:
    if of == "string":
        return [body.decode()]
    if of == "AttributeProto*":
        return [message("AttributeProto", body)]
    assert of == "uint64*"  # packed
    found: list[Any] = []
    at = 0
    while at < len(body):
        value, at = varint(body, at)
        found.append(value)
    return found


def _signed(of: str, value: int) -> int | bool:
    if of == "bool":
        assert value in (0, 1)
        return bool(value)
    return value - 2**64 if of.startswith("int") and value >= 2**63 else value


def messages(data: bytes) -> Iterator[bytes]:
    """Messages, each behind its length."""
    at = 0
    while at < len(data):
        size, at = varint(data, at)
        yield data[at : at + size]
        at += size
    assert at == len(data), "it ends within a message"


def trace(data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The metadata and the nodes of a file, each node with its attributes by name."""
    first, *rest = messages(data)
    nodes = [message("Node", body) for body in rest]
    for node in nodes:
        attributes = {each.pop("name"): each for each in node.pop("attr", [])}
        assert all(len(each) == 1 for each in attributes.values())  # a oneof
        node |= {name: next(iter(each.values())) for name, each in attributes.items()}
    return message("GlobalMetadata", first), nodes
