"""What a folder of a run or of a model from anybody may hold: the same list for every door that reads one."""

import copy

TRAP = "trap.py"  # a module whose import leaves the file `sprung` beside it


def set_trap(folder, monkeypatch):
    """Write a module whose import creates a file; return the path of that file."""
    (folder / TRAP).write_text(
        "from pathlib import Path\nPath(__file__).with_name('sprung').touch()\n"
        "def call(*args, **options):\n    return None\n"
    )
    monkeypatch.syspath_prepend(folder)
    return folder / "sprung"


def node(folder):
    return {"_target_": "os.system", "command": f"touch {folder / 'sprung'}"}


IMPORTED = {"_target_": "trap.call"}


def changes(folder):
    """(name, what is done to an attention as `Mechanism.to_saved` wrote it) of each."""
    evil = node(folder)

    def set_all(**values):
        return lambda saved: saved.update(copy.deepcopy(values))

    def both(key, value):
        """There, and in what it is compared with."""

        def change(saved):
            saved[key] = copy.deepcopy(value)
            saved["described"][key] = copy.deepcopy(value)

        return change

    yield from {
        "sampler": both("sampler", evil),
        "features": both("features", evil),
        "imported": both("sampler", IMPORTED),
        "partial": both("sampler", evil | {"_partial_": True}),
        "in a list": both("features", [evil]),
        "described": lambda saved: saved["described"].update(features=evil, sampler=evil),
        "phi": set_all(name="elu", features=None, sampler=None, m=None, options={"phi": IMPORTED}),
        "phi of a sum": set_all(name="generalized", features=None, options={"phi": {"f": evil}}),
        "nested option": set_all(options={"redraw_every": evil}),
        "option of the map": set_all(options={"features.A": evil}),
        "name": set_all(name=evil),
        "name in a list": set_all(name=[evil]),
        "name a number": set_all(name=5),
        "path": set_all(name="../../setup"),
        "m": set_all(m=evil),
        "seed": set_all(seed=evil),
        "whole": set_all(**evil),
        "no attention": lambda saved: saved.clear(),
        "long name": set_all(name="f" * 10**6),
        "m huge": both("m", 10**12),
        "m of a float": both("m", 1e12),
        "m true": both("m", True),
        "m of many digits": both("m", 10**1000),
        "seed huge": set_all(seed=10**30),
        "open": set_all(
            name="nearfar", features=None, sampler=None, m=None, options={"open": [10**12]}
        ),
        "rank": set_all(
            name="linformer",
            features=None,
            sampler=None,
            m=None,
            options={"rank": 65536, "length": 65536},
        ),
        "deep": both("features", deep(200)),
    }.items()


def deep(levels):
    """A dictionary within a dictionary, and so on."""
    whole = {}
    for _ in range(levels):
        whole = {"a": whole}
    return whole


def check_one_line(message):
    """One clear line: an error that names what is wrong in no more than a few hundred letters."""
    first = str(message).splitlines()[0]
    assert 10 < len(first) < 700, message
    assert len(str(message)) < 3000, message
