"""Types and defaults shared by the sections of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from meshpoint.model.options import Options

TEN_YEARS = 315_360_000

Seconds = Annotated[float, Field(gt=0, le=TEN_YEARS, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, le=TEN_YEARS, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Bytes = Annotated[int, Field(ge=1024, le=1024**4)]

EMBEDDED_URL = "sqlite:///meshpoint.db"
DEFAULT_OPTIONS = Options()


class Section(BaseModel):
    """Base of all sections: frozen, rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
