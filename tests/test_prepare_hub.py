"""prepare.py as a process, against a stand-in of the Hub: kinds of data sets, faults, kills."""

import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, SMALL_DATA, last_line
from hub import StandIn

SLOW = pytest.mark.slow  # each run of prepare.py imports for seconds
FILES = ("tokenizer.json", "train.bin", "val.bin")
# Everything is small, so that a small data set is many blocks, batches and journals.
SMALL = {"sources.BLOCK": 20000, "prepare.BATCH": 20000, "prepare.ALONE": 3}
SMALL |= {"prepare.SAVE_EVERY": 0.02, "prepare.CHUNK": 20000, "prepare.MOVED": 50000}
SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import prepare
from nanocram import safety, sources
from nanocram.configurator import configure
if __name__ == "__main__":
    for name, value in json.loads(sys.argv.pop(1)).items():
        module, name = name.split(".")
        setattr(globals()[module], name, value)
    configure(vars(prepare), sys.argv[1:])
    safety.run(prepare.main, prepare.data_dir, "the same command goes on")
"""
CONFIGS = """---
configs:
- config_name: part
  data_files:
  - split: train
    path: sample/*
- config_name: all
  data_files:
  - split: train
    path: data/*
---
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory, texts):
    """A StandIn with data sets as FineWeb, C4, the Pile are laid out; a gated one, an empty one."""
    root = tmp_path_factory.mktemp("hub")
    some = [text[:6000] for text in texts[:240]]
    shards = [some[i::3] for i in range(3)]
    web = root / "datasets/some/web"
    (web / "sample").mkdir(parents=True)
    (web / "README.md").write_text(CONFIGS)
    for folder in ("some/gated", "some/c4", "some/pile", "some/other"):
        (root / "datasets" / folder).mkdir(parents=True)
    for i, shard in enumerate(shards):
        table = pyarrow.table({"id": range(len(shard)), "text": shard})
        pyarrow.parquet.write_table(table, web / f"sample/{i:03}.parquet", row_group_size=7)
        lines = "".join(json.dumps({"text": text, "url": "u"}) + "\n" for text in shard).encode()
        (root / f"datasets/some/c4/train-{i:05}-of-00003.json.gz").write_bytes(gzip.compress(lines))
        with pyarrow.CompressedOutputStream(
            root / f"datasets/some/pile/train-{i}.jsonl.zst", "zstd"
        ) as out:
            out.write(lines)
    (root / "datasets/some/gated/.gated").write_text("")
    pyarrow.parquet.write_table(table, root / "datasets/some/gated/train.parquet")
    (root / "datasets/some/other/test.jsonl").write_bytes(lines)
    stand_in = StandIn(root)
    yield stand_in
    stand_in.stop()


@pytest.fixture
def start(tmp_path, hub):
    """A function that starts prepare.py on the stand-in; its output goes into a pipe."""
    (tmp_path / "small_prepare.py").write_text(SCRIPT)
    hub.fault = None
    hub.requests.clear()
    processes = []

    def begin(folder, source="some/web:part", constants=(), **settings):
        values = SMALL_DATA | {"source": source, "data_dir": folder, "threads": 2} | settings
        flags = [f"--{name}={value}" for name, value in values.items()]
        environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        given = json.dumps(SMALL | dict(constants))
        command = [sys.executable, tmp_path / "small_prepare.py", given, *flags]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=environment, cwd=tmp_path, **pipe))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def end_of(process):
    """The process when it has ended, with its output as .stdout."""
    said, _ = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, said)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, hub):
    """The folder that local copies of some/web's files give."""
    out = tmp_path_factory.mktemp("expected") / "out"
    pattern = f"{hub.root}/datasets/some/web/sample/*.parquet"
    flags = [f"--{name}={value}" for name, value in SMALL_DATA.items()]
    command = [sys.executable, ROOT / "prepare.py", f"--source={pattern}", f"--data_dir={out}"]
    subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL, cwd=out.parent)
    return out


def same(first, second):
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in FILES)


SOURCES = ["some/web:part", *(pytest.param(f"some/{n}", marks=SLOW) for n in ("c4", "pile"))]


@pytest.mark.parametrize("source", SOURCES)
def test_data_sets_are_read_as_their_files_are(tmp_path, start, expected, source):
    done = end_of(start(tmp_path / "out", source))
    assert done.returncode == 0, done.stdout
    assert same(tmp_path / "out", expected)
    assert json.loads((tmp_path / "out/meta.json").read_text())["complete"]


@SLOW
def test_bodies_that_break_off_are_asked_for_again(tmp_path, start, hub, expected):
    cut = iter([False, False, True] * 4)
    hub.fault = lambda path: "cut" if path.startswith("/cdn/") and next(cut, False) else None
    done = end_of(start(tmp_path / "out"))
    assert done.returncode == 0, done.stdout
    assert not any(cut)
    assert same(tmp_path / "out", expected)


def reading_has_begun(folder):
    """Whether a journal knows of documents that were read."""
    path = Path(f"{folder}.partial/journal.json")
    return path.exists() and json.loads(path.read_text())["counts"]["read"] > 0


def break_the_line(hub, is_time, answer, seconds=1e9):
    """Answer files' bytes with a fault, for some seconds from when is_time() on."""
    begin = []

    def fault(path):
        if not path.startswith("/cdn/"):
            return None
        if not begin and is_time():
            begin.append(time.monotonic())
        return answer if begin and time.monotonic() < begin[0] + seconds else None

    hub.fault = fault


@SLOW
def test_a_dead_line_leaves_the_set_unfinished_until_it_is_back_or_a_part_is_accepted(
    tmp_path, start, hub, expected
):
    out, impatient = tmp_path / "out", {"sources.PATIENCE": 1.0}
    break_the_line(hub, lambda: reading_has_begun(out), "cut")
    for _ in range(2):
        done = end_of(start(out, constants=impatient))
        assert done.returncode == 1, done.stdout
        assert "--accept_partial=True" in last_line(done) and not out.exists()
    accepted = tmp_path / "accepted"
    shutil.copytree(tmp_path / "out.partial", tmp_path / "accepted.partial")
    done = end_of(start(accepted, constants=impatient, accept_partial=True))
    assert done.returncode == 0, done.stdout
    meta = json.loads((accepted / "meta.json").read_text())
    whole = json.loads((expected / "meta.json").read_text())
    assert not meta["complete"] and meta["errors"]
    assert 0 < meta["counts"]["read"] < whole["counts"]["read"]
    again = end_of(start(accepted))
    assert again.returncode == 1 and "holds a part of the text" in last_line(again)

    hub.fault = None
    done = end_of(start(out))
    assert done.returncode == 0, done.stdout
    assert same(out, expected)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the vocabulary", "the rows"])
def test_a_busy_server_is_waited_for(tmp_path, start, hub, expected, where):
    begun = {
        "the vocabulary": lambda: True,
        "the rows": lambda: reading_has_begun(tmp_path / "out"),
    }
    break_the_line(hub, begun[where], 503, seconds=60)
    done = end_of(start(tmp_path / "out"))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("no answer from the Hub") <= 2
    assert same(tmp_path / "out", expected)


@pytest.mark.slow
def test_a_server_that_ends_and_begins_again_is_waited_for(tmp_path, start, hub, expected):
    process = start(tmp_path / "out")
    while not reading_has_begun(tmp_path / "out"):
        time.sleep(0.01)
    hub.stop()
    time.sleep(40)
    hub.start()
    done = end_of(process)
    assert done.returncode == 0, done.stdout
    assert same(tmp_path / "out", expected)


def children_of(process):
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pids):
    end = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


@SLOW
def test_ctrl_c_ends_in_one_line_and_the_same_command_goes_on(tmp_path, start, expected):
    process = start(tmp_path / "out")
    while not reading_has_begun(tmp_path / "out"):
        time.sleep(0.01)
    children = children_of(process)
    for pid in (process.pid, *children):  # as a terminal does
        os.kill(pid, signal.SIGINT)
    done = end_of(process)
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout
    assert last_line(done) == "stopped: the same command goes on"
    wait_for_end(children)
    done = end_of(start(tmp_path / "out"))
    assert done.returncode == 0, done.stdout
    assert same(tmp_path / "out", expected)


@pytest.mark.slow
def test_kills_at_any_moment_change_nothing(tmp_path, start, hub, expected):
    """25 times; each time the same command is killed once more, or comes to its end."""
    rng, kills, went_on, finished = random.Random(0), 0, 0, 0
    out = tmp_path / "out"
    while kills < 25:
        begun = reading_has_begun(out)
        process = start(out)
        time.sleep(rng.uniform(0.5, 4.0))
        if begun or rng.random() < 0.5:  # in mid-stream, as soon as there is something new
            read = len(hub.requests)
            while process.poll() is None and len(hub.requests) < read + rng.randrange(12):
                time.sleep(0.001)
        children = children_of(process)
        is_over = process.poll() is not None
        process.kill()
        done = end_of(process)
        wait_for_end(children)
        kills += not is_over
        went_on += "going on behind" in done.stdout
        if out.exists():
            assert same(out, expected)
            finished += 1
            shutil.rmtree(out)
    done = end_of(start(out))
    assert done.returncode == 0, done.stdout
    assert same(out, expected)
    print(f"\n{kills} kills, {went_on} runs went on, {finished} came to their end between them")
    assert went_on >= 5


@pytest.mark.parametrize(
    "source, message",
    [
        ("some/gated", "hf auth login"),
        ("some/web", "NAME:CONFIG"),
        ("some/nothing", "check the name"),
        ("some/other", "it has no split 'train', but test"),
    ],
)
def test_what_the_hub_refuses_is_told_once(tmp_path, start, source, message):
    done = end_of(start(tmp_path / "out", source))
    assert done.returncode == 1
    assert message in last_line(done) and done.stdout.count(message) == 1
    assert "Traceback" not in done.stdout
    assert len([line for line in done.stdout.splitlines() if "default" not in line]) <= 2


def rss_of(pids):
    """MB of memory of processes, what they share counted for each."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.slow
@pytest.mark.parametrize("where", ["files", "hub"])
def test_memory_does_not_grow_with_a_parquet_file(tmp_path, start, hub, texts, where):
    """60 MB of text beside 700 MB of another column, in groups of 1,000 rows."""
    path = hub.root / "datasets/some/large/train.parquet"
    if not path.exists():
        path.parent.mkdir()
        long = "\n".join(texts)
        with pyarrow.parquet.ParquetWriter(
            path, pyarrow.schema([("blob", pyarrow.binary()), ("text", pyarrow.string())])
        ) as file:
            for group in range(20):
                some = [long[3000 * i : 3000 * i + 3000] for i in range(1000)]
                some = [f"{group} {i} {text}" for i, text in enumerate(some)]
                blobs = [os.urandom(35000) for _ in some]
                file.write_table(pyarrow.table({"blob": blobs, "text": some}))
    source = {"files": path, "hub": "some/large"}[where]
    ordinary = {"sources.BLOCK": 8 << 20, "prepare.BATCH": 1 << 18, "prepare.CHUNK": 1 << 20}
    process = start(tmp_path / "out", source, ordinary, vocab_sample_mb=5)
    seen = []
    while process.poll() is None:
        memory = rss_of([process.pid, *children_of(process)])
        if reading_has_begun(tmp_path / "out"):
            seen.append(memory)
        time.sleep(0.05)
    done = end_of(process)
    assert done.returncode == 0, done.stdout
    print(f"\n{where}: {seen[0]:.0f} MB at the beginning, {max(seen):.0f} at most")
    assert max(seen) < 1000
