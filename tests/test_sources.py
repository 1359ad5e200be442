"""Texts out of files: broken lines, quotes, the ends of documents; patience with the Hub."""

import io
import re

import pytest
from conftest import put
from hypothesis import given
from hypothesis import strategies as st

from nanocram import sources


def texts_in(path, column="text"):
    with open(path, "rb") as file:
        return list(sources.read_texts(file, str(path), column))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": b}\n', "line 3, column 10: Expecting value"),
        ("a.jsonl", "3\n", "3 is no object with columns"),
        ("a.csv", 'text,id\n"a ""b"" c",1\n"d" e,2\n', "line 3: ',' expected"),
        ("a.csv", 'text,id\nab,1\n"cd,2\nef,3\n', "line 3: unexpected end of data"),
        ("a.csv", "text;id\nab;1\n", "no column 'text', it has text;id: type --text_column"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path, name, content, why):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(why)):
        texts_in(tmp_path / name)


def test_quotes_and_bytes_that_are_no_utf8(tmp_path):
    """A quote is one in a .tsv; a row without the cell has no text."""
    path = tmp_path / "a.tsv"
    path.write_text('id\ttext\n1\t"open\n2\n3\tend"\textra\n')
    assert texts_in(path) == ['"open', None, 'end"']
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "\xfcber"}\n')
    assert texts_in(path) == ["a", "\ufffdber"]


@given(st.lists(st.sampled_from(["a", "bb", "", "  "])))
def test_blank_lines_end_documents(lines):
    found = sources.split_documents(io.StringIO("\n".join(lines)))
    ours = [text.strip() for text in found if text.strip()]
    theirs = [p.strip() for p in re.split(r"\n[ \n]*\n", "\n".join(lines)) if p.strip()]
    assert ours == theirs


def test_a_text_without_blank_lines_is_cut(monkeypatch):
    put(monkeypatch, sources, MAX_DOCUMENT=10)
    cut = list(sources.split_documents(io.StringIO("\n".join(["abcd"] * 5))))
    assert cut == ["abcd\nabcd\n", "abcd\nabcd\n", "abcd"]
    line = "0123456789" * 5 + "end"
    cut = list(sources.split_documents(io.StringIO(f"abc\n{line}\nxyz")))
    assert max(map(len, cut)) < 2 * 10 and "".join(cut) == f"abc\n{line}\nxyz"


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (ConnectionError("reset"), 5),
        (TimeoutError("slow"), 5),
        (FileNotFoundError("no such file"), 1),
        (ConnectionError("OfflineModeIsEnabled"), 1),
    ],
)
def test_what_may_pass_is_asked_for_again(monkeypatch, error, tries):
    monkeypatch.setattr(sources.time, "sleep", lambda seconds: None)
    calls = []

    def ask(value):
        calls.append(value)
        if len(calls) < 5:
            raise error
        return value

    if tries == 1:
        with pytest.raises(type(error)):
            sources.ask_again(ask, 7)
    else:
        assert sources.ask_again(ask, 7) == 7
    assert len(calls) == tries


def test_a_silent_hub_is_given_up_in_the_end(monkeypatch):
    put(monkeypatch, sources, PATIENCE=0.05)
    monkeypatch.setattr(sources.time, "sleep", lambda seconds: None)

    def ask():
        raise ValueError("wrapped") from ConnectionError("reset")

    with pytest.raises(ValueError):
        sources.ask_again(ask)
