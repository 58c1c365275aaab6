"""python -m crt_exp.predict run=DIR input=IMAGE_OR_FOLDER [--maps out.png]: classes of images, by a run of imagenet.

It prints the likeliest five classes of each image with their probabilities.
--maps draws where the model looks, by attention rollout: exact attention next to the linear one that the run was
trained with; for a run with exact attention next to FAVOR++, or what attention=... m=... name.
"""

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from crt_exp.arguments import read
from crt_exp.config import ConfigError, own_names
from crt_exp.data import DataError
from crt_exp.data import images as data
from crt_exp.hints import at_least, at_most
from crt_exp.mechanism import Mechanism
from crt_exp.models import vision
from crt_exp.nonfinite import NotFinite
from crt_exp.stored import yaml_object
from crt_exp import drawing
from crt_exp.drawing import markdown, new_figure, save_figure
from crt_exp.swap.rollout import rollout

NAMED, BATCH, DRAWN = 5, 16, 6     # classes of an image; images at once; images in the picture
OTHER = "favorpp"                 # what exact attention is drawn next to
IMAGES = "crt_exp.tasks.imagenet.ImageNet"


@dataclass(frozen=True)
class PredictOptions:
    run: str
    input: str
    maps: str | None = None
    attention: str | None = None
    m: Annotated[int, at_least(1), at_most(2**16)] | None = None     # beyond, noise and positions fill the memory
    size: Annotated[int, at_least(1), at_most(2**12)] | None = None
    names: str | None = None


class Read(NamedTuple):
    """An image as the model takes it, (3, H, W)."""

    name: str
    tensor: Tensor


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 after a mistake, which is said in one line or two."""
    try:
        predict(options_of(arguments))
    except (DataError, ConfigError, ValueError, OSError) as error:
        print(f"crt_exp.predict: error: {error}", file=sys.stderr)
        return 2
    return 0


def options_of(arguments: Sequence[str] | None) -> PredictOptions:
    """Raises ConfigError as `read` does."""
    given = parser().parse_args(arguments)
    return read(PredictOptions, [*given.options, *(f"maps={file}" for file in given.maps)])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m crt_exp.predict", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("options", nargs="+", metavar="KEY=VALUE",
                      help="run: its directory; input: an image, or a folder of images; maps: as --maps; size: "
                           "pixels of a side, where they are to be others than the run's; attention, m: what exact "
                           f"attention is drawn next to, of a run that has no other (default {OTHER}); names: a "
                           "folder of your own names, the --config-dir of that run")
    made.add_argument("--maps", metavar="FILE.png", action="append", default=[],
                      help=f"draw the attention rollout of the first {DRAWN} images")
    return made


def predict(options: PredictOptions) -> None:
    check_run(Path(options.run).expanduser())
    check_maps(options)
    with own_names([options.names] if options.names else []):
        kept = vision.load(options.run, options.size)
    beside = drawn_beside(kept.model, options) if options.maps else None  # before anything is computed
    files = files_of(Path(options.input).expanduser())
    results, first = [], []
    for at in range(0, len(files), BATCH):
        images = list(readable(files[at:at + BATCH], kept, alone=len(files) == 1))
        first += images[:DRAWN - len(first)]
        results += classified(kept, images)
    if not results:
        raise DataError(f"none of the {len(files)} files of {options.input} can be read as an image")
    print(markdown(["image", *(f"{place}." for place in range(1, 1 + len(results[0][1])))],
                   [[name, *(f"{label} {share:.3f}" for label, share in likely)] for name, likely in results]), end="")
    if beside is not None:
        draw(kept, options.run, beside, first, Path(options.maps))
        print(f"attention rollout of {len(first)} of {len(results)} images: {options.maps}")


def check_maps(options: PredictOptions) -> None:
    """Raises ConfigError for a picture that is no PNG, and for options of a picture where none is drawn."""
    if options.maps is not None and not options.maps.lower().endswith(".png"):
        raise ConfigError(f"maps={options.maps}: it is drawn as PNG, so give a name that ends in .png")
    unused = [f"{key}=..." for key in ("attention", "m") if getattr(options, key) is not None]
    if unused and options.maps is None:
        raise ConfigError(f"{' and '.join(unused)}: what exact attention is drawn next to, and nothing is drawn; give "
                          "--maps out.png, or leave it out")


def check_run(run: Path) -> None:
    """Raises DataError for a directory that is not there, and for a run of another task."""
    if not run.is_dir():
        raise DataError(f"run={run}: there is no such directory. Give that of a run of task=imagenet")
    if (run / "config.yaml").is_file():
        task = yaml_object(run / "config.yaml").get("task")
        target = task.get("_target_") if isinstance(task, dict) else None
        if target != IMAGES:
            raise DataError(f"run={run} is a run of {target}, which classifies no images: give one of task=imagenet")


def files_of(place: Path) -> list[Path]:
    """The image itself, or all images below the folder, in the order of their names. Raises DataError for none."""
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise DataError(f"input={place}: there is no such file or folder")
    files = sorted(place / name for name in data.image_files(place))
    if not files:
        raise DataError(f"input={place}: this folder holds no image ({' '.join(data.endings())})")
    return files


def readable(files: Sequence[Path], kept: vision.KeptClassifier, alone: bool) -> Iterator[Read]:
    """Those that are images; in a folder the others are named and left out."""
    for file in files:
        try:
            yield Read(str(file), kept.transform(data.read(file)))
        except data.Unreadable as error:
            if alone:
                raise
            print(f"crt_exp.predict: left out: {error}", file=sys.stderr)


@torch.no_grad()
def classified(kept: vision.KeptClassifier, read: Sequence[Read]) -> list[tuple[str, list[tuple[str, float]]]]:
    """The name of each image, and its likeliest classes with their probabilities."""
    if not read:
        return []
    shares = kept.model(torch.stack([each.tensor for each in read])).float().softmax(-1)
    if not bool(shares.isfinite().all()):
        raise NotFinite(f"{read[int((~shares.isfinite()).any(-1).nonzero()[0])].name}: the model's outputs are not "
                        "finite")
    best = shares.topk(min(NAMED, len(kept.classes)))
    return [(each.name, [(kept.classes[i], share) for i, share in zip(classes, shares)])
            for each, classes, shares in zip(read, best.indices.tolist(), best.values.tolist())]


# ---- where it looks

def drawn_beside(model: nn.Module, options: PredictOptions) -> dict[str, nn.Module]:
    """The model with exact and with linear attention, by the titles of their pictures.

    Raises ConfigError where another linear attention is asked for than the one that the run was trained with.
    """
    own = {part.swapped.mechanism for part in model.modules() if "swapped" in part._modules}
    asked = options.attention is not None or options.m is not None
    if own and asked:
        raise ConfigError(f"this run was trained with {', '.join(own)}: leave attention and m out, which are for a run "
                          "with exact attention")
    exact = Mechanism.of("exact").swap(copy.deepcopy(model))
    if own:
        return {"exact": exact, ", ".join(map(drawing.label, own)): model}
    other = Mechanism.parse(options.attention or OTHER, m=options.m)
    title = drawing.label(other.name) + (f", m = {other.m}" if other.m else "")
    return {"exact": exact, title: other.swap(copy.deepcopy(model))}


def looked_at(model: nn.Module, images: Tensor) -> Tensor:
    """(B, rows, columns): how much of each patch reaches what the head reads, by attention rollout."""
    flow, before = rollout(model, images), model.num_prefix_tokens
    read = flow[:, 0] if model.global_pool == "token" else flow[:, before:].mean(1)
    return read[:, before:].unflatten(1, model.patch_embed.dynamic_feat_size(images.shape[-2:]))


def pictures(run: str, images: Tensor) -> Tensor:
    """What the model is shown, (B, H, W, 3) between 0 and 1, of its input (B, 3, H, W)."""
    description = vision.checkpoint_of(run).description
    mean, std = (torch.tensor(values)[:, None, None] for values in (description.mean, description.std))
    return (images * std + mean).permute(0, 2, 3, 1).clamp(0, 1)  # rounding alone leaves that range


def draw(kept: vision.KeptClassifier, run: str, models: dict[str, nn.Module], read: Sequence[Read],
         place: Path) -> None:
    """An image a row: itself, and over it the rollout of each model, on a scale that both share."""
    images = torch.stack([each.tensor for each in read])
    shown, maps = pictures(run, images), {title: looked_at(model, images) for title, model in models.items()}
    likely = {title: [best[0] for _, best in classified(kept._replace(model=model), read)]
              for title, model in models.items()}
    columns = 1 + len(models)
    fig, axes = new_figure(len(read), columns, figsize=(2.9 * columns, 2.6 * len(read)), squeeze=False)
    for i, (each, row) in enumerate(zip(read, axes)):
        row[0].imshow(shown[i].numpy())
        row[0].set_title(Path(each.name).name, fontsize=8)
        both = torch.stack([rolled[i] for rolled in maps.values()])
        for ax, title in zip(row[1:], maps):
            ax.imshow(shown[i].numpy())
            drawn = ax.imshow(maps[title][i].numpy(), extent=row[0].images[0].get_extent(), alpha=0.65, cmap="viridis",
                              vmin=float(both.min()), vmax=float(both.max()))
            ax.set_title("{}: {} {:.2f}".format(title, *likely[title][i]), fontsize=8)
        fig.colorbar(drawn, ax=row[1:].tolist(), shrink=0.8)
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        ax.grid(False)
    place.parent.mkdir(parents=True, exist_ok=True)
    save_figure(fig, place)


if __name__ == "__main__":
    sys.exit(main())
