"""What a run reads besides its options, as digests: a run that continues must find what it has read before.

A digest covers the sizes of all files in the order in which they are read, and their bytes: all of them up to
`WHOLE_BYTES`; of more, `BLOCKS` blocks of `BLOCK_BYTES`, spread evenly over the whole, its beginning and its end among
them. A change of a size (text added or removed) is always found, and so is any change of a part longer than one
``BLOCKS``-th of the whole. A change of fewer bytes in place is found only where a block happens to lie on it: it alters
no other sequence than those it stands in. Names and times of files do not count: data may be copied.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from monarch_slurm.errors import ConfigError
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.corpus import Folder, find_corpus

WHOLE_BYTES = 256 << 20
BLOCK_BYTES = 64 << 10
BLOCKS = WHOLE_BYTES // BLOCK_BYTES

DATA, TOKENIZER = "data", "tokenizer"

_SIZE = struct.Struct(">Q")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def text_files(data: str | None) -> list[Path]:
    """Return the files that `monarch_slurm.train.data.load_corpus` looks at, in its order.

    Raises:
        DataError: there is nothing.
        OSError: a folder cannot be read.
    """
    found = find_corpus(data)
    return [Path(path) for path in (found.files() if isinstance(found, Folder) else [found])]


def files_digest(paths: list[Path]) -> str:
    """Return the digest of the files, in hexadecimal; see above for what it covers.

    Raises:
        OSError: one of them cannot be read.
    """
    sizes = [path.stat().st_size for path in paths]
    hasher = hashlib.sha256()
    for size in sizes:
        hasher.update(_SIZE.pack(size))
    total = sum(sizes)
    if total <= WHOLE_BYTES:
        wanted = iter([(0, total)])
    else:
        wanted = iter([((total - BLOCK_BYTES) * i // (BLOCKS - 1), BLOCK_BYTES) for i in range(BLOCKS)])
    offset, length = next(wanted)
    start = 0  # of the file in the whole
    for path, size in zip(paths, sizes, strict=True):
        if offset < start + size:
            with open(path, "rb", buffering=0) as file:
                while length and offset < start + size:
                    part = min(length, start + size - offset)
                    file.seek(offset - start)
                    _hash(file.read, part, hasher.update)
                    offset, length = offset + part, length - part
                    if not length:
                        offset, length = next(wanted, (total, 0))
        start += size
    return hasher.hexdigest()


def _hash(read: Callable[[int], bytes], count: int, update: Callable[[bytes], None]) -> None:
    while count and (data := read(min(count, 1 << 20))):
        update(data)
        count -= len(data)


def inputs_of(config: TrainConfig) -> dict[str, str]:
    """Return the digests of what a run reads: ``data``, and ``tokenizer`` if it has one of its own.

    Of TorchTitan's these are the folder or file of ``--dataloader.dataset_path``, and the files of ``--hf_assets_path``
    but for weights. A data set that a library downloads by its name has no digest.

    Raises:
        ConfigError: something cannot be read.
    """
    try:
        return {name: files_digest(files) for name, files in _files_of(config).items()}
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}): check its permissions") from error


def _files_of(config: TrainConfig) -> dict[str, list[Path]]:
    if config.engine != "torchtitan":
        return {DATA: text_files(config.data)}
    from monarch_slurm.train.titan import load_config

    titan = load_config(config.engine_options)
    paths = {DATA: getattr(titan.dataloader, "dataset_path", None)}
    if titan.tokenizer is not None:
        paths[TOKENIZER] = titan.hf_assets_path
    found = {name: text_files(path) for name, path in paths.items() if path and os.path.exists(path)}
    if TOKENIZER in found:
        found[TOKENIZER] = [path for path in found[TOKENIZER] if path.suffix not in _WEIGHTS]
    return found


def changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of what is not what it was, in words; what has had no digest before is not compared."""
    words = {DATA: "the training data", TOKENIZER: "the tokenizer"}
    return [words.get(name, name) for name, digest in before.items() if now.get(name) != digest]
