"""config.json as an object with typed access: what is wrong is noted, and reading goes on."""

import json
from pathlib import Path
from typing import Any, NoReturn

from nxbucket.toolkit.buckets import describe
from nxbucket.toolkit.errors import Problem, SpecError

MAX_CONFIG_BYTES = 1 << 20


class ConfigJson:
    """A JSON object with typed access. What is wrong is noted, and a stand-in returned."""

    def __init__(
        self,
        file: Path,
        fields: dict[str, Any] | None = None,
        prefix: str = "",
        problems: list[Problem] | None = None,
    ) -> None:
        self.file = file
        self.problems: list[Problem] = [] if problems is None else problems
        self._prefix = prefix
        self._fields = self._load() if fields is None else fields

    def _load(self) -> dict[str, Any]:
        hint = "take the folder of a Hugging Face checkpoint, with config.json as published"
        try:
            if self.file.exists() and not self.file.is_file():
                # Opening a pipe would wait for whoever writes to it.
                self._fail("config-unreadable", "config.json is not a file", hint)
            with self.file.open("rb") as stream:
                content = stream.read(MAX_CONFIG_BYTES + 1)
        except FileNotFoundError:
            self._fail("config-missing", "the model folder has no config.json", hint)
        except (OSError, ValueError) as err:
            self._fail("config-unreadable", f"cannot be read: {err}", "check its owner and mode")
        if len(content) > MAX_CONFIG_BYTES:
            self._fail("config-too-large", "config.json is larger than 1 MiB", hint)
        try:
            loaded = json.loads(content)
        except json.JSONDecodeError as err:
            problem = Problem(
                "config-not-json", f"not JSON: {err.msg}", hint, self.file, err.lineno, err.colno
            )
            raise SpecError([problem]) from None
        except (ValueError, RecursionError):
            # Not UTF-8, an integer of thousands of digits, or nested deeper than Python's stack.
            self._fail("config-not-json", "not JSON that can be read", hint)
        if not isinstance(loaded, dict):
            self._fail("config-not-json", "config.json is not a JSON object", hint)
        return loaded

    def _fail(self, code: str, message: str, hint: str) -> NoReturn:
        raise SpecError([Problem(code, message, hint, self.file)])

    def get(self, key: str, default: Any = None) -> Any:
        """null and absent are the same thing: transformers writes either."""
        value = self._fields.get(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Whether the key is there at all; its value may be null."""
        return key in self._fields

    def child(self, key: str, fields: dict[str, Any]) -> "ConfigJson":
        """The object under `key`; what is wrong in it is noted with this one's."""
        return ConfigJson(self.file, fields, f"{self._prefix}{key}.", self.problems)

    def report(self, key: str, code: str, message: str, hint: str) -> None:
        self.problems.append(Problem(code, message, hint, self.file, key=self._prefix + key))

    def _wanted(self, key: str, wanted: str) -> None:
        name = self._prefix + key
        if self.get(key) is None:
            message = f"{name} is missing, {wanted} wanted"
            self.report(key, "config-missing-field", message, "take config.json as published")
        else:
            message = f"{name} is {describe(self.get(key))}, {wanted} wanted"
            self.report(key, "config-type", message, "take config.json as published")

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value: object = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 1 << 31:
            self._wanted(key, "positive integer")
            return 1
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        # `value < 1e30` also keeps out integers no float can hold, NaN and infinity.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self._wanted(key, "positive number")
            return 1.0
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self._wanted(key, "true or false")
            return False
        return value

    def dtype(self) -> str | None:
        """`dtype` is the newer name of `torch_dtype`; either may be null."""
        key = "dtype" if self.get("dtype") is not None else "torch_dtype"
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            self._wanted(key, "a dtype's name")
            return None
        return value.removeprefix("torch.")
