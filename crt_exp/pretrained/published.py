"""Pretrained models with a short name, such as models/minilm, and where a fetched one lies below the data folder."""

from pathlib import Path
from typing import NamedTuple

from crt_exp.data import DataError
from crt_exp.data.sources import data_root

GROUP = "models"
SCRIPT = "python tests/tools/fetch_wheel_models.py"  # of a checkout: takes models out of wheels


class Published(NamedTuple):
    """hub: the model's name there, empty where it is not there. page: who publishes it. tasks: that take it by name."""

    name: str
    hub: str
    licence: str
    page: str
    what: str
    tasks: str = ""


HUB, REACTIONS = "https://huggingface.co", "https://github.com/rxn4chemistry"
MODELS = {model.name: model for model in (
    Published("models/smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "Apache-2.0",
              f"{HUB}/HuggingFaceTB/SmolLM2-135M-Instruct", "causal language model, 30 layers, 9 heads of 64 over 3 of "
              "keys, 8192 places; weights of 4 bits in the wheel", "advise fidelity"),
    Published("models/minilm", "sentence-transformers/all-MiniLM-L6-v2", "Apache-2.0",
              f"{HUB}/sentence-transformers/all-MiniLM-L6-v2",
              "BERT of sentences, 6 layers, 12 heads of 32, 512 places", "glue fidelity"),
    Published("models/whisper-tiny.en", "openai/whisper-tiny.en", "MIT", f"{HUB}/openai/whisper-tiny.en",
              "speech recogniser, 4 + 4 layers, 6 heads of 64, 1500 frames"),
    Published("models/rxnfp", "", "MIT", f"{REACTIONS}/rxnfp",
              "masked BERT of reactions (SMILES), 12 layers, 4 heads of 64, 512 places", "advise fidelity"),
    Published("models/rxnmapper", "", "MIT", f"{REACTIONS}/rxnmapper", "masked ALBERT of reactions (SMILES), 12 layers "
              "of one set of weights, 8 heads of 32, 512 places; its attention maps atoms", "advise fidelity"),
    Published("models/vit-s-saliency", "", "MIT", "https://github.com/julesGoueffon/jgo_saliency", "ViT of images, "
              "begun from DINOv2 (Apache-2.0) and trained on for saliency, 12 layers, 6 heads of 64, patches of 14 "
              "pixels"))}


def is_model(name: str) -> bool:
    """Whether `fetch` and `verify` are asked for models, one or all of them."""
    return name.strip("/").split("/")[0] == GROUP


def select(name: str) -> list[Published]:
    """The model called models/<name>, or all. Raises DataError where there is none."""
    name = name.strip("/")
    if name != GROUP and name not in MODELS:
        raise DataError(f"There is no model {name!r} to fetch. Known: {', '.join(MODELS)}.")
    return list(MODELS.values()) if name == GROUP else [MODELS[name]]


def fetched(name: str | Path, option: str = "") -> Path | None:
    """The folder of a fetched model where `name` is that of one, such as models/minilm, and no folder of one's own has
    that name; else None. Raises DataError, naming `option`, for one that was not fetched."""
    model = MODELS.get(str(name))
    if model is None or Path(name).is_dir():
        return None
    root = data_root()
    if root is not None and (root / name / "config.json").is_file():
        return root / name
    named = f"{option} = {name}" if option else name
    if root is None:
        raise DataError(f"{named}: CRT_DATA is not set: get the model with `python -m crt_exp.data fetch {name} --dir "
                        "DIR`, then set CRT_DATA=DIR")
    raise DataError(f"{named}: it is not in CRT_DATA = {root}: get it with `python -m crt_exp.data fetch {name}`")


def instead(hub: str) -> str:
    """What to add where the hub does not give a model: the script that gets it elsewhere, where there is one."""
    known = [model.name for model in MODELS.values() if model.hub == hub]
    return f"\nOr, in a checkout of crt_exp, `{SCRIPT} {known[0]}`, then {known[0]} as its name." if known else ""
