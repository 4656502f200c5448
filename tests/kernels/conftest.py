import pytest

_native = pytest.importorskip("joestar._native")


@pytest.fixture
def any_threads():
    """``any_threads(f)`` runs ``f`` with 1, 2 and 16 threads, checks that the bits agree, and returns them."""
    from native_support import same

    before = _native.num_threads()

    def run(f):
        results = []
        for threads in (1, 2, 16):
            _native.set_num_threads(threads)
            results.append(f())
        assert same(results[1], results[0])
        assert same(results[2], results[0])
        return results[0]

    yield run
    _native.set_num_threads(before)
