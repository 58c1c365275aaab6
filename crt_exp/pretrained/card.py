"""A model card for a model whose attention was swapped: what it has, how true it stays, how to load it."""

from pathlib import Path
from typing import Any

from torch import nn

from crt_exp import __version__
from crt_exp.swap import record

CARD = """---
library_name: {library}
tags: [crt_exp, linear-attention]
---
# {title}

{kind} whose attention was swapped with crt_exp {version}.

| mechanism | layers | options |
| --- | --- | --- |
{mechanisms}

{fidelity}

Load it as it was saved; `from_pretrained` alone gives its weights exact attention:

```python
import crt_exp
from {library} import {kind}

model = crt_exp.from_pretrained({kind}, "{title}")
```
"""
MEASURED = """`|output - exact| / |exact|` of each layer's attention on the batches of its calibration, and the same of
uniform attention, the mean of the values:

| layer | {name} | uniform |
| --- | ---: | ---: |
{rows}"""
UNKNOWN = "How far it is from exact attention was not measured: `crt_exp.calibrate_attention(model, batches)` does."


def card(model: nn.Module, folder: str | Path | None = None, *, advice: Any = None) -> str:
    """The card as Markdown, in the form of the Hugging Face hub; with `folder` written there as README.md too.

    advice: what `crt_exp.advise` returned for this model, whose table of losses and times then stands in the card.
    Raises ValueError where nothing is swapped, and where that folder has a README.md.
    """
    holders = [holder for holder in record.holders(model) if record.is_swapped(holder)]
    if not holders:
        raise ValueError(f"this {type(model).__name__} has no swapped attention that its configuration records: call "
                         "swap_attention on a model of transformers")
    saved, kind = record.record_of(holders[0]), type(holders[0]).__name__
    parts = [_fidelity(model), *([] if advice is None else [advice.markdown()])]
    library = type(holders[0]).__module__.partition(".")[0]
    text = CARD.format(title=Path(folder).name if folder else kind, kind=kind, version=__version__, library=library,
                       mechanisms="\n".join(_rows(saved)), fidelity="\n\n".join(parts))
    if folder is not None:
        file = Path(folder) / "README.md"
        if file.exists():
            raise ValueError(f"{file} is there already: move it away, or write the text that card(model) returns")
        file.write_text(text)
    return text


def _rows(saved: dict[str, Any]) -> list[str]:
    rows, layers = [], list(saved["layers"].values())
    for number, mechanism in enumerate(saved["mechanisms"]):
        given = {"m": mechanism.get("m"), "sampler": mechanism.get("sampler"), "seed": mechanism.get("seed"),
                 **mechanism.get("options", {})}
        settings = ", ".join(f"{key} = {value}" for key, value in given.items() if value is not None)
        rows.append(f"| {mechanism['name']} | {layers.count(number)} of {len(layers)} | {settings} |")
    return rows


def _fidelity(model: nn.Module) -> str:
    states = [(path.removesuffix(".swapped"), part) for path, part in model.named_modules()
              if path.endswith("swapped") and getattr(part, "measured", None) is not None]
    if not states:
        return UNKNOWN
    rows = [f"| {path} | {state.measured.relative_error:.3g} | {state.measured.relative_uniform:.3g} |"
            for path, state in states]
    return MEASURED.format(name=states[0][1].mechanism, rows="\n".join(rows))
