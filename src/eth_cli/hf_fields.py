"""What the readers of Hugging Face configurations share: the base record and its checks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from eth_cli.faults import shown
from eth_cli.model import ModelSpec
from eth_cli.serde import FieldError, Location, Record

Epsilon = Annotated[float, Field(gt=0)]
Layers = Annotated[int, Field(gt=0, le=99_998)]
Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Our activation functions by Hugging Face's names; of two names the first is written."""

EVERYWHERE: Mapping[str, Any] = {"is_encoder_decoder": False, "quantization_config": None}
"""What every type must have."""


def activation_name(activation: str) -> str:
    """Hugging Face's name of an activation function."""
    return next(name for name, own in ACTIVATIONS.items() if own == activation)


def activation_faults(field: str, name: str) -> list[tuple[Location, str]]:
    """What is wrong with the name of an activation function."""
    if name in ACTIVATIONS:
        return []
    return [((field,), f"unknown activation {name!r}; known are {', '.join(ACTIVATIONS)}")]


def divides(field: str, part: int, whole_field: str, whole: int) -> list[tuple[Location, str]]:
    """The fault that one field does not divide another, if it does not."""
    if whole % part == 0:
        return []
    return [((field,), f"{part} does not divide {whole_field} {whole}")]


class HfConfig(Record):
    """Base of the records: unknown fields are passed over, unlike in our own files."""

    model_config = ConfigDict(extra="ignore")

    is_encoder_decoder: bool = False
    quantization_config: dict[str, Any] | None = None

    required: ClassVar[Mapping[str, Any]] = {}
    """Fields that must have one value, because the blocks can do no other."""

    @model_validator(mode="after")
    def _check(self) -> HfConfig:
        faults: list[tuple[Location, str]] = [
            (
                (field,),
                f"{shown(getattr(self, field))} is a feature that is not built; "
                f"only {shown(value)} is",
            )
            for field, value in {**EVERYWHERE, **self.required}.items()
            if getattr(self, field) != value
        ]
        faults += self.shape_faults()
        if faults:
            raise FieldError(faults)
        return self

    @abstractmethod
    def shape_faults(self) -> list[tuple[Location, str]]:
        """Everything wrong with how the fields go together."""

    @abstractmethod
    def to_spec(self, name: str) -> ModelSpec:
        """The model that the configuration describes."""

    @classmethod
    @abstractmethod
    def fields_of(cls, spec: ModelSpec) -> dict[str, Any]:
        """The fields that describe a model; reading them gives it back where the type can."""
