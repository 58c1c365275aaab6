"""The folder in which a run keeps a recogniser, `<run>/model`: weights, symbols, sizes, and the names of its attention.

Nothing in it names code that is run: the attention is rebuilt from names of conf/ and compared with what it was.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypedDict

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.data.symbols import Symbols
from crt_exp.options import Count, check, check_options
from crt_exp.mechanism import Mechanism
from crt_exp.models.conformer_transducer import (
    ConformerSizes,
    ConformerTransducer,
    Joiner,
    Layer,
    Predictor,
    Subsampling,
)
from crt_exp.models.conformer_transducer import check_sizes as check_model_sizes
from crt_exp.models.folder import (CONFIG, check_numbers, check_shapes, description_in, folder_of, save_tensors,
                                   whole_folder)

KIND = "conformer_transducer"
WEIGHTS, PIECES = "model.safetensors", "pieces.model"


class KeptSymbols(TypedDict):
    kind: Literal["characters", "words", "pieces"]
    entries: Sequence[str]


class Recogniser(NamedTuple):
    """All but the weights."""

    symbols: Symbols
    rate: int
    sizes: ConformerSizes
    mechanism: Mechanism

    def build(self) -> nn.Module:
        """With new weights; blank is one symbol more."""
        model = ConformerTransducer(len(self.symbols) + 1, self.rate, self.sizes)
        return model if self.mechanism.is_exact else self.mechanism.swap(model)


def keep(recogniser: Recogniser, tensors: dict[str, Tensor], directory: Path) -> None:
    """Writes `<directory>/model`, whole or not at all; `tensors` are the model's state. Raises OSError."""
    symbols = recogniser.symbols
    config = {"kind": KIND, "rate": recogniser.rate, "sizes": dict(recogniser.sizes),
              "attention": recogniser.mechanism.saved(), "symbols": {"kind": symbols.kind, "entries": symbols.entries}}
    with whole_folder(directory) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        if symbols.kind == "pieces":
            (folder / PIECES).write_bytes(symbols.pieces)
        save_tensors(tensors, folder / WEIGHTS)


def load(run: str | Path, option: str) -> tuple[Recogniser, dict[str, Tensor]]:
    """What a run kept, and its weights. Raises DataError, naming `option`, for what is no run of a recogniser."""
    folder = folder_of(run, option, "the directory of a run of task=librispeech")
    try:
        config = description_in(folder, f"{option} = {run}")
        if config.get("kind") != KIND:
            raise DataError(f"{option} = {run} is a run of another task: {folder / CONFIG} describes no speech "
                            "recogniser. Give a run of task=librispeech.")
        symbols = config["symbols"]
        check_options("symbols", KeptSymbols, symbols)
        symbols = (Symbols.of_pieces((folder / PIECES).read_bytes()) if symbols["kind"] == "pieces"
                   else Symbols(symbols["kind"], tuple(symbols["entries"])))
        mechanism = Mechanism.of_saved(config["attention"], f"{option} = {run}")
        tensors = load_file(folder / WEIGHTS)
        check_numbers(tensors.items(), f"{option} = {run}")
        check("rate", config["rate"], Annotated[Count, Field(le=10**6)])
        check_sizes(config["sizes"], len(symbols) + 1, tensors, f"{option} = {run}")
        return Recogniser(symbols, config["rate"], config["sizes"], mechanism), tensors
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        raise DataError(f"{option} = {run}: {folder} cannot be read: {type(error).__name__}: {error}") from None


def check_sizes(sizes: ConformerSizes, symbols: int, tensors: dict[str, Tensor], named: str) -> None:
    """Raises ConfigError and DataError for sizes that are not those of the weights, before a model takes memory."""
    check_options("sizes", ConformerSizes, sizes)
    check_model_sizes(sizes)
    dim, cells = sizes["dim"], sizes["predictor"]
    check_shapes(lambda: nn.ModuleDict({
        "encoder": nn.ModuleDict({
            "subsampling": Subsampling(sizes["mels"], sizes["channels"], dim, sizes["dropout"]),
            "layers": nn.ModuleList(Layer(sizes) for _ in range(sizes["layers"]))}),
        "predictor": Predictor(symbols, cells, sizes["dropout"]),
        "joiner": Joiner(dim, cells, sizes["joiner"], symbols)}), sizes["layers"], tensors, named)


def take_weights(model: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """The weights of a run in a model whose attention may be another: its noise stays its own.

    Raises ConfigError where a weight is missing or has another shape.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if ".swapped." not in name}
    for name, tensor in state.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            got = tuple(tensors[name].shape) if name in tensors else "not there"
            raise ConfigError(f"{source}: {name} is {got}, and this model takes {tuple(tensor.shape)}: choose the "
                              "task.preset and task.sizes of that run")
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(tensors[name])


def load_whole(recogniser: Recogniser, tensors: dict[str, Tensor], source: str) -> nn.Module:
    """The model as it was, its noise included, ready to recognise."""
    model = recogniser.build()
    try:
        model.load_state_dict(tensors)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise DataError(f"{source}: its weights do not fit its {CONFIG}: {reason}") from None
    return model.eval()
