"""`OffloadingSpecFactory`: finds specs by name. A spec outside this package is registered once, or named
with its module.

A module is imported when its spec is asked for, not before. One thread calls this while an engine starts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from kvtier.errors import ConfigError
from kvtier.offload.base import OffloadingSpec

if TYPE_CHECKING:
    from kvtier.config import OffloadingConfig

__all__ = ["OffloadingSpecFactory"]


class OffloadingSpecFactory:
    """The registry of offloading specs by name."""

    _places: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_spec(cls, name: str, module_path: str, class_name: str) -> None:
        """Give a name to a class of a module. A name can be given once."""
        if name in cls._places:
            taken = ":".join(cls._places[name])
            raise ConfigError("spec_name", f"expected a new name, got {name!r}, which stands for {taken}")
        cls._places[name] = (module_path, class_name)

    @classmethod
    def get_spec_cls(cls, name: str, module_path: str | None = None) -> type[OffloadingSpec]:
        """Import the class of a registered name, or the class of that name from `module_path`."""
        if name not in cls._places and module_path is None:
            known = ", ".join(sorted(cls._places))
            raise ConfigError(
                "spec_name", f"expected one of {known}, or spec_module_path to be given, got {name!r}"
            )
        module, class_name = cls._places.get(name) or (str(module_path), name)
        try:
            found = getattr(import_module(module), class_name)
        except (ImportError, AttributeError) as error:
            raise ConfigError("spec_name", f"cannot import {class_name} from {module}: {error}") from error
        if not (isinstance(found, type) and issubclass(found, OffloadingSpec)):
            raise ConfigError("spec_name", f"expected a subclass of OffloadingSpec, got {found!r}")
        return found

    @classmethod
    def create_spec(
        cls, config: OffloadingConfig, name: str = "CPUOffloadingSpec", module_path: str | None = None
    ) -> OffloadingSpec:
        """Make a spec."""
        return cls.get_spec_cls(name, module_path)(config)


OffloadingSpecFactory.register_spec("CPUOffloadingSpec", "kvtier.offload.cpu", "CPUOffloadingSpec")
