import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxbucket.toolkit.errors import EnvironmentProblem, Problem, SpecError, UsageError
from nxbucket.toolkit.yaml_source import (
    MAX_FILE_BYTES,
    Document,
    ListNode,
    Node,
    ScalarNode,
    parse_yaml,
    read_yaml,
)

FILE = Path("model.yaml")


def plain(node: Node) -> Any:
    if isinstance(node, ScalarNode):
        return node.value
    if isinstance(node, ListNode):
        return [plain(item) for item in node.items]
    return {key: plain(entry.node) for key, entry in node.entries.items()}


def parse(text: str | bytes) -> Document:
    return parse_yaml(text.encode() if isinstance(text, str) else text, FILE)


def problems(text: str | bytes) -> list[Problem]:
    """What is wrong, whether it stopped the reading or not."""
    try:
        return list(parse(text).problems)
    except SpecError as err:
        return err.problems


def test_flow_and_block_lists_are_the_same_and_stay_lists() -> None:
    # B114
    document = parse("a: [1, 4]\nb:\n  - 1\n  - 4\nc: [x, y]\n")
    assert plain(document.root) == {"a": [1, 4], "b": [1, 4], "c": ["x", "y"]}


def test_false_is_false() -> None:
    assert plain(parse("a: false\nb: False\nc: null\nd:\ne: 'false'\n").root) == {
        "a": False, "b": False, "c": None, "d": None, "e": "false",
    }  # fmt: skip


def test_every_value_knows_its_place() -> None:
    entry = parse("# c\na: 1\nb:\n  c: [7, 8]\n").root.entries["b"].node
    assert not isinstance(entry, ScalarNode | ListNode)
    items = entry.entries["c"].node
    assert isinstance(items, ListNode)
    assert [(item.line, item.column) for item in items.items] == [(4, 7), (4, 10)]


@pytest.mark.parametrize(
    "text",
    [
        *("1_024", "0x100", "0o10", "0b11", "010", "1:30", "1e3", "1.0e+3", "2_048.5", "+5"),
        *(".5", ".inf", "-.INF", ".nan", "yes", "No", "ON", "off"),
    ],
)
def test_forms_yaml_readers_dispute_are_no_numbers_and_no_booleans(text: str) -> None:
    # B118, B119
    node = parse(f"a: {text}").root.entries["a"].node
    assert isinstance(node, ScalarNode)
    assert node.kind in ("odd", "float")
    assert node.kind == "odd" or text == "1.0e+3"


@pytest.mark.parametrize("text", ["0", "7", "2048", "-3", "999999999999999999"])
def test_plain_decimal_numbers_are_integers(text: str) -> None:
    assert plain(parse(f"a: {text}").root) == {"a": int(text)}


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [("cache:\n\turl: /tmp/c", 2, 1), ("a: [1,\t2]", 1, 7), ("a:\t1", 1, 3), ("\ta: 1", 1, 1)],
)
def test_a_tab_is_named_with_its_place(text: str, line: int, column: int) -> None:
    # B120
    [problem] = problems(text)
    assert problem.message == f"tab character at line {line} column {column}; use spaces"
    assert (problem.line, problem.column) == (line, column)


def test_a_duplicate_key_names_both_lines() -> None:
    [problem] = problems("a: 1\nb: 2\na: 3\n")
    assert problem.code == "duplicate-key"
    assert "line 1 and line 3" in problem.message


def test_a_duplicate_key_does_not_hide_what_follows() -> None:
    assert [p.code for p in problems("a: 1\na: 2\nb: {c: 1, c: 2}\nd: !!int 3\n")] == [
        "duplicate-key",
        "duplicate-key",
        "yaml-tag",
    ]


def test_plain_aliases_are_read_as_copies() -> None:
    # B122
    assert plain(parse("a: &x [1, 2]\nb: *x\nc: &y 4\nd: *y\n").root) == {
        "a": [1, 2], "b": [1, 2], "c": 4, "d": 4,
    }  # fmt: skip


def test_merge_keys_are_refused_by_name() -> None:
    # B122
    [problem] = problems("a: &x {b: 1}\nc:\n  <<: *x\n  b: 2\n")
    assert problem.code == "merge-key"
    assert "<<" in problem.message
    assert problem.line == 3


def test_an_alias_bomb_is_refused_fast_and_small() -> None:
    # B122
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    tracemalloc.start()
    begin = time.monotonic()
    [problem] = problems("\n".join(lines))
    seconds = time.monotonic() - begin
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert problem.code == "too-many-values"
    assert seconds < 1
    assert peak < 200e6


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "file-empty"),
        ("# nothing\n", "file-empty"),
        ("---\n", "not-a-mapping"),
        ("[1]", "not-a-mapping"),
        ("model", "not-a-mapping"),
        ("a: 1\n---\nb: 2\n", "several-documents"),
        ("a: !!python/object:os.system x", "yaml-tag"),
        ("a: !mine [1]", "yaml-tag"),
        ("a: *b", "alias-unknown"),
        ("a: &a [*a]", "alias-recursive"),
        ("[a]: 1", "key-not-a-word"),
        ("? [a]\n: 1", "key-not-a-word"),
        ("a: " + "[" * 50, "too-deep"),
        ("a: " + "{b: " * 5000, "too-deep"),
        ("a: [1", "yaml-syntax"),
        ("a: 'x", "yaml-syntax"),
        ('a: "\\UFFFFFFFF"', "yaml-syntax"),
        ('a: "\\ud800"', "control-character"),
        ("a: \x00", "control-character"),
        ("a: \x1b[2J", "control-character"),
        (b"\xef\xbb\xbfa: 1", "byte-order-mark"),
        ("a: 1".encode("utf-16"), "not-utf8"),
        (b"a: 1\nb: \xff", "not-utf8"),
        (b"a" * (MAX_FILE_BYTES + 1), "file-too-large"),
        ("a: [" + "1," * 9000, "too-many-values"),
    ],
)
def test_what_is_not_read_is_answered_in_a_sentence(text: str | bytes, code: str) -> None:
    found = problems(text)
    assert [p.code for p in found] == [code]
    assert found[0].message and found[0].hint


def test_a_missing_file_and_a_directory_are_usage_errors(tmp_path: Path) -> None:
    # B123
    with pytest.raises(UsageError, match="no such file"):
        read_yaml(tmp_path / "nope.yaml")
    with pytest.raises(UsageError, match="is a directory"):
        read_yaml(tmp_path)
    with pytest.raises(UsageError):
        read_yaml(tmp_path / ("x" * 5000))


def test_a_file_that_may_not_be_read_is_the_hosts_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(EnvironmentProblem, match="no permission"):
        read_yaml(tmp_path / "model.yaml")


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_a_tree_or_a_spec_error(content: bytes) -> None:
    problems(content)


YAML_ALPHABET = "ab:-?[]{},&*!|>'\"%@`#<= \n\t\\0129_.e+~xUu\x85\u2028"


@settings(deadline=None)
@given(st.text(YAML_ALPHABET, max_size=80))
def test_any_yaml_looking_text_is_a_tree_or_a_spec_error(text: str) -> None:
    problems(text)
