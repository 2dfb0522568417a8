"""The JSON schema of result files, `docs/result.schema.json`: results/model.py and the registered verdicts' records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kbsub.eval.results.model import SCHEMA, Result
from kbsub.eval.verdicts.register import KINDS

FILE = Path("docs") / "result.schema.json"


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of one result file; `schema` may only be the number that this version reads."""
    content = Result.model_json_schema(by_alias=True)
    for kind in KINDS.values():
        record = kind.record.model_json_schema(by_alias=True, ref_template="#/$defs/{model}")
        content["$defs"].update(record.pop("$defs", {}))
        content["$defs"].setdefault(kind.record.__name__, record)
        for row in ("Candidate", "Baseline"):
            either = {"anyOf": [{"$ref": f"#/$defs/{kind.record.__name__}"}, {"type": "null"}], "default": None}
            content["$defs"][row]["properties"].setdefault(kind.key, either)
    content["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    content["title"] = "A result file of kb-submissions: one task on one GPU"
    content["properties"]["schema"] = {"const": SCHEMA, "description": "Refused by readers of another number."}
    content["required"] = sorted({*content.get("required", []), "schema"})
    return content


def text() -> str:
    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"


def outline(content: dict[str, Any]) -> dict[str, Any]:
    """What must not differ between two schemas: each model's keys and required keys.

    The rest (wording, the order, how a union is written) differs between versions of pydantic.
    """
    models = {"": content, **content.get("$defs", {})}
    return {
        name: (sorted(model.get("properties", {})), sorted(model.get("required", [])), sorted(model.get("enum", [])))
        for name, model in models.items()
    }


def is_current(path: Path) -> bool:
    """Whether the stored schema says what the models say."""
    try:
        stored = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(stored, dict) and outline(stored) == outline(schema())
