"""Which GPUs the caller may use, as CUDA_VISIBLE_DEVICES names them, and the name that each local worker is given.

A batch system hands out "4,5", "GPU-8f3c..." or "MIG-..."; a worker told to use "0" would then take somebody else's
GPU. Reads the text as the CUDA driver does. Knows neither torch nor dask, and asks no driver: counts are passed in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
_BY_NAME = ("GPU-", "MIG-")  # a whole or abbreviated UUID; also MIG-GPU-<uuid>/<instance>/<compute instance>


class DevicesError(ValueError):
    """There are not as many visible GPUs as were asked for; the message says which there are and the way out."""


def visible_devices(text: str | None) -> list[str] | None:
    """The entries of a CUDA_VISIBLE_DEVICES in order, each fit to be the whole text for one worker.

    None: the variable is not set, so nothing is hidden. The driver's rules: "" and "-1" mean none; the list ends at the
    first entry that is no device ("0,-1,2" is 0); it holds numbers, GPU UUIDs or MIG names, of one kind; a device that
    is named twice leaves none.
    """
    if text is None:
        return None
    entries = [entry.strip() for entry in text.split(",")]
    prefix = next((prefix for prefix in _BY_NAME if entries[0].startswith(prefix)), "")
    found: list[str] = []
    for entry in entries:
        number = re.match(r"\+?(\d+)", entry)  # the driver reads numbers as strtoul does: "1st" is 1
        if not (entry.startswith(prefix) if prefix else number):
            break
        name = entry if prefix else str(int(number[1])) if number else entry
        if name in found:
            return []
        found.append(name)
    return found


def devices_for(count: int, variables: Mapping[str, str], there: int | None = None) -> list[str]:
    """The first `count` GPUs that the caller may use, one CUDA_VISIBLE_DEVICES text each.

    variables: the caller's environment. there: how many GPUs the driver shows this process, None where it cannot be
    asked. Raises DevicesError when there are fewer than `count`.
    """
    text = variables.get(VARIABLE)
    named = visible_devices(text)
    if named is None:
        found: Sequence[str] = [str(index) for index in range(count if there is None else there)]
    elif there is None or (named and named[0].startswith("MIG-")):  # the driver shows one MIG instance a process
        found = named
    else:
        found = named[:there]  # what stands after an entry that this machine does not have is not visible
    if count > len(found):
        raise DevicesError(_too_many(count, found, text))
    return list(found[:count])


def _too_many(count: int, found: Sequence[str], text: str | None) -> str:
    here = f"this machine shows {len(found)}" if text is None else f'{VARIABLE}="{text}" shows {len(found)}'
    which = f" ({', '.join(found)})" if found and text is not None else ""
    most = f"write --gpus {len(found)} or fewer" if found else "no GPU can be used"
    more = "" if text is None else f", or name more of them in {VARIABLE}"
    return f"--gpus {count}: {here} GPU{'' if len(found) == 1 else 's'}{which}; {most}{more}"
