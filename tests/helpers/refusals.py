"""What the errors of command lines and of data look like."""

import re

import pytest

from crt_exp.experiments.data import DataError


def check_error(found, *words, code=2, lines=1):
    """found: (exit code, stdout, stderr) of `typed`: one error in at most so many lines, with these words."""
    exit_code, _, err = found
    assert exit_code == code, err
    assert "Traceback" not in err, err
    progress = re.compile(r".*\d(%\|| batches \[| steps \[).*")
    told = []
    for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[\w", "", err)):
        if line.strip() and not progress.match(line):
            told.append(line)
    assert len(told) <= lines, err
    for word in words:
        assert word in err, err


def check_refused(found, words, directory):
    """The error of a command line that is refused, of at most four lines, which leaves no run."""
    check_error(found, "crt_exp: error:", *words, lines=4)
    assert found[2].count("crt_exp: error:") == 1, found[2]
    assert not directory.exists(), found[2]


def refused(call, *arguments, **options) -> str:
    """The message of the DataError that a call raises."""
    with pytest.raises(DataError) as caught:
        call(*arguments, **options)
    return str(caught.value)
