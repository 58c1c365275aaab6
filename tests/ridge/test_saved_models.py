"""Models in a file: the same predictions to the bit, rows that go on, and files that are refused."""

import json
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file, save_file
from sklearn.exceptions import NotFittedError

from crt_exp import RandomFeatureClassifier, RandomFeatureRidge
from crt_exp.features import MaternRF, TrigRF
from crt_exp.samplers import hadamard

R = np.random.default_rng(0)
X = R.normal(size=(500, 3))
Y = np.sin(2 * X[:, 0]) + X[:, 1] + 0.3 * R.normal(size=500)
WORDS = np.array(["a", "b", "c"])[np.digitize(Y, [-0.7, 0.7])]
# Features of Hadamard rows are nearly dependent: with the alpha that is found their coefficients, of sums in another
# order, differ by more than predictions do.
REGRESSORS = {
    "default": {}, "hadamard": {"sampler": "hadamard", "n_components": 96, "alpha": 1e-3}, "odd": {"n_components": 41},
    "fitted": {"mechanism": "sderf", "gamma": 0.1, "alpha": 1e-3}, "oprf": {"mechanism": "oprf", "alpha": 0.1},
    "kernel": {"kernel": "matern32", "length_scale": np.array([1.0, 2.0, 4.0])},
    "object": {"mechanism": MaternRF(nu=2.5), "sampler": hadamard, "alpha": 1e-3},
    "generator": {"random_state": np.random.RandomState(1)}}


@pytest.mark.parametrize("name", REGRESSORS)
def test_a_regressor_is_the_same_and_goes_on(name, tmp_path):
    model = RandomFeatureRidge(**{"n_components": 40} | REGRESSORS[name]).partial_fit(X[:300], Y[:300])
    model.save(tmp_path / "m.safetensors")
    again = RandomFeatureRidge.load(tmp_path / "m.safetensors")
    for mine, theirs in zip(again.predict(X, return_std=True), model.predict(X, return_std=True)):
        np.testing.assert_array_equal(mine, theirs)
    assert again.rows_ == 300 and again.alpha_ == model.alpha_ and repr(again.alpha) == repr(model.alpha)
    scale = 1e-7 * abs(model.partial_fit(X[300:], Y[300:]).coef_).max()
    np.testing.assert_allclose(again.partial_fit(X[300:], Y[300:]).coef_, model.coef_, rtol=1e-6, atol=scale)


@pytest.mark.parametrize("labels", [WORDS, WORDS.astype(object), (Y > 0).astype(int), Y > 0],
                         ids=lambda labels: labels.dtype.name)
def test_a_classifier_keeps_its_labels_and_column_names(labels, tmp_path):
    frame = pd.DataFrame(X.astype(np.float32), columns=["u", "v", "w"])
    model = RandomFeatureClassifier(n_components=40, random_state=0).fit(frame[:300], labels[:300])
    model.save(tmp_path / "m.safetensors")
    again = RandomFeatureClassifier.load(tmp_path / "m.safetensors")
    assert again.classes_.dtype == model.classes_.dtype and (again.predict(frame) == model.predict(frame)).all()
    np.testing.assert_array_equal(again.predict_proba(frame), model.predict_proba(frame))
    assert again.partial_fit(frame[300:], labels[300:]).rows_ == 500
    with pytest.raises(ValueError, match="feature names should match"):
        again.predict(frame.rename(columns={"u": "x"}))


@dataclass(frozen=True)
class Own(TrigRF):
    """A map of a user."""


def own_sampler(*given, **options):
    return hadamard(*given, **options)


def changed(path, change):
    RandomFeatureRidge(n_components=8).fit(X, Y).save(path)
    described = json.loads(metadata(path)["crt_exp.ridge"])
    change(described)
    save_file(load_file(path), path, {"crt_exp.ridge": json.dumps(described)})


def metadata(path):
    from safetensors import safe_open
    with safe_open(path, framework="np") as file:
        return file.metadata()


def called(content):
    content["attributes"]["dict"]["mechanism"] = {"map": {"of": "system", "command": "true"}}


BAD = {
    "no fitted RandomFeatureRidge: it is a RandomFeatureClassifier, not a RandomFeatureRidge":
        lambda p: RandomFeatureClassifier(n_components=8).fit(X, WORDS).save(p),
    "no fitted RandomFeatureRidge: it lacks 'crt_exp.ridge'": lambda p: save_file({"a": np.zeros(1)}, p),
    "no fitted RandomFeatureRidge: Error while deserializing": lambda p: p.write_text("what else"),
    "no fitted RandomFeatureRidge: it lacks 'system'": lambda p: changed(p, lambda d: called(d["content"]["dict"])),
    "no fitted RandomFeatureRidge: it lacks 'state'": lambda p: changed(p, lambda d: d["content"]["dict"].pop("state")),
    "no fitted RandomFeatureRidge: 'int' object": lambda p: changed(p, lambda d: d.update(content=5)),
    "Own is a map of your own": lambda p: RandomFeatureRidge(Own("gaussian"), n_components=8).fit(X, Y).save(p),
    "sampler own_sampler is none of the package's":
        lambda p: RandomFeatureRidge(sampler=own_sampler, n_components=8).fit(X, Y).save(p),
}


@pytest.mark.parametrize("message", BAD)
def test_other_files_and_own_objects_are_refused(message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        BAD[message](tmp_path / "m.safetensors")
        RandomFeatureRidge.load(tmp_path / "m.safetensors")
    assert "\n" not in str(error.value)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(NotFittedError):
        RandomFeatureRidge().save(tmp_path / "m.safetensors")
    with pytest.raises(FileNotFoundError, match="m.safetensors"):
        RandomFeatureRidge.load(tmp_path / "m.safetensors")
