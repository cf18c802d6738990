"""The SPI as others see it. A change of it is announced in docs/spi-compatibility.md."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import runnerd_spi

SNAPSHOT = Path(__file__).with_name("spi_snapshot.txt")


def described() -> str:
    lines = [f"SPI {runnerd_spi.SPI_VERSION}"]
    for name in sorted(runnerd_spi.__all__):
        one = getattr(runnerd_spi, name)
        if dataclasses.is_dataclass(one):
            lines += [f"{name}.{field.name}: {field.type}{_default(field)}" for field in dataclasses.fields(one)]
        elif inspect.isclass(one) and hasattr(one, "_fields"):
            lines += [f"{name}.{field} = {one._field_defaults.get(field, 'required')}" for field in one._fields]
        elif inspect.isclass(one):
            lines.append(f"{name}({', '.join(base.__name__ for base in one.__bases__)})")
            methods = {key: member for key, member in vars(one).items() if not key.startswith("_")}
            lines += [f"{name}.{key}{_signature(member)}" for key, member in sorted(methods.items())]
        elif inspect.isfunction(one):
            lines.append(f"{name}{inspect.signature(one)}")
        else:
            lines.append(f"{name} = {one}")
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return " = " + ("<function>" if callable(field.default) else repr(field.default))
    return "" if field.default_factory is dataclasses.MISSING else " = <new>"


def _signature(member: object) -> str:
    return str(inspect.signature(member)) if inspect.isfunction(member) else ""


def test_the_spi_is_what_was_announced() -> None:
    assert described() == SNAPSHOT.read_text(), (
        "the SPI has changed; announce it in docs/spi-compatibility.md, raise SPI_VERSION as told there, and write "
        f"the new description: python {Path(__file__).name}"
    )


if __name__ == "__main__":
    SNAPSHOT.write_text(described())
