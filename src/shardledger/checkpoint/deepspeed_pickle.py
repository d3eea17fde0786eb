"""Reading DeepSpeed's ``.pt`` files without running what they say.

A pickle is a program. Two locks, one behind the other: the names it calls are read first, without running it, and every
name that is not on the list below ends the reading; then torch's own ``weights_only`` unpickler, which executes nothing but
the listed names, builds the objects. DeepSpeed's classes are stand-ins without behaviour. Tensors stay in the file (mapped)
until they are used.
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardledger.errors import CheckpointError


class ZeroStage(int):
    """Stands for ``deepspeed.runtime.zero.config.ZeroStageEnum``: the number of the stage."""


class LossScaler:
    """Stands for DeepSpeed's loss scalers: a record of their attributes."""


class FragmentAddress:
    """Stands for ``deepspeed.utils.tensor_fragment.fragment_address``: attributes ``numel`` and ``start``."""

    numel: int
    start: int


class Inert:
    """Stands for a class that the caller has asked to skip: takes anything, does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:  # whatever the pickle passes
        """An empty record."""
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


STAND_INS: dict[str, type] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": LossScaler,
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
}
"""DeepSpeed's classes and what is built in their place."""

DTYPES = ("float16", "bfloat16", "float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
STORAGES = ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
TORCH_NAMES = frozenset(
    {
        *("torch.Size", "torch.Tensor", "torch.device", "torch.nn.parameter.Parameter"),
        *("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", "torch._tensor._rebuild_from_type_v2"),
        *(f"torch.{name}" for name in DTYPES),
        *(f"torch.{name}Storage" for name in STORAGES),
    }
)
#: Python's own containers and numbers. Pickles of protocol 2 spell the module as in Python 2.
PLAIN_NAMES = frozenset(
    {
        *("collections.OrderedDict", "collections.Counter", "_codecs.encode"),
        *(f"{module}.{name}" for module in ("__builtin__", "builtins") for name in ("set", "complex", "bytearray")),
    }
)
#: Opcodes that bring in a name without spelling it, or that torch never writes.
_HIDDEN_NAMES = frozenset({"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX"})


def load_restricted(path: Path, inert: Iterable[str] = ()) -> dict[str, Any]:
    """What a ``.pt`` file of DeepSpeed holds; tensors are mapped, not read.

    Args:
        path: the file.
        inert: full names of classes to replace by empty records, for client state that holds the user's own objects.

    Raises:
        CheckpointError: the file is missing, damaged, or names a class or function that is not on the list.
    """
    skipped = dict.fromkeys(inert, Inert)
    unknown = sorted(set(_names(path)) - TORCH_NAMES - PLAIN_NAMES - set(STAND_INS) - set(skipped))
    if unknown:
        raise CheckpointError(
            f"{path} names {', '.join(unknown)}. A pickle can run whatever it names, so only the classes that DeepSpeed's "
            f"own state needs are built. If these are objects of yours in the client state, read them as empty records: "
            f"{' '.join(f'--inert {name}' for name in unknown)}. If they are not, do not trust the file."
        )
    # (object, name) pairs: torch looks names up in the file's words, so nothing of DeepSpeed is imported.
    allowed = [(kind, name) for name, kind in {**STAND_INS, **skipped}.items()]
    try:
        with torch.serialization.safe_globals(allowed):  # type: ignore[arg-type]
            content = torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint file: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not the dict that DeepSpeed writes.")
    return content


def check_records(path: Path) -> None:
    """Compare every record of a ``.pt`` file with the CRC-32 that was written with it. Reads the whole file.

    Raises:
        CheckpointError: names the first record that differs.
    """
    with _archive(path) as archive:
        try:
            damaged = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise CheckpointError(f"{path} is damaged: {_first_line(error)}") from error
    if damaged is not None:
        raise CheckpointError(
            f"{path} is damaged: the record {damaged!r} does not match its checksum. Take another copy of the file. (A file "
            f"written under torch.serialization.set_crc32_options(False) has no checksums: pass --no-checksums for it.)"
        )


def _names(path: Path) -> Iterator[str]:
    """Every global the pickle names, read without running it."""
    with _archive(path) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1 or any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise CheckpointError(f"{path} is a zip archive, but none that torch.save wrote; is it a checkpoint file?")
        try:
            text = archive.read(pickles[0])
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise CheckpointError(f"{path} is damaged: {_first_line(error)}") from error
    try:
        for opcode, argument, _ in pickletools.genops(text):
            if opcode.name == "GLOBAL":
                yield str(argument).replace(" ", ".")
            elif opcode.name in _HIDDEN_NAMES:
                raise CheckpointError(
                    f"{path} uses the pickle instruction {opcode.name}, which torch.save does not write and which can name "
                    f"any function. It was not run; do not trust the file."
                )
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: its pickle breaks off ({_first_line(error)}).") from error


def _archive(path: Path) -> zipfile.ZipFile:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist.")
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is cut off or no file of torch.save: it has no table of contents. Copy it "
            f"again, or take an older tag. (Files in torch's format from before 1.6 are not read.)"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}.") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
