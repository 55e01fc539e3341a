"""A C header from the declarations that NVIDIA's and AMD's Python bindings have of NCCL and RCCL (Cython's .pxd)."""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = re.compile(r"(?:ctypedef|cdef) (enum|struct) (\w+)(?: ['\"]\w+['\"])?:")
_ALIAS = re.compile(r"ctypedef (\w+) (\w+)$")
_FUNCTION = re.compile(r"cdef (.+?)(\w+)\((.*)\)(?: except.*| noexcept nogil)")
_HANDLES = "ncclComm_t", "cudaStream_t", "hipStream_t"


def c_header(pxd: Path, functions: list[str]) -> str:
    """Return a header with ``functions``, every enumeration, and the structs of NCCL's configuration and unique id.

    An enumeration whose values the bindings leave to the vendor's header has its names only, numbered from 0.
    """
    lines = [line.split("#")[0].strip() for line in pxd.read_text().splitlines()]
    parts = ["#pragma once", "#include <stdint.h>", "#include <stddef.h>"]
    parts += [f"typedef struct {handle}_of* {handle};" for handle in _HANDLES]
    wanted = ("ncclUniqueId", "ncclConfig_")
    for index, line in enumerate(lines):
        if block := _BLOCK.match(line):
            kind, name = block.groups()
            end = lines.index("", index)
            members = [re.sub(r' "\w+"', "", member) for member in lines[index + 1 : end]]
            if kind == "enum":
                parts.append(f"typedef enum {name} {{ {', '.join(members)} }} {name};")
            elif name.startswith(wanted):
                parts.append(f"typedef struct {name} {{ {' '.join(f'{member};' for member in members)} }} {name};")
        elif (alias := _ALIAS.match(line)) and alias[2].startswith(wanted):
            parts.append(f"typedef {alias[1]} {alias[2]};")
        elif (function := _FUNCTION.match(line)) and function[2] in functions:
            parts.append(f'extern "C" {function[1]} {function[2]}({function[3]});')
    return "\n".join(parts) + "\n"
