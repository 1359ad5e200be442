"""results/blimp.py against transformers, a token at a time."""

import json
from statistics import fmean

import torch
import transformers
from conftest import script, table_cells, write_model


def test_scores_are_those_of_transformers(tmp_path, data_dir, corpus):
    """Two sets of one field, of 15 and 5 pairs, count the same; a tie counts as right."""
    write_model(tmp_path / "model", data_dir)
    model = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "model", trust_remote_code=True
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")

    @torch.no_grad()
    def score(text):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        total = 0.0
        for i in range(1, ids.shape[1] - 1):
            hidden = ids.clone()
            hidden[0, i] = tokenizer.mask_token_id
            total += model(hidden).logits[0, i].log_softmax(-1)[ids[0, i]].item()
        return total

    words = corpus.read_text().split()
    pairs = [("syntax/semantics", "tie", "It was there.", "It was there.")]
    for i in range(20):
        some = words[10 * i : 10 * i + 3 + i % 5]
        set_name = "short" if i < 15 else "long"
        pairs.append(("morphology", set_name, " ".join(some), " ".join(reversed(some))))
    names = ("field", "UID", "sentence_good", "sentence_bad")
    lines = [json.dumps(dict(zip(names, pair, strict=True))) for pair in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    right = [100 * (score(good) >= score(bad)) for _, _, good, bad in pairs]
    sets = [fmean(right[:1]), fmean(right[1:16]), fmean(right[16:])]
    wanted = [fmean(sets[1:]), 100, fmean(sets)]
    printed = script("results/blimp.py", tmp_path, tmp_path / "model")
    assert table_cells(printed)[-1][1:] == [f"{share:.1f}" for share in wanted]
    assert 0 < wanted[0] < 100
