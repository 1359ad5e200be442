"""The model card: README.md of a run's folder, whose front matter the Hub reads."""

import json
from pathlib import Path

from nanocram.facts import read_facts
from nanocram.runlog import read_log
from nanocram.safety import extra, write_text

BEGIN = "---\n# written anew with every save: take this line out, and your edits stay\n"


@extra("README.md")
def write_card(folder, glue_table=""):
    """Write README.md into a run's folder, unless it has one that somebody wrote."""
    folder = Path(folder).resolve()
    path, name = folder / "README.md", folder.name
    evaluations = [line for line in read_log(folder) if "val_loss_15" in line and line["step"]]
    is_ours = not path.exists() or path.read_text("utf-8").startswith(BEGIN)
    if not (evaluations and is_ours):
        return
    facts, last = read_facts(folder), evaluations[-1]
    config = json.loads((folder / "config.json").read_text("utf-8"))
    trained = config["trained_on"]
    sources = " and ".join(f"`{source}`" for source in dict.fromkeys(trained["sources"]))
    trust = ", trust_remote_code=True" if "auto_map" in config else ""
    text = f"""{BEGIN}library_name: transformers
pipeline_tag: fill-mask
license: other  # yours to choose
tags: [masked-lm, cramming]
---

# {name}

A masked language model of {facts["parameters"]:,} parameters, pre-trained by nanocram: it has read
{trained["tokens"]:,} tokens of {sources} in rows of {trained["seq_len"]}.
Its last run had {last["step"]:,} steps on {facts["processes"]} × {facts["device"]}. Held-out loss:
{last["val_loss_15"]:.3f} nats per token with 15 % masked, {last["val_loss_25"]:.3f} with 25 %.

```python
from transformers import pipeline
fill = pipeline("fill-mask", model="{name}"{trust})
```

{glue_table}
"""
    write_text(path, text.rstrip() + "\n")
