"""What `fig4_left` measures on its exact checkpoint without training: queries and keys, errors, long images."""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp import calibrate_attention
from crt_exp.data import images as data
from crt_exp.mechanism import Mechanism
from crt_exp.models import vision
from crt_exp.studies.memory import in_new_process, peak, reset_peak
from crt_exp.studies.predicted import predicted_error

CAPTURED = 64  # held-out images on which queries and keys are captured
LONG_BATCH = 8


def mechanism(name: str, m: int | None, seed: int = 0, **options: int) -> Mechanism:
    return Mechanism.of(name, m=m, seed=seed) if m else Mechanism.of(name, seed=seed, **options)


def shown(kept: vision.Kept, images: data.Images, rows: Sequence[int]) -> Tensor:
    """(len(rows), 3, H, W), as the model takes them."""
    return torch.stack([kept.transform(images.read(images.sources[row])) for row in rows])


def spread(images: data.Images, count: int) -> np.ndarray:
    """Rows of at most that many images, of all classes alike: files are listed class by class."""
    return np.unique(np.linspace(0, len(images) - 1, min(count, len(images))).astype(int))


def layers(run: str, dataset: str, name: str, m: int, seed: int) -> list[dict[str, Any]]:
    """Of each layer: mean |x + y|^2 of its heads, and the errors: predicted of one entry of the kernel matrix, measured
    of the layer's output, and uniform attention's."""
    kept, held_out = vision.load(run), data.load(dataset)["val"]
    model = mechanism(name, m, seed).swap(kept.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # layers beyond uniform attention: the report says it
        calibrate_attention(model, [shown(kept, held_out, spread(held_out, CAPTURED))])
    states = [block.attn.swapped for block in model.blocks]
    return [{"S": s.seen.mean_sq_sum.double().tolist(), "predicted": predicted_error(s.phi, s.seen, m),
             "measured": s.measured.relative_error, "uniform": s.measured.relative_uniform} for s in states]


def long(run: str, dataset: str, size: int, count: int, name: str, m: int | None,
         options: dict[str, int]) -> dict[str, float]:
    """Accuracy, loss, milliseconds an image, peak memory on images of `size` pixels a side, positions interpolated."""
    return in_new_process(long_here, run=run, dataset=dataset, size=size, count=count, name=name, m=m,
                          options=options)


def long_here(run: str, dataset: str, size: int, count: int, name: str, m: int | None,
              options: dict[str, int]) -> dict[str, float]:
    kept, held_out = vision.load(run, size), data.load(dataset)["val"]
    model = kept.model if name == "exact" else mechanism(name, m, **options).swap(kept.model)
    rows = spread(held_out, count)
    batches = [shown(kept, held_out, part) for part in np.array_split(rows, max(1, len(rows) // LONG_BATCH))]
    logits, times, before = [], [], reset_peak()
    with torch.no_grad():
        for batch in batches:
            start = time.perf_counter()
            logits.append(model(batch).float())
            times.append(1e3 * (time.perf_counter() - start) / len(batch))
    found, labels = torch.cat(logits), torch.from_numpy(held_out.labels[rows])
    return {"accuracy": (found.argmax(-1) == labels).double().mean().item(),
            "loss": nn.functional.cross_entropy(found, labels).item(), "images": len(rows),
            "ms_image": float(np.median(times[1:] or times)), "mib": (peak() - before) / 2**20,
            "tokens": model.patch_embed.num_patches}
