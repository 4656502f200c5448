"""Values written where a mask says so, ``x[mask] = value``: one value, or row, for all that are picked."""

import torch
from torch import nn

from joestar import fn

from .harness import WIDTH, Case, Rows, check_rows, refused_alone


def masked(write):
    """Writes to a copy of the rows, under a mask of rows and one of entries."""

    def operation(m, b, h):
        h = h.clone()
        write(m, h, h[:, 0] > 0, h > 0.2)
        return h

    return operation


def put(m, h, rows, entries):
    h[rows] = m.token


def put_in_a_row_of_its_own(m, h, rows, entries):
    h[rows] = m.token[None]


def added(m, h, rows, entries):
    h.index_put_((rows,), m.token, accumulate=True)


def zeroed(m, h, rows, entries):
    h[rows] = 0


def entries_too(m, h, rows, entries):
    h[entries] = 0.5


def a_computed_number(m, h, rows, entries):
    h[entries] = m.token.sum()


def by_degree(m, b, h):
    rows = b.pull(fn.copy_u(h), "mean")
    rows[b.in_degrees() > 2] = m.token
    return h + m.linear(rows).sum(0)


def test_values_for_all_that_are_picked():
    writes = (put, put_in_a_row_of_its_own, added, zeroed, entries_too, a_computed_number)
    operations = {write.__name__: masked(write) for write in writes} | {"by degree": by_degree}
    token, linear = nn.Parameter(torch.linspace(-1, 1, WIDTH, dtype=torch.float64)), nn.Linear(WIDTH, WIDTH)
    check_rows(operations, token=token, linear=linear)


def test_writes_at_positions_are_refused():
    messages = refused_alone(
        {"by position": lambda m, b, h: h.index_put((b.srcs.long() % 3,), m.token)},
        token=nn.Parameter(torch.zeros(WIDTH)),
    )
    assert "writes rows at computed positions" in messages["by position"]


def test_a_buffer_that_is_written_under_a_mask_is_the_same():
    """In place, and lasting: only real rows of a step count."""

    def operation(m, b, h):
        m.average[h.detach().mean(0) > 0] = 2.0
        return h * m.average

    case = Case(Rows(operation, average=torch.ones(WIDTH, dtype=torch.float64)))
    for step in range(2):
        seeds = case.seeds()
        got, expected = case.padded(seeds, step), case.eager(seeds, step)
        torch.testing.assert_close(got.buffers["average"], expected.buffers["average"])
        torch.testing.assert_close(got.loss, expected.loss)
