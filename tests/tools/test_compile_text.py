"""Parsing compilers' output: launches, memory, spills."""

from __future__ import annotations

import pytest

from jaxinfer.tools.compile_gate import text as text_module

Launches, parse_hlo = text_module.Launches, text_module.parse_hlo

MODULE = """HloModule jit_step, is_scheduled=true

%fused_add (p0: f32[8], p1: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  ROOT %add.1 = f32[8]{0} add(%p0, %p1)
}

%turn (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %next = s32[] add(%i, %i)
  %f.1 = f32[8]{0} fusion(%x, %x), kind=kLoop, calls=%fused_add
  %copied = f32[8]{0} copy(%f.1)
  ROOT %out = (s32[], f32[8]{0}) tuple(%next, %copied)
}

%more (state.1: (s32[], f32[8])) -> pred[] {
  %state.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] fusion(%state.1), kind=kLoop, calls=%fused_less
}

%short (p.2: f32[8]) -> f32[8] {
  ROOT %p.2 = f32[8]{0} parameter(0)
}

%long (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  ROOT %sorted = f32[8]{0} sort(%p.3), dimensions={0}
}

ENTRY %main (a: f32[8], c: pred[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %c = pred[] parameter(1)
  %zero = s32[] constant(0)
  %scalar = s32[] add(%zero, %zero)
  %view = f32[4,2]{1,0} bitcast(%a)
  %f.2 = f32[8]{0} fusion(%a, %a), kind=kLoop, calls=%fused_add, metadata={op_name="jit(s)/block_1/add"}
  %init = (s32[], f32[8]{0}) tuple(%zero, %f.2)
  %w = (s32[], f32[8]{0}, /*index=2*/f32[]) while(%init), condition=%more, body=%turn LOOP
  %sum = f32[8]{0} all-reduce(%f.2), replica_groups={{0,1}}, to_apply=%fused_add
  %gs = (bf16[4]{0}, bf16[8]{0}) all-gather-start(%view), dimensions={0}
  %gd = bf16[8]{0} all-gather-done(%gs)
  %alloc = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"
  %k = f32[8]{0} custom-call(%sum), custom_call_target="tpu_custom_call", backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"},{"memory_space":"2","offset":"0","size":"7"}]}
  ROOT %r = f32[8]{0} conditional(%c, %a, %k), true_computation=%short, false_computation=%long
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("loop", "expected"),
    # Straight: f.2, all-reduce, all-gather, the kernel, and the longer branch's sort. A turn of the
    # loop: a fusion, a copy, and the fusion of its condition; scalars and views are free.
    [("", Launches(5, 1, 3)), (', backend_config={"known_trip_count":{"n":"4"}}', Launches(17))],
)
def test_launches_separate_loops_of_unknown_length(loop, expected):
    assert text_module.launches(parse_hlo(MODULE.replace(" LOOP", loop))) == expected


def test_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_hlo("%f (p: f32[]) -> f32[] {\n}\n")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("f32[2,3]{1,0}", [24]), ("(bf16[4], s32[])", [8, 4]), ("pred[9]", [9]), ("s4[3]", [2]),
     ("f8e4m3fn[5]", [5]), ("token[]", [0]), ("f32[0,7]", [0])],
)  # fmt: skip
def test_array_bytes_of_a_type(text, sizes):
    assert text_module.array_bytes(text) == sizes


def test_vmem_is_read_from_the_mosaic_call():
    assert text_module.mosaic_vmem(parse_hlo(MODULE)) == [4096]


def test_layer_kernels_are_found_by_name():
    [kernel] = text_module.layer_kernels(parse_hlo(MODULE), 1)
    assert kernel == {"name": "f.2", "result": "f32[8]", "op": "add", "inside": {"add": 1}}
    assert not text_module.layer_kernels(parse_hlo(MODULE), 0)


PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode' for 'sm_90a'
ptxas info    : Function properties for decode
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'merge' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


def test_ptxas_resources_are_read_per_kernel():
    assert text_module.ptxas_resources(PTXAS) == [
        text_module.KernelResources("decode", 168, 1024, 64),
        text_module.KernelResources("merge", 32, 0, 0),
    ]


def test_spills_are_found_among_xlas_warnings():
    log = (
        "W0101 asm.cc:1] Registers are spilled to local memory in function 'gemm_fusion_dot_3', "
        "8 bytes spill stores, 12 bytes spill loads\nW sort_rewriter.cc] something else\n"
    )
    assert text_module.xla_spills(log) == {"gemm_fusion_dot_3": 20}
    assert text_module.xla_spills("0 bytes spill stores in function 'x'") == {}


def test_reason_is_the_first_nonempty_line():
    assert text_module.first_reason(ValueError("\n  out of memory\nstack...")) == "out of memory"
    assert text_module.first_reason(KeyError()) == "KeyError"
    assert len(text_module.first_reason("x" * 900)) == 300
