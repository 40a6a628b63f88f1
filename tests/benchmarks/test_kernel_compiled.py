"""The report on compiled kernels: what is read from machine code and from Triton's own code, and the model of time."""

import textwrap

import pytest
from rich.console import Console

from benchmarks import kernel_compiled
from benchmarks.framework.processes import BenchmarkError
from benchmarks.framework.results import VERSIONS, ResultsFile
from benchmarks.kernel_compiled import (
    GPU,
    PASSES,
    ROWS,
    Compilation,
    Mesh,
    bytes_in_flight,
    edge_loop,
    least_bytes,
    moved_bytes,
)
from benchmarks.kernels import Kernels

pytest.importorskip("triton", "3.7")

CODE = textwrap.dedent("""
    .L_x_9:
            /*0000*/                   LDG.E R1, desc[UR4][R2.64] ;
    .L_x_0:
            /*0010*/               @P1 LDG.E.128 R4, desc[UR4][R2.64] ;
            /*0020*/                   BRA.DIV UR5, `(.L_x_2) ;
    .L_x_1:
            /*0030*/                   FADD R1, R4, R5 ;
            /*0040*/               @P0 BRA `(.L_x_0) ;
            /*0050*/               @P2 BRA `(.L_x_9) ;
            /*0060*/                   EXIT ;
    .L_x_2:
            /*0070*/                   LDG.E R1, desc[UR4][R2.64] ;
            /*0080*/                   BRA `(.L_x_1) ;
""")

IR = textwrap.dedent("""
    %0 = tt.load %a : tensor<4x!tt.ptr<i32>>
    scf.for %i = %b to %c  : i32 {
      %1 = tt.load %d : tensor<4x8x8x!tt.ptr<f32>>
      scf.if %e {
        %2 = tt.load %f, %g, %h : tensor<4x!tt.ptr<i32>>
      }
      %3 = scf.for %j = %b to %c step %k iter_args(%x = %y) -> (tensor<4x8xf32>)  : i32 {
        %4 = tt.load %d, %m, %z : tensor<4x!tt.ptr<i32>>
        %5 = tt.load %d, %m, %z : tensor<4x8x!tt.ptr<f32>>
        %6 = tt.load %d, %m, %z : tensor<4x8x32x!tt.ptr<bf16>>
        scf.yield %5 : tensor<4x8xf32>
      }
      tt.store %d, %3 : tensor<4x8x8x!tt.ptr<f32>>
    }
""")


def test_the_loop_over_edges_is_found():
    """Not the one around it, nor the way back from code for threads that went apart."""
    for branch in ("@P0 BRA `(.L_x_0)", "BRA.U UP0, `(.L_x_0)", "BRA `(.L_x_0)"):
        loop = edge_loop(CODE.replace("@P0 BRA `(.L_x_0)", branch))
        assert [line.split("*/")[1].split()[0] for line in loop] == ["@P1", "BRA.DIV", "FADD", branch.split()[0]]


def test_bytes_are_those_of_the_innermost_loop_without_padding():
    arguments = {
        "BLOCK_R": 4,
        "BLOCK_H": 8,
        "BLOCK_C": 32,
        "BLOCK_V": 8,
        "HEADS": 6,
        "CHANNELS": 24,
        "VALUE_CHANNELS": 8,
    }
    assert moved_bytes(IR, arguments, 1) == 4 + 6 * 4 + 6 * 24 * 2


def test_bytes_in_flight():
    """Of loads until the first of them is used: also as an address, and as one of several registers."""
    lines = """
        /*0000*/ LDG.E R8, desc[UR4][R2.64] ;
        /*0010*/ LDG.E.128 R12, desc[UR4][R4.64] ;
        /*0020*/ @P1 LDG.E.U16 R20, desc[UR4][R6.64] ;
        /*0030*/ FADD R1, R14, R0 ;
        /*0040*/ LDG.E.64 R16, desc[UR4][R20.64] ;
        /*0050*/ FADD R1, R17, R1 ;
    """.strip().splitlines()
    assert bytes_in_flight(lines) == 32 * (4 + 16 + 2)
    assert bytes_in_flight(lines[:1] + lines[3:]) == 32 * (4 + 8)
    assert bytes_in_flight(lines[3:4]) == 0


def test_too_few_bytes_in_flight_or_spilled_registers_are_an_error(tmp_path):
    parsed = Kernels.parse(["--device", "cuda", "--compile-only", "--out", str(tmp_path)])
    case = Compilation("gatv2", 4, 64, False, "float32", 90, "forward")
    row = dict.fromkeys(kernel_compiled.Compiled.__annotations__, 1) | dict.fromkeys((*VERSIONS, "loads"), "1")
    right = {"in_flight": 14 * 1024, "spilled_bytes": 0}
    with Kernels.session(parsed, Console(quiet=True)) as benchmark:
        kernel_compiled.report(benchmark, {case: row | right})
        for wrong in ({"in_flight": 13 * 1024}, {"spilled_bytes": 8}):
            with pytest.raises(BenchmarkError, match="registers are spilled, or too few bytes are in flight, in gatv2"):
                kernel_compiled.report(benchmark, {case: row | right | wrong})


def test_least_bytes():
    found = [least_bytes(Compilation("transformer", 4, 64, False, "float32", 90, kernel)) for kernel in PASSES]
    assert found == [4 + 2 * 1024, 8 + 2 * 1024 + 4 * 16, 8 + 1024 + 16]
    found = [least_bytes(Compilation("gat", 8, 8, True, "bfloat16", 90, kernel)) for kernel in PASSES]
    assert found == [8 + 32 + 32 + 128, 8 + 32 + 128 + 4 * 32 + 2 * 32, 4 + 32]


def test_room_for_blocks():
    assert kernel_compiled._blocks_with_room(90, 64, 0, 1) == 32
    assert kernel_compiled._blocks_with_room(90, 128, 0, 1) == 16
    assert kernel_compiled._blocks_with_room(90, 33, 0, 4) == 12  # registers come in units of eight for each thread
    assert kernel_compiled._blocks_with_room(80, 32, 40 * 1024, 1) == 4


def test_the_model_is_the_larger_of_both():
    gpu, mesh = GPU(90, 10, 1.0, 1e9), Mesh(0, 0, 1000, {})
    loops = {name: {"bytes": 100.0, "instructions": 1.0} for name in PASSES}
    assert kernel_compiled.modelled_seconds(loops, gpu, mesh, 64) == pytest.approx(3 * 1e5 / 1e9)
    loops = {name: {"bytes": 0.0, "instructions": 4000.0} for name in PASSES}
    assert kernel_compiled.modelled_seconds(loops, gpu, mesh, 64) == pytest.approx(3 * 4e6 / 4e10)
    for nodes, rows in ((Mesh(1000, 0, 0, {}), 4), (Mesh(0, 1000, 0, {}), 4 + 7 + 2)):
        assert kernel_compiled.modelled_seconds(loops, gpu, nodes, 64) == pytest.approx(rows * 64e3 / 1e9)


def test_options(capsys):
    parsed = Kernels.parse(["--device", "cuda", "--compile-only", "--layers", "gat", "--architectures", "90"])
    cases = Kernels(parsed, None, None).cases()
    assert {(case.layer, case.architecture) for case in cases} == {("gat", 90)}
    assert {case.kernel for case in cases} == {*PASSES, *ROWS}
    assert {case.edge_features for case in cases if case.kernel in ROWS} == {False}
    assert {case.dtype for case in cases} == {"float32", "bfloat16"}
    for wrong, words in (([], "only with --device cuda"), (["--device", "cuda", "--peers", "pyg"], "--peers is for")):
        with pytest.raises(SystemExit):
            Kernels.parse(["--compile-only", *wrong])
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_compiled_and_reported(tmp_path, monkeypatch, capsys):
    """In processes that have no interpreter, whatever this one has."""
    monkeypatch.setattr(kernel_compiled, "WIDTHS", ((2, 8),))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = [
        "--device",
        "cuda",
        "--compile-only",
        "--layers",
        "transformer",
        "--edge-features",
        "with",
        "--dtypes",
        "float32",
    ]
    Kernels.main([*options, "--architectures", "90", "--out", str(tmp_path)])
    lines = (tmp_path / "compiled.md").read_text().splitlines()
    assert sum("| transformer, edge features | 2 × 8 | float32 | 90 |" in line for line in lines) == 3
    assert sum("| 16 × 32 | float16 |" in line for line in lines) == 3
    model = (tmp_path / "model.md").read_text()
    assert "| mesh, 327,660 edges | H200 |" in model
    assert "| 0.83 | 1.69 | 9.64 |" in model
    rows = ResultsFile(tmp_path / "runs.jsonl").rows()
    assert all(row["spilled_bytes"] == row["barriers"] == 0 for row in rows)
