"""Kernel regression by scikit-learn's maps, and what the last record says of each split."""

import numpy as np
import pytest

from crt_exp.config import ConfigError
from crt_exp.mechanism import Mechanism
from crt_exp.tasks.uci import UCI

GIVEN = {"dataset": "wine", "coding": "ordinal", "scaling": "standard", "split": (0.6, 0.15, 0.25), "repeats": 2,
         "sigmas": [0.1, 0.3]}


@pytest.mark.parametrize("baseline, draws", [("Nystroem m=16", 2), ("RBFSampler m=128", 2), ("majority", 2), (None, 1)])
def test_the_last_record_has_each_split_in_percent(baseline, draws):
    records = [*UCI(**GIVEN, draws=2, baseline=baseline).records(Mechanism.parse("exact"), 0)]
    splits = np.reshape([100 * record["accuracy"] for record in records[:-1]], (2, draws))
    assert records[-1]["accuracy_percent"] == pytest.approx(splits.mean(1))
    assert 100 * records[-1]["accuracy"] == pytest.approx(splits.mean())
    assert (splits > 50).all() == (baseline != "majority")


def test_a_peer_is_named():
    with pytest.raises(ConfigError, match="did you mean Nystroem"):
        UCI(**GIVEN, baseline="Nystrom m=16")
