"""BLiMP (arXiv 1912.00582) of model folders of train.py: how often the right sentence is likelier.

    git clone https://github.com/alexwarstadt/blimp data/blimp
    python results/blimp.py data/blimp/data out/babylm/chck_{1,10,90}M out/babylm

A sentence's score is the sum of its tokens' log-probabilities, each hidden in its turn (Salazar et
al., arXiv 1910.14659), as BabyLM's pipeline has it, ties for the right one included. It prints the
accuracy of each field, in percent, and the mean over the 67 sets, all weighted equally.

--trust_remote_code=True uses the model.py in a folder instead of this clone's.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from model import gather_positions
from nanocram import model_folder
from nanocram.tokenizer import CLS, MASK, SEP, Tokenizer

BATCH_TOKENS = 8192


@torch.no_grad()
def score(model, texts, device):
    """The sum of log-probabilities of each text, a list of ids (T,): an array (N,)."""
    by_length = defaultdict(list)  # so that nothing is padded
    for i, ids in enumerate(texts):
        by_length[len(ids)].append(i)
    scores = np.zeros(len(texts))
    for length, which in by_length.items():
        n_texts = max(1, BATCH_TOKENS // length**2)
        for some in np.split(which, range(n_texts, len(which), n_texts)):
            ids = torch.tensor(np.array([texts[i] for i in some]), device=device)  # (N, T)
            positions = torch.arange(1, length - 1, device=device)  # not [CLS] and [SEP]
            hidden = ids[:, None].repeat(1, length - 2, 1)  # (N, T - 2, T)
            hidden[:, positions - 1, positions] = MASK
            logits = model(hidden.flatten(0, 1), positions.repeat(len(some))[:, None])
            labels = ids[:, 1:-1].reshape(-1, 1)
            log_probs = logits[:, 0].float().log_softmax(-1).gather(1, labels)
            scores[some] = log_probs.view(len(some), -1).sum(1).tolist()
    return scores


def load(folder, device, trust_remote_code):
    """A function of ids (B, T) and positions (B, K) to logits (B, K, V)."""
    if not trust_remote_code:
        return model_folder.load(folder, device)
    from transformers import AutoModelForMaskedLM

    model_folder.read_weights(Path(folder))  # transformers compares no checksum
    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    model.to(device).float().eval()  # it may have been saved in half precision
    return lambda ids, positions: gather_positions(model(ids).logits, positions)


def accuracies(folder, pairs, device, trust_remote_code):
    """{set: share of its pairs whose right sentence is at least as likely}, of a model folder."""
    model = load(folder, device, trust_remote_code)
    tokenizer = Tokenizer(Path(folder) / "tokenizer.json")
    texts = [pair[key] for pair in pairs for key in ("sentence_good", "sentence_bad")]
    ids = [[CLS, *tokenizer.encode(text).tolist(), SEP] for text in texts]
    good, bad = score(model, ids, device).reshape(-1, 2).T
    right = defaultdict(list)
    for pair, is_right in zip(pairs, good >= bad, strict=True):
        right[pair["UID"]].append(is_right)
    return {name: fmean(values) for name, values in right.items()}


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    flag = "--trust_remote_code=True"
    data, *folders = [word for word in sys.argv[1:] if word != flag]
    if not folders:
        sys.exit(__doc__)
    if unknown := [word for word in folders if not Path(word, "config.json").exists()]:
        sys.exit(f"{unknown[0]} is no model folder of train.py, nor {flag}")
    files = sorted(Path(data).glob("*.jsonl"))
    if not files:
        sys.exit(f"{data} has no .jsonl files: name the folder data of BLiMP's repository")
    pairs = [json.loads(line) for path in files for line in path.open(encoding="utf-8")]
    field_of = {pair["UID"]: pair["field"].replace("/", "_") for pair in pairs}
    fields = sorted(set(field_of.values()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("| model |", " | ".join([*fields, "all"]), "|\n| --- |" + " ---: |" * (len(fields) + 1))
    for folder in folders:
        try:
            shares = accuracies(folder, pairs, device, flag in sys.argv)
        except (OSError, ValueError) as e:
            sys.exit(str(e))
        means = [fmean(shares[u] for u in shares if field_of[u] == name) for name in fields]
        cells = [f"{100 * x:.1f}" for x in [*means, fmean(shares.values())]]
        print(f"| {folder} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
