"""What every command line that is refused must look like."""


def check_refused(found, words, directory):
    """found: (exit code, stdout, stderr) of `typed`: one error in at most four lines, with these words, and no run."""
    code, _, err = found
    assert code == 2, err
    assert err.count("crt_exp: error:") == 1, err
    assert len(err.splitlines()) <= 4, err
    for word in words:
        assert word in err, err
    assert not directory.exists(), err
