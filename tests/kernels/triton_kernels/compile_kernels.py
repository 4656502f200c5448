"""Compiles every kernel for an H100/H200 (sm_90), where there is no GPU: what the interpreter does not check.

A launch is compiled instead of run: one large sample of every op of the op database, and the kernels that are no ops of
their own. With ``--all`` in every value dtype and with every candidate of the launch settings.

Prints JSON: ``kernels``, the number of binaries; ``missing``, the ``@triton.jit`` functions of ``joestar/kernels`` that
no launch reached; ``resources``, per binary its kernel, launch settings, registers of a thread, bytes of its stack
(where registers spill to), bytes of shared memory of a program, and the length of its PTX. Must run in a process of its
own, without ``TRITON_INTERPRET``. ``--spills`` prints only the binaries with a stack, as a table.
"""

import importlib
import itertools
import json
import pkgutil
import sys
from pathlib import Path

import torch
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2]))

from compile_only import compiled, launched, reached, resources, zeroed
from ops.database import OPS
from ops.database_activated import ACTS
from ops.segments import PROGRAMS
from ops.segments import differentiable as segment_wanted
from ops.segments import leaves_of as segment_leaves
from ops.structures import Structure

import joestar.kernels
from joestar.kernels import (
    gpu,
    gpu_book,
    gpu_edge_products,
    gpu_fill,
    gpu_gather_attend,
    gpu_grad,
    gpu_heads,
    gpu_place,
    gpu_shards,
    tune,
)
from joestar.kernels.gpu_checksum import checksums
from joestar.kernels.gpu_heads import heads_fit
from joestar.kernels.gpu_mailbox import opened
from joestar.kernels.gpu_optimizer import adam, sgd
from joestar.kernels.gpu_ranks import TILE, counters, sum_ranks
from joestar.kernels.gpu_shuffle import shuffle_keys
from joestar.kernels.layout import REDUCTIONS
from joestar.kernels.segment_gradient import grad_rows
from joestar.kernels.segment_program import SegmentProgram, activates
from joestar.stages.device_slots import DeviceSlots

KEY, COUNT = torch.tensor([1, 2, 3]), torch.tensor(5)
EVERYTHING = "--all" in sys.argv
FANOUTS = (5, 25, -1) if EVERYTHING else (5, -1)
ROWS, EDGES, NODES = 3000, 9000, 5000
WIDEST = 20_001
INDPTR = torch.zeros(ROWS + 1, dtype=torch.int64)


def every_candidate(kernel, shape, candidates, launch, work, device, reset=None):
    """In place of ``tune.choose``: all of them."""
    for config in candidates:
        launch(config)
    return candidates[0]


def last_candidate(kernel, shape, candidates, launch, work, device, reset=None):
    """In place of ``tune.choose``: one of a form of its own."""
    return candidates[-1]


def database(dtype: torch.dtype) -> None:
    """The large sample of every op that has a kernel."""
    for name in sorted(set(gpu.__all__) & set(OPS)):
        getattr(gpu, name)(*OPS[name].large(dtype if OPS[name].floats else torch.float32))


def structure(ids: torch.dtype) -> None:
    """Sampling, relabelling and structure."""
    indices, dsts = torch.zeros(EDGES, dtype=ids), torch.zeros(ROWS, dtype=ids)
    weight = torch.zeros(EDGES)
    for k, replace in ((5, False), (20, False), (3, True), (-1, False)):
        draws = (k, replace, KEY, 0)
        gpu.sample_cols(INDPTR, indices, dsts, COUNT, *draws, EDGES)
        gpu.rowwise_sample(INDPTR, indices, dsts, *draws, EDGES)
        gpu.sample_eids(INDPTR, dsts, COUNT, *draws, EDGES)
        gpu.weighted_sample(INDPTR, weight, dsts, COUNT, True, *draws, EDGES)
        gpu.sample_cols(INDPTR, indices, dsts, COUNT, *draws, EDGES, dsts)
        gpu.weighted_sample(INDPTR, weight, dsts, COUNT, False, *draws, EDGES, dsts)
        gpu.weighted_sample(INDPTR, weight, dsts, COUNT, False, *draws, EDGES, dsts, weight.to(torch.int32))
    gpu.weighted_sample(INDPTR, weight, dsts, COUNT, True, 40, False, KEY, 0, EDGES)  # more than lanes of a warp
    gpu.compact(dsts, COUNT, INDPTR, indices, NODES, EDGES)
    gpu.collective_sample(INDPTR, indices, weight[:NODES], NODES, 512, KEY, 0)
    gpu.collective_sample(INDPTR, indices, weight[:NODES], NODES, 512, KEY, 0, indices[:NODES])
    gpu.slice_cols(INDPTR, indices, dsts, COUNT, EDGES)
    gpu.slice_rows(INDPTR, indices, dsts, dsts, COUNT, EDGES)
    gpu.add_self_loops(INDPTR, indices, COUNT)
    gpu.edge_dst(INDPTR, EDGES, indices)
    gpu.out_degrees(INDPTR, indices, NODES)
    gpu.dropout_bits(dsts, KEY, 0, 0.3, 100)
    gpu.edge_dropout_bits(INDPTR, EDGES, dsts, KEY, 0, 0.5, 4)
    gpu.take_batch(dsts, KEY, KEY, 104)


def values(dtype: torch.dtype, widths: tuple[int, ...], reduces: tuple[str, ...]) -> None:
    """Aggregation, edge values and their gradients."""
    indices, dsts = torch.zeros(EDGES, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    for width in widths:
        x, grad = torch.zeros(NODES, width, dtype=dtype), torch.zeros(ROWS, width, dtype=dtype)
        for reduce in reduces:
            for k in FANOUTS:
                args = (INDPTR, indices, dsts, COUNT, k, False, KEY, 0, x, reduce)
                gpu.sample_aggregate(*args)
                gpu.sample_aggregate_self(*args)
                gpu.sample_aggregate_cat(*args)
                gpu.sample_aggregate_cat(*args, False)
                gpu.sample_aggregate_cat(*args, False, dsts)
            gpu.sample_aggregate_two_hops(INDPTR, indices, dsts, COUNT, 10, 5, False, KEY, 0, x, reduce)
            gpu.spmm(INDPTR, indices, x, None, reduce)
            gpu.spmm_csr(INDPTR, indices, grad, None, NODES, reduce)
            gpu.spmm_coo(dsts, dsts, x, None, ROWS, reduce)
        gpu.multi_aggregate(INDPTR, indices, x, "mean,max,min,mean2", False)
        gpu.multi_aggregate(INDPTR, indices, x, ",".join(REDUCTIONS), True)
        gpu.multi_aggregate_grad(INDPTR, indices, x, grad, grad, [grad, grad], [grad, grad])
        bits = torch.zeros(NODES, -(-width // 32), dtype=torch.int32)
        for mask in (None, bits):
            gpu.aggregate_cat(INDPTR, indices, x, mask, 2.0, "mean")
            gpu.aggregate_cat_grad(INDPTR, indices, torch.cat([grad, grad], 1), x, mask, 2.0, "mean")
        for bias in (None, x[0]):
            gpu.aggregate_cat_kept(INDPTR, indices, x, bits, 2.0, "mean", bias)
            both = torch.cat([grad, grad], 1)
            gpu.aggregate_cat_kept_grad(INDPTR, indices, both, bits, 2.0, "mean", bias is not None)
            _, kept = gpu.bias_relu(x, bias, bits if bias is None else None, 2.0)
            gpu.bias_relu_grad(x, kept, 2.0, bias is not None)
        words = torch.zeros(NODES, 4, dtype=torch.int32)
        for tf32 in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            gpu.gather_linear(x, dsts, torch.zeros(128, width, dtype=dtype), torch.zeros(128, dtype=dtype))
            for weight, mask in (
                (torch.zeros(width, 128, dtype=dtype), words),
                (torch.zeros(128, width).to(dtype).t(), None),
            ):
                _, kept = gpu.mm_bias_relu(x, weight, weight[0].contiguous(), mask, 2.0)
                gpu.mm_bias_relu_grad(x, weight, kept, 2.0, mask is None)
                gpu.mm_unaligned(x, weight[:, :47], weight[0, :47].contiguous())
                gpu.turn_all([weight, x])
            for heads, columns in ((4, 32), (2, 64)):
                rows, by = x.new_zeros(NODES, heads, width), x.new_zeros(heads, columns, width)
                if heads_fit(dtype, heads, width, columns):
                    y, kept = gpu.head_linear_bias_relu(rows, by, x.new_zeros(heads * columns), words, 2.0)
                    for biased in (True, False):
                        gpu.head_linear_bias_relu_grad(y, kept, 2.0, biased, rows, by)
        chosen, tune.choose = tune.choose, last_candidate
        gpu.gather_linears(x, dsts, [torch.zeros(130, width, dtype=dtype)] * 3, [torch.zeros(130, dtype=dtype)] * 2)
        gpu.gather_linear_grad(x, dsts, [torch.zeros(ROWS, 130, dtype=dtype)] * 2, 0)  # no sums: rows may be gathered
        tune.choose = chosen
        for biases, columns in itertools.product((0, 1), (4, 16)):
            gpu.gather_linear_grad(x, dsts, [torch.zeros(ROWS, columns, dtype=dtype)] * 2, biases)
        parts, joined = [x, x, x[:, 0], x], [torch.zeros(NODES, 2 * width + 8, dtype=dtype), x]
        gpu.join_columns_all(parts, [3, 1], [2 * width + 8, width])
        gpu.join_columns_all([x, x[:, 0].contiguous()], [1, 1], [width, 1], "bfloat16")
        gpu.split_columns_all(joined, [3, 1], [width, width, 0, width])
        gpu.split_columns_all(gpu.join_columns_all(parts, [4], [4 * width], "bfloat16"), [4], [width] * 4, "float32")
        gpu.spmm_grad_x(INDPTR, indices, grad, None, NODES, "mean")
        gpu.spmm_extremum_grad(INDPTR, indices, x, None, grad, grad)
        gpu.spmm_csr_extremum_grad(INDPTR, indices, grad, None, x, x)
        gpu.sddmm(INDPTR, indices, x, None, "copy_lhs")
        gpu.sddmm(INDPTR, indices, x, grad, "div")
    x, grad = torch.zeros(NODES, 4, 32, dtype=dtype), torch.zeros(ROWS, 4, 32, dtype=dtype)
    weight = torch.zeros(EDGES, 4, dtype=dtype)
    gpu.spmm(INDPTR, indices, x, weight, "sum")
    gpu.spmm_grad_x(INDPTR, indices, grad, weight, NODES, "sum")
    gpu_grad.spmm_grad_x_transposed(INDPTR, indices, grad, weight, NODES, "mean")
    gpu.spmm_grad_weight(INDPTR, indices, x, grad, weight, "mean")
    gpu.spmm_extremum_grad(INDPTR, indices, x, weight, grad, grad)
    scores, bits = (weight[:NODES], weight[:ROWS]), torch.zeros(EDGES, 1, dtype=torch.int32)
    for rows, of_edges in itertools.product((x, x[:, :1].contiguous()), (None, weight)):
        _, top, total = gpu.attend(INDPTR, indices, *scores, rows, 0.2, bits, 2.0, of_edges)
        gpu.attend_grad(INDPTR, indices, *scores, rows, top, total, grad, 0.2, bits, 2.0, True, of_edges)
    table, vectors = x[:, 0].contiguous(), torch.zeros(4, 32, dtype=dtype)
    ids = INDPTR[:-1].to(indices.dtype)
    for rows, by in ((table, vectors), (torch.zeros(NODES, 768, dtype=dtype), torch.zeros(4, 768, dtype=dtype))):
        for of_edges in (None, weight):
            sums, alpha = gpu.gather_attend(INDPTR, indices, ids, rows, by, by, 0.2, bits, 2.0, of_edges)
        gpu.gather_attend_grad(INDPTR, indices, ids, rows, alpha, sums, grad, grad, 0.2, bits, 2.0)
        gpu_gather_attend.first_products(rows, ROWS, by)
    gpu.column_sums(table)
    gpu.column_sums(table.bfloat16(), "float32")
    gpu_heads.block_diagonal(torch.zeros(4, 32, 32, dtype=dtype))
    rows, wide = x[:, 0].contiguous(), torch.zeros(ROWS, 4, 32, dtype=dtype)
    gpu.attend_own_grad(INDPTR, indices, rows, vectors, vectors, *scores, top, total, wide, 0.2, bits, 2.0)
    gpu.sddmm(INDPTR, indices, x, grad, "dot")
    gpu.sddmm(INDPTR, indices, weight[:NODES], weight[:ROWS], "add")
    gpu.sddmm(INDPTR, indices, None, grad, "copy_rhs")
    gpu.edge_softmax(INDPTR, weight)
    gpu.edge_softmax_grad(INDPTR, weight, weight)
    gpu.scatter_src(INDPTR, indices, weight, NODES)
    gpu_grad.scatter_src_transposed(INDPTR, indices, weight, NODES)
    gpu.scatter_dst(INDPTR, weight)


def products_of_two_dtypes() -> None:
    """Rows of one and weights of another, as under autocast, with every candidate of the launch settings."""
    ids, chosen, before = torch.zeros(ROWS, dtype=torch.int32), tune.choose, torch.backends.cuda.matmul.allow_tf32
    tune.choose, torch.backends.cuda.matmul.allow_tf32 = every_candidate, True
    halves, width = (torch.bfloat16, torch.float16), 100
    for table, weight in (*((torch.float32, half) for half in halves), *((half, torch.float32) for half in halves)):
        for columns in (16, 128):
            weights = [torch.zeros(columns, width, dtype=weight)] * 2
            gpu.gather_linears(torch.zeros(NODES, width, dtype=table), ids, weights, [weights[0][:, 0].contiguous()])
    tune.choose, torch.backends.cuda.matmul.allow_tf32 = chosen, before


def activations(dtype: torch.dtype, width: int) -> None:
    """Every activation, with a norm and without, with a bias and without."""
    indices, vector = torch.zeros(EDGES, dtype=torch.int32), torch.zeros(width)
    x, grad = torch.zeros(NODES, width, dtype=dtype), torch.zeros(ROWS, 2 * width, dtype=dtype)
    bits = torch.zeros(NODES, -(-width // 32), dtype=torch.int32)
    for act in ACTS:
        for vectors in ((vector, vector, 1e-5, vector), (None, None, 0.0, None)):
            rest = (None, None, bits, 2.0, "mean", True, act, *vectors)
            gpu.aggregate_activated(INDPTR, indices, x, *rest)
            gpu.aggregate_activated_grad(INDPTR, indices, grad, x, *rest)


def batch_norms(dtype: torch.dtype) -> None:
    """Batch norm of rows, of one tile of columns and of several."""
    for width in (3, 128, 300):
        x, vector = torch.zeros(NODES, width, dtype=dtype), torch.zeros(width)
        y, mean, _, scale = gpu.batch_norm_rows(x, vector, vector, COUNT, 1e-5)
        gpu.batch_norm_rows_sums(y, x, COUNT, mean, scale)


def segments(dtype: torch.dtype, heads: int, width: int) -> None:
    """Segment programs of known layers; both orders of the sources."""
    indices = torch.zeros(EDGES, dtype=torch.int32)
    structure = Structure("large", INDPTR, indices, NODES, ROWS)
    some = ("dot", "of nodes", "stored", "gatv2", "gatv2, added up", "film", "every leaf")
    for name in PROGRAMS if EVERYTHING else some:
        program = PROGRAMS[name][0]
        args = (INDPTR, indices, segment_leaves(program, heads, width, structure, dtype), program, heads)
        outputs = gpu.segment(*args)
        if activates(SegmentProgram.parse(program), heads * width):
            zeros = torch.zeros_like(outputs[0])
            bits = torch.zeros(ROWS, -(-heads * width // 32), dtype=torch.int32)
            gpu.segment_bias_relu(*args, zeros[0].contiguous(), bits, 2.0, zeros)
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            rows = grad_rows(SegmentProgram.parse(program), heads, heads * width, INDPTR, outputs, outputs)
            gpu.segment_grad(*args, rows, segment_wanted(program))
        torch.use_deterministic_algorithms(False)


def heads_of_one_row(dtype: torch.dtype) -> None:
    """Rows that several heads share."""
    indices, weight = torch.zeros(EDGES, dtype=torch.int32), torch.zeros(EDGES, 4, dtype=dtype)
    x, grad = torch.zeros(NODES, 1, 32, dtype=dtype), torch.zeros(ROWS, 4, 32, dtype=dtype)
    gpu.spmm(INDPTR, indices, x, weight, "sum")
    gpu.spmm_grad_x(INDPTR, indices, grad, weight, NODES, "sum", True)
    gpu.spmm_grad_weight(INDPTR, indices, x, grad, weight, "mean")


def wide_rows(dtype: torch.dtype, width: int) -> None:
    """Kernels that go over tiles of rows too wide for one."""
    indices, dsts = torch.zeros(EDGES, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    x, grad = torch.zeros(NODES, width, dtype=dtype), torch.zeros(ROWS, width, dtype=dtype)
    gpu.sample_aggregate_cat(INDPTR, indices, dsts, COUNT, FANOUTS[0], False, KEY, 0, x, "mean")
    weight, vectors = torch.zeros(EDGES, 2, dtype=dtype), torch.zeros(2, width, dtype=dtype)
    grads = torch.zeros(ROWS, 2, width, dtype=dtype)
    gpu.sddmm(INDPTR, indices, x, grad, "dot")
    gpu.spmm_grad_weight(INDPTR, indices, x[:, None], grads, weight, "mean")
    gpu.spmm_extremum_grad(INDPTR, indices, x, weight[:, 0].contiguous(), grad, grad)
    sums, alpha = gpu.gather_attend(INDPTR, indices, dsts, x, vectors, vectors, 0.2, None, 1.0)
    gpu.gather_attend_grad(INDPTR, indices, dsts, x, alpha, sums, grads, grads, 0.2, None, 1.0)


def dense_products(dtype: torch.dtype) -> None:
    """Products of edges' rows on tensor cores, which are a candidate where TF32 is allowed."""
    x, grad = torch.zeros(NODES, 1, 100, dtype=dtype), torch.zeros(ROWS, 4, 100, dtype=dtype)
    others, gpu_edge_products._edge_tiles = gpu_edge_products._edge_tiles, lambda width, numbers: []
    in_warps, gpu_edge_products.fits = gpu_edge_products.fits, lambda *sizes, held: False
    torch.backends.cuda.matmul.allow_tf32 = True
    out = torch.zeros(EDGES, 4)
    gpu_edge_products.edge_products(INDPTR, torch.zeros(EDGES, dtype=torch.int32), x, grad, out)
    torch.backends.cuda.matmul.allow_tf32 = False
    gpu_edge_products._edge_tiles, gpu_edge_products.fits = others, in_warps


def steps() -> None:
    """What a training step does besides the program."""
    flag, ok = torch.tensor(False), torch.tensor(True)
    for sets in (0, 3):
        counts = [COUNT] * sets
        gpu.overflow(counts, [7] * sets, flag)
        with opened(COUNT, torch.zeros(sets + 1, dtype=torch.int64)):
            gpu.overflow(counts, [7] * sets, flag)
    for dtype in (torch.float32, torch.bfloat16):
        gpu.finish_step(KEY, flag, torch.zeros(10), KEY, torch.tensor(1.0, dtype=dtype), ok)
        values, shares = [torch.zeros(()), torch.zeros((), dtype=torch.float64)], torch.zeros(3, dtype=torch.float64)
        gpu.own_words(torch.zeros(9, dtype=dtype), torch.zeros(3), values, shares, ok, 0)
    parameters = [torch.zeros(128, 200), torch.zeros(128), torch.zeros(47, 256), torch.zeros(47)]
    for dtype in (torch.float32, torch.float64):
        weights, table = [p.to(dtype) for p in parameters], torch.zeros(9, dtype=torch.float64)
        for decoupled, largest in ((True, weights), (False, [])):
            steps = [torch.zeros(())] * 4
            adam(weights, weights, weights, weights, largest, steps, table, ok, decoupled=decoupled, maximize=False)
        for buffers in (weights, []):
            sgd(weights, weights, buffers, table, ok, nesterov=bool(buffers), maximize=False)
    for a, b in ((1, 2), (16, 2**31), (2**32 - 1, 0)):  # one binary, whatever the state
        shuffle_keys(INDPTR, a, b)
    checksums(INDPTR, [INDPTR])
    for dtype in (torch.float32, torch.float64):
        for world in (2, 3, 8):
            out, numbers = torch.zeros(32 * TILE, dtype=dtype), counters(ok.device)
            given = torch.zeros(3, dtype=torch.float64), ok, ok.clone(), torch.zeros(world, dtype=torch.int64), numbers
            sum_ranks(out, parameters[:3], [0, 25600, 25728], 2, [steps[0]] * 2, *given, 1, 1)
            sum_ranks(out, [out], [0], 0, [], *given, 0, 0)


def feeding() -> None:
    """Rows and structure on their way into an arena."""
    ids, slots = torch.zeros(EDGES, dtype=torch.int32), torch.zeros(NODES, dtype=torch.int32)
    for dtype, width in ((torch.float32, 128), (torch.bfloat16, 37), (torch.float16, 768)):
        x = torch.zeros(NODES, width, dtype=dtype)
        gpu_fill.fill_rows(x, ids, ids.long(), x)
        gpu_fill.fill_rows(x, ids, ids, x.float())
        for cache, slot_of in ((x[:9].contiguous(), slots), (None, None)):
            gpu_fill.gather_stored(x, cache, slot_of, ids)
            for world in (2, 4):
                gpu_shards.gather_shards([x] * world, INDPTR[: world + 1], 64, cache, slot_of, ids)
    gpu_place.place_structure(INDPTR, ids, slots, INDPTR, ids)
    for index in (torch.int32, torch.int64):
        book(index)


def book(dtype: torch.dtype) -> None:
    """Slots for a macro-batch's nodes."""
    slots = DeviceSlots(torch.zeros(0, dtype=dtype), 9, NODES, False, torch.device("cpu"))
    used = torch.zeros(9, dtype=torch.uint8)
    gpu_book.mark_nodes(slots._bits, torch.zeros(EDGES, dtype=dtype))
    counts = gpu_book.count_nodes(slots._bits, slots.slot_of, used, 0)
    free = gpu_book.count_free(used, used, slots._hand)
    for alone in (False, True):
        taken = gpu_book.list_free(used, used, slots._hand, free, 2, alone)
    book = slots.slot_of, slots._owner, slots._since, used
    gpu_book.take_free(slots._bits, *book, taken, counts, slots._hand, 0, 1)
    gpu_book.leave_slots(slots.slot_of, slots._owner, slots._since, 1)
    ids, out = torch.zeros(9, dtype=dtype), torch.zeros(NODES, dtype=torch.int64)
    gpu_book.fill_near(None, ids, ids.int(), out.to(dtype))
    for table, to in (
        (out.to(torch.int8), out),
        (out.bool(), out.bool()),
        (torch.zeros(9, 3), torch.zeros(9, 3).half()),
    ):
        gpu_book.fill_near(table, ids, ids.int(), to)


def functions() -> dict[str, JITFunction]:
    """Every ``@triton.jit`` function of ``joestar.kernels``, by module and name."""
    found = {}
    for info in pkgutil.iter_modules(joestar.kernels.__path__):
        if info.name.startswith("gpu"):
            module = importlib.import_module(f"joestar.kernels.{info.name}")
            for name, value in vars(module).items():
                if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__:
                    found[f"{info.name}.{name}"] = value
    return found


def main() -> None:
    """Compiles, and prints what came of it."""
    with zeroed():
        if EVERYTHING:
            tune.choose = every_candidate
            for ids in (torch.int32, torch.int64):
                structure(ids)
            values(torch.float32, (1, 47, 100, 768), ("mean", "max"))
            values(torch.bfloat16, (100, 256), ("mean", "max"))
            values(torch.float16, (100,), ("mean",))
            values(torch.float64, (100,), ("mean",))
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                database(dtype)
                heads_of_one_row(dtype)
                if dtype != torch.float64:
                    dense_products(dtype)
            activations(torch.float32, 128)
            activations(torch.bfloat16, 128)
            segments(torch.float32, 4, 25)
            segments(torch.float32, 4, 32)
            segments(torch.float32, 1, 47)
            segments(torch.bfloat16, 1, 128)
        else:
            structure(torch.int32)
            values(torch.float32, (100,), ("mean",))
            database(torch.float32)
            heads_of_one_row(torch.float32)
            segments(torch.float32, 4, 32)
            dense_products(torch.float32)
        batch_norms(torch.float32)
        products_of_two_dtypes()
        wide_rows(torch.float32, WIDEST)
        feeding()
        steps()
    covered: set[JITFunction] = set()
    for function in launched:
        reached(function, covered)
    missing = sorted(name for name, function in functions().items() if function not in covered)
    rows = resources()
    if "--spills" in sys.argv:
        for row in sorted(rows, key=lambda row: -row["stack"]):
            if row["stack"]:
                print(row)
    else:
        print(json.dumps({"kernels": len(compiled), "missing": missing, "resources": rows}))


main()
