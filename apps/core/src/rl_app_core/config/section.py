"""What all sections of the configuration have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Beta = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
# Absolute, so that a resume from another folder finds the same files.
File = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]


class Section(BaseModel):
    """Frozen, and closed to keys that nobody reads."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """``yes`` and ``true`` are 1 to Python; nobody who writes them means that."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError(f"{value} is a flag, and this is not one")
        return value
