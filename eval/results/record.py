"""The base of every record in a result file, and where a file was made. Must not know what is judged or measured."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer


class Record(BaseModel):
    """Listed keys are checked, others kept. A listed key that has no value is absent, unless somebody wrote null.

    KEY: under which key of a row a verdict's record stands.
    """

    KEY: ClassVar[str] = ""

    # Built when first used: 80 models take a quarter of a second, and most verbs and judges use few of them.
    model_config = ConfigDict(
        extra="allow",
        protected_namespaces=(),
        validate_assignment=True,
        ser_json_inf_nan="constants",
        defer_build=True,
    )

    @model_serializer(mode="wrap")
    def _absent_rather_than_null(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None or key in self.model_fields_set}

    def clear(self, name: str) -> None:
        """Take the value of a listed key away, so that the key is absent: None alone would be written as null."""
        setattr(self, name, None)
        self.__pydantic_fields_set__.discard(name)


class Environment(Record):
    """Where a result was made; null where this machine has no such thing (no GPU, no CuPy)."""

    gpu: str | None
    driver: str | None
    cuda: str | None
    torch: str
    cupy: str | None
    nvrtc: str | None
    python: str
    kernelbench_commit: str
    project_commit: str | None
    date: str
    stand_ins: list[str] = Field(default_factory=list)
    cpu: str | None = None
    memory_bytes: int | None = None  # of the GPU
    multiprocessors: int | None = None
