"""What `pixels` draws from its models: images, and lower halves of test images beside the truth.

Each cell is two rows of pictures, as `python -m crt_exp.sample` writes them.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from crt_exp.data import images
from crt_exp.report import writing
from crt_exp.report.long_runs import HOME
from crt_exp.report.writing import new_figure, save_figure
from crt_exp.sample import Options, draw

SAMPLES, COMPLETED, TIMES = 8, 2, 3  # images drawn; test images, and how often each is completed


def drawings(overrides: Sequence[str], dataset: str) -> dict[str, list[str]]:
    """Of the model of a kept run, as PNG in base64: `samples` and, of COMPLETED test images, `completions`."""
    run, held_out = str(HOME.place(overrides)), images.load(dataset)["val"]
    chosen = np.linspace(0, len(held_out) - 1, COMPLETED + 2)[1:-1].astype(int)  # files are listed class by class
    return {"samples": [drawn(run, SAMPLES)],
            "completions": [drawn(run, TIMES, held_out.read(held_out.sources[i])) for i in chosen]}


def drawn(run: str, n: int, prompt=None) -> str:
    """prompt: a PIL.Image, whose lower half is drawn."""
    with TemporaryDirectory() as folder:
        path, begun = Path(folder) / "drawn.png", Path(folder) / "prompt.png"
        if prompt:
            prompt.save(begun)
        draw(Options(run=run, prompt=str(begun) if prompt else "", n=n, output=str(path)))
        return base64.b64encode(path.read_bytes()).decode()


def picture(encoded: str) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))


def write(name: str, found: Mapping[str, dict[str, list[str]]]) -> str:
    """Writes <name>.png in the folder of reports and returns the section that shows it. found: by the name of an
    attention."""
    widths = [SAMPLES, *COMPLETED * [1 + TIMES]]
    fig, axes = new_figure(len(found), len(widths), figsize=(15, 1.3 * len(found)), width_ratios=widths, squeeze=False)
    for row, (arm, each) in zip(axes, found.items()):
        for ax, encoded in zip(row, [*each["samples"], *each["completions"]]):
            ax.imshow(picture(encoded), cmap="gray", interpolation="nearest")
            ax.axis("off")
        row[0].set_title(arm, fontsize=9, loc="left")
    fig.tight_layout()
    writing.REPORT.mkdir(parents=True, exist_ok=True)
    save_figure(fig, writing.REPORT / f"{name}.png")
    return (f"## Drawn\n\nBy `python -m crt_exp.sample` from the model of the first seed, at temperature 1: {SAMPLES} "
            f"images; then {COMPLETED} test images, each the truth and {TIMES} images whose upper half is its own and "
            f"whose lower half is drawn.\n\n![Images drawn]({name}.png)\n")
