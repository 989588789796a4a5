"""How Python calls kernels: with next to nothing in between.

Numba looks up the type of every argument, and makes a counted reference to the memory of every
array: that takes as long as all else that is done for a small batch. Here a kernel is called by
an *entry*, a C function for one combination of types. It compares them with those of the
arguments, and reads what the kernel is given from the arrays' own structures, which have been the
same in all of NumPy 1 and 2.
"""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, typeof, types
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.np import numpy_support
from numba.np.arrayobj import populate_array

from .cache import KernelCache, warn_not_kept
from .undisturbed import undisturbed

__all__ = ["Kernel", "keep"]

# A PyObject ends with its type, a PyArrayObject goes on with these, in bytes from its begin,
_HEAD = object.__basicsize__
_TYPE = _HEAD - 8
_DATA, _NDIM, _SHAPE, _DTYPE, _FLAGS = _HEAD, _HEAD + 8, _HEAD + 16, _HEAD + 40, _HEAD + 48
# and a dtype, after the type of its scalars, with three letters: kind, character, byte order, of
# which the native one has two.
_LETTERS = _HEAD + 8
_BYTE_ORDER = _LETTERS + 2
_FOREIGN = {"little": ">", "big": "<"}[sys.byteorder]
_C_CONTIGUOUS, _ALIGNED = 0x1, 0x100  # flags

_BYTE, _INT, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)

# Half types go as integers, which kernels tell one from the other by: types by the dtypes' letters.
_HALVES = {"fe": types.uint16, "VE": types.int16}
_LETTERS_OF_HALVES = {kind: letters for letters, kind in _HALVES.items()}


def _letters(dtype: np.dtype) -> str:
    return f"{dtype.kind}{dtype.char}"


def _type_of(value: Any) -> types.Type:
    """Numba's type of an argument; kernels write to outputs alone, so all arrays count as such."""
    if not isinstance(value, np.ndarray):
        return typeof(value)
    assert value.flags.c_contiguous
    assert value.dtype.isnative
    kind = _HALVES.get(_letters(value.dtype)) or numpy_support.from_dtype(value.dtype)
    return types.Array(kind, value.ndim, "C", aligned=value.flags.aligned)


class _Writer:
    """Writes what an entry does."""

    def __init__(self, context: Any, function: ir.Function) -> None:
        self.context = context
        self.function = function
        self.builder = ir.IRBuilder(function.append_basic_block())
        self.api = context.get_python_api(self.builder)
        self.others = function.append_basic_block("others")  # where other types lead

    def field(self, address: Any, offset: int, kind: ir.Type) -> Any:
        """What lies so many bytes from an address."""
        place = self.builder.gep(self.builder.bitcast(address, _BYTE.as_pointer()), [_INT(offset)])
        return self.builder.load(self.builder.bitcast(place, kind.as_pointer()))

    def expect(self, condition: Any) -> None:
        """Go on if this holds."""
        going_on = self.function.append_basic_block()
        self.builder.cbranch(condition, going_on, self.others)
        self.builder.position_at_end(going_on)

    def expect_same(self, found: Any, expected: Any) -> None:
        """Go on if two words, or pointers, are the same."""
        if isinstance(found.type, ir.PointerType):
            expected = self.builder.bitcast(expected, found.type)
        self.expect(self.builder.icmp_unsigned("==", found, expected))

    def value(self, argument: Any, kind: types.Type) -> Any:
        """The value of an argument, if it is of this kind."""
        if isinstance(kind, types.Array):
            return self.array(argument, kind)
        api, builder = self.api, self.builder
        if kind == types.none:
            self.expect_same(argument, api.borrow_none())
            return self.context.get_dummy_value()
        if kind == types.boolean:
            is_true = builder.icmp_unsigned("==", argument, api.get_c_object("_Py_TrueStruct"))
            false = builder.icmp_unsigned("==", argument, api.get_c_object("_Py_FalseStruct"))
            self.expect(builder.or_(is_true, false))
            return is_true
        name, read = {
            types.int64: ("PyLong_Type", api.long_as_longlong),
            types.float64: ("PyFloat_Type", api.float_as_double),
        }[kind]
        self.expect_same(self.field(argument, _TYPE, argument.type), api.get_c_object(name))
        return read(argument)

    def array(self, argument: Any, kind: types.Array) -> Any:
        """An array, if it is one of this dtype, dimensions and layout."""
        builder = self.builder
        self.expect_same(self.field(argument, _TYPE, argument.type), self.function.args[0])
        dtype = self.field(argument, _DTYPE, _BYTE.as_pointer())
        letters = _LETTERS_OF_HALVES.get(kind.dtype) or _letters(numpy_support.as_dtype(kind.dtype))
        for place, letter in enumerate(letters.encode(), _LETTERS):
            self.expect_same(self.field(dtype, place, _BYTE), _BYTE(letter))
        order = self.field(dtype, _BYTE_ORDER, _BYTE)
        self.expect(builder.icmp_unsigned("!=", order, _BYTE(ord(_FOREIGN))))
        self.expect_same(self.field(argument, _NDIM, _INT), _INT(kind.ndim))
        wanted = _INT(_C_CONTIGUOUS | (_ALIGNED if kind.aligned else 0))
        flags = builder.and_(self.field(argument, _FLAGS, _INT), wanted)
        self.expect_same(flags, wanted)

        sizes = self.field(argument, _SHAPE, _WORD.as_pointer())
        shape = [self.field(sizes, 8 * axis, _WORD) for axis in range(kind.ndim)]
        itemsize = _WORD(kind.dtype.bitwidth // 8)
        strides = [itemsize]
        for size in reversed(shape[1:]):
            strides.insert(0, builder.mul(size, strides[0]))
        array = self.context.make_array(kind)(self.context, builder)
        data = self.field(argument, _DATA, array.data.type)
        populate_array(
            array, data=data, shape=shape, strides=strides[: kind.ndim], itemsize=itemsize,
            meminfo=None,
        )  # fmt: skip
        return array._getvalue()


def _entry_name(description: Any) -> str:
    return f"{description.llvm_func_name}.entry"


def _add_entry(context: Any, library: Any, description: Any, *_: Any, **__: Any) -> None:
    """Write a kernel's entry, for `METH_FASTCALL`; it is given NumPy's type of arrays as self.

    It returns NotImplemented for arguments of other types.
    """
    convention, kinds, result = context.call_conv, description.argtypes, description.restype
    module = context.create_module("entry")
    kernel = ir.Function(
        module, convention.get_function_type(result, kinds), description.llvm_func_name
    )
    pointer = context.get_argument_type(types.pyobject)
    kind = ir.FunctionType(pointer, [pointer, pointer.as_pointer(), _WORD])
    writer = _Writer(context, ir.Function(module, kind, _entry_name(description)))
    builder, api = writer.builder, writer.api
    _, arguments, number = writer.function.args

    writer.expect_same(number, _WORD(len(kinds)))
    values = [
        writer.value(builder.load(builder.gep(arguments, [_INT(i)])), kind)
        for i, kind in enumerate(kinds)
    ]
    state = api.save_thread()
    status, returned = convention.call_function(builder, kernel, result, kinds, values)
    api.restore_thread(state)
    with builder.if_then(status.is_error, likely=False):  # only an allocation can fail
        api.err_set_string("PyExc_MemoryError", "no memory for the working arrays of a kernel")
        builder.ret(api.get_null_object())
    builder.ret(api.from_native_value(result, returned))

    builder.position_at_end(writer.others)
    other = api.get_c_object("_Py_NotImplementedStruct")
    api.incref(other)
    builder.ret(other)
    library.add_ir_module(module)


class _KernelCompiler(Compiler):  # type: ignore[misc]
    """Numba's compiler, which writes an entry in place of its own way to call a function."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        context = self.state.targetctx  # which is of this function alone
        context.create_cpython_wrapper = partial(_add_entry, context)


class _Method(ctypes.Structure):
    """A PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_METH_FASTCALL = 0x80
_new_function = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.POINTER(_Method), ctypes.py_object, ctypes.py_object
)(("PyCFunction_NewEx", ctypes.pythonapi))

#: Keep an object for good.
keep = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


def _no_entry(*_: Any) -> Any:
    return NotImplemented


class Kernel:
    """A function that Python calls: compiled once per machine and types, then kept on disk.

    Its arguments are C-contiguous NumPy arrays, ints, floats, booleans and None. It runs without
    the interpreter lock. Its copies on disk have the name of `source`, the function that it was
    made from, if any.

    Raises
    ------
    MemoryError
        If memory for its working arrays is missing.
    TypeError
        For arguments of other types.

    Attributes
    ----------
    entry : callable
        That of the types that came last. For others it returns NotImplemented; it is quicker by a
        step of Python than a call of the kernel itself, which looks for the right one.
    """

    def __init__(self, function: Any, options: dict[str, Any], source: Any = None) -> None:
        self.__name__: str = function.__name__
        self.__doc__ = function.__doc__
        self.entry: Any = _no_entry
        # Numba's own, which is not to be called: there are entries in place of what it would call.
        self.compiled = njit(pipeline_class=_KernelCompiler, **options)(function)
        self._entries: dict[tuple[types.Type, ...], Any] = {}
        try:
            self.compiled._cache = KernelCache(source or function)
        except RuntimeError as error:
            warn_not_kept(str(error))

    def __call__(self, *arguments: Any) -> Any:
        result = self.entry(*arguments)
        if result is not NotImplemented:
            return result
        for entry in list(self._entries.values()):
            result = entry(*arguments)
            if result is not NotImplemented:
                self.entry = entry
                return result
        # For the first time; or they are arrays of subclasses.
        values = [np.asarray(one) if isinstance(one, np.ndarray) else one for one in arguments]
        kinds = tuple(map(_type_of, values))
        if kinds not in self._entries:
            self._entries[kinds] = self._new_entry(kinds)
        entry = self.entry = self._entries[kinds]  # and at once another thread's, perhaps
        result = entry(*values)
        if result is NotImplemented:
            raise TypeError(f"{self.__name__}: no entry for {kinds}")
        return result

    def _new_entry(self, kinds: tuple[types.Type, ...]) -> Any:
        work = partial(self._compile, kinds)
        # A thread that is compiling, and has come here by a signal's handler, has the lock already.
        owns = global_compiler_lock.is_locked()
        made, address = work() if owns else undisturbed(work)
        method = _Method(self.__name__.encode(), address, _METH_FASTCALL, None)
        keep(method)  # functions look at theirs when they end, be it when all modules are gone
        return _new_function(method, np.ndarray, made.library)  # which it keeps

    def _compile(self, kinds: tuple[types.Type, ...]) -> tuple[Any, int]:
        """(What Numba has compiled, address of its entry)."""
        with global_compiler_lock:  # no fork meanwhile: see `elements`
            self.compiled.compile(kinds)
            made = self.compiled.overloads[kinds]
            return made, made.library.get_pointer_to_function(_entry_name(made.fndesc))
