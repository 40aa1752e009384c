"""Translate a mask_mod or score_mod to a Triton function: its jaxpr, line by line.

A mod is elementwise, so it is traced on scalars; each equation becomes one line of Triton, which
broadcasts where the kernel calls the function with tiles. Operations that are not in the tables
below raise `NotImplementedError` with their name.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxinfer.kernels.flash_attention.rule import Mod

INDICES = ("row", "head", "q_position", "k_position")

# Primitive -> expression of its operands. Triton's integer // and % round towards zero, as XLA's.
_PLAIN: Mapping[str, str] = {
    "add": "{0} + {1}",
    "add_any": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "rem": "{0} % {1}",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "max": "tl.maximum({0}, {1})",
    "min": "tl.minimum({0}, {1})",
    "clamp": "tl.minimum(tl.maximum({1}, {0}), {2})",
    "square": "{0} * {0}",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "tanh": "1.0 - 2.0 / (tl.exp(2.0 * {0}) + 1.0)",
    "logistic": "1.0 / (1.0 + tl.exp(-{0}))",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "shift_left": "{0} << {1}",
    "shift_right_arithmetic": "{0} >> {1}",
    "stop_gradient": "{0}",
    "copy": "{0}",
    "copy_p": "{0}",
    # Scalars stay scalars: these change nothing.
    "broadcast_in_dim": "{0}",
    "reshape": "{0}",
    "squeeze": "{0}",
}
_TYPES: Mapping[str, str] = {
    "bool": "tl.int1",
    "int8": "tl.int8",
    "uint8": "tl.uint8",
    "int16": "tl.int16",
    "int32": "tl.int32",
    "uint32": "tl.uint32",
    "float16": "tl.float16",
    "bfloat16": "tl.bfloat16",
    "float32": "tl.float32",
}
_CALLS = ("pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint")


def mask_function(mask_mod: Mod) -> Any:
    """Return (row, head, q_position, k_position) -> bool, under `triton.jit`."""
    return _compiled(source_of(mask_mod, "mask_mod"), "mask_mod")


def score_function(score_mod: Mod) -> Any:
    """Return (score, row, head, q_position, k_position) -> float32 score, under `triton.jit`."""
    return _compiled(source_of(score_mod, "score_mod"), "score_mod")


def source_of(mod: Mod, name: str) -> str:
    """Return the source of a function `name` for `triton.jit`.

    Raises `NotImplementedError` for what the source cannot express: operations without a line in
    the tables, arrays that the mod closes over, values that are not one number an element.
    """
    score_args = ("score",) if name == "score_mod" else ()
    score = [jax.ShapeDtypeStruct((), jnp.float32)] * len(score_args)
    closed = jax.make_jaxpr(mod)(*score, *[jax.ShapeDtypeStruct((), jnp.int32)] * len(INDICES))
    if closed.consts:
        raise NotImplementedError(f"{name} closes over arrays; Triton takes constants and indices")
    if len(closed.out_avals) != 1 or closed.out_avals[0].shape != ():
        raise NotImplementedError(f"{name} gives {closed.out_avals}, not one number an element")
    writer = _Writer(name)
    (result,) = writer.write(closed.jaxpr, [*score_args, *INDICES])
    if isinstance(closed.jaxpr.outvars[0], Literal):
        raise NotImplementedError(f"{name} is the constant {result}; leave it out")
    as_type = "tl.int1" if name == "mask_mod" else "tl.float32"
    lines = [*writer.lines, f"return ({result}).to({as_type})"]
    header = f"def {name}({', '.join([*score_args, *INDICES])}):"
    return "\n".join([header, *("    " + line for line in lines)]) + "\n"


class _Writer:
    """The lines written so far; results are named in order."""

    def __init__(self, mod_name: str):
        self.mod_name = mod_name
        self.lines: list[str] = []

    def write(self, jaxpr: Any, arguments: list[str]) -> list[str]:
        """Append the equations of `jaxpr` and return the names, or literals, of its results."""
        names = dict(zip(jaxpr.invars, arguments, strict=True))

        def name_of(var: Any) -> str:
            if isinstance(var, Literal):
                aval: Any = var.aval
                return _literal(var.val, aval.dtype)
            return names[var]

        for equation in jaxpr.eqns:
            operands = [name_of(var) for var in equation.invars]
            if equation.primitive.name in _CALLS:
                results = self._call(equation, operands)
            else:
                results = [self._assign(self._expression(equation, operands))]
            names.update(zip(equation.outvars, results, strict=True))
        return [name_of(var) for var in jaxpr.outvars]

    def _assign(self, expression: str) -> str:
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def _call(self, equation: Any, operands: list[str]) -> list[str]:
        inner = next(
            equation.params[key]
            for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")
            if key in equation.params
        )
        if getattr(inner, "consts", ()):
            raise NotImplementedError(f"{self.mod_name} closes over arrays")
        return self.write(getattr(inner, "jaxpr", inner), operands)

    def _expression(self, equation: Any, operands: list[str]) -> str:
        name, params = equation.primitive.name, equation.params
        kind = equation.outvars[0].aval.dtype
        if equation.outvars[0].aval.shape != ():
            raise NotImplementedError(f"{self.mod_name} uses {name} on a vector")
        if name == "div":
            operator = "/" if jnp.issubdtype(kind, jnp.floating) else "//"
            return f"{operands[0]} {operator} {operands[1]}"
        if name == "not":
            return f"{operands[0]} == 0" if kind.name == "bool" else f"~{operands[0]}"
        if name == "sign":
            ends = [f"({operands[0]} {way} 0).to({_type(kind)})" for way in "><"]
            return " - ".join(ends)
        if name == "select_n" and len(operands) == 3:
            condition, if_false, if_true = operands
            return f"tl.where({condition}, {if_true}, {if_false})"
        if name == "convert_element_type":
            to_type = _type(params["new_dtype"])
            is_literal = operands[0][:1] in "(TF" or operands[0].startswith("float")
            made = f"tl.full([], {operands[0]}, {to_type})"  # a Python number has no `to`
            return made if is_literal else f"{operands[0]}.to({to_type})"
        if name == "integer_pow" and 1 <= params["y"] <= 8:
            return " * ".join([operands[0]] * params["y"])
        if name not in _PLAIN:
            raise NotImplementedError(f"{self.mod_name} uses {name}, which has no line in Triton")
        return _PLAIN[name].format(*operands)


def _type(dtype: Any) -> str:
    name = jnp.dtype(dtype).name
    if name not in _TYPES:
        raise NotImplementedError(f"a mod has values of {name}; use 32 bits at most")
    return _TYPES[name]


def _literal(value: Any, dtype: Any) -> str:
    _type(dtype)
    if jnp.dtype(dtype).name == "bool":
        return str(bool(value))
    if jnp.issubdtype(dtype, jnp.integer):
        return f"({int(value)})"
    number = float(value)
    return f"({number!r})" if math.isfinite(number) else f'float("{number}")'


@functools.cache
def _compiled(source: str, name: str) -> Any:
    """Return the function of a source: one object for each, since compiled kernels are cached by
    it.

    Triton reads a function's source through `inspect`, which uses `linecache`.
    """
    import triton
    import triton.language as tl

    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<jaxinfer.kernels.flash_attention {name} {digest}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"tl": tl, "__name__": f"jaxinfer_mod_{digest}"}
    exec(compile(source, file, "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    return triton.jit(function)
