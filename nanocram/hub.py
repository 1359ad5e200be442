"""Files of the Hub's data sets: which there are, reading them as if they lay here, its errors."""

import re

from nanocram.sources import file_kind

HUB = "hf://"  # how the address of a Hub file begins
BLOCK = 16 << 20  # bytes of a Hub file in one request; the next one comes while one is read


def file_system():
    from huggingface_hub import HfFileSystem, logging

    logging.set_verbosity(logging.CRITICAL)  # prepare.py says what is to be said
    return HfFileSystem()


def files_of(name):
    """[[address, bytes]] of the training files of a Hub data set, NAME or NAME:CONFIG, as of now;
    raises ValueError where there are none, or of a kind that is not read."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    path, _, config = name.partition(":")
    fs = file_system()  # first, for it silences the library
    splits = datasets.load_dataset_builder(path, config or None).config.data_files or {}
    if "train" not in splits:
        raise ValueError(f"it has no split 'train', but {', '.join(map(str, splits)) or 'none'}")
    files = [str(file) for file in splits["train"]]
    if unknown := [file for file in files if not file_kind(file)]:
        raise ValueError(f"{unknown[0]} is of no kind that is read")
    folders = {file.rpartition("/")[0] for file in files}
    sizes = {HUB + entry["name"]: entry["size"] for name in folders for entry in fs.ls(name)}
    return [[file, sizes.get(file, 0)] for file in files]


def open_bytes(path):
    """A file to read and to seek in; one of the Hub is streamed in blocks as if it lay here."""
    if not path.startswith(HUB):
        return open(path, "rb")
    ahead = {"cache_type": "background", "cache_options": {"maxblocks": 4}}
    return file_system().open(path, "rb", block_size=BLOCK, **ahead)


def explain(error):
    """What went wrong with a source, in one line, and what helps, where that is known."""
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    hints = {
        "offlinemode": "unset HF_HUB_OFFLINE, or give files of your own",
        "(localentrynotfound|connect)": "",  # no hint, so that read_file() tries again
        "gated": "accept its terms on its page at the Hub, then type: hf auth login",
        "(config name is missing|builderconfig)": "name one as NAME:CONFIG",
        "zstd.* memory": "zstd -d --long=31 makes a file that is read",
        r"\w*notfound": "check the name; for a private one type: hf auth login",
    }
    found = (hint for words, hint in hints.items() if re.search(rf"\b{words}", why, re.IGNORECASE))
    return why, next(found, "")
