"""A report with something in every field, made by hand."""

from joestar.profile.ledger import (
    CandidateRecord,
    Counters,
    Environment,
    KernelRecord,
    PassSummary,
    PlaceSummary,
    ProfileRecord,
    ProgramRecord,
    Report,
    SetRecord,
    SiteRecord,
    StageRecord,
    TuningRecord,
)

LINE = "/home/me/project/model.py:45 in forward: h = self.lin(block.pull(fn.copy_u(x), 'mean')) if a < b & c else x"


def program() -> ProgramRecord:
    """Three hops, padded."""
    sets = [
        SetRecord("hop 0 sampled edges", 200, 14_121, 14_803.4, 15_000, 15_440, 0.0412),
        SetRecord("hop 0 source nodes", 200, 13_377, 14_702.25, 15_111, 15_424, 0.0468),
        SetRecord("hop 1 sampled edges", 200, 131_313, 136_161.5, 138_777, 142_944, 0.0474),
        SetRecord("hop 1 source nodes", 200, 117_071, 120_606.75, 122_999, None, None),
        SetRecord("hop 2 sampled edges", 12, 411_000, 415_500.5, 421_000, None, None, stored=False),
    ]
    passes = [
        PassSummary("dce", 9, 157, 148, 1.25, False),
        PassSummary("extract-select", 3, 148, 145, 2.5, False),
        PassSummary("relu-dropout", 0, 145, 145, 0.0, True),
        PassSummary("hoist", 0, 145, 145, 0.375, False),
    ]
    places = [
        PlaceSummary("extract-select", "rowwise_sample", True, "fanout 15", LINE),
        PlaceSummary("extract-select", "rowwise_sample_1", True, "fanout 15", LINE),
        PlaceSummary("order", "linear", False, "aggregating first is chosen, by cost", LINE, "convs.0"),
        PlaceSummary("order", "linear_1", False, "aggregating first is chosen, by cost", LINE, "convs.1"),
        PlaceSummary(
            "sample-gather-aggregate", "spmm_2", False, "its <script>alert(1)</script> result is used twice", LINE
        ),
    ]
    sites = [
        SiteRecord("order:convs_0", ["update-first", "aggregate-first"], "update-first", "aggregate-first", LINE),
        SiteRecord("backward:convs_1", ["scatter", "gather"], "scatter", "scatter", "no line"),
    ]
    seconds = {"capture": 1.5, "passes": 0.125, "padding": 0.0625, "backend": 22.75}
    return ProgramRecord(
        "train", "graph():\n    %before = aten.relu(%x<1>)", "graph():\n    %after = joestar.fused(%x & %y)", passes,
        places, sites, sets, 1000, 2, {"masked loss": 4}, seconds, 0.0125,
    )  # fmt: skip


def profile() -> ProfileRecord:
    """As on a GPU with everything resident."""
    kernels = [
        KernelRecord("_sample_aggregate_kernel", "forward", 103.25, 1.0, "", "convs.0", LINE),
        KernelRecord(
            "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_32x3_nt_align4>(Params)",
            "backward",
            58.5,
            3.0,
            "64x416 · 416x2872",
            "convs.0.lin_l",
            LINE,
        ),
        KernelRecord("_floyd<int, long>", "sampling", 24.75, 2.0),
        KernelRecord("_adam_kernel", "optimizer", 23.875, 1.0),
        *(KernelRecord(f"triton_poi_fused_relu_{index}", "forward", 9.5 - index / 8, 1.0) for index in range(21)),
    ]
    stages = [
        StageRecord("Joestar eager, no passes", 5.375, 300.0, 912 << 20),
        StageRecord("+ fusion", 4.125, 212.0, 700 << 20),
        StageRecord("+ Inductor", 4.625, 61.0, 612 << 20),
        StageRecord("+ CUDA graph", 0.6125, 58.0, 640 << 20),
    ]
    phases = {"sampling": 0.0248, "forward": 0.255, "backward": 0.178, "optimizer": 0.0239, "idle": 0.1308}
    return ProfileRecord(
        0.6125, 0.609, 0.62, 200, phases, kernels, stages, 640 << 20, 1_050_000_000, 4.2e12,
        {"host to device": 0, "device to host": 16}, 197, "Kernels of 5 steps launched one by one.",
        [StageRecord("PyTorch eager, layers of PyG 2.8.0", 12.25, 640.0, 1200 << 20)],
    )  # fmt: skip


def tuning() -> TuningRecord:
    """Three candidates."""
    candidates = [
        CandidateRecord({}, 0.03, 4.875, 0.6625, False),
        CandidateRecord({"order:convs_0": "aggregate-first"}, 0.03, 4.25, 0.6125, True),
        CandidateRecord({"order:convs_0": "aggregate-first", "backward:convs_1": "gather"}, 0.05, 6.75, None, False),
    ]
    return TuningRecord(candidates, 41.5, True, "9f2c77")


def report() -> Report:
    """All of it."""
    counters = Counters(
        1213, 13, 11, 7, 3, 2, 12, {"prepare": 24.5, "capture": 3.25, "first backward": 2.5, "forward": 0.5}
    )
    environment = Environment("0.1.0", "2.11.0", "3.12.1", "cuda (NVIDIA H200)", 16, "AMD EPYC 9654", 64, 96 << 30)
    return Report(
        environment, "GraphSAGE<b>", "NeighborSampler(fanouts=[15, 10, 5])", "inductor", "padded", [program()],
        counters, tuning(), profile(), "Graph(ogbn-products: 2,449,029 nodes, 123,718,280 edges)",
        {"batch_size": "1000", "lr": "0.003", "dropout": "0.5"}, "joestar profile ogbn-products --lr=0.003",
        "2026-05-04 13:37 UTC",
    )  # fmt: skip
