"""The checks of `python -m tools.checks` find what they are for, on files that break each rule."""

from pathlib import Path

import pytest

from tools.checks import commits, docstrings, layout, links, names, unused
from tools.checks.source import Repository


def repository(root: Path, **files: str) -> Repository:
    """A directory with these files; `__` in a name stands for a slash, the last `_` for the dot."""
    paths = []
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        path = f"{stem.replace('__', '/')}.{suffix}"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        paths.append(path)
    return Repository(root, paths)


def test_retired_identifier_is_found_as_name_and_as_part(tmp_path: Path) -> None:
    found = repository(tmp_path, services__a_py="class RoomPool:\n    has_room = 1\n\ndef f(headroom): pass\n")
    assert [problem.split(": ")[1] for problem in names.retired_words(found)] == ["RoomPool", "has_room"]


def test_retired_file_name_is_found(tmp_path: Path) -> None:
    found = repository(tmp_path, services__idle_blocks_py="")
    assert names.retired_words(found) == [
        "services/idle_blocks.py: file name with retired word 'idle_blocks'; write eviction"
    ]


def test_retired_word_in_docs_is_found_and_ordinary_english_is_not(tmp_path: Path) -> None:
    found = repository(tmp_path, docs__page_md="There is room for more.\nSee wire.md for the messages.\n")
    assert names.retired_words(found) == ["docs/page.md:2: retired word 'wire.md'; write docs/design/protocol.md"]


def test_retired_words_in_native_code_and_the_protocol_are_found(tmp_path: Path) -> None:
    found = repository(
        tmp_path,
        services__a_h="// no room here\nint lanes;\nint num_room = 1;\n",
        proto__baton__wire__b_proto="message A {\n  uint32 life = 1;  // the life\n}\n",
        proto__baton__v1__c_proto="message A {\n  uint32 life = 1;\n}\n",
        docs__worn_workers_md="A worn worker.\n",
    )
    assert [problem.split("; ")[0] for problem in names.retired_words(found)] == [
        "services/a.h:3: num_room: retired word 'room'",
        "proto/baton/wire/b.proto:2: life: retired word 'life'",
        "docs/worn_workers.md: file name with retired word 'worn'",
    ]


@pytest.mark.parametrize("text", ["See rule R3.", "By invariant I12 it holds.", "Row 4 of wire-notes.md says so."])
def test_references_by_number_into_a_document_are_found(text: str, tmp_path: Path) -> None:
    (problem,) = names.retired_words(repository(tmp_path, docs__page_md=f"Rule 3 and row 4 are fine.\n{text}\n"))
    assert problem.startswith("docs/page.md:2: retired word ")


def test_two_classes_or_modules_of_one_name_are_found(tmp_path: Path) -> None:
    found = repository(
        tmp_path, services__a__x_py="class A: pass\n", services__b__x_py="class A: pass\n", services__b____init___py=""
    )
    assert names.unique_classes(found) == ["class A is defined 2 times: services/a/x.py:1, services/b/x.py:1"]
    assert names.unique_modules(found) == ["module name x.py is used 2 times: services/a/x.py, services/b/x.py"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Return the next block.", None),
        ("Return the next block.\n\nRaises ValueError if there is none.", None),
        ("What comes next.", "begins with 'What'; state what it is or does"),
        ("`Which` worker is asked.", "begins with 'Which'; state what it is or does"),
        ("the next block", "the first paragraph does not end with a period: 'the next block'"),
        ("Return " + "x " * 40 + "now.", "the first sentence has 42 words, at most 40"),
        ("", "the docstring is empty"),
    ],
)
def test_first_line_of_a_docstring_is_a_statement(text: str, problem: str | None) -> None:
    assert docstrings.problem_of(text) == problem


def test_docstrings_of_public_code_are_checked_and_private_ones_are_not(tmp_path: Path) -> None:
    text = '"""Fine."""\nclass A:\n    """bad"""\n    def _b(self):\n        """bad"""\n'
    found = repository(tmp_path, services__a_py=text, services__b_py="x = 1\n")
    assert [problem.split(": ")[1] for problem in docstrings.first_lines(found)] == ["A"]
    assert docstrings.modules_without_docstring(found) == ["services/b.py: the module has no docstring"]


def test_docstrings_of_constants_and_fields_are_checked(tmp_path: Path) -> None:
    text = (
        '"""Fine."""\nA = 1\n"""How long it waits."""\nB: int = 1\n"""Fine."""\nclass C:\n    d: int\n    """bad"""\n'
    )
    found = repository(tmp_path, services__a_py=text)
    assert [problem.split(": ")[0:2] for problem in docstrings.first_lines(found)] == [
        ["services/a.py:3", "A"],
        ["services/a.py:8", "d"],
    ]


def test_docstrings_whose_constant_was_moved_are_found(tmp_path: Path) -> None:
    text = '"""Fine."""\nA = 1\n"""Of A."""\n"""Of another one."""\nclass B:\n    c: int\n    """Of c."""\n'
    found = repository(tmp_path, tests__a_py=text)
    assert docstrings.stray_docstrings(found) == ["tests/a.py:4: a docstring below no constant"]


def test_links_to_missing_files_and_headings_are_found(tmp_path: Path) -> None:
    page = "# One two\n[a](b.md) [b](#one-two) [c](#three) [d](gone.md) [e](https://x.y/z)\n```\n[f](gone.md)\n```\n"
    found = repository(tmp_path, docs__a_md=page, docs__b_md="")
    assert links.broken_links(found) == [
        "docs/a.md: link to #three: the page has no such heading",
        "docs/a.md: link to gone.md: no such file",
    ]


def test_files_that_a_page_mentions_and_that_do_not_exist_are_found(tmp_path: Path) -> None:
    found = repository(
        tmp_path, docs__a_md="`services/baton/x.py` `x/y.py` `gone/z.py`", services__baton__x_py="", tests__x__y_py=""
    )
    assert links.missing_files(found) == ["docs/a.md: mentions `gone/z.py`: no such file"]


def test_wide_lines_and_large_folders_are_found(tmp_path: Path) -> None:
    wide = "word " * 23
    files = {f"services__p__m{number}_py": "" for number in range(layout.MAX_FILES + 1)}
    found = repository(
        tmp_path, docs__a_md=f"{wide}\n| {wide} |\n", services__q_py=f'"""{wide}"""\nx = "{"y" * 120}"\n', **files
    )
    assert [problem.rsplit(" columns", 1)[0].rsplit(": ", 1)[0] for problem in layout.wide_lines(found)] == [
        "docs/a.md:1",
        "services/q.py:1",
        "services/q.py:1",
        "services/q.py:2",
    ]
    assert layout.large_folders(found) == ["services/p has 17 modules, at most 16"]


def test_long_functions_are_found_and_exempt_ones_are_not(tmp_path: Path) -> None:
    def function(name: str, num_lines: int) -> str:
        return f"def {name}():\n" + "    x = 1\n" * (num_lines - 1)

    most = layout.MAX_FUNCTION_LINES
    found = repository(
        tmp_path,
        services__a_py=function("short", most) + function("long", most + 1),
        loadgen__plan__sources__sharegpt_py=function("replay_conversations", most + 1),
        tests__a_py=function("long", most + 1),
    )
    assert layout.long_functions(found) == [f"services/a.py:{most + 1}: long has 61 lines, at most 60"]


def test_modules_that_nothing_imports_are_found_and_programs_are_not(tmp_path: Path) -> None:
    found = repository(
        tmp_path,
        services__baton__a_py="from baton import b\nimport baton.c\nfrom baton.d import x\n",
        **{f"services__baton__{name}_py": "" for name in "bcde"},
        bench__f_py='if __name__ == "__main__":\n    pass\n',
        tests__g_py="import baton.e\n",
    )
    assert [problem.split(":")[0] for problem in unused.unimported_modules(found)] == [
        "services/baton/a.py",
        "services/baton/e.py",
    ]


def test_names_that_occur_only_at_their_definition_are_found(tmp_path: Path) -> None:
    text = (
        "LIMIT = 1\nUSED = 2\n\n@group.command()\ndef registered(): pass\n\nclass A:\n    field = USED\n"
        "    def method(self): pass\n    def __len__(self): pass\n    def on_url(self): pass\n"
    )
    found = repository(
        tmp_path, services__a_py=text, bench__b_py="A()\nunknown = 1\n", tests__c_py="A().method(LIMIT)\n"
    )
    assert unused.unused_names(found) == [
        "services/a.py:1: LIMIT is used nowhere; delete it",
        "services/a.py:9: method is used nowhere; delete it",
    ]


@pytest.mark.parametrize(
    ("subject", "is_fine"),
    [
        ("engine: plan the next step while one runs", True),
        ("docs, bench: publish raw figures", True),
        ("Engine: plan", False),
        ("plan the next step", False),
        ("engine: " + "x" * 65, False),
        ("engine: end with a period.", False),
    ],
)
def test_commit_subject_names_area_and_change(subject: str, is_fine: bool) -> None:
    assert (commits.problem_of(subject) is None) is is_fine
