"""Limits of how far samples run ahead of inserts, and inserts ahead of samples."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class RateLimiter:
    """Keep `num_samples` within one batch of `ratio * num_inserts`.

    Both are counted from when a batch can be sampled for the first time. At least one side may
    always proceed: if samples must wait, inserts need not. The limiter is Reverb's, with a margin
    of one batch.

    Args:
      ratio: Number of items sampled for each step inserted, positive.
      batch_size: Number of items in a batch.
      num_inserts: Number of steps inserted. Default: 0.
      num_samples: Number of items sampled. Default: 0.

    References:
      Cassirer et al., "Reverb: A Framework for Experience Replay" (2021),
      https://arxiv.org/abs/2102.04736
    """

    ratio: float
    batch_size: int
    num_inserts: int = 0
    num_samples: int = 0

    def __post_init__(self):
        if not 0 < self.ratio < float("inf"):
            raise ValueError(f"samples_per_insert must be a positive number, got {self.ratio}")

    def resume(self, saved: dict[str, Any] | None) -> None:
        """Resume from a saved limiter's counts, or from 0 if its ratio or batch size differs.

        Args:
          saved: Fields of the saved limiter, or None.
        """
        fields = saved if isinstance(saved, dict) else {}
        is_alike = (fields.get("ratio"), fields.get("batch_size")) == (self.ratio, self.batch_size)
        num_inserts, num_samples = fields.get("num_inserts"), fields.get("num_samples")
        if not (is_alike and isinstance(num_inserts, int) and isinstance(num_samples, int)):
            num_inserts = num_samples = 0
        self.num_inserts, self.num_samples = num_inserts, num_samples

    @property
    def has_begun(self) -> bool:
        """True if steps or items were counted."""
        return self.num_inserts > 0 or self.num_samples > 0

    def may_sample(self) -> bool:
        return self.num_samples <= self.ratio * self.num_inserts

    def may_insert(self, ahead: int = 0) -> bool:
        """Return whether steps may be added.

        Args:
          ahead: Number of steps that inserts may be ahead, besides the margin; a negative one: that
            they must be behind. Default: 0.
        """
        return self.ratio * (self.num_inserts - ahead) - self.num_samples < self.batch_size
