"""Files with any bytes changed, or cut anywhere: they are read, or refused in a sentence."""

import numpy as np
import pytest

import joestar
from joestar.data.convert import convert
from joestar.errors import JoestarError

from .converting import QUIET

ROUNDS = 150


def archive(path, write=np.savez_compressed):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(50, 4)), np.arange(50) % 3
    write(path / "g.npz", edge_index=random.integers(0, 50, (2, 300)), x=x, y=y, symmetric=1)
    return path / "g.npz"


def features(path):
    np.save(path / "x.npy", np.random.default_rng(0).normal(size=(50, 4)))
    return path / "x.npy"


FORMS = {
    "archive": (archive, lambda path: joestar.load(path, verbose=False)),
    "stored archive": (lambda path: archive(path, np.savez), lambda path: joestar.load(path, verbose=False)),
    "converted archive": (archive, lambda path: convert(path, path.parent / "out", overwrite=True, **QUIET)),
    "features": (
        features,
        lambda path: joestar.load({"source": range(50), "target": range(50)}, features=path, verbose=False),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [True, False])
def test_any_damage(tmp_path, form, cut):
    """Of packed archives errors of ``zlib``, ``zipfile`` and ``tokenize`` came up."""
    write, read = FORMS[form]
    path = write(tmp_path)
    whole, random = path.read_bytes(), np.random.default_rng(len(form))
    refused = 0
    for _ in range(ROUNDS if "converted" not in form else ROUNDS // 5):
        content = bytearray(whole[: random.integers(len(whole))] if cut else whole)
        places = [] if cut else random.integers(len(whole), size=random.choice([1, 3, 30]))
        for place in places:
            content[place] = random.integers(256)
        path.write_bytes(content)
        try:
            read(path)
        except JoestarError:
            refused += 1
    assert refused
