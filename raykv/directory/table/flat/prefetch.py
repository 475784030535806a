"""Memory that is wanted soon, asked for ahead of time: what a lookup in a large table waits for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_READ, _KEEP, _DATA = 0, 3, 1


@intrinsic
def prefetch(_context: Any, column: Any, position: Any) -> Any:
    """Begin to load `column[position]` into the cache; nothing else happens, out of bounds too."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = signature.args[0]
        array = context.make_array(kind)(context, builder, values[0])
        item = cgutils.get_item_pointer(context, builder, kind, array, [values[1]])
        address = builder.bitcast(item, ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [address.type], shape)
        builder.call(ask, [address, word(_READ), word(_KEEP), word(_DATA)])
        return context.get_dummy_value()

    return types.void(column, position), generate
