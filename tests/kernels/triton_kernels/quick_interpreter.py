"""Triton's interpreter at twice its speed: what it makes anew at every operation is made once.

Nothing is computed otherwise. Profiled over kernels of attention: most of the time went to shapes (lists of constants,
each with a type and that type's name), to a table of dtypes, and to patches of the language.
"""

import contextlib
import functools
import math

import pytest


@contextlib.contextmanager
def quick(interpreter):
    """While it is entered; ``interpreter`` is ``triton.runtime.interpreter``."""
    with pytest.MonkeyPatch.context() as context:
        _patch_once(interpreter, context)
        _shapes_once(interpreter.tl.core, context)
        _dtypes_once(interpreter, context)
        yield


def _patch_once(interpreter, context) -> None:
    """The language is patched anew in every function that a kernel calls: once per launch will do."""
    language, patch = interpreter.tl, interpreter._patch_lang

    def unless_patched(fn):
        seen = [module for module in fn.__globals__.values() if module is language or module is language.core]
        if any(language.core.is_builtin(module.load) for module in seen):
            return patch(fn)
        return interpreter._LangPatchScope()

    context.setattr(interpreter, "_patch_lang", unless_patched)


def _shapes_once(core, context) -> None:
    """Types of blocks by element and shape, a tensor's shape and size by its type's; nobody writes to either."""
    block_type, tensor, blocks, shapes = core.block_type, core.tensor, {}, {}
    make_block = block_type.__init__

    def init_block(self, element_ty, shape):
        sizes = tuple(_plain(size) for size in shape)
        key = (type(element_ty), str(element_ty), getattr(element_ty, "address_space", None), sizes)
        if key not in blocks:
            made = block_type.__new__(block_type)
            make_block(made, element_ty, shape)
            blocks[key] = vars(made)
        vars(self).update(blocks[key])
        self.element_ty = element_ty

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(_plain(size) for size in type.shape) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
        self.shape, self.numel = shapes[sizes]

    context.setattr(block_type, "__init__", init_block)
    context.setattr(tensor, "__init__", init_tensor)


def _plain(size) -> int:
    return getattr(size, "value", size)


def _dtypes_once(interpreter, context) -> None:
    """NumPy's dtypes by the name of Triton's."""
    block_type, make, known = interpreter.tl.block_type, interpreter._get_np_dtype, {}

    @functools.wraps(make)
    def get(dtype):
        element = dtype.element_ty if isinstance(dtype, block_type) else dtype
        key = type(element), str(element)
        if key not in known:
            known[key] = make(element)
        return known[key]

    context.setattr(interpreter, "_get_np_dtype", get)
