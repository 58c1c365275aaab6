"""What the error of a command line looks like."""

import re


def check_error(found, *words, code=2, lines=1):
    """found: (exit code, stdout, stderr) of `typed`: one error in at most so many lines, with these words."""
    exit_code, _, err = found
    assert exit_code == code, err
    assert "Traceback" not in err, err
    progress = re.findall(r"^step \d+ of ", err, re.M)  # printed where a run is slow
    assert len(err.strip().splitlines()) <= lines + len(progress), err
    for word in words:
        assert word in err, err


def check_refused(found, words, directory):
    """The error of a command line that is refused, of at most four lines, which leaves no run."""
    check_error(found, "crt_exp: error:", *words, lines=4)
    assert found[2].count("crt_exp: error:") == 1, found[2]
    assert not directory.exists(), found[2]
