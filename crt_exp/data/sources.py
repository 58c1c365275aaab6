"""Where every data set comes from: one table, read by the loaders' messages and by list, fetch and verify.

Paths are relative to the data folder ($CRT_DATA), whose subfolders are named as in the table. A new data set is a new
line; URLs lead to the publisher's own server, or to the publisher's stand-in where that server is gone.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from crt_exp.data import DataError


@dataclass(frozen=True)
class File:
    """One file, or one folder that is taken whole.

    rows: lines that are not blank (sequences in a FASTA file, recordings or images in a folder); 0 = not checked.
    digest: "kind:value", with kind `rows` (sha256 of the fields, separators and line ends made alike), `sha256`,
    `gunzip` (sha256 of the decompressed content) or `size` (bytes). Empty: only the rows are checked.
    """

    path: str
    url: str = ""                # the file or the archive that holds it; empty: it can only be got by hand
    member: str = ""             # its name inside the archive
    rows: int = 0
    at_least: bool = False       # `rows` is a lower bound, for what changes with each release
    digest: str = ""
    archive_sha256: str = ""

    @property
    def is_folder(self) -> bool:
        return "." not in self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Source:
    """One data set: the name for fetch and verify, which tasks read it, its official page and its files."""

    name: str
    tasks: str
    page: str
    files: tuple[File, ...] = ()
    embedded: bool = False       # usable without any file
    size: str = ""
    note: str = ""


def uci(name: str, path: str, page: str, rows: int, digest: str, embedded: bool = False) -> Source:
    """A file of the UCI Machine Learning Repository: `path` on its server, the page's id and title in `page`."""
    url = f"https://archive.ics.uci.edu/ml/machine-learning-databases/{path}"
    file = File(f"uci/{path.rsplit('/', 1)[-1]}", url, rows=rows, digest=f"rows:{digest}")
    return Source(f"uci/{name}", "uci qmc", page if "://" in page else f"https://archive.ics.uci.edu/dataset/{page}",
                  (file,), embedded)


def sklearn_set(name: str, size: str) -> Source:
    page = f"https://scikit-learn.org/stable/modules/generated/sklearn.datasets.load_{name}.html"
    return Source(f"uci/{name}", "uci qmc", page, embedded=True, size=size)


def glue(task: str, lines: dict[str, int], archive: str = "", note: str = "") -> Source:
    """A GLUE task in the official TSV layout; `lines` counts the header line where there is one."""
    url = f"https://dl.fbaipublicfiles.com/glue/data/{archive}" if archive else ""
    files = tuple(File(f"glue/{task}/{part}.tsv", url, f"{task}/{part}.tsv" if url else "", rows)
                  for part, rows in lines.items())
    read_by = "glue lra" if task == "SST-2" else "glue"
    return Source(f"glue/{task}", read_by, "https://gluebenchmark.com/tasks", files, note=note)


def librispeech(part: str, utterances: int, size: str, sha256: str) -> Source:
    file = File(f"speech/LibriSpeech/{part}", f"https://www.openslr.org/resources/12/{part}.tar.gz",
                f"LibriSpeech/{part}", utterances, archive_sha256=sha256)
    return Source(f"speech/LibriSpeech/{part}", "librispeech", "https://www.openslr.org/12", (file,), size=size)


def images(name: str, page: str, count: int, url: str = "", size: str = "", note: str = "") -> Source:
    file = File(f"images/{name}", url, name if url else "", count)
    return Source(f"images/{name}", "imagenet mae pixels lra", page, (file,), size=size, note=note)


def proteome(kingdom: str, name: str, sequences: int) -> File:
    """A UniProt reference proteome; its sequences change a little with each release."""
    folder = "https://ftp.uniprot.org/pub/databases/uniprot/current_release/knowledgebase/reference_proteomes"
    url = f"{folder}/{kingdom}/{name.split('_')[0]}/{name}.fasta.gz"
    return File(f"protein/{name}.fasta", url, f"{name}.fasta", sequences, at_least=True)


FSDD = "Jakobovski/free-spoken-digit-dataset"
FSDD_COMMIT = "26eb9aaf76e81b692f806f9140c2d2777410d7a1"
MNIST_SERVER = "https://ossci-datasets.s3.amazonaws.com/mnist"
PTB_ARCHIVE = "https://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
WIKITEXT2_ARCHIVE = "https://wikitext.smerity.com/wikitext-2-v1.zip"
BY_CLASS = "sort the images into train/<class>/ and val/<class>/"

TABLE = (
    uci("abalone", "abalone/abalone.data", "1/abalone", 4177,
        "eb2de13be807e9bb9ec4128b9c89b98ab23d7739121cfd17b7dde69b46ba7bf6"),
    uci("banknote", "00267/data_banknote_authentication.txt", "267/banknote+authentication", 1372,
        "564ac22b61d87388b1662adee2867e5d382aae78afb0bf5d6745c1a843174b8e"),
    uci("car", "car/car.data", "19/car+evaluation", 1728,
        "73fb39dc8dc9193047bc5f7007ff54aa9b7c2b701f293eb79695892c1abcc934"),
    uci("yeast", "yeast/yeast.data", "110/yeast", 1484,
        "d59305c2e20130b92cd2c9c55b9c448d3bf161b39458d40a79fa3af0d879b720"),
    uci("cmc", "cmc/cmc.data", "30/contraceptive+method+choice", 1473,
        "bcea7e5e7436379a37f1ccf076c9cf672cc1a9e3e09efb90bfb6d6ef1cba734c"),
    uci("nursery", "nursery/nursery.data", "76/nursery", 12960,
        "ed63762eabd18af61fdb96fb86439a911d04abceed9be122093033aefdd0581e"),
    uci("wifi", "00422/wifi_localization.txt", "422/wireless+indoor+localization", 2000,
        "284229a1caa352376060d392b4dcc6295719ffdf4afe67589dcc0a5e899592e4"),
    uci("chess", "chess/king-rook-vs-king/krkopt.data", "23/chess+king+rook+vs+king", 28056,
        "922dc98f60185ee51697c1e5b26a0e3e16fc3a87cf1a48eeb4ca37c4e30e8646", embedded=True),
    uci("wine", "wine/wine.data", "109/wine", 178,
        "e38e887d93d41c79d1eaf1b285d2a27237df336f207e486d39cf26ed17633aee", embedded=True),
    # UCI no longer lists the Boston housing data; StatLib is where they were first published.
    uci("boston", "housing/housing.data", "http://lib.stat.cmu.edu/datasets/boston", 506,
        "2682ca02e83b89467d7d0cdcbde7c0cc4d2566119be8ce8d84dad4f0fa20859a"),
    sklearn_set("digits", "1797 rows"),
    sklearn_set("breast_cancer", "569 rows"),
    sklearn_set("iris", "150 rows"),
    glue("CoLA", {"train": 8551, "dev": 1043, "test": 1064}, "CoLA.zip"),
    glue("SST-2", {"train": 67350, "dev": 873, "test": 1822}, "SST-2.zip"),
    glue("MRPC", {"train": 3669, "dev": 409, "test": 1726},
         note="made from https://www.microsoft.com/en-us/download/details.aspx?id=52398 by the GLUE authors' script"),
    glue("STS-B", {"train": 5750, "dev": 1501, "test": 1380}, "STS-B.zip"),
    glue("QQP", {"train": 0, "dev": 0, "test": 0}, "QQP-clean.zip"),
    glue("MNLI", {"train": 392703, "dev_matched": 9816, "dev_mismatched": 9833, "test_matched": 9797,
                  "test_mismatched": 9848}, "MNLI.zip"),
    glue("QNLI", {"train": 104744, "dev": 5464, "test": 5464}, "QNLIv2.zip"),
    glue("RTE", {"train": 2491, "dev": 278, "test": 3001}, "RTE.zip"),
    glue("WNLI", {"train": 636, "dev": 72, "test": 147}, "WNLI.zip"),
    Source("ptb", "ptb", "https://www.fit.vutbr.cz/~imikolov/rnnlm/", tuple(
        File(f"ptb/ptb.{part}.txt", PTB_ARCHIVE, f"simple-examples/data/ptb.{part}.txt", rows,
             digest=f"sha256:{digest}")
        for part, rows, digest in (
            ("train", 42068, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
            ("valid", 3370, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
            ("test", 3761, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"))), size="35 MB"),
    # The order of the articles in the training file differs between copies, so only its size is checked.
    Source("wikitext2", "mlm ptb books lra", "https://huggingface.co/datasets/Salesforce/wikitext", tuple(
        File(f"wikitext2/wiki.{part}.tokens", WIKITEXT2_ARCHIVE, f"wikitext-2/wiki.{part}.tokens", rows, digest=digest)
        for part, rows, digest in (
            ("train", 23767, "size:10797148"),
            ("valid", 2461, "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
            ("test", 2891, "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"))), size="4.5 MB"),
    librispeech("dev-clean", 2703, "340 MB", "76f87d090650617fca0cac8f88b9416e0ebf80350acb97b343a85fa903728ab3"),
    librispeech("dev-other", 2864, "310 MB", "12661c48e8c3fe1de2c1caa4c3e135193bfb1811584f11f569dd12645aa84365"),
    librispeech("test-clean", 2620, "350 MB", "39fde525e59672dc6d1551919b1478f724438a95aa55f874b576be21967e6c23"),
    librispeech("test-other", 2939, "330 MB", "d09c181bba5cf717b3dee7d4d592af11a3ee3a09e08ae025c5506f6ebe961c29"),
    librispeech("train-clean-100", 28539, "6.3 GB",
                "d4ddd1d5a6ab303066f14971d768ee43278a5f2a0aa43dc716b0e64ecbbbf6e2"),
    librispeech("train-clean-360", 104014, "23 GB",
                "146a56496217e96c14334a160df97fffedd6e0a04e66b9c5af0d40be3c792ecf"),
    librispeech("train-other-500", 148688, "30 GB",
                "ddb22f27f96ec163645d53215559df6aa36515f26e01dd70798188350adcb6d2"),
    Source("speech/free-spoken-digit-dataset", "librispeech", f"https://github.com/{FSDD}", (
        File("speech/free-spoken-digit-dataset/recordings", f"https://github.com/{FSDD}/archive/{FSDD_COMMIT}.zip",
             f"free-spoken-digit-dataset-{FSDD_COMMIT}/recordings", 3000),), size="16 MB"),
    images("imagenette2-320", "https://github.com/fastai/imagenette", 13394,
           "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-320.tgz", "330 MB"),
    images("tiny-imagenet-200", "http://cs231n.stanford.edu/tiny-imagenet-200.zip", 110000, size="240 MB",
           note=BY_CLASS),
    images("cifar10", "https://www.cs.toronto.edu/~kriz/cifar.html", 60000, size="160 MB", note=BY_CLASS),
    images("imagenet", "https://www.image-net.org/download.php", 1331167, size="150 GB", note=BY_CLASS),
    Source("protein", "trembl", "https://www.uniprot.org/proteomes", (
        proteome("Bacteria", "UP000000625_83333", 4000), proteome("Eukaryota", "UP000002311_559292", 5500)),
           size="4 MB", note="every *.fasta and *.fasta.gz with UniProt headers in the folder is read"),
    Source("mnist", "variance", "http://yann.lecun.com/exdb/mnist/", tuple(
        File(f"mnist/{name}-ubyte.gz", f"{MNIST_SERVER}/{name}-ubyte.gz", digest=f"gunzip:{digest}")
        for name, digest in (
            ("train-images-idx3", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
            ("train-labels-idx1", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
            ("t10k-images-idx3", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
            ("t10k-labels-idx1", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"))), size="11 MB"),
)
SOURCES = {source.name: source for source in TABLE}


def select(name: str) -> list[Source]:
    """The sources called `name`, or all below it ("uci" is every uci/...). DataError where there is none."""
    name = name.strip("/")
    sources = [source for source in TABLE if source.name == name or source.name.startswith(name + "/")]
    if not sources:
        raise DataError(f"There is no data set {name!r}. Known: {', '.join(groups())},\n"
                        "or one set of them such as uci/abalone; `python -m crt_exp.data list` shows all.")
    return sources


def groups() -> list[str]:
    return list(dict.fromkeys(source.name.split("/")[0] for source in TABLE))


def data_root(folder: str | Path | None = None) -> Path | None:
    """The folder that holds uci/, glue/ and so on: `folder`, else $CRT_DATA, else None."""
    folder = folder or os.environ.get("CRT_DATA")
    return Path(folder).expanduser() if folder else None


def task_folder(name: str, data_dir: str | Path | None = None) -> Path | None:
    """The folder of one task's files: `data_dir` (the option task.data_dir), else $CRT_DATA/name, else None."""
    if data_dir:
        return Path(data_dir).expanduser()
    root = data_root()
    return root / name if root else None


def no_folder(data_dir: str | Path | None, by: str, instead: str = "leave it out") -> None:
    """Raises DataError where a folder is given to something that reads none: it would be taken for what was read."""
    if data_dir:
        raise DataError(f"task.data_dir = {data_dir} is not used by {by}: {instead}")


def missing(name: str, path: Path | None, file: int = 0) -> DataError:
    """The error for a file of source `name` that is not at `path`; None: nobody said where the data are."""
    source = SOURCES[name]
    wanted = Path(source.files[file].path)
    what = f"{path} is not there" if path else "CRT_DATA is not set"
    placed = path is not None and path.parts[-len(wanted.parts):] == wanted.parts
    root = Path(*path.parts[:-len(wanted.parts)]) if placed else Path("DIR")
    return DataError(
        f"{name} needs the file {wanted.name}: {what}.\n"
        f"Get it with `python -m crt_exp.data fetch {name} --dir {root}`, or from {source.page},\n"
        f"into {root / wanted.parent}; then set CRT_DATA={root} or task.data_dir={root / wanted.parent}.")
