"""The folder in which a run keeps a recogniser, `<run>/model`: weights, symbols, sizes, and the names of its attention.

Nothing in it names code that is run: the attention is rebuilt from names of conf/ and compared with what it was.
"""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from crt_exp.config import ConfigError
from crt_exp.data.vocabularies import Symbols
from crt_exp.options import check_options
from crt_exp.mechanism import Mechanism
from crt_exp.models import kept
from crt_exp.models.conformer_transducer import ConformerSizes, ConformerTransducer
from crt_exp.models.folder import check_shapes

KIND = "conformer_transducer"
PIECES = "pieces.model"


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
    kept.write(directory, config, tensors, {PIECES: symbols.pieces} if symbols.kind == "pieces" else {})


def load(run: str | Path, option: str) -> tuple[Recogniser, dict[str, Tensor]]:
    """What a run kept, and its weights. Raises DataError, naming `option`, for what is no run of a recogniser."""
    with kept.read(run, option, KIND, "task=librispeech") as (folder, config, tensors):
        kind, entries = config["symbols"]["kind"], tuple(config["symbols"]["entries"])
        symbols = Symbols.of_pieces((folder / PIECES).read_bytes()) if kind == "pieces" else Symbols(kind, entries)
        mechanism = Mechanism.of_saved(config["attention"], f"{option}={run}")
        rate, sizes = config["rate"], config["sizes"]
        check_options("sizes", ConformerSizes, sizes)
        check_shapes(lambda: ConformerTransducer(len(symbols) + 1, rate, sizes), sizes["layers"], tensors,
                     f"{option}={run}")
        return Recogniser(symbols, rate, sizes, mechanism), tensors


def take_weights(model: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """The weights of a run in a model whose attention may be another: its noise stays its own.

    Raises ConfigError where a weight is missing or has another shape.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if ".swapped." not in name}
    for name, tensor in state.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            raise ConfigError(f"{source}: {name} is not of shape {tuple(tensor.shape)}; choose task.preset and "
                              "task.sizes of that run")
    model.load_state_dict({name: tensors[name] for name in state}, strict=False)


def load_whole(recogniser: Recogniser, tensors: dict[str, Tensor]) -> nn.Module:
    """The model as it was, its noise included, ready to recognise."""
    model = recogniser.build()
    model.load_state_dict(tensors)
    return model.eval()
