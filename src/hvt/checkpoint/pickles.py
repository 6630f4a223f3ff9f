"""What `torch.save` wrote, read as data: nothing is unpickled, so nothing is called or built.

`torch.load` with `weights_only` runs no code either, but it builds whatever a file asks for: 300
bytes are enough to have it allocate 12 GB, or hash for hours. Here the instructions of the pickle
are followed on plain values alone. A tensor is noted with where its numbers lie, and is read when
it is known to be wanted and to fit into the file.
"""

from __future__ import annotations

import argparse
import io
import math
import pickletools
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .container import StoredZip, UnsafeCheckpointError, file_size

MAX_STEPS = 500_000
"""Instructions followed and items copied; a training's whole state takes some 50,000."""
NUMBER_KEY = 100
"""Steps that a number costs as a key: numbers can be chosen to collide, texts cannot."""
MAX_DIMS = 8
MAX_SHARING = 4
"""How many times the file's size its tensors may be, where several share their numbers."""

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of files before torch 1.6

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}


class Foreign(Exception):
    """A class or function that is not part of a state dict, by its name."""


@dataclass(frozen=True)
class Storage:
    """Numbers of one type in the file, by their key."""

    key: str
    dtype: torch.dtype
    numel: int

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that was not read yet: a view of a storage."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self, name: str) -> None:
        """Refuse one that is not within its storage, or has an element of it twice."""
        if len(self.shape) != len(self.strides) or len(self.shape) > MAX_DIMS:
            raise ValueError(f"{name} has {len(self.shape)} dimensions")
        whole = (self.offset, *self.shape, *self.strides)
        if not all(type(n) is int and 0 <= n < 2**48 for n in whole):
            raise ValueError(f"{name} has no usable shape")
        if not self.bytes:
            return
        reach = 0  # the furthest element along the axes so far
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride <= reach:
                raise UnsafeCheckpointError(
                    f"{name} has elements that share their memory (stride {stride})"
                )
            reach += stride * (size - 1)
        if (self.offset + reach + 1) * self.dtype.itemsize > self.storage.bytes:
            raise ValueError(f"{name} goes beyond its storage")


class TorchFile:
    """A file of `torch.save`, zip or older: its `content`, and tensors of it on demand."""

    def __init__(self, path: Path) -> None:
        self.size = file_size(path)
        with path.open("rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
        self._read = self._open_zip(path) if zipped else self._open_legacy(path)

    def tensors(self, entries: dict[str, TensorEntry]) -> dict[str, Tensor]:
        """These tensors by name, each storage read once."""
        for name, entry in entries.items():
            entry.check(name)
        if sum(entry.bytes for entry in entries.values()) > MAX_SHARING * self.size:
            raise UnsafeCheckpointError(
                "its tensors share their memory, and are together far larger than the file"
            )
        storages: dict[Storage, bytearray] = {}
        tensors = {}
        for name, entry in entries.items():
            if entry.storage not in storages:
                storages[entry.storage] = self._read(entry.storage)
            if not entry.bytes:
                tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
                continue
            flat = torch.frombuffer(storages[entry.storage], dtype=entry.dtype)
            tensors[name] = flat.as_strided(entry.shape, entry.strides, entry.offset)
        return tensors

    def _open_zip(self, path: Path) -> Callable[[Storage], bytearray]:
        archive = StoredZip(path)
        if "byteorder" in archive and archive.read("byteorder") != b"little":
            raise UnsafeCheckpointError("its numbers are big-endian")
        self.content = _Values().read(io.BytesIO(archive.read("data.pkl")))

        def read(storage: Storage) -> bytearray:
            name = f"data/{storage.key}"
            if archive.length(name) != storage.bytes:
                raise ValueError(f"{name} is cut short")
            return archive.read(name)

        return read

    def _open_legacy(self, path: Path) -> Callable[[Storage], bytearray]:
        content = path.read_bytes()
        file = io.BytesIO(content)
        values = _Values()
        magic, protocol, machine = (values.read(file) for _ in range(3))
        if magic != _MAGIC or protocol != _PROTOCOL or not machine["little_endian"]:
            raise ValueError("it is of an unknown form")
        self.content = values.read(file)
        places: dict[Storage, int] = {}
        for key in values.read(file):  # each storage is its length, then its numbers
            storage = values.storages[key]
            (numel,) = struct.unpack("<q", file.read(8))
            places[storage] = file.tell()
            if numel != storage.numel or file.seek(storage.bytes, io.SEEK_CUR) > self.size:
                raise ValueError(f"storage {key} is cut short")

        def read(storage: Storage) -> bytearray:
            place = places[storage]
            return bytearray(memoryview(content)[place : place + storage.bytes])

        return read


# ── the pickle's instructions ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Name:
    """A class or function that a pickle names; what it does when called is ours to say."""

    name: str


_CALLS = {
    "collections.OrderedDict",
    "collections.Counter",
    "builtins.set",
    "_codecs.encode",
    "argparse.Namespace",
    "torch.Size",
    "torch.device",
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._tensor._rebuild_from_type_v2",
}


class _Values:
    """Follows pickles on plain values; whatever else they ask for raises."""

    def __init__(self) -> None:
        self.storages: dict[str, Storage] = {}
        self._steps = 0

    def read(self, file: BinaryIO) -> Any:
        """The value of the pickle that begins here."""
        stack: list[Any] = []
        outer: list[list[Any]] = []  # stacks below each MARK
        memo: dict[int, Any] = {}
        arg: Any
        for op, arg, _ in pickletools.genops(file):
            self._count(1)
            match op.name:
                case "PROTO":
                    pass
                case "STOP":
                    return stack.pop()
                case "MARK":
                    outer.append(stack)
                    stack = []
                case "BINPUT" | "LONG_BINPUT":
                    memo[arg] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[arg])
                case "NONE":
                    stack.append(None)
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(op.name == "NEWTRUE")
                case (
                    "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE"
                    | "SHORT_BINSTRING"
                ):  # fmt: skip
                    stack.append(arg)
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_SET":
                    self._count(3)  # as large as four of the others
                    stack.append(set())
                case "EMPTY_TUPLE":
                    stack.append(())
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    length = int(op.name[-1])
                    stack[-length:] = [tuple(stack[-length:])]
                case "TUPLE":
                    items, stack = stack, outer.pop()
                    stack.append(tuple(items))
                case "APPEND":
                    item = stack.pop()
                    _only(list, stack[-1]).append(item)
                case "APPENDS":
                    items, stack = stack, outer.pop()
                    _only(list, stack[-1]).extend(items)
                case "SETITEM":
                    value, key = stack.pop(), stack.pop()
                    self._set(stack[-1], [(key, value)])
                case "SETITEMS":
                    items, stack = stack, outer.pop()
                    self._set(stack[-1], zip(items[::2], items[1::2], strict=True))
                case "GLOBAL":
                    stack.append(_named(*arg.split(" ", 1)))
                case "NEWOBJ" | "REDUCE":
                    args, called = stack.pop(), stack.pop()
                    stack.append(self._call(_only(_Name, called).name, _only(tuple, args)))
                case "BUILD":
                    state = stack.pop()
                    self._build(stack[-1], state)
                case "BINPERSID":
                    stack.append(self._storage(stack.pop()))
                case _:
                    raise UnsafeCheckpointError(
                        f"it uses {op.name}, which torch.save does not write"
                    )
        raise ValueError("it has no end")

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise UnsafeCheckpointError("it holds more values than any model has")

    def _set(self, target: Any, items: Iterable[tuple[Any, Any]]) -> None:
        for key, value in items:
            _only(dict, target)[self._key(key)] = value

    def _key(self, key: Any) -> Any:
        """A key of a dict or item of a set; a tuple of tuples can take for ever to hash."""
        if isinstance(key, (int, float)):
            self._count(NUMBER_KEY)
        elif not isinstance(key, (str, bytes, type(None))):
            raise UnsafeCheckpointError("a key is neither text nor a number")
        return key

    def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        match name, args:
            case "argparse.Namespace", ():
                return argparse.Namespace()
            case "collections.OrderedDict" | "collections.Counter", ():
                return {}
            case "collections.OrderedDict", (list(pairs),):  # Python 2's
                result: dict[Any, Any] = {}
                self._count(len(pairs))
                self._set(result, (_pair(pair) for pair in pairs))
                return result
            case "collections.Counter", (dict(counts),):
                self._count(NUMBER_KEY * len(counts))
                return dict(counts)
            case "builtins.set", (list(items),):
                self._count(len(items))
                return {self._key(item) for item in items}
            case "_codecs.encode", (str(text), "latin1" | "latin-1"):
                self._count(len(text) // 64)
                return text.encode("latin-1")
            case "torch.Size", (tuple(sizes),):
                return sizes
            case "torch.device", (str(), *_):
                return args[0]
            case "torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2", (
                Storage() as storage, offset, tuple(shape), tuple(strides), *_,
            ):  # fmt: skip
                return TensorEntry(storage, storage.dtype, offset, shape, strides)
            case "torch._utils._rebuild_tensor_v3", (
                Storage() as storage, offset, tuple(shape), tuple(strides), _, _,
                torch.dtype() as dtype, *_,
            ):  # fmt: skip
                return TensorEntry(storage, dtype, offset, shape, strides)
            case (
                "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state",
                (TensorEntry() as data, *_),
            ):
                return data
            case "torch._tensor._rebuild_from_type_v2", (
                _Name(inner), _Name("torch.Tensor" | "torch.nn.parameter.Parameter"),
                tuple(inner_args), _,
            ):  # fmt: skip
                if inner == name:
                    raise Foreign(name)
                return self._call(inner, inner_args)
        raise Foreign(name)

    def _build(self, target: Any, state: Any) -> None:
        if isinstance(target, argparse.Namespace):
            self._count(len(_only(dict, state)))
            vars(target).update({_only(str, key): value for key, value in state.items()})
        elif not isinstance(target, (dict, TensorEntry)):  # whose attributes are not needed
            raise Foreign(f"attributes of a {type(target).__name__}")

    def _storage(self, identity: Any) -> Storage:
        match identity:
            case ("storage", torch.dtype() as dtype, str(key), str(), int(numel)) | (
                "storage", torch.dtype() as dtype, str(key), str(), int(numel), None,
            ) if 0 <= numel < 2**48:  # fmt: skip
                storage = self.storages.setdefault(key, Storage(key, dtype, numel))
                if storage == Storage(key, dtype, numel):
                    return storage
        raise ValueError("a storage is described in an unknown way")


def _named(module: str, name: str) -> Any:
    full = f"{'builtins' if module == '__builtin__' else module}.{name}"
    if module in ("torch", "torch.storage", "torch.cuda") and name in _STORAGES:
        return _STORAGES[name]
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    if full not in _CALLS:
        raise Foreign(full)
    return _Name(full)


def _pair(value: Any) -> tuple[Any, Any]:
    key, item = value
    return key, item


def _only(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value
