"""The reader of machine code: it sees a register that is written while a product may still read it, and nothing else."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from tests.kernels.triton.sass import overwritten

LOOP = """
.L_x_1:
        /*0010*/                   LDS.128 {loaded}, [R20] ;
        /*0020*/                   HFMA2.BF16_V2 R88, R96, R113.H0_H0, -136, -136 ;
        /*0030*/                   WARPGROUP.ARRIVE ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR16], R24, gsb0 ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, R92, gdesc[UR16], R24, gsb0 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0070*/                   STG.E [R88], R89 ;
        /*0080*/              @P0  BRA `(.L_x_1) ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00a0*/                   IMAD.MOV.U32 R93, RZ, RZ, R1 ;
        /*00b0*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("loaded", "left", "wrong"),
    [
        ("R96", "0x0", []),
        ("R96", "0x1", []),  # the first product is over, and its registers are free
        ("R96", "0x2", ["HFMA2.BF16_V2"]),
        ("R92", "0x0", []),
        ("R92", "0x1", ["LDS.128"]),
        ("R90", "0x1", ["LDS.128"]),  # its last two numbers
        ("R84", "0x1", []),
    ],
)
def test_ways_through_a_loop(loaded: str, left: str, wrong: list[str]) -> None:
    found = overwritten(LOOP.format(loaded=loaded, left=left))
    assert [line.split()[1] for line in found] == wrong


def test_products_without_registers() -> None:
    """Both operands in shared memory: nothing can be written too early."""
    assert not overwritten(LOOP.format(loaded="R88", left="0x2").replace("R88, gdesc", "gdesc").replace("R92, ", ""))
