"""What a probe found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One measured value and the limit that it must not exceed, both in `unit`."""

    what: str
    value: float
    limit: float
    unit: str

    @property
    def is_good(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        verdict = "ok" if self.is_good else "FAIL"
        return f"{self.what}: {self.value:.4g} {self.unit} (at most {self.limit:g}) {verdict}"
