"""Counting speculative rounds; acceptance length counts the bonus token: tau = 1 + accepted / rounds."""

from dataclasses import dataclass, field


@dataclass
class RoundCounts:
    """Rounds of one or more texts. `per_position[j]` counts the rounds whose draft token j was accepted."""

    speculative_tokens: int
    rounds: int = 0
    per_position: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.per_position = self.per_position or [0] * self.speculative_tokens

    def add_round(self, accepted: int) -> None:
        """One draft and verify pass that kept so many draft tokens."""
        self.rounds += 1
        for position in range(accepted):
            self.per_position[position] += 1

    def add(self, other: "RoundCounts") -> None:
        """Take in another text's rounds."""
        self.rounds += other.rounds
        self.per_position = [a + b for a, b in zip(self.per_position, other.per_position, strict=True)]

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the bonus token included; 1.0 before the first round."""
        return 1 + sum(self.per_position) / self.rounds if self.rounds else 1.0

    @property
    def acceptance_rates(self) -> list[float]:
        """Share of rounds whose draft token j was accepted, for each j."""
        return [count / self.rounds if self.rounds else 0.0 for count in self.per_position]
