# SPDX-License-Identifier: Apache-2.0
"""Lazy reading of a model folder: names and shapes from headers, tensors one by one from mapped files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING

from onebasin.families import named_table, table_of, tables
from onebasin.symmetry import Signature, Table, resolve
from onebasin.symmetry.tables.conditions import lookup

from .configuration import built_in, completed, refuse_counts, refuse_kinds
from .errors import ModelError, one_line, read_json
from .fetching import gguf, locate, quantised
from .stored import PickleFile, SafeFile

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_ADAPTER = "adapter_config.json"


def finite(tensor: Tensor) -> bool:
    """Return whether a tensor contains neither NaN nor infinity. Its sum shows both, but may itself overflow."""
    return bool(tensor.sum().isfinite()) or bool(torch.isfinite(tensor).all())


class Folder:
    """A model folder, read lazily: tensors are loaded by `read`, and not kept in memory.

    Args:
        model: A folder with config.json and weights, or a hub id.
        family: The name or file of a table, for a model type that has none.

    Raises:
        ModelError: Here or later: a file cannot be read, or does not fit the table.
    """

    def __init__(self, model: str | Path, family: str | None = None) -> None:
        self.name = str(model)
        self.folder = locate(model)
        self._family = family
        self._opened: dict[Path, SafeFile | PickleFile] = {}
        self._finite: set[str] = set()  # roles found to be finite: a descent reads them again and again
        self.notes: list[str] = []

    def __repr__(self) -> str:
        return f"Folder({self.name!r})"

    @property
    def origin(self) -> Folder:
        return self

    @cached_property
    def _stated(self) -> dict[str, Any]:
        """The contents of config.json."""
        path = self.folder / "config.json"
        if not path.is_file():
            raise ModelError(self._no_config())
        config = read_json(path)
        if not isinstance(config, dict) or not isinstance(config.get("model_type", ""), str):
            raise ModelError(f"'{path}' names no model_type")
        if "quantization_config" in config:
            raise ModelError(quantised(self.name, config))
        refuse_kinds(config, path)
        return config

    def _no_config(self) -> str:
        """Return a message for a folder without config.json, which says what it is instead of a model."""
        if (self.folder / _ADAPTER).is_file():
            config = read_json(self.folder / _ADAPTER)
            base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
            named = base if isinstance(base, str) and base else "BASE"
            return f"'{self.name}' is only an adapter; write it with its base model: '{named}+{self.name}'"
        packed = sorted(self.folder.glob("*.gguf"))
        if packed:
            return gguf(packed[0])
        return f"'{self.folder}' holds no config.json; is it a Hugging Face model folder?"

    @cached_property
    def raw_config(self) -> dict[str, Any]:
        """The contents of config.json, with a `model_type` where it has none, as in old models."""
        if "model_type" in self._stated:
            self._say_if_replaced()
            return self._stated
        kind = self._kind_of_old()
        self.notes.append(f"'{self.folder / 'config.json'}' names no model_type: it is '{kind}' by its tensors' names")
        return {**self._stated, "model_type": kind}

    def _say_if_replaced(self) -> None:
        """Note that transformers lacks the class named in the config, so that another one of its type stands in for it.

        Raises:
            ModelError: The folder has code of its own for that class, and no table was chosen for it.
        """
        stated, kind = self._stated, self._stated["model_type"]
        named, code = stated.get("architectures") or [], stated.get("auto_map")
        if not named or not {*named}.isdisjoint(getattr(transformers, "__all__", ())) or not built_in(kind):
            return
        lacking = f"'{self.folder / 'config.json'}' names the class '{named[0]}', which transformers does not have"
        if self._family is None and isinstance(code, dict) and any(auto.startswith("AutoModel") for auto in code):
            raise ModelError(f"{lacking}, and code of its own for it (auto_map), which is never run; choose a table "
                             f"with --family, or remove both if the model is a plain '{kind}'")  # fmt: skip
        self.notes.append(f"{lacking}: a class of the type '{kind}' stands in for it")

    def _kind_of_old(self) -> str:
        """Return the model type whose table fits these tensors and the sizes in the config.

        If several do, the class named in the config decides, or else the prefix of the tensors' names, which is the
        type's own in most models with a head (`bert.`), or else the first type of the chosen family.
        """
        path, fitting = self.folder / "config.json", dict[str, str]()
        for table in [named_table(self._family)] if self._family else tables().values():
            for kind in table.types:
                if kind in CONFIG_MAPPING and self._fits(table, kind):
                    fitting[kind] = table.family
        named = {self._kind_of_class(name) for name in self._stated.get("architectures") or []}
        own = {kind for kind in fitting if any(name.startswith(kind.replace("-", "_") + ".") for name in self.shapes)}
        for narrower in (fitting, named, own, [*fitting][:1] if self._family else []):
            kinds = [kind for kind in fitting if kind in narrower]
            if len(kinds) == 1:
                return kinds[0]
        if not fitting:
            chosen = named_table(self._family) if self._family else None
            raise ModelError(f"'{path}' names no model_type, and {self._misfit(chosen)}; add the model_type to it, and "
                             "remove tensors that its class does not have")  # fmt: skip
        families = list(dict.fromkeys(fitting.values()))
        listed = ", ".join(kind if kind == one else f"{kind} (family {one})" for kind, one in fitting.items())
        raise ModelError(f"'{path}' names no model_type, and its tensors fit {listed}; choose one with "
                         f"{' or '.join(f'--family {family}' for family in families)}")  # fmt: skip

    def _misfit(self, table: Table | None) -> str:
        """Return why a table does not fit (default: that of the type whose name begins the tensors' names)."""
        table = table or next((each for each in tables().values() for kind in each.types
                               if any(name.startswith(f"{kind}.") for name in self.shapes)), None)  # fmt: skip
        if table is None:
            return "no family's table fits its tensors and sizes"
        try:
            resolve(table, self.shapes, completed({**self._stated, "model_type": table.types[0]})[0])
        except Exception as error:  # as in `_fits`
            return f"its tensors are not those of {one_line(error)}"
        return f"its sizes are not those of {table.family}"

    def _fits(self, table: Table, kind: str) -> bool:
        try:
            full, aliases = completed({**self._stated, "model_type": kind})
            stated = {**self._stated, **{new: self._stated[old] for new, old in aliases.items() if old in self._stated}}
            resolve(table, self.shapes, full)
        except Exception:  # each class refuses values in its own way, and so does each table
            return False
        return not table.sizes or any(lookup(stated, keys) is not None for keys in table.sizes.values())

    @staticmethod
    def _kind_of_class(name: str) -> str | None:
        kind = getattr(getattr(transformers, name, None), "config_class", None)
        return getattr(kind, "model_type", None)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration with the defaults of its class filled in. No code from the folder is run."""
        if self.raw_config["model_type"] not in CONFIG_MAPPING:
            return self.raw_config
        refuse_counts(self.raw_config, len(self.files), self.folder / "config.json")
        try:
            return completed(self.raw_config)[0]
        except Exception as error:  # each config class refuses bad values in its own way
            raise ModelError(f"'{self.folder / 'config.json'}': {one_line(error)}") from None

    @cached_property
    def files(self) -> dict[str, Path]:
        """Tensor name -> file that contains it, with the order of preference of transformers.

        Raises:
            ModelError: There are no weights, or an index does not fit its files.
        """
        if "transformers_weights" in self._stated:
            raise ModelError(f"'{self.name}' renames its weight files (transformers_weights); "
                             "save it again with the usual names")  # fmt: skip
        for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
            single = self.folder / f"{stem}{suffix}"
            if single.is_file():
                if not (names := self._file(single).names()):
                    raise ModelError(f"'{single}' holds no tensors")
                return dict.fromkeys(names, single)
            index = self.folder / f"{stem}{suffix}.index.json"
            if index.is_file():
                return self._indexed(index, suffix)
        if packed := sorted(self.folder.glob("*.gguf")):
            raise ModelError(gguf(packed[0]))
        raise ModelError(f"'{self.folder}' holds no model.safetensors and no pytorch_model.bin")

    def _indexed(self, index: Path, suffix: str) -> dict[str, Path]:
        read = read_json(index)
        named = read.get("weight_map") if isinstance(read, dict) else None
        if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
            raise ModelError(f"'{index}' is not an index of weight files: it has no usable 'weight_map'")
        files: dict[str, Path] = {}
        for file in dict.fromkeys(named.values()):
            path = self.folder / file
            if Path(file).name != file or not file.endswith(suffix) or not path.is_file():
                raise ModelError(f"'{index}' names '{file}', which is not a weight file of this folder")
            for name in self._file(path).names():  # transformers loads all tensors of a file, listed or not
                if name in files:
                    raise ModelError(f"'{name}' is in '{files[name]}' and again in '{path}'")
                files[name] = path
        for name, file in named.items():
            if files.get(name) != self.folder / file:
                raise ModelError(f"'{self.folder / file}' lacks '{name}', which '{index.name}' lists")
        return files

    def _file(self, path: Path) -> SafeFile | PickleFile:
        if path not in self._opened:
            self._opened[path] = (SafeFile if path.suffix == ".safetensors" else PickleFile)(path)
        return self._opened[path]

    def close(self) -> None:
        """Close all files."""
        for file in self._opened.values():
            file.close()
        self._opened.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which opens the files itself."""
        return {**self.__dict__, "_opened": {}}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name on disk -> shape, from headers only."""
        return {name: self._file(path).shape(name) for name, path in self.files.items()}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Tensor name on disk -> floating-point dtype, from headers only; other tensors are left out."""
        found = {name: self._file(path).dtype(name) for name, path in self.files.items()}
        return {name: dtype for name, dtype in found.items() if dtype is not None and dtype in DTYPES.values()}

    @property
    def stored_dtype(self) -> torch.dtype:
        """The floating-point dtype that most tensors are stored in (float32 if there are none)."""
        counted = Counter(self.dtypes.values()).most_common(1)
        return counted[0][0] if counted else torch.float32

    @cached_property
    def table(self) -> Table:
        """The table of this model type, or the one chosen by `family`.

        Raises:
            TableError: There is none.
        """
        return named_table(self._family) if self._family else table_of(self.raw_config)

    def read_by(self, table: Table) -> None:
        """Use another table from now on."""
        self.table = table
        self.__dict__.pop("signature", None)

    @cached_property
    def signature(self) -> Signature:
        """The table, fitted to these tensors.

        Raises:
            ModelError: Tensors are unknown or missing, or have a wrong shape; the message names them.
        """
        try:
            return resolve(self.table, self.shapes, self.config)
        except ModelError:
            raise
        except ValueError as error:
            raise ModelError(f"'{self.name}': {error}") from None

    def read_name(self, name: str) -> Tensor:
        """Return the tensor `name` (as on disk) in its own dtype."""
        return self._file(self.files[name]).read(name)

    def read(self, role: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        """Return the tensor `role` of the signature.

        Args:
            role: Its name in the signature.
            dtype: The type to return it in.
            device: The device to return it on.

        Raises:
            ModelError: It contains NaN or infinity, or is not of a floating-point type; a single number (a counter) may
                have another type.
        """
        entry = self.signature.tensors[role]
        name = entry.name
        if entry.shape and not all(each in self.dtypes for each in entry.names):
            raise ModelError(f"'{self.name}': the tensor '{name}' does not contain plain floating-point numbers")
        tensor = entry.whole([self.read_name(each).to(device=device, dtype=dtype) for each in entry.names])
        if role not in self._finite and not finite(tensor):
            raise ModelError(f"'{self.name}': the tensor '{name}' contains NaN or infinite values")
        self._finite.add(role)
        return tensor

    def others(self) -> Iterator[str]:
        """Return the names on disk of tensors that the table ignores (buffers)."""
        placed = {name for entry in self.signature.tensors.values() for name in entry.names}
        return (name for name in self.files if name not in placed)

    def ignored(self) -> dict[str, Tensor]:
        """Return these tensors by name, as they are: the class may need them (the counters of batch norms)."""
        return {name: self.read_name(name) for name in self.others()}
