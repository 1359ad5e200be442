import io
import random

import pytest
from conftest import put

from nanocram import sources


class FlakyHub:
    """A file system of one file; every call but each third fails as a busy line does."""

    def __init__(self, data, error=None, fails=lambda n: n % 3):
        self.data = data
        self.calls = 0
        self.error = error or ConnectionError("reset")
        self.fails = fails

    def answer(self):
        self.calls += 1
        if self.fails(self.calls):
            raise self.error

    def info(self, address):
        self.answer()
        return {"size": len(self.data)}

    def open(self, address, mode, cache_type):
        self.answer()
        return io.BytesIO(self.data)


def put_hub(monkeypatch, flaky):
    put(monkeypatch, sources, hub=lambda: flaky, BLOCK=100)
    monkeypatch.setattr(sources.time, "sleep", lambda seconds: None)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1234])
def test_a_file_in_blocks_is_the_file(monkeypatch, size):
    """Whatever is read and sought, in any order, over a line that fails two times of three."""
    data = random.Random(size).randbytes(size)
    put_hub(monkeypatch, FlakyHub(data))
    file = io.BufferedReader(sources.HubFile("hf://x"), 64)
    assert file.read() == data
    rng = random.Random(1)
    for _ in range(60):
        start, length = rng.randint(0, size), rng.randint(0, 300)
        file.seek(start)
        assert file.read(length) == data[start : start + length]
    file.seek(-min(7, size), io.SEEK_END)
    assert file.read() == data[max(0, size - 7) :]


def test_a_silent_line_is_given_up_in_the_end(monkeypatch):
    put_hub(monkeypatch, FlakyHub(b"x", fails=lambda n: True))
    put(monkeypatch, sources, PATIENCE=0.05)
    with pytest.raises(sources.Silence):
        sources.HubFile("hf://x").read(1)


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("no such file"), ValueError("x"), ConnectionError("OfflineModeIsEnabled")],
)
def test_what_waiting_cannot_help_is_raised_at_once(monkeypatch, error):
    flaky = FlakyHub(b"x", error, fails=lambda n: True)
    put_hub(monkeypatch, flaky)
    with pytest.raises(type(error)):
        sources.HubFile("hf://x").read(1)
    assert flaky.calls == 1


@pytest.mark.parametrize("name", ["a.txt", "b.jsonl", "c.parquet", "d.jsonl.gz", "e.jsonl.zst"])
def test_reading_goes_on_at_any_document(tmp_path, corpus, name):
    from test_prepare import write_kinds

    write_kinds(tmp_path, corpus)
    (tmp_path / "a.txt").write_bytes(corpus.read_bytes())
    path = str(tmp_path / name)
    whole = [text for text, _ in sources.read_texts(path, "body")]
    assert len(whole) >= 40
    for start in (0, 1, 17, len(whole) - 1, len(whole)):
        assert [text for text, _ in sources.read_texts(path, "body", start)] == whole[start:]
    parts = [part for _, part in sources.read_texts(path, "body")]
    assert parts == sorted(parts) and parts[0] > 0 and parts[-1] == pytest.approx(1)
