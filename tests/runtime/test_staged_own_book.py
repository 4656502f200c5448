"""Steps over macro-batches whose slots the device gives, as a GPU does: all that holds of others holds of them."""

import pytest

from tests.runtime.test_staged import *  # noqa: F403  (its tests, once more)

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")
from .device_book import book_on_device

pytestmark = pytest.mark.fuzz  # ``test_staged.py`` has one of them for ``make test``


@pytest.fixture(autouse=True)
def own_book():
    with book_on_device():
        yield
