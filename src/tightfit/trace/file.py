"""Files of traces and profiles: two gzipped lines of JSON, what the file is and what it holds.

    {"format": "tightfit-trace", "version": 4}
    {"origin": "measured", "ops": [{"name": "aten.mm.default", "tick": 1, ...}, ...], "allocations": [...], ...}

Fields that have their default are left out.
"""

from __future__ import annotations

import gzip
import json
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from tightfit.errors import RecipeError, ReportError
from tightfit.files import replacing
from tightfit.trace import Trace

T = TypeVar("T")


@dataclass(frozen=True)
class FileFormat(Generic[T]):
    """A kind of file. what: `trace` or `profile`. content: the dataclass of what it holds."""

    what: str
    version: int
    content: type[T]

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        return TypeAdapter(self.content)

    def save(self, value: T, path: Path) -> None:
        """Write a file, whole or not at all. Raises OSError."""
        head = json.dumps({"format": f"tightfit-{self.what}", "version": self.version}).encode()
        with replacing(path) as temporary:
            body = self._adapter.dump_json(value, exclude_defaults=True)
            temporary.write_bytes(gzip.compress(head + b"\n" + body, compresslevel=5))

    def load(self, path: Path) -> T:
        """Read a file. Raises ReportError for one that is not there, is none of these, is damaged, or of another
        version."""
        foreign = ReportError(f"{path}: this is no {self.what} of tightfit's; write a folder that `tightfit profile` "
                              "made")
        try:
            head, _, body = gzip.decompress(path.read_bytes()).partition(b"\n")
            said = _mapping(head)
            if said.get("format") != f"tightfit-{self.what}":
                raise foreign
            if (version := said.get("version")) != self.version:
                raise ReportError(f"{path}: the {self.what} is of version {version!r}, and this tightfit reads version "
                                  f"{self.version}; update tightfit, or read it with the one that wrote it")
            return self._adapter.validate_json(body, strict=True)
        except EOFError:
            reason = "it ends too early"
        except (gzip.BadGzipFile, zlib.error) as error:
            reason = str(error)
            if "Not a gzipped file" in reason:
                raise foreign from None
        except OSError as error:
            raise ReportError(f"{path}: the {self.what} cannot be read ({error.strerror or error})") from None
        except ValidationError as error:
            reason = wrong_fields(error)
        except RecipeError as error:
            reason = str(error)
        raise ReportError(f"{path}: the {self.what} is damaged ({reason}); profile again")


def _mapping(line: bytes) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    with suppress(ValueError, TypeError, RecursionError):
        return dict(json.loads(line))
    return {}


TRACE_FILE = FileFormat("trace", 4, Trace)


def wrong_fields(error: ValidationError) -> str:
    """The first few fields that are not as they should be, and why."""
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
