"""Two streams on a GPU: the same results as on one, replay after replay, and steps that train alike."""

import random

import pytest
import torch

from joestar.ops.step.side_by_side import Call, Input, Program, Value, forking, side_stream

from .test_step_graph import make, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("exact_products"),
]

ADD, MM, T = "aten.add.Tensor", "aten.mm.default", "aten.t.default"


def drawn(seed: int, calls: int = 80) -> Program:
    """Products, sums and views in any order, on either stream; a few of the results are handed out."""
    draw, made = random.Random(seed), []
    for index in range(calls):
        sources = [
            Value(draw.randrange(index)) if index and draw.random() < 0.8 else Input(draw.randrange(3)) for _ in "ab"
        ]
        if draw.random() < 0.15:
            made.append(Call(T, sources[:1]))
        else:
            made.append(Call(MM if draw.random() < 0.4 else ADD, sources, draw.random() < 0.5))
    outputs = {Value(calls - 1), *(Value(draw.randrange(calls)) for _ in range(5))}
    return Program(tuple(made), tuple(value for value in outputs if made[value.call].op != T))


@pytest.mark.parametrize("seed", range(8))
def test_programs_of_any_shape(seed):
    """Captured and replayed with other inputs each time; memory is reused on both streams meanwhile."""
    program = drawn(seed)
    inputs = [torch.empty(700, 700, device="cuda") for _ in range(3)]

    def fill(turn):
        generator = torch.Generator(device="cuda").manual_seed(100 * seed + turn)
        for tensor in inputs:
            tensor.uniform_(-0.04, 0.04, generator=generator)

    def run():
        return torch.ops.joestar.side_by_side(inputs, program.text())

    fill(0)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with forking(stream) as ran:
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            results = run()
    assert ran == [program]
    for turn in range(5):
        fill(turn)
        expected = [value.clone() for value in run()]
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value, rtol=1e-3, atol=1e-4)


def streams_used(run) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    gpu = torch.autograd.DeviceType.CUDA
    return len({event.device_resource_id for event in seen.events() if event.device_type == gpu})


def test_two_streams_where_a_graph_is_prepared_and_one_elsewhere():
    x = torch.randn(64, 64, device="cuda")
    program = Program((Call(MM, (Input(0), Input(0))), Call(ADD, (Input(0), Input(0)), True)), (Value(0), Value(1)))

    def run():
        return torch.ops.joestar.side_by_side([x], program.text())

    run()
    assert streams_used(run) == 1 and side_stream(x.device).priority == 0
    with forking(torch.cuda.current_stream()):
        assert streams_used(run) == 2
    with forking(torch.cuda.Stream()) as ran:
        assert streams_used(run) == 1 and not ran, "another stream is being prepared"


def test_a_failing_op_leaves_the_streams_joined():
    """The capture ends as any other does whose op fails, and the next one works."""
    x = torch.randn(64, 64, device="cuda")
    calls = Call(MM, (Input(0), Input(0)), True), Call(MM, (Input(0), Input(1)))
    stream = torch.cuda.Stream()

    def capture(right):
        program = Program(calls, (Value(0), Value(1)))
        with forking(stream), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            torch.ops.joestar.side_by_side([x, right], program.text())

    with torch.cuda.stream(stream):
        torch.mm(x, x)  # libraries make what they need before a capture
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        capture(x[:5])
    capture(x)


@pytest.mark.parametrize("model", ["GraphSAGE", "GCN", "GIN", "GAT"])
def test_steps_train_alike(model):
    overlapped, alone = make(model=model), make(model=model, disable_passes=("overlap",))
    assert train(overlapped)[:25] == pytest.approx(train(alone)[:25], rel=1e-3)
    assert "fired   overlap" in overlapped.explain() and "overlap" not in alone.explain()
    for name, value in overlapped.model.state_dict().items():
        torch.testing.assert_close(value, alone.model.state_dict()[name], rtol=1e-2, atol=2e-3, msg=name)
