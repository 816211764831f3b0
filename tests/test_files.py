from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ConfigDict

from megatron_hetero.errors import ClusterError, FileFormatError, HeteroError
from megatron_hetero.files import (
    canonical_json,
    content_hash,
    document,
    read_json,
    read_yaml,
    validate_document,
    write_json,
)
from megatron_hetero.files.document import MAX_FILE_BYTES, MAX_YAML_BYTES
from megatron_hetero.units import parse_bandwidth


def _write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_yaml_is_the_core_schema_of_1_2(tmp_path: Path) -> None:
    text = "a: [1, 2.5, 1e9, .5, -7, NO, ~, 0x10, 0o17, '5', 12:30:45, 2020-01-01, true]\nb: {}\n"
    assert read_yaml(_write(tmp_path, "c.yaml", text)).data == {
        "a": [1, 2.5, 1e9, 0.5, -7, "NO", None, 16, 15, "5", "12:30:45", "2020-01-01", True],
        "b": {},
    }


def test_locate_gives_the_line_of_keys_and_items(tmp_path: Path) -> None:
    text = "version: 1\nnodes:\n  - name: a\n    count: 2\n  - name: b\n"
    document = read_yaml(_write(tmp_path, "c.yaml", text))
    assert document.locate(["nodes", 1]) == f"{document.path}:5"
    assert document.locate(["nodes", 0, "count"]) == f"{document.path}:4"
    # A key that the file lacks is located where it should have been; labels are passed over.
    assert document.locate(["nodes", 1, "count"]) == f"{document.path}:5"
    assert document.locate(["nodes", 0, "label", "count"]) == f"{document.path}:4"
    assert document.locate([]) == f"{document.path}:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", ':3: duplicate key "a", first on line 1; keep one of them'),
        ("b:\n  x: 1\n  x: 1", ':3: b: duplicate key "x", first on line 2; keep one of them'),
        ("a: &x 1", ":1: a: the anchor &x is not allowed"),
        ("a: 1\nb: *x", ":2: b: the alias *x is not allowed"),
        ("<<: {a: 1}", ":1: the merge key << is not allowed"),
        ("a: !!python/object:os.system x", ":1: a: the tag tag:yaml.org,2002:python/object"),
        ("a: !!str 5", ":1: a: the tag"),
        ("a: .nan", ":1: a: NaN and infinite numbers are not allowed"),
        ("a: -.Inf", ":1: a: NaN and infinite numbers are not allowed"),
        ("a: 1e999", ":1: a: NaN and infinite numbers are not allowed"),
        ("1: 2", ":1: the key 1 is not text; put it in quotes"),
        ("true: 2", ":1: the key True is not text"),
        ("? [a]\n: b", ":1: a list or mapping is used as a key"),
        ("a: 1\n---\nb: 2", ":3: a second document begins here; keep one"),
        ("", ":1: the file is empty"),
        ("# only a comment", ":1: the file is empty"),
        ("a: [b", ":1: a: not valid YAML"),
        ("x: 1\n\ta: b", ":2: not valid YAML"),
        ("a: b: c", ":1: not valid YAML: mapping values are not allowed here"),
        ("a: " + "[" * 40 + "]" * 40, "nested deeper than 32 levels"),
        ("a: " + "9" * 5000, ":1: a: a number of 5000 digits; the limit is 40"),
        (b"a: 1\nb: \xff", ":2: byte 0xff is not UTF-8 text; save the file as UTF-8"),
        (b"a: \x01", ":1: not valid YAML"),
        ("a: 1".encode("utf-16"), ":1: this is UTF-16 text, as Windows PowerShell writes with >"),
        ("a" * (MAX_YAML_BYTES + 1), ":1: larger than 4194304 bytes, the limit of such a file"),
    ],
)
def test_yaml_refusals_name_line_and_key(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = _write(tmp_path, "c.yaml", text)
    with pytest.raises(FileFormatError) as error:
        read_yaml(path)
    assert str(error.value).startswith(f"{path}:")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "a": 2}', ':2: duplicate key "a", first on line 1; keep one of them'),
        ('{"a": NaN}', ":1: a: NaN and infinite numbers are not allowed"),
        ('{"a": -Infinity}', ":1: a: NaN and infinite numbers are not allowed"),
        ('{"a": 1e999}', ":1: a: NaN and infinite numbers are not allowed"),
        ("[1,]", ":1: not valid JSON: a comma stands before ]; remove it"),
        ('{"a": 1,}', ":1: not valid JSON: a comma stands before }; remove it"),
        ('{"a" 1}', ":1: a: not valid JSON: expected :, found 1"),
        ('{"a": [1\n2]}', "not valid JSON: expected , or ], found 2"),
        ("[1] 2", ":1: something follows the end of the JSON value; remove it"),
        ("", ":1: not valid JSON: expected a value, found the end of the file"),
        ("[01]", ":1: not valid JSON: unexpected '01]'"),
        ('{"a":\n\n tru}', ':3: a: not valid JSON: "tru" is not a value'),
        ("['a']", ":1: not valid JSON: unexpected"),
        ("{1: 2}", ":1: not valid JSON: expected a key in quotes, found 1"),
        ('["\\q"]', ":1: not valid JSON: Invalid"),
        ('{"a": ' * 40, "nested deeper than 32 levels"),
        ("[" + "9" * 50 + "]", "a number of 50 digits; the limit is 40"),
        ("a" * (MAX_FILE_BYTES + 1), ":1: larger than 16777216 bytes, the limit of such a file"),
    ],
)
def test_json_refusals_name_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = _write(tmp_path, "p.json", text)
    with pytest.raises(FileFormatError) as error:
        read_json(path)
    assert str(error.value).startswith(f"{path}:")
    assert message in str(error.value)


@pytest.mark.parametrize("read", [read_yaml, read_json])
def test_files_of_too_many_values_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    monkeypatch.setattr(document, "MAX_VALUES", 1000)
    # The list is a value, too.
    assert len(read(_write(tmp_path, "most.json", "[" + "0," * 998 + "0]")).data) == 999
    with pytest.raises(FileFormatError, match=r":1: .*more than 1000 values, the limit of a file"):
        read(_write(tmp_path, "more.json", "[" + "0," * 999 + "0]"))


def test_a_string_of_escapes_takes_no_gigabytes(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.json", '["' + "\\u00e9" * 500_000 + '"]')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(read_json(path).data[0]) == 500_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("read", [read_yaml, read_json])
def test_unreadable_files_are_named(tmp_path: Path, read: Any) -> None:
    with pytest.raises(FileFormatError, match="absent: cannot be read: No such file"):
        read(tmp_path / "absent")
    with pytest.raises(FileFormatError, match="cannot be read: Is a directory"):
        read(tmp_path)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(_VALUES)
@settings(max_examples=200)
def test_json_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.mktemp("round-trip") / "p.json"
    write_json(path, data)
    assert read_json(path).data == data
    assert path.read_text().endswith("\n")


@given(st.text(alphabet='{}[],:"\\ntrue0123456789.eE+- \n', max_size=60))
@settings(max_examples=500)
def test_json_is_accepted_exactly_when_the_standard_library_does(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = _write(tmp_path_factory.getbasetemp(), "fuzz.json", text)
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(FileFormatError):
            read_json(path)
        return
    try:
        assert read_json(path).data == expected
    except FileFormatError as error:
        refused = ("duplicate key", "not allowed", "digits")
        assert any(reason in str(error) for reason in refused)


@given(st.binary(max_size=80) | st.text(alphabet="ab:-?&*!|>'\"[]{}%#,\n\t 1.~<", max_size=80))
@settings(max_examples=500)
def test_any_bytes_give_data_or_a_file_format_error(
    tmp_path_factory: pytest.TempPathFactory, content: str | bytes
) -> None:
    path = _write(tmp_path_factory.getbasetemp(), "fuzz", content)
    for read in (read_yaml, read_json):
        try:
            canonical_json(read(path).data)
        except FileFormatError as error:
            assert str(error).startswith(f"{path}:")


def test_equal_data_give_equal_bytes_and_an_equal_hash(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": [0.1, "é"]})
    write_json(tmp_path / "b.json", {"a": [0.1, "é"], "b": 1})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert content_hash({"b": 1, "a": 2}) == content_hash({"a": 2, "b": 1})
    assert content_hash({"a": 1}) != content_hash({"a": "1"})


def test_writing_replaces_a_file_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_json(path, {"old": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"new": float("nan")})
    assert read_json(path).data == {"old": 1}
    assert os.listdir(tmp_path) == ["p.json"]
    with pytest.raises(FileFormatError, match="cannot be written: there is no folder"):
        write_json(tmp_path / "absent" / "p.json", {})


def _bandwidth(text: str) -> str:
    parse_bandwidth(text)
    return text


class _Link(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
    bandwidth: Annotated[str, AfterValidator(_bandwidth)]


class _File(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
    version: int
    links: tuple[_Link, ...] = ()
    named: dict[str, _Link] = {}


def test_a_schema_reports_every_fault_with_its_line(tmp_path: Path) -> None:
    text = (
        "version: true\n"
        "links:\n"
        "  - {bandwidth: 25 Gb/s}\n"
        "  - bandwidth: '25'\n"
        "    latncy: 1\n"
        "  - {}\n"
        "named: {x: {bandwith: 1 GB/s}}\n"
        "bogus: 1\n"
    )
    document = read_yaml(_write(tmp_path, "c.yaml", text))
    with pytest.raises(ClusterError) as error:
        validate_document(document, _File, ClusterError)
    lines = str(error.value).replace(str(document.path), "c.yaml").splitlines()
    assert lines == [
        "c.yaml:1: version: input should be a valid integer; it is true",
        'c.yaml:4: links[1].bandwidth: "25" is a bandwidth without a unit; "b" is a bit and "B" '
        'a byte (8 bits): write for example "25 Gb/s" or "3.1 GB/s"',
        'c.yaml:5: links[1].latncy: unknown key "latncy"; allowed: bandwidth',
        'c.yaml:6: links[2]: the key "bandwidth" is missing; add it',
        'c.yaml:7: named.x.bandwith: unknown key "bandwith" (did you mean "bandwidth"?); allowed: '
        "bandwidth",
        'c.yaml:7: named.x: the key "bandwidth" is missing; add it',
        'c.yaml:8: bogus: unknown key "bogus"; allowed: version, links, named',
    ]


def test_a_schema_shows_no_screens_of_a_value(tmp_path: Path) -> None:
    document = read_yaml(_write(tmp_path, "c.yaml", f"version: {'x' * 5000}\n"))
    with pytest.raises(ClusterError, match=r'; it begins "x{199}$'):
        validate_document(document, _File, ClusterError)


def test_a_valid_document_becomes_an_instance(tmp_path: Path) -> None:
    path = _write(tmp_path, "p.json", '{"version": 1, "links": [{"bandwidth": "1 GB/s"}]}')
    instance = validate_document(read_json(path), _File, HeteroError)
    assert instance.links[0].bandwidth == "1 GB/s"
