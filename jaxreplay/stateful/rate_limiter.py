"""How far samples may run ahead of inserts, and inserts ahead of samples."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class RatioLimiter:
    """Keeps `num_samples` within one batch of `ratio * num_inserts`, both counted since sampling
    became possible.

    Never are both sides stopped: where samples must wait, inserts need not. As Reverb's
    sample-to-insert limiter (Cassirer et al., "Reverb: A Framework for Experience Replay", 2021),
    with a margin of one batch.

    Args:
      ratio: items drawn for each step inserted, positive. batch_size: items of a batch.
    """

    ratio: float
    batch_size: int
    num_inserts: int = 0
    num_samples: int = 0

    def __post_init__(self):
        if not 0 < self.ratio < float("inf"):
            raise ValueError(f"samples_per_insert must be a positive number, got {self.ratio}")

    def resume(self, saved: dict[str, Any] | None) -> None:
        """Go on from the counts of another limiter, given as a dict of its fields; from none where
        that had another ratio."""
        fields = saved if isinstance(saved, dict) else {}
        is_alike = (fields.get("ratio"), fields.get("batch_size")) == (self.ratio, self.batch_size)
        num_inserts, num_samples = fields.get("num_inserts"), fields.get("num_samples")
        if not (is_alike and isinstance(num_inserts, int) and isinstance(num_samples, int)):
            num_inserts = num_samples = 0
        self.num_inserts, self.num_samples = num_inserts, num_samples

    def may_sample(self) -> bool:
        return self.num_samples <= self.ratio * self.num_inserts

    def may_insert(self) -> bool:
        return self.ratio * self.num_inserts - self.num_samples < self.batch_size
