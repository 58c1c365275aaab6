"""What decides a cell: all that its function reads, whatever file it stands in, and nothing else."""

import pytest

from crt_exp.attention.engines import native_library
from crt_exp.report import table1
from crt_exp.report.decided import HERE, Code, Node, without_comments

FILES = {
    "crt_exp/__init__.py": "",
    "crt_exp/report/__init__.py": "",
    "crt_exp/report/page.py": (
        "import numpy as np\n"
        "from crt_exp import maps\n"
        "from crt_exp.train import main\n"
        "from crt_exp.tools import doubled, unused\n\n"
        "SIGMAS = (1, 2)\n"
        "TITLE = 'some'\n\n"
        "def value(x, name):\n"
        '    """Doubles."""\n'
        "    return np.sum([doubled(s) * x for s in SIGMAS])\n\n"
        "def run(overrides):\n"
        "    from crt_exp.train import main\n"
        "    return main(['task=uci'])\n\n"
        "def page():\n"
        "    return TITLE\n"),
    "crt_exp/tools.py": "FACTOR = 2\n\ndef doubled(x):\n    return FACTOR * x\n\ndef unused():\n    return 0\n",
    "crt_exp/native.c": "int x = 1; /* two */\n",
    "crt_exp/native.h": "#define Y 3 // four\n",
    "crt_exp/maps.py": "class OPRF:\n    A = 0\n\nclass PosRF:\n    A = 1\n",
    "crt_exp/tasks.py": "class UCI:\n    n = 1\n\nclass GLUE:\n    n = 2\n",
    "crt_exp/train.py": "def main(argv):\n    return argv\n",
    "crt_exp/trainer.py": "class Trainer:\n    lr = 1\n",
    "conf/config.yaml": "defaults:\n- trainer: default\n- task: glue\nseed: 0\nhydra:\n  help: crt_exp.tasks.GLUE\n",
    "conf/features/oprf.yaml": "_target_: crt_exp.maps.OPRF\nA: null  # fitted\n",
    "conf/features/pos.yaml": "_target_: crt_exp.maps.PosRF\n",
    "conf/attention/favorpp.yaml": "defaults:\n  - override /features@_global_.features: oprf\nredraw: 0\n",
    "conf/task/uci.yaml": "_target_: crt_exp.tasks.UCI\n",
    "conf/task/glue.yaml": "_target_: crt_exp.tasks.GLUE\n",
    "conf/trainer/default.yaml": "_target_: crt_exp.trainer.Trainer\n",
}


@pytest.fixture
def changed(tmp_path):
    """Whether replacing text of one of these files changes the digest of a function and of strings of its key."""
    def digest(files, name, strings):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        code = Code(tmp_path, tmp_path / "conf")
        return code.digest(Node("crt_exp.report.page", name), code.named_in(strings))

    def change(file, old, new, name="value", strings=("oprf",)):
        assert old in FILES[file]
        return digest(FILES, name, strings) != digest(FILES | {file: FILES[file].replace(old, new)}, name, strings)
    return change


@pytest.mark.parametrize("file, old, new", [
    ("crt_exp/report/page.py", "(1, 2)", "(1, 3)"),                   # constants of its module
    ("crt_exp/report/page.py", "* x for", "+ x for"),                 # itself
    ("crt_exp/tools.py", "FACTOR = 2", "FACTOR = 3"),                 # what other modules give it, and what that reads
    ("crt_exp/tools.py", "def unused", "FACTOR.x()\n\ndef unused"),   # what a module does when it is imported
    ("crt_exp/native.c", "1", "2"),                                   # the C in the folder
    ("crt_exp/native.h", "3", "2"),
    ("conf/features/oprf.yaml", "null", "0"),                         # configuration that its key names
    ("crt_exp/maps.py", "A = 0", "A = 2"),                            # and what is built of that
    ("crt_exp/report/page.py", "numpy as np", "math as np"),          # what a name stands for
])
def test_what_decides_a_cell_changes_its_code(changed, file, old, new):
    assert changed(file, old, new)


@pytest.mark.parametrize("file, old, new", [
    ("crt_exp/report/page.py", "'some'", "'other'"),                  # the page
    ("crt_exp/report/page.py", "doubled, unused", "doubled"),         # imports for it
    ("crt_exp/report/page.py", "Doubles", "Makes twice as much"),     # docstrings
    ("crt_exp/report/page.py", "return np", "# why\n    return np"),  # comments
    ("crt_exp/tools.py", "return 0", "return 1"),                     # functions that it does not read
    ("conf/features/oprf.yaml", "# fitted", "# by a fit"),
    ("crt_exp/native.c", "/* two */", "/* other */"),
    ("crt_exp/native.h", "// four", "/* other\n */"),
    ("crt_exp/maps.py", "A = 1", "A = 2"),                            # other choices
    ("crt_exp/trainer.py", "lr = 1", "lr = 2"),                       # it starts no run
])
def test_what_does_not_leaves_it(changed, file, old, new):
    assert not changed(file, old, new)


@pytest.mark.parametrize("file, old, new, decides", [
    ("crt_exp/tasks.py", "n = 1", "n = 3", True),             # the task that is named
    ("crt_exp/tasks.py", "n = 2", "n = 3", False),            # not the one that would be run else
    ("crt_exp/trainer.py", "lr = 1", "lr = 2", True),         # what config.yaml chooses
    ("conf/config.yaml", "seed: 0", "seed: 1", True),
    ("crt_exp/maps.py", "A = 0", "A = 2", True),              # by the attention that is named, and its defaults
    ("crt_exp/maps.py", "A = 1", "A = 2", False)])
def test_runs_are_decided_by_their_arguments_and_by_what_is_chosen_for_them(changed, file, old, new, decides):
    assert changed(file, old, new, "run", ["attention=favorpp"]) == decides


def test_constants_of_reports_decide_their_cells():
    for report, name, constants in ((table1, "accuracies", "SIGMAS SPLIT SEED"),):
        reached = HERE.reached(Node(report.__name__, name))
        assert {Node(report.__name__, constant) for constant in constants.split()} <= reached
        assert Node(report.__name__, "figure") not in reached


@pytest.mark.parametrize("place, name", [("crt_exp.attention.call", "attention"),
                                         ("crt_exp.attention.nearfar.layer", "NearFar"),
                                         ("crt_exp.studies.head_errors", "errors")])
def test_sources_of_the_engines_decide_what_attention_computes(place, name):
    """All that the library is compiled of, in whichever folder of engines."""
    text = "\n".join(HERE.content(node).text for node in HERE.reached(Node(place, name)))
    assert all(without_comments(source.read_text()) in text for source in native_library.SOURCES)


def test_a_run_reaches_its_task_trainer_and_maps():
    reached = {node.place for node in HERE.reached(Node("crt_exp.train", "main"), HERE.named_in(["task=glue"]))}
    assert {"crt_exp.tasks.glue", "crt_exp.runner.trainer", "trainer/default.yaml", "config.yaml", "task/glue.yaml",
            "crt_exp.features.exponential", "sampler/orthogonal.yaml"} <= reached
    assert not {"crt_exp.tasks.librispeech", "task/librispeech.yaml"} & reached


def test_a_function_without_source_is_refused():
    for compute in (abs, lambda x: x, Code.digest):
        with pytest.raises(ValueError, match="no function at the top of a module"):
            HERE.of_cell(compute, {})
