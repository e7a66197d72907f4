import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import model_folder
from nxbucket.toolkit.errors import EnvironmentProblem, SpecError, UsageError
from nxbucket.toolkit.yaml_edit import with_bucket_lists, write_bucket_lists

FILE = Path("model.yaml")
TOKENS = "num_batched_tokens_buckets"
SEQS = "num_seqs_buckets"


def edited(text: str | bytes, *values: int, key: str = SEQS) -> str:
    return with_bucket_lists(text, FILE, {key: values})


def refused(text: str, *values: int) -> UsageError:
    with pytest.raises(UsageError) as caught:
        edited(text, *values)
    return caught.value


def test_a_list_on_one_line_keeps_its_comment_and_its_spacing() -> None:
    text = "neuron_config:\n  num_seqs_buckets: [ 1,8 ]  # [1, 8]\nserve: {port: 1}\n"
    after = "neuron_config:\n  num_seqs_buckets: [ 1,4,8 ]  # [1, 8]\nserve: {port: 1}\n"
    assert edited(text, 1, 4, 8) == after


def test_equal_lists_change_nothing() -> None:
    text = "a: &a [1, 2]\nneuron_config: {num_seqs_buckets: *a}\nb: *a"
    assert edited(text, 1, 2) == text
    assert edited(text.encode(), 1, 2) == text


def test_a_list_over_several_lines_keeps_the_lines_of_values_that_stay() -> None:
    text = """\
neuron_config:
  num_seqs_buckets: [
    1,   # alone
    # about two
    2,
    8    # the most
  ]  # end
"""
    after = """\
neuron_config:
  num_seqs_buckets: [
    # alone
    # about two
    2,
    4,
    8,    # the most
    16
  ]  # end
"""
    assert edited(text, 2, 4, 8, 16) == after
    assert edited(after, 2, 4, 8).count("8    # the most") == 1


def test_several_values_on_a_line_stay_together() -> None:
    text = "neuron_config:\n  num_seqs_buckets: [\n    1, 2, 4,  # few\n    32, 64,  # many\n  ]\n"
    after = "neuron_config:\n  num_seqs_buckets: [\n    1, 3, 4,  # few\n    # many\n    48,\n  ]\n"
    assert edited(text, 1, 3, 4, 48) == after


@pytest.mark.parametrize("indent", ["  ", "    "])
def test_a_block_list_keeps_comments_of_values_that_go(indent: str) -> None:
    text = """\
neuron_config:
  num_seqs_buckets:  # decode
  # sequences
  - 1  # alone
  # a few

  - 4  # four
  - 8
  # - 16
serve:
  port: 8000
"""
    after = """\
neuron_config:
  num_seqs_buckets:  # decode
  # sequences
  - 1  # alone
  - 2
  # a few

  # four
  - 6
  - 8
  # - 16
serve:
  port: 8000
"""
    text, after = (re.sub("(?m)^  (?=[-#])", indent, t) for t in (text, after))
    wanted = [1, 2, 6, 8]
    assert edited(edited(text, 1, 2, 4, 8), *wanted) == after
    assert edited(edited(text, 1, 6, 8), *wanted) == after


def test_a_key_that_is_not_there_comes_below_the_others() -> None:
    text = "neuron_config:\n    num_seqs_buckets:\n      - 1\n      # - 2\n\n# next\nserve: {}\n"
    line = "    num_batched_tokens_buckets: [128]\n"
    assert edited(text, 128, key=TOKENS) == text.replace("# - 2\n", f"# - 2\n{line}")


def test_comments_between_dashes_stay_with_their_list() -> None:
    text = "neuron_config:\n  num_seqs_buckets:\n  - 1\n  # - 2\n"
    assert edited(text, 128, key=TOKENS) == f"{text}  num_batched_tokens_buckets: [128]\n"


def test_a_section_that_is_not_there_comes_last() -> None:
    lists = {SEQS: [1, 2], TOKENS: [128]}
    section = f"neuron_config:\n  {TOKENS}: [128]\n  {SEQS}: [1, 2]"
    for before, after in (("model: x\n# end\n", "\n"), ("---\nmodel: x\n", "\n...\n# more")):
        assert with_bucket_lists(before + after[1:], FILE, lists) == before + section + after
    assert with_bucket_lists("model: x", FILE, lists) == f"model: x\n{section}"
    assert edited("{model: x}", 1) == "{model: x, neuron_config: {num_seqs_buckets: [1]}}"


def test_a_new_section_is_indented_as_the_others_are() -> None:
    text = "model: x\nserve:\n    port: 1\n"
    assert edited(text, 1) == f"{text}neuron_config:\n    num_seqs_buckets: [1]\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("neuron_config:  # c\nb: 1", "neuron_config:  # c\n  num_seqs_buckets: [1]\nb: 1"),
        ("neuron_config: ~  # c\nb: 1", "neuron_config:  # c\n  num_seqs_buckets: [1]\nb: 1"),
        ("neuron_config:\n  # c", "neuron_config:\n  num_seqs_buckets: [1]\n  # c"),
        ("neuron_config: {}  # c", "neuron_config: {num_seqs_buckets: [1]}  # c"),
        ("neuron_config: &a  # c", "neuron_config: &a {num_seqs_buckets: [1]}  # c"),
        ("{neuron_config: , b: 1}", "{neuron_config: {num_seqs_buckets: [1]} , b: 1}"),
        ("{neuron_config, b: 1}", "{neuron_config: {num_seqs_buckets: [1]}, b: 1}"),
        ("b: &b\nneuron_config: *b", "b: &b\nneuron_config: {num_seqs_buckets: [1]}"),
    ],
)
def test_an_empty_section_is_filled(before: str, after: str) -> None:
    assert edited(before, 1) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  num_seqs_buckets:  # c\n", "  num_seqs_buckets: [1, 2]  # c\n"),
        ("  num_seqs_buckets: ~  # c\n", "  num_seqs_buckets: [1, 2]  # c\n"),
        ("  num_seqs_buckets: []  # c\n", "  num_seqs_buckets: [1, 2]  # c\n"),
        ("  num_seqs_buckets:\n    # c\n    null\n", "  num_seqs_buckets:\n    # c\n    [1, 2]\n"),
        ("  'num_seqs_buckets': [3]\n", "  'num_seqs_buckets': [1, 2]\n"),
        ('  "num_seqs_buckets":\n  - 3', '  "num_seqs_buckets":\n  - 1\n  - 2'),
        ("  num_seqs_buckets:\n  - 2", "  num_seqs_buckets:\n  - 1\n  - 2"),
        ("  num_seqs_buckets:\n  - 1\n  - 2\n  - 3", "  num_seqs_buckets:\n  - 1\n  - 2"),
        ("  num_seqs_buckets: [1, 2, 4,]\n", "  num_seqs_buckets: [1, 2,]\n"),
        ("  num_seqs_buckets: &a [3]\n", "  num_seqs_buckets: &a [1, 2]\n"),
        ("  num_seqs_buckets: [&a 1]\n  x: *a\n", "  num_seqs_buckets: [&a 1, 2]\n  x: *a\n"),
        ("  ? num_seqs_buckets\n  : [1]\n", "  ? num_seqs_buckets\n  : [1, 2]\n"),
        (
            "  num_seqs_buckets: [\n    1\n  , 8 # c\n  ]",
            "  num_seqs_buckets: [\n    1,\n  # c\n  2\n  ]",
        ),
    ],
)  # fmt: skip
def test_other_ways_to_write_a_list(before: str, after: str) -> None:
    assert edited(f"neuron_config:\n{before}", 1, 2) == f"neuron_config:\n{after}"


def test_a_section_in_braces_gets_the_key_inside() -> None:
    text = "neuron_config: {num_seqs_buckets: [1, 2], a: b}"
    assert edited(text, 1) == "neuron_config: {num_seqs_buckets: [1], a: b}"
    assert edited(text, 7, key=TOKENS) == text.replace("b}", f"b, {TOKENS}: [7]}}")
    text = "neuron_config: {\n  num_seqs_buckets: [1]  # c\n}\n"
    after = f"neuron_config: {{\n  num_seqs_buckets: [1],  # c\n  {TOKENS}: [7]\n}}\n"
    assert edited(text, 7, key=TOKENS) == after


def test_an_alias_gets_a_list_of_its_own() -> None:
    text = "a: &a [1, 2]\nneuron_config:\n  num_seqs_buckets: *a  # c\nb: *a\n"
    assert edited(text, 1) == text.replace("*a  #", "[1]  #")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "neuron_config:\n  num_seqs_buckets: &a [1]\nb: *a\n",
            "model.yaml:2: *a on line 3 stands for this value too, and would change with it",
        ),
        ("neuron_config: &a\n  x: 1\nb: *a\n", "model.yaml:1: *a on line 3 stands for"),
        ("neuron_config: &a\nb: *a\n", "model.yaml:1: *a on line 2 stands for"),
        (
            "neuron_config:\n  num_seqs_buckets:\n  - &a 1\nb: *a\n",
            "model.yaml:3: *a on line 4 stands for",
        ),
        (
            "b: &a {x: 1}\nneuron_config: *a\n",
            "model.yaml:2: neuron_config stands for the mapping on line 1",
        ),
        (
            "neuron_config:\n  num_seqs_buckets:\n  -\n    1\n",
            "model.yaml:3: this entry is not on one line of its own",
        ),
        ("? neuron_config", "model.yaml: num_seqs_buckets cannot be set without a change to"),
        ("a: |\n  text", "model.yaml:1: this text ends with the file; end its last line first"),
    ],
)
def test_what_only_a_person_can_edit_is_refused_with_its_line(text: str, message: str) -> None:
    error = refused(text, 2, 3)
    assert error.message.startswith(message)
    assert error.hint == "edit it by hand, in neuron_config: num_seqs_buckets: [2, 3]"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\xef\xbb\xbfmodel: x", "byte-order-mark"),
        (b"model: \xe9", "not-utf8"),
        ("model: \ud800", "not-utf8"),
        (b"", "file-empty"),
        ("a: 1\na: 2", "duplicate-key"),
        ("neuron_config: 3", "wrong-type"),
        ("neuron_config: {num_seqs_buckets: 8}", "wrong-type"),
        ("neuron_config: {num_seqs_buckets: [1, 1_024]}", "wrong-type"),
        ("neuron_config: {num_seqs_buckets: [true]}", "wrong-type"),
        ("neuron_config: {num_seqs_buckets: [[1]]}", "wrong-type"),
    ],
)
def test_a_file_that_is_wrong_is_a_spec_error(content: bytes | str, code: str) -> None:
    with pytest.raises(SpecError) as caught:
        edited(content, 1)
    assert [problem.code for problem in caught.value.problems] == [code]


def test_only_bucket_lists_with_values_are_written() -> None:
    for lists in ({"block_size": [32]}, {SEQS: list[int]()}):
        with pytest.raises(UsageError, match="cannot be written"):
            with_bucket_lists("model: x", FILE, lists)


# ---- any file


@dataclass
class Draft:
    """A model file in the making, with what must survive an edit."""

    draw: Callable[[st.SearchStrategy[Any]], Any]
    lines: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Lines that hold neither list."""
    comments: list[str] = field(default_factory=list)

    def chance(self) -> bool:
        return bool(self.draw(st.booleans()))

    def comment(self) -> str:
        odd = self.draw(
            st.sampled_from(["", " é😀", " 'a", ' "', " [1, 2]", " - 3", " k: v", "#", ","])
        )
        self.comments.append(f"# <{len(self.comments)}>{odd}")
        return self.comments[-1]

    def at_end(self) -> str:
        return self.draw(st.sampled_from([" ", "  "])) + self.comment() if self.chance() else ""

    def add(self, line: str, *, is_list: bool = False) -> None:
        self.lines.append(line)
        if not is_list:
            self.kept.append(line)

    def between(self, indent: str, *, is_list: bool = False) -> None:
        if self.chance():
            blank = self.chance()
            self.add("" if blank else indent + self.comment(), is_list=is_list)


QUOTES = "'\""
VALUES = st.lists(st.integers(1, 12), max_size=6)
WANTED = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def add_list(draft: Draft, indent: str, key: str) -> None:
    """One list of the block form of neuron_config."""
    draw = draft.draw
    values = [str(value) for value in draw(VALUES)]
    key = draw(st.sampled_from([key, f'"{key}"', f"'{key}'"]))
    style = draw(st.sampled_from(["null", "one line", "lines", "block", "alias"]))
    if style == "alias":
        draft.add(f"{indent}{key}: *shared{draft.at_end()}", is_list=True)
    elif style == "null" or not values:
        null = draw(st.sampled_from(["", " ~", " null", " []"]))
        draft.add(f"{indent}{key}:{null}{draft.at_end()}", is_list=True)
    elif style == "one line":
        anchor = draw(st.sampled_from(["", f"&of_{key.strip(QUOTES)} "]))
        text = draw(st.sampled_from([", ", ",", " , "])).join(values)
        comma, pad = draw(st.sampled_from(["", ","])), draw(st.sampled_from(["", " "]))
        draft.add(f"{indent}{key}: {anchor}[{pad}{text}{comma}{pad}]{draft.at_end()}", is_list=True)
    elif style == "block":
        draft.add(f"{indent}{key}:{draft.at_end()}", is_list=True)
        inner = indent + draw(st.sampled_from(["", "  ", "   "]))
        for value in values:
            draft.between(inner, is_list=True)
            dash = draw(st.sampled_from(["- ", "-   "]))
            draft.add(f"{inner}{dash}{value}{draft.at_end()}", is_list=True)
    else:
        line = f"{indent}{key}: ["
        for index, value in enumerate(values):
            if draft.chance():
                draft.add(line + draft.at_end(), is_list=True)
                draft.between(f"{indent}  ", is_list=True)
                line = f"{indent}    "
            comma = index < len(values) - 1 or draft.chance()
            line += value + ("," if comma else "") + (" " if draft.chance() else "")
        if draft.chance():
            draft.add(line + draft.at_end(), is_list=True)
            draft.between(indent, is_list=True)
            line = f"{indent}  "
        draft.add(line + "]" + draft.at_end(), is_list=True)


def add_section(draft: Draft) -> None:
    draw = draft.draw
    style = draw(st.sampled_from(["block", "block", "block", "braces", "null"]))
    if style == "null":
        null = draw(st.sampled_from(["", " ~", " {}", " { }"]))
        draft.add(f"neuron_config:{null}{draft.at_end()}", is_list=True)
        return
    keys = draw(st.lists(st.sampled_from([TOKENS, SEQS, "other"]), min_size=1, unique=True))
    if style == "braces":
        entries = [f"{key}: {draw(VALUES)}" for key in keys]
        if draft.chance():
            draft.add(f"neuron_config: {{{', '.join(entries)}}}{draft.at_end()}", is_list=True)
            return
        draft.add("neuron_config: {" + draft.at_end(), is_list=True)
        for index, entry in enumerate(entries):
            draft.between("  ", is_list=True)
            comma = "," if index < len(entries) - 1 or draft.chance() else ""
            draft.add(f"  {entry}{comma}{draft.at_end()}", is_list=True)
        draft.add("}" + draft.at_end(), is_list=True)
        return
    indent = draw(st.sampled_from(["  ", "    "]))
    draft.add(f"neuron_config:{draft.at_end()}")
    for key in keys:
        draft.between(indent)
        if key == "other":
            other = draw(st.sampled_from(["[1, 2]", "'#'", "{a: [3]}"]))
            draft.add(f"{indent}kv_segment_size_buckets: {other}{draft.at_end()}")
        else:
            add_list(draft, indent, key)
            draft.between(indent + "  ")


OTHERS = [
    ["model: './a # b'"],
    ["dtype: float32"],
    ["serve:", "  port: 8000", "  num_seqs_buckets: [9]"],
    ["note: |", "  # no comment", "", "  num_seqs_buckets: [1]"],
    ["flags:", "- a", "- 'b # c'"],
    ["folded: a", "  b", "  c"],
    ["copy: *shared"],
    ["empty:"],
    ["flow: {a: [1,", "  2], b: *shared}"],
]


@st.composite
def model_files(draw: st.DrawFn) -> Draft:
    draft = Draft(draw)
    draft.between("")
    if draft.chance():
        draft.add("---")
    draft.add("base: &shared [2, 3]" + draft.at_end())
    parts: list[list[str] | None] = [*draw(st.lists(st.sampled_from(OTHERS), unique_by=id))]
    if draw(st.integers(0, 4)):
        parts.insert(draw(st.integers(0, len(parts))), None)
    for part in parts:
        draft.between("")
        if part is None:
            add_section(draft)
        else:
            for line in part:
                draft.add(line)
    if parts and parts[-1] and parts[-1][0] == "note: |":
        draft.add("last: 1")
    draft.between("  ")
    if draft.chance():
        draft.add("..." + draft.at_end())
        draft.between("")
    return draft


@settings(max_examples=300, deadline=None)
@given(
    draft=model_files(),
    lists=st.dictionaries(st.sampled_from([TOKENS, SEQS]), WANTED, min_size=1),
    newline=st.sampled_from(["\n", "\r\n"]),
    ended=st.booleans(),
)
def test_any_file_keeps_all_but_its_lists(
    draft: Draft, lists: dict[str, list[int]], newline: str, ended: bool
) -> None:
    text = newline.join(draft.lines) + (newline if ended else "")
    # A file of one line says nothing about the ends of its lines.
    newline = newline if newline in text else "\n"
    before = yaml.safe_load(text)
    new = with_bucket_lists(text, FILE, lists)

    wanted = before | {"neuron_config": (before.get("neuron_config") or {}) | lists}
    assert yaml.safe_load(new) == wanted

    found = [match[0] for match in re.finditer("# <[0-9]+>", new)]
    assert found == [comment[: comment.index(">") + 1] for comment in draft.comments]
    assert all(comment in new for comment in draft.comments)

    remaining = iter(new.split(newline))
    assert all(line in remaining for line in draft.kept)
    assert newline == "\n" or "\n" not in new.replace(newline, "")
    if draft.lines[-1] or ended:
        assert new.endswith(newline) == text.endswith(newline)

    assert with_bucket_lists(new, FILE, lists) == new
    assert with_bucket_lists(text.encode(), FILE, lists) == new


PIECES = [
    "neuron_config", "neuron_config:",
    "num_seqs_buckets", "num_seqs_buckets:", "num_seqs_buckets: ",
    "\n", "\n", "\n  ", "\n  ", "\n    ", " ", " ", "[", "]", "{", "}", "{}", ", ", ",", ": ", "- ",
    "? ", "1", "2", "1, 2", "~", "# c", " # c", "&a ", "&b", "*a", "*b", "|\n", "'", "...", "---",
    "x: ", "x", "\r", "\u2028",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["", "neuron_config:", "x: &a [1]\nneuron_config:"]), st.data())
def test_any_yaml_looking_text_is_edited_or_refused(head: str, data: st.DataObject) -> None:
    text = head + "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=20)))
    try:
        new = edited(text, 1, 3)
    except (SpecError, UsageError):
        return
    assert new.count("# c") == text.count("# c")
    assert edited(new, 1, 3) == new


def test_it_is_fast_for_a_large_file() -> None:
    text = (
        "model: x\n"
        + "# a line\n" * 10_000
        + "serve:\n"
        + "".join(f"  k{n}: {n}\n" for n in range(1500))
    )
    assert edited(text, 1).endswith("neuron_config:\n  num_seqs_buckets: [1]\n")


# ---- the file itself


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    model_folder(tmp_path / "llama")
    file = tmp_path / "model.yaml"
    file.write_bytes(
        b"model: llama  # \xc3\xa9\r\nmax_num_seqs: 8\r\nmax_model_len: 512\r\n"
        b"neuron_config:\r\n  num_seqs_buckets: [1, 8]  # decode\r\n"
    )
    return file


def test_the_file_is_edited_and_loaded(model_file: Path) -> None:
    model_file.chmod(0o640)
    before = model_file.read_bytes()
    spec = write_bucket_lists(model_file, {SEQS: (1, 4, 8), TOKENS: (128, 512)})
    assert spec.path == model_file
    assert spec.neuron_config.num_seqs_buckets == (1, 4, 8)
    assert spec.neuron_config.num_batched_tokens_buckets == (128, 512)
    line = b"  num_batched_tokens_buckets: [128, 512]\r\n"
    assert model_file.read_bytes() == before.replace(b"[1, 8]", b"[1, 4, 8]") + line
    assert model_file.stat().st_mode & 0o777 == 0o640
    assert names_in(model_file.parent) == ["llama", "model.yaml"]


def test_a_list_that_breaks_a_rule_leaves_the_file_as_it_was(model_file: Path) -> None:
    before = model_file.read_bytes()
    with pytest.raises(SpecError) as caught:
        write_bucket_lists(model_file, {SEQS: [1, 4]})
    (problem,) = caught.value.problems
    assert problem.place.startswith(f"{model_file}:5:")
    assert model_file.read_bytes() == before
    assert names_in(model_file.parent) == ["llama", "model.yaml"]


def test_a_file_with_these_lists_is_not_written(model_file: Path) -> None:
    model_file.chmod(0o444)
    inode = model_file.stat().st_ino
    assert write_bucket_lists(model_file, {SEQS: [1, 8]}).path == model_file
    assert model_file.stat().st_ino == inode


def test_a_symlink_stays_one_and_paths_start_at_its_folder(
    model_file: Path, tmp_path: Path
) -> None:
    target = tmp_path / "configs" / "prod.yaml"
    target.parent.mkdir()
    model_file.rename(target)
    model_file.symlink_to("configs/prod.yaml")
    spec = write_bucket_lists(model_file, {SEQS: [1, 2, 8]})
    assert (spec.path, spec.model_dir) == (model_file, tmp_path / "llama")
    assert model_file.is_symlink()
    assert b"[1, 2, 8]" in target.read_bytes()
    assert names_in(target.parent) == ["prod.yaml"]


def test_a_read_only_file_is_not_replaced(model_file: Path) -> None:
    model_file.chmod(0o444)
    with pytest.raises(EnvironmentProblem, match=r"model\.yaml is read-only") as caught:
        write_bucket_lists(model_file, {SEQS: [8]})
    assert caught.value.hint == f"chmod u+w {model_file}"


def test_a_folder_that_takes_no_new_file_is_answered_in_a_sentence(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", forbidden)
    with pytest.raises(EnvironmentProblem, match="cannot be written: Permission denied"):
        write_bucket_lists(model_file, {SEQS: [8]})


def test_a_file_that_changes_meanwhile_is_left_alone(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tempfile.mkstemp

    def edit_and_stage(prefix: str, dir: Path) -> tuple[int, str]:
        model_file.write_text("model: other\n")
        return stage(prefix=prefix, dir=str(dir))

    monkeypatch.setattr("tempfile.mkstemp", edit_and_stage)
    with pytest.raises(UsageError, match="was changed by someone else meanwhile"):
        write_bucket_lists(model_file, {SEQS: [8]})
    assert model_file.read_text() == "model: other\n"
    assert names_in(model_file.parent) == ["llama", "model.yaml"]


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        write_bucket_lists(tmp_path / "model.yaml", {SEQS: [8]})
